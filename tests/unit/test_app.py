"""The daemon's surface, spoken to in plain HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from memory_yard import MemoryDaemon, MemoryYard

from forkyard import errors, verbs
from forkyard import requests as rq

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
DEADLINE_S = 10


@pytest.fixture
async def daemon() -> AsyncIterator[MemoryDaemon]:
    it = MemoryDaemon()
    yield it
    it.clean()


@pytest.fixture
async def yard(daemon: MemoryDaemon) -> AsyncIterator[MemoryYard]:
    async with asyncio.timeout(60), daemon.up() as yard:
        yield yard


@pytest.fixture
async def http(daemon: MemoryDaemon, yard: MemoryYard) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(daemon.socket), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://d", timeout=DEADLINE_S) as client:
        yield client


async def post(http: httpx.AsyncClient, verb: str, request: rq.Request) -> httpx.Response:
    return await http.post(f"/v1/{verb}", content=encode(request), headers={"content-type": verbs.MSGPACK})


async def until(condition, what: str) -> None:
    """Wait for what another task will make true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert condition(), what


async def test_a_verb_in_msgpack_and_in_json(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    made = await post(http, "create_sandbox", rq.CreateSandbox(name="a", request_id="1"))
    assert made.status_code == 200
    assert made.headers[verbs.VERSION_HEADER] == str(verbs.API_VERSION)
    assert decode(made.content)["name"] == "a"

    found = await http.post("/v1/get_sandbox", json={"sandbox": "a"})
    assert found.headers["content-type"] == verbs.JSON
    assert found.json()["id"] == decode(made.content)["id"]
    ran = await http.post("/v1/exec", json={"sandbox": "a", "command": "echo hi"})
    assert ran.json()["stdout"] == "hi\n"


async def test_the_kernel_says_who_calls(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    import os

    await post(http, "create_sandbox", rq.CreateSandbox())
    caller = yard.callers[0]
    assert (caller.uid, caller.pid) == (os.getuid(), os.getpid())
    assert caller.start_time


@pytest.mark.parametrize(
    ("verb", "body", "status", "code"),
    [
        ("get_sandbox", encode({"sandbox": "none"}), 404, "not_found"),
        ("get_sandbox", encode({"sandbox": 3}), 400, "invalid_request"),
        ("get_sandbox", encode({"sandbox": "a", "extra": 1}), 400, "invalid_request"),
        ("get_sandbox", b"\xc1", 400, "invalid_request"),
        ("no_such_verb", b"", 404, "not_found"),
        ("delete_template", encode({"name": "x"}), 500, "internal"),
        ("delete_snapshot", encode({"snapshot": "x"}), 422, "corrupt_snapshot"),
        ("write_file", b"\0\0\xff\xff", 400, "invalid_request"),
        ("write_file", b"\xff\xff\xff\xff" + b"x" * 64, 400, "invalid_request"),
        ("spawn", encode({"sandbox": "none", "command": "true"}), 404, "not_found"),
    ],
)
async def test_errors_have_a_status_and_a_code(
    http: httpx.AsyncClient, verb: str, body: bytes, status: int, code: str
) -> None:
    reply = await http.post(f"/v1/{verb}", content=body)
    assert reply.status_code == status
    error = decode(reply.content)
    assert error["code"] == code
    assert "secret" not in error["message"]


async def test_every_code_has_a_status() -> None:
    assert set(verbs.STATUS) == set(errors._BY_CODE)


async def test_a_body_that_is_too_long(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/get_sandbox", content=b"x" * (verbs.MAX_BODY + 1))
    assert reply.status_code == 400


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("verb", "request_", "named"),
    [
        ("create_sandbox", rq.CreateSandbox(labels={"key": LONG}), "labels"),
        ("create_sandbox", rq.CreateSandbox(labels={LONG: "value"}), "labels"),
        ("create_sandbox", rq.CreateSandbox(labels={str(n): "" for n in range(65)}), "labels"),
        ("create_sandbox", rq.CreateSandbox(user=LONG), "user"),
        ("create_sandbox", rq.CreateSandbox(request_id=LONG), "request_id"),
        ("create_sandbox", rq.CreateSandbox(egress_allow=["a.test"] * 1001), "egress_allow"),
        ("create_sandbox", rq.CreateSandbox(lease=rq.Lease(run=LONG)), "lease.run"),
        ("snapshot", rq.TakeSnapshot(sandbox="a", labels={"key": LONG}), "labels"),
        ("fork", rq.Fork(source="a", labels={"key": LONG}), "labels"),
        ("checkpoint", rq.TakeCheckpoint(sandbox="a", label=LONG), "label"),
        ("make_dir", rq.MakeDir(sandbox="a", path=LONG), "path"),
    ],
)
async def test_what_would_be_kept_is_bounded(
    http: httpx.AsyncClient, verb: str, request_: rq.Request, named: str
) -> None:
    refused = await post(http, verb, request_)
    error = decode(refused.content)
    assert (refused.status_code, error["code"]) == (400, "invalid_request"), error
    assert named in error["message"] and "length" in error["message"], error


def test_every_word_of_every_request_has_a_length() -> None:
    """Only what is passed on to the guest, or used up, is as long as a request may be."""
    whole = {"command", "code", "message", "password", "dockerfile", "warm", "ready"}
    for table in (verbs.VERBS, verbs.STREAMS, verbs.FILES):
        for name, verb in table.items():
            for field in msgspec.structs.fields(verb.request):
                kinds = getattr(msgspec.inspect.type_info(field.type), "types", None)
                for kind in kinds or [msgspec.inspect.type_info(field.type)]:
                    if isinstance(kind, msgspec.inspect.StrType) and field.name not in whole:
                        assert kind.max_length or kind.pattern, (name, field.name)


async def test_a_change_is_done_once_for_its_request_id(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    request = rq.CreateSandbox(name="a", request_id="same", lease=rq.Lease(pid=1, start_time=1))
    first = await post(http, "create_sandbox", request)
    # Another process asks again: the lease is another, the sandbox is the same.
    again = await post(http, "create_sandbox", msgspec.structs.replace(request, lease=rq.Lease(pid=2)))
    assert first.content == again.content
    assert yard.creates == 1
    other = await post(http, "create_sandbox", rq.CreateSandbox(name="b", request_id="same"))
    assert decode(other.content)["code"] == "conflict"


async def test_a_reply_is_replayed_by_the_next_daemon(daemon: MemoryDaemon) -> None:
    transport = httpx.AsyncHTTPTransport(uds=str(daemon.socket), verify=False)
    request = rq.CreateSandbox(name="a", request_id="same")
    async with httpx.AsyncClient(transport=transport, base_url="http://d") as http, asyncio.TaskGroup():
        async with daemon.up() as yard:
            first = await post(http, "create_sandbox", request)
            failed = await post(http, "create_sandbox", rq.CreateSandbox(name="a", request_id="other"))
            assert failed.status_code == 409
        async with daemon.up(before=yard):
            await post(http, "delete_sandbox", rq.DeleteSandbox(sandbox="a"))
            assert (await post(http, "create_sandbox", request)).content == first.content
            replayed = await post(http, "create_sandbox", rq.CreateSandbox(name="a", request_id="other"))
            assert replayed.content == failed.content
            assert (
                await post(http, "create_sandbox", rq.CreateSandbox(name="b", request_id="same"))
            ).status_code == 409
            assert yard.creates == 2


async def test_requests_at_the_same_time_share_one_run(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    yard.gate = asyncio.Event()
    request = rq.CreateSandbox(name="a", request_id="same")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(post(http, "create_sandbox", request)) for _ in range(5)]
        await until(lambda: yard.creates == 1, "it began")
        yard.gate.set()
    assert len({task.result().content for task in tasks}) == 1
    assert yard.creates == 1


async def test_a_retryable_error_is_not_replayed(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
    for _ in range(2):
        reply = await post(http, "fork", rq.Fork(source="a", n=100, request_id="same"))
        assert reply.status_code == 429
    assert len([request for request in yard.requests if isinstance(request, rq.Fork)]) == 2


async def test_an_exec_is_undone_when_its_client_goes_and_shared_while_one_stays(
    http: httpx.AsyncClient, yard: MemoryYard
) -> None:
    await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
    request = rq.Exec(sandbox="a", command="read x; echo $x", stdin=None, request_id="same")
    request = msgspec.structs.replace(request, command="while [ ! -e go ]; do sleep 0.01; done; echo done")
    async with asyncio.TaskGroup() as group:
        leaves = group.create_task(post(http, "exec", request))
        stays = group.create_task(post(http, "exec", request))
        await until(lambda: yard.execs.runs == 1, "it began")
        leaves.cancel()
        (yard.root("a") / "go").touch()
    assert decode(stays.result().content)["stdout_bytes"] == b"done\n"
    assert (yard.execs.runs, yard.execs.cancelled) == (1, 0)

    async with asyncio.TaskGroup() as group:
        request = rq.Exec(sandbox="a", command="sleep 1000", request_id="other")
        alone = group.create_task(post(http, "exec", request))
        await until(lambda: yard.execs.runs == 2, "it began")
        alone.cancel()
    await until(lambda: yard.execs.cancelled == 1, "it was ended")


async def test_a_create_whose_client_goes_is_undone(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    yard.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(post(http, "create_sandbox", rq.CreateSandbox(name="a", request_id="1")))
        await until(lambda: yard.creates == 1, "it began")
        task.cancel()
    await until(lambda: yard.undone == 1, "it was undone")
    yard.gate.set()
    # The same request is a new one then.
    made = await post(http, "create_sandbox", rq.CreateSandbox(name="a", request_id="1"))
    assert made.status_code == 200


async def test_a_wait_is_given_up_when_its_client_goes(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(post(http, "wait_sandbox", rq.WaitSandbox(sandbox="a", state="stopped")))
        group.create_task(post(http, "get_sandbox", rq.SandboxRequest(sandbox="a")))
        await asyncio.sleep(0)
        while not yard.undone:
            await asyncio.sleep(0.01)
            task.cancel()
    assert yard.undone == 1


async def test_a_command_that_ignores_endless_input(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    await post(http, "create_sandbox", rq.CreateSandbox(name="a"))

    async def body() -> AsyncIterator[bytes]:
        yield verbs.frame(encode(rq.Exec(sandbox="a", command="head -c 3")))
        while True:
            yield b"x" * 65536

    reply = await http.post("/v1/exec", content=body(), headers={"content-type": verbs.EXEC_STREAM})
    assert decode(reply.content)["stdout_bytes"] == b"xxx"


async def test_exec_many_keeps_order_and_puts_errors_in_place(
    http: httpx.AsyncClient, yard: MemoryYard
) -> None:
    await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
    commands = [
        rq.Exec(sandbox="a", command="sleep 0.1; echo 1", request_id="1"),
        rq.Exec(sandbox="gone", command="echo 2", request_id="2"),
        rq.Exec(sandbox="a", command="echo 3", request_id="3"),
    ]
    reply = await post(http, "exec_many", rq.ExecMany(commands=commands, request_id="0"))
    first, second, third = decode(reply.content)
    assert first["result"]["stdout_bytes"] == b"1\n"
    assert second["error"]["code"] == "not_found"
    assert third["result"]["stdout_bytes"] == b"3\n"


async def test_events_end_with_their_listener(http: httpx.AsyncClient, yard: MemoryYard) -> None:
    async with http.stream("POST", "/v1/events", json={}) as reply:
        lines = reply.aiter_lines()
        assert json.loads(await anext(lines))["kind"] == "listening"
        await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
        assert json.loads(await anext(lines))["kind"] == "created"
        assert len(yard.listeners) == 1
    await until(lambda: not yard.listeners, "nobody listens")


async def test_going_down_sends_clients_to_the_next_daemon(daemon: MemoryDaemon) -> None:
    transport = httpx.AsyncHTTPTransport(uds=str(daemon.socket), verify=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://d", timeout=DEADLINE_S) as http,
        asyncio.TaskGroup() as group,
    ):
        async with daemon.up() as yard:
            await post(http, "create_sandbox", rq.CreateSandbox(name="a"))
            running = group.create_task(post(http, "exec", rq.Exec(sandbox="a", command="sleep 1000")))
            await until(lambda: yard.execs.runs == 1, "it began")
            assert (await post(http, "shutdown", rq.Shutdown())).status_code == 200
            assert daemon.stopped.is_set()
        reply = await running
        assert reply.status_code == 503
        assert verbs.RESTARTING_HEADER in reply.headers


async def test_a_peer_that_is_no_unix_socket_is_nobody() -> None:
    from forkyard.daemon.auth import NOBODY, may_speak, peer

    with socket.socket(socket.AF_INET) as sock:
        assert peer(sock) is NOBODY
    assert not may_speak(NOBODY)


def test_frames_however_they_are_cut() -> None:
    payloads = [b"a" * 10, b"b", b"c" * 1000]
    stream = b"".join(map(verbs.frame, payloads)) + verbs.END_FRAME
    for step in (1, 3, 7, 64, len(stream)):
        reader = verbs.FrameReader()
        got = [p for at in range(0, len(stream), step) for p in reader.feed(stream[at : at + step])]
        assert got == payloads
        assert reader.ended and reader.error is None
        reader = verbs.FrameReader(partial=True)
        pieces = [p for at in range(0, len(stream), step) for p in reader.feed(stream[at : at + step])]
        assert b"".join(pieces) == b"".join(payloads)
    reader = verbs.FrameReader(partial=True)
    reader.feed(verbs.frame(b"x") + verbs.error_frame(b"why")[:5])
    reader.feed(verbs.error_frame(b"why")[5:])
    assert reader.ended and reader.error == b"why"
    with pytest.raises(ValueError, match="longer"):
        verbs.FrameReader(limit=10).feed(verbs.frame(b"x" * 11))
