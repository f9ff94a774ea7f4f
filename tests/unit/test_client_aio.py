"""What is peculiar to the asynchronous client: its twin has the rest of the tests."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from memory_yard import MemoryDaemon, MemoryYard

from forkyard import AsyncClient, AsyncSandbox

DEADLINE_S = 10


@pytest.fixture
async def daemon() -> AsyncIterator[MemoryDaemon]:
    it = MemoryDaemon()
    yield it
    it.clean()


@pytest.fixture
async def yard(daemon: MemoryDaemon) -> AsyncIterator[MemoryYard]:
    async with daemon.up() as yard:
        yield yard


@pytest.fixture
async def client(daemon: MemoryDaemon, yard: MemoryYard) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(socket=daemon.socket, start=False) as client:
        await client.create_sandbox("box")
        yield client


@pytest.fixture
def box(client: AsyncClient) -> AsyncSandbox:
    return client.sandbox("box")


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_commands_side_by_side(box: AsyncSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(box.shell(f"sleep 0.2; echo {i}")) for i in range(20)]
    assert [task.result().stdout for task in tasks] == [f"{i}\n" for i in range(20)]


async def test_a_cancelled_call_ends_its_command(box: AsyncSandbox, yard: MemoryYard) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await box.shell("sleep 1000")
    await until(lambda: yard.execs.cancelled == 1)
    assert (await box.shell("echo on")).stdout == "on\n"


async def test_spawn(box: AsyncSandbox, yard: MemoryYard) -> None:
    async with await box.spawn(["cat"]) as process:
        await process.write("hello")
        await process.close_stdin()
        assert [chunk async for chunk in process.stream()] == [("stdout", b"hello")]
        assert (await process.wait()).ok
    process = await box.spawn("sleep 1000")
    del process
    gc.collect()
    await until(lambda: yard.execs.cancelled == 1)


async def test_long_input_and_large_files(box: AsyncSandbox, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20
    await box.write_file("f", data)
    assert await box.read_file("f") == data
    assert (await box.shell("cmp - f && echo same", stdin=data)).stdout == "same\n"
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "f").write_bytes(data)
    assert (await box.upload(tmp_path / "in", "tree")).files == 1
    assert (await box.download("tree", tmp_path / "out")).size_bytes == len(data)
    assert (tmp_path / "out" / "sub" / "f").read_bytes() == data


async def test_events(client: AsyncClient, yard: MemoryYard) -> None:
    events = client.events()
    assert (await anext(events)).kind == "listening"
    info = await client.create_sandbox("new")
    event = await anext(events)
    assert (event.kind, event.sandbox) == ("created", info.id)
    await events.aclose()
    await until(lambda: not yard.listeners)


async def test_exec_many(client: AsyncClient) -> None:
    results = await client.exec_many([("box", "echo 1"), ("none", "echo 2")])
    assert results[0].stdout == "1\n"
    assert isinstance(results[1], Exception)


def test_one_client_in_two_loops(tmp_path: Path) -> None:
    from daemon_thread import ThreadedDaemon

    daemon = ThreadedDaemon()
    try:
        client = AsyncClient(socket=daemon.socket, start=False)
        for _ in range(2):
            assert asyncio.run(client.version()).api == 1
    finally:
        daemon.close()
