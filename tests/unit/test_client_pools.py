"""Pools, against the daemon's surface: what is ready, what is refused, what is left."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from daemon_thread import DEADLINE_S, ThreadedDaemon, until

from forkyard import (
    AsyncClient,
    CapacityError,
    Client,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
)
from forkyard import requests as rq
from forkyard.client import pools


@pytest.fixture(autouse=True)
def box(client: Client) -> None:
    client.create_sandbox("box")


def names(client: Client) -> set[str]:
    return {info.name for info in client.list_sandboxes()}


def test_copies_are_ready_and_made_again(client: Client, daemon: ThreadedDaemon) -> None:
    with client.pool("box", 3, env={"MODE": "test"}) as pool:
        until(lambda: pool.ready == 3)
        taken = [pool.acquire() for _ in range(3)]
        assert len({info.id for info in taken}) == 3 and all(info.ephemeral for info in taken)
        until(lambda: pool.ready == 3)
        assert {info.name for info in taken} < names(client) and len(names(client)) == 7
    assert names(client) == {"box"} | {info.name for info in taken}
    forks = [request for request in daemon.yard.requests if isinstance(request, rq.Fork)]
    assert all(request.env == {"MODE": "test"} for request in forks)
    # The first ones are the sandbox's, the others that same state's.
    assert forks[0].source == "box" and "box" not in {request.source for request in forks[1:]}


def test_more_than_are_ready(client: Client) -> None:
    with client.pool("box", 1) as pool, ThreadPoolExecutor(8) as threads:
        taken = [future.result(DEADLINE_S) for future in [threads.submit(pool.acquire) for _ in range(24)]]
        assert len({info.id for info in taken}) == 24
        until(lambda: pool.ready >= 1)


def test_what_somebody_ended_is_not_handed_out(client: Client) -> None:
    with client.pool("box", 2) as pool:
        until(lambda: pool.ready == 2)
        ready = [info for info in client.list_sandboxes() if info.name != "box"]
        client.delete_sandbox(ready[0].id)
        client.stop_sandbox(ready[1].id)
        assert pool.acquire(DEADLINE_S).id not in {info.id for info in ready}


def test_an_asynchronous_pool_without_a_loop() -> None:
    with pytest.raises(ConflictError, match="event loop"):
        AsyncClient().pool("box", 1)


def test_a_state_that_is_gone_is_taken_again(client: Client, daemon: ThreadedDaemon) -> None:
    with client.pool("box", 1) as pool:
        until(lambda: pool.ready == 1)
        daemon.yard.states.clear()
        pool.acquire()
        assert pool.acquire(DEADLINE_S).name in names(client)


def test_what_cannot_be_made_is_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "RETRY_S", 0.01)
    with client.pool("nobody", 2) as pool:
        for _ in range(2):
            with pytest.raises(NotFoundError, match="nobody"):
                pool.acquire()
    with client.pool("box", 65) as pool:  # 64 fit at once
        pool.acquire(DEADLINE_S)
    for size in (0, 1001, "3"):
        with pytest.raises(InvalidRequestError):
            client.pool("box", size)
    for options in ({"names": ["a", "b"]}, {"ttl_min": 1}, {"bogus": 1}):
        with pytest.raises(InvalidRequestError, match=f"takes no {min(options)}"):
            client.pool("box", 2, **options)
    with pytest.raises(ConflictError, match="closed"):
        pool.acquire()


@pytest.mark.parametrize("error", [CapacityError("full", retryable=True), RuntimeError("unforeseen")])
def test_whatever_stands_in_the_way_is_told(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    real = client.fork
    monkeypatch.setattr(pools, "RETRY_S", 0.01)
    monkeypatch.setattr(client, "fork", fails)
    with client.pool("box", 2) as pool:
        with pytest.raises(type(error), match=str(error)):
            pool.acquire(DEADLINE_S)
        monkeypatch.setattr(client, "fork", real)
        assert pool.acquire(DEADLINE_S).name in names(client)


def test_nobody_waits_longer_than_told(
    client: Client, daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.fork

    def slow(*args: object, **options: object) -> object:
        time.sleep(0.5)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "fork", slow)
    with client.pool("box", 1) as pool:
        with pytest.raises(DeadlineError):
            pool.acquire(0.05)
        assert pool.acquire(DEADLINE_S).name in names(client)


def test_a_client_that_closes_closes_its_pools(daemon: ThreadedDaemon, client: Client) -> None:
    with Client(socket=daemon.socket, start=False) as other:
        pool = other.pool("box", 2)
        until(lambda: pool.ready == 2)
    assert names(client) == {"box"}
    with pytest.raises(ConflictError):
        pool.acquire()


def test_a_child_process_leaves_it_alone(client: Client) -> None:
    with client.pool("box", 2) as pool:
        until(lambda: pool.ready == 2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.acquire()
            except ConflictError:
                pool.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.acquire().name in names(client)


def test_the_asynchronous_one(daemon: ThreadedDaemon, client: Client) -> None:
    async def main() -> None:
        async with AsyncClient(socket=daemon.socket, start=False) as client:
            async with client.pool("box", 2) as pool:
                taken = await asyncio.gather(*(pool.acquire() for _ in range(6)))
                assert len({info.id for info in taken}) == 6
                async with asyncio.timeout(DEADLINE_S):
                    while pool.ready < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
            assert len(await client.list_sandboxes()) == 7
            pool = client.pool("box", 3)
            async with asyncio.timeout(DEADLINE_S):
                while pool.ready < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            for _ in range(3):
                closing = asyncio.create_task(pool.close())
                await asyncio.sleep(0.001)
                closing.cancel()
                await asyncio.wait([closing])
            await pool.close()
            assert len(await client.list_sandboxes()) == 7
            async with client.pool("nobody", 1) as pool:
                with pytest.raises(NotFoundError):
                    await pool.acquire()
            with pytest.raises(ConflictError):
                await pool.acquire()

    asyncio.run(main())
