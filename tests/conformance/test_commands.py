"""Commands and files in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.errors import (
    AccessDeniedError,
    ConflictError,
    DeadlineError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
)


@pytest.fixture
async def box(yard: TestYard) -> str:
    return (await yard.create(name="box")).id


async def test_results(yard: TestYard, box: str) -> None:
    done = await yard.shell(box, "echo out; echo err >&2; exit 3")
    assert (done.ok, done.exit_code, done.stdout, done.stderr) == (False, 3, "out\n", "err\n")
    assert done.signal is None and not done.timed_out and done.duration_ms > 0 and done.audit_seq > 0
    assert (await yard.exec(box, "true")).ok
    killed = await yard.shell(box, "kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, 9)
    merged = await yard.shell(box, "echo a; echo b >&2; echo c", merge=True)
    assert (merged.merged, merged.stderr) == ("a\nb\nc\n", "")


async def test_missing_programs(yard: TestYard, box: str) -> None:
    missing = await yard.exec(box, "no-such-program")
    assert missing.exit_code == 127 and "not found" in missing.stderr
    refused = await yard.exec(box, "/usr/local/bin/plain.txt")
    assert refused.exit_code == 126 and refused.stderr
    assert (await yard.shell(box, "no-such-program")).exit_code == 127
    for bad in ([], [""]):
        with pytest.raises(InvalidRequestError):
            await yard.exec(box, *bad)
    with pytest.raises(NotFoundError):
        await yard.shell(box, "true", user="nobody-of-this-name")
    with pytest.raises(ForkyardError):
        await yard.shell(box, "true", cwd="/no/such/directory")


async def test_where_and_as_whom(yard: TestYard, box: str) -> None:
    assert await yard.out(box, "pwd; whoami") == "/home/user\nuser"
    assert await yard.out(box, "pwd", cwd="/tmp") == "/tmp"
    await yard.out(box, "mkdir deep")
    assert await yard.out(box, "pwd", cwd="deep") == "/home/user/deep"
    assert not (await yard.info(box)).tainted
    assert await yard.out(box, "whoami", user="root") == "root"
    assert (await yard.info(box)).tainted


async def test_the_environment_arrives_exactly(yard: TestYard, box: str) -> None:
    values = {"NL": "a\nb", "QUOTES": "'\"`", "DOLLAR": "$HOME", "EMPTY": "", "UTF": "ä€"}
    for name, value in values.items():
        done = await yard.exec(box, "printenv", name, env={name: value})
        assert done.stdout == value + "\n"


async def test_a_timeout_ends_every_descendant(yard: TestYard, box: str) -> None:
    begun, times = time.monotonic(), yard.home.kind.times
    done = await yard.shell(box, "echo a; sleep 600", timeout_s=0.5 * times)
    assert (done.timed_out, done.ok, done.stdout, done.signal) == (True, False, "a\n", 9)
    stubborn = "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.01; done' & sleep 600"
    assert (await yard.shell(box, stubborn, timeout_s=0.5 * times)).timed_out
    assert time.monotonic() - begun < 6 * times
    await until(lambda: _nothing_runs(yard, box), "nothing runs")
    with pytest.raises(InvalidRequestError):
        await yard.shell(box, "true", timeout_s=0)


async def _nothing_runs(yard: TestYard, box: str) -> bool:
    return await yard.yard.execs.processes(rq.SandboxRequest(sandbox=box), yard.caller) == []


async def test_a_command_longer_than_linux_takes(yard: TestYard, box: str) -> None:
    for argv in (["echo", *["x"] * 70_000], ["echo", "x" * (3 << 20)]):
        with pytest.raises(InvalidRequestError, match="longer than Linux takes"):
            await yard.exec(box, *argv)
    assert await yard.out(box, "echo on") == "on"


async def test_a_background_child_does_not_hold_the_call(yard: TestYard, box: str) -> None:
    begun = time.monotonic()
    times = yard.home.kind.times
    assert await yard.out(box, f"sleep {20 * times} & echo hi") == "hi"
    assert time.monotonic() - begun < 3 * times
    # It is given 100 ms, by the clock: a busy host may need another try.
    late = [await yard.out(box, "(sleep 0.05; echo late) & exit 0") for _ in range(4)]
    assert "late" in late or times > 1  # a translated shell takes longer than that to begin
    found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox=box), yard.caller)
    assert any("sleep 20" in process.command for process in found)


async def test_stdin(yard: TestYard, box: str) -> None:
    assert await yard.out(box, "cat") == ""
    assert await yard.out(box, "cat", stdin=b"a\0b") == "a\0b"
    data = bytes(range(256)) * 4096

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 65536):
            yield data[at : at + 65536]

    assert await yard.out(box, "wc -c", stream=chunks()) == str(len(data))
    done = await yard.shell(box, "cat", stream=chunks())
    assert done.stdout_bytes == data
    assert await yard.out(box, "head -c 3", stdin=b"abc" * 100_000) == "abc"


async def test_much_output_is_cut_and_counted(yard: TestYard, box: str) -> None:
    size = 3 << 20
    done = await yard.shell(box, f"head -c {size} /dev/zero; echo end", max_output=1000)
    assert done.ok and done.truncated and len(done.stdout_bytes) == 1000
    assert done.omitted_bytes == size + 4 - 1000
    assert done.stdout_bytes.endswith(b"end\n")
    head = await yard.shell(box, "echo start; head -c 5000 /dev/zero", max_output=10, keep="head")
    assert head.stdout_bytes == b"start\n\0\0\0\0"


async def test_the_same_request_joins_the_command(yard: TestYard, box: str) -> None:
    request = "sleep 0.3; echo x >> /home/user/count; echo done"
    both = await asyncio.gather(*(yard.shell(box, request, request_id="twice") for _ in range(2)))
    assert [done.stdout for done in both] == ["done\n", "done\n"]
    assert await yard.read(box, "count") == b"x\n"
    slow = asyncio.ensure_future(yard.shell(box, "sleep 5", request_id="other"))
    await until(lambda: _busy(yard, box), "it runs")
    with pytest.raises(ConflictError):
        await yard.shell(box, "echo", request_id="other")
    slow.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await slow


async def _busy(yard: TestYard, box: str) -> bool:
    return not await _nothing_runs(yard, box)


async def test_who_goes_away_ends_his_command(yard: TestYard, box: str) -> None:
    task = asyncio.ensure_future(yard.shell(box, "sleep 60; echo never"))
    await until(lambda: _busy(yard, box), "it runs")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: _nothing_runs(yard, box), "nothing runs")


async def test_a_spawned_process(yard: TestYard, box: str) -> None:
    stream = yard.spawn(box, "echo ready; cat; exit 5", stdin=True)
    started = await anext(stream)
    assert started.kind == "started" and started.pid > 1
    said = await anext(stream)
    assert (said.kind, said.data, said.offset) == ("stdout", b"ready\n", 0)
    write = yard.yard.execs.write
    await write(rq.Write(sandbox=box, pid=started.pid, data=b"echo\n"), yard.caller)
    assert (await anext(stream)).data == b"echo\n"
    await write(rq.Write(sandbox=box, pid=started.pid, eof=True), yard.caller)
    last = await anext(stream)
    assert last.kind == "exit" and last.result is not None and last.result["exit_code"] == 5
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_dropped_stream_ends_its_command(yard: TestYard, box: str) -> None:
    stream = yard.spawn(box, "sleep 60")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: _nothing_runs(yard, box), "nothing runs")


async def test_a_detached_one_is_found_again(yard: TestYard, box: str) -> None:
    pid = await yard.background(box, "echo one; sleep 0.2; echo two; sleep 60")
    found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox=box), yard.caller)
    assert [one.handle for one in found if one.pid == pid] == [str(pid)]
    stream = yard.attach(box, pid)
    said = b""
    async for event in stream:
        said += event.data
        if said == b"one\ntwo\n":
            break
    await yard.yard.execs.signal(rq.Signal(sandbox=box, pid=pid, signal=15), yard.caller)
    events = [event async for event in stream]
    assert events[-1].result is not None and events[-1].result["signal"] == 15
    with pytest.raises(NotFoundError):
        await anext(yard.attach(box, 1))


async def test_a_spawn_runs_out_of_time(yard: TestYard, box: str) -> None:
    command = "echo a; sleep 600"
    events = [event async for event in yard.spawn(box, command, timeout_s=0.3 * yard.home.kind.times)]
    assert events[-1].result is not None and events[-1].result["timed_out"]
    assert b"".join(event.data for event in events) == b"a\n"


async def test_wait(yard: TestYard, box: str) -> None:
    pid = await yard.background(box, "sleep 0.3; exit 4")
    with pytest.raises(DeadlineError):
        await yard.yard.execs.wait(rq.WaitProcess(sandbox=box, pid=pid, timeout_s=0.01), yard.caller)
    patient = rq.WaitProcess(sandbox=box, pid=pid, timeout_s=20 * yard.home.kind.times)
    done = await yard.yard.execs.wait(patient, yard.caller)
    assert done.exit_code == 4


async def test_a_terminal(yard: TestYard, box: str) -> None:
    stream = yard.spawn(box, "stty size; exec cat", pty=True, rows=33, cols=44)
    pid = (await anext(stream)).pid
    said = b""
    while b"33 44" not in said:
        said += (await anext(stream)).data
    await yard.yard.execs.resize(rq.Resize(sandbox=box, pid=pid, rows=10, cols=20), yard.caller)
    await yard.yard.execs.write(rq.Write(sandbox=box, pid=pid, data=b"typed\n"), yard.caller)
    while said.count(b"typed") < 2:
        said += (await anext(stream)).data
    await yard.yard.execs.write(rq.Write(sandbox=box, pid=pid, data=b"\x03"), yard.caller)
    events = [event async for event in stream]
    assert events[-1].result is not None and events[-1].result["exit_code"] == 130


async def test_many_at_once(yard: TestYard, box: str) -> None:
    done = await asyncio.gather(*(yard.shell(box, f"sleep 0.05; echo {n}") for n in range(20)))
    assert [one.stdout for one in done] == [f"{n}\n" for n in range(20)]


async def test_files(yard: TestYard, box: str) -> None:
    names = ["f", "deep/er/g", "emoji 😀\nb'\".txt", "-rf", "n" * 255, "~/tilde", "/tmp/absolute"]
    files = yard.yard.files
    await files.write_files(
        rq.WriteFiles(sandbox=box, files={name: name.encode() for name in names}), yard.caller
    )
    assert await files.read_files(rq.ReadFiles(sandbox=box, paths=names), yard.caller) == {
        name: name.encode() for name in names
    }
    assert await yard.out(box, "cat f deep/er/g; cat /home/user/tilde") == "fdeep/er/g~/tilde"
    found = await files.stat(rq.PathRequest(sandbox=box, path="f"), yard.caller)
    assert (found.type, found.size, found.uid, found.mode) == ("file", 1, 1000, 0o644)
    listed = await files.list_files(rq.PathRequest(sandbox=box, path="/home/user/deep"), yard.caller)
    assert [(one.name, one.type) for one in listed] == [("er", "dir")]
    await files.make_dir(rq.MakeDir(sandbox=box, path="a/b", mode=0o700), yard.caller)
    assert (await files.stat(rq.PathRequest(sandbox=box, path="a/b"), yard.caller)).mode == 0o700
    await files.move(rq.MoveFile(sandbox=box, path="f", to="moved/f"), yard.caller)
    assert await yard.read(box, "moved/f") == b"f"
    await files.remove(rq.RemoveFile(sandbox=box, path="deep"), yard.caller)
    with pytest.raises(NotFoundError):
        await yard.read(box, "deep/er/g")
    for refused in ("", "a\0b"):
        with pytest.raises(InvalidRequestError):
            await yard.read(box, refused)


async def test_files_have_owners(yard: TestYard, box: str) -> None:
    files = yard.yard.files
    with pytest.raises(AccessDeniedError):
        await files.write_files(rq.WriteFiles(sandbox=box, files={"/root/x": b""}), yard.caller)
    await files.write_files(
        rq.WriteFiles(sandbox=box, files={"/root/x": b"secret"}, user="root", mode=0o600), yard.caller
    )
    with pytest.raises(AccessDeniedError):
        await yard.read(box, "/root/x")
    assert (await yard.shell(box, "cat /root/x")).exit_code == 1
    assert await yard.out(box, "cat /root/x", user="root") == "secret"


async def test_large_files_stream(yard: TestYard, box: str) -> None:
    data = bytes(range(256)) * 20_000

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    files = yard.yard.files
    await files.write_stream(rq.WriteFile(sandbox=box, path="big", mode=0o640), chunks(), yard.caller)
    read = files.read_stream(rq.PathRequest(sandbox=box, path="big"), yard.caller)
    assert b"".join([piece async for piece in read]) == data
    assert await yard.out(box, "wc -c", stdin=b"") == "0"

    async def broken() -> AsyncIterator[bytes]:
        yield data[:100_000]
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        await files.write_stream(rq.WriteFile(sandbox=box, path="big"), broken(), yard.caller)
    info = await files.stat(rq.PathRequest(sandbox=box, path="big"), yard.caller)
    assert (info.size, info.mode) == (len(data), 0o640)


async def test_trees_travel_whole(yard: TestYard, box: str) -> None:
    await yard.out(box, "mkdir -p tree/sub; echo a > tree/a; echo b > tree/sub/b")
    files = yard.yard.files
    download = files.download_tar(rq.PathRequest(sandbox=box, path="tree"), yard.caller)
    packed = [piece async for piece in download]

    async def chunks() -> AsyncIterator[bytes]:
        for piece in packed:
            yield piece

    await files.upload_tar(rq.PathChange(sandbox=box, path="copy"), chunks(), yard.caller)
    assert await yard.out(box, "cat copy/a copy/sub/b") == "a\nb"


async def test_usage_and_audit(yard: TestYard, box: str) -> None:
    await yard.shell(box, "echo audited")
    usage = await yard.yard.usage(rq.SandboxRequest(sandbox=box), yard.caller)
    assert usage.processes == 0
    kinds = [record.kind for record in await yard.yard.audit(rq.Audit(sandbox=box), yard.caller)]
    assert kinds[0] == "sandbox.created" and kinds[-1] == "exec"
