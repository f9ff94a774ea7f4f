"""Commands through the real agent, running here as an ordinary process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import plain_agent
import pytest
from plain_agent import ME, Wire, run, sh

from forkyard.errors import (
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnavailableError,
)
from forkyard.guest import Guest, GuestProcess, Identity, Scope, SpawnSpec
from forkyard.wire import HEADER, MAGIC, Decoder, Type, encode


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_agent.build(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def wire(agent: Path, tmp_path: Path) -> Iterator[Wire]:
    with plain_agent.running(agent, tmp_path) as w:
        yield w


@pytest.fixture
async def guest(wire: Wire) -> AsyncIterator[Guest]:
    async with plain_agent.attached(wire) as g:
        yield g


async def until(what: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110 - processes of the host give no event
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def spawn(guest: Guest, command: str, **options) -> GuestProcess:
    return await guest.spawn(SpawnSpec(["/bin/sh", "-c", command], {}, user=ME, **options))


async def read_until(process: GuestProcess, needle: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(5):
        async for item in process.output():
            seen += item.data
            if needle in seen:
                return seen
    raise AssertionError(f"{needle!r} never came: {seen!r}")


async def test_output_and_exit(guest: Guest) -> None:
    out, err, status = await sh(guest, "echo out; echo err >&2; exit 7")
    assert (out, err, status.code, status.signal, status.oom) == (b"out\n", b"err\n", 7, None, False)
    assert 0 < status.max_rss_mb < 1000


async def test_merged_output_is_in_order(guest: Guest) -> None:
    out, err, _ = await sh(guest, "echo 1; echo 2 >&2; echo 3", merge=True)
    assert (out, err) == (b"1\n2\n3\n", b"")


async def test_missing_and_not_executable(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    _, err, status = await run(guest, "no-such-program")
    assert (status.code, status.signal) == (127, None) and b"not found" in err
    _, err, status = await run(guest, str(tmp_path / "plain"))
    assert status.code == 126 and b"ermission denied" in err
    _, _, status = await run(guest, str(tmp_path))
    assert status.code == 126


async def test_script_without_a_hash_bang(guest: Guest, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1"\n')
    script.chmod(0o755)
    assert (await run(guest, str(script), "arg"))[0] == b"arg\n"


async def test_killed_by_a_signal(guest: Guest) -> None:
    _, _, status = await sh(guest, "kill -TERM $$")
    assert (status.code, status.signal) == (128 + 15, 15)


async def test_environment_arrives_exact(guest: Guest) -> None:
    value = "line\n\"quotes\" 'both' $HOME `x` \\ \u00fc"
    out, _, _ = await run(guest, "/usr/bin/env", "-0", env={"TRICKY": value, "PATH": "/bin"})
    entries = out.split(b"\0")
    assert f"TRICKY={value}".encode() in entries
    assert b"PATH=/bin" in entries
    assert any(e.startswith(b"HOME=/") for e in entries)


async def test_long_arguments(guest: Guest) -> None:
    args = ["x" * 100_000] * 8
    out, _, status = await run(guest, "/bin/sh", "-c", 'echo "$#"; printf %s "$7" | wc -c', "sh", *args)
    assert (out.split(), status.code) == ([b"8", b"100000"], 0)
    with pytest.raises(InvalidRequestError):
        await run(guest, "/bin/true", "x" * (5 << 20))


async def test_working_directory(guest: Guest, tmp_path: Path) -> None:
    assert (await run(guest, "/bin/pwd", cwd=str(tmp_path)))[0].strip() == str(tmp_path).encode()
    with pytest.raises(NotFoundError, match="directory"):
        await run(guest, "/bin/pwd", cwd="/no/such/place")
    with pytest.raises(NotFoundError, match="user"):
        await run(guest, "/bin/pwd", user="no-such-user")


async def test_nothing_of_the_agent_is_inherited(guest: Guest) -> None:
    out, _, _ = await sh(guest, "ls /proc/self/fd; grep -E 'SigBlk|SigIgn' /proc/self/status", stdin=b"")
    numbers, *rest = out.decode().split("SigBlk:")
    assert set(numbers.split()) <= {"0", "1", "2", "3"}  # 3 is the directory that ls reads
    blocked, ignored = rest[0].split("SigIgn:")
    assert int(blocked, 16) == 0 and int(ignored, 16) == 0


async def test_stdin_none_is_empty(guest: Guest) -> None:
    out, _, status = await run(guest, "/bin/cat")
    assert (out, status.code) == (b"", 0)


async def test_stdin_is_exact(guest: Guest) -> None:
    data = os.urandom(1 << 20) * 20 + b"\0" * 1000
    out, _, status = await run(guest, "/bin/cat", stdin=data)
    assert out == data and status.code == 0


async def test_stdin_that_nobody_reads(guest: Guest) -> None:
    _, _, status = await sh(guest, "exec <&-; exit 4", stdin=bytes(3 << 20))
    assert status.code == 4


async def test_background_child_does_not_hold_the_end(guest: Guest) -> None:
    started = time.monotonic()
    out, _, _ = await sh(guest, "sleep 30 & echo $!")
    assert time.monotonic() - started < 1
    child = int(out)
    assert alive(child)
    os.kill(child, signal.SIGKILL)


async def test_late_output_is_kept(guest: Guest) -> None:
    out, _, _ = await sh(guest, "(sleep .05; echo late) & exit 0")
    assert out == b"late\n"


async def test_detached_writer_gets_no_sigpipe(guest: Guest, tmp_path: Path) -> None:
    script = f"(sleep .8; echo x; echo y; touch {tmp_path}/lived) & exit 0"
    _, _, status = await sh(guest, script)
    assert status.code == 0
    await until((tmp_path / "lived").exists)


async def test_all_output_of_a_slow_reader_survives_the_exit(guest: Guest) -> None:
    process = await spawn(guest, "head -c 3000000 /dev/zero; echo end")
    total, tail = 0, b""
    async for item in process.output():
        await asyncio.sleep(0.01)
        total += len(item.data)
        tail = (tail + item.data)[-4:]
    assert (total, tail) == (3_000_004, b"end\n")
    assert (await process.wait()).code == 0


async def test_waiting_needs_no_reader_and_loses_nothing(guest: Guest) -> None:
    process = await spawn(guest, "head -c 900000 /dev/zero; exit 6")
    async with asyncio.timeout(5):
        assert (await process.wait()).code == 6
    assert sum([len(o.data) async for o in process.output()]) == 900_000
    with pytest.raises(NotFoundError):
        await guest.process(process.pid)


async def test_letting_go_of_an_ended_command(guest: Guest) -> None:
    process = await spawn(guest, "head -c 900000 /dev/zero")
    assert (await process.wait()).code == 0
    process.detach()
    with pytest.raises(NotFoundError):
        await guest.process(process.pid)


async def test_a_stalled_reader_holds_up_its_command_only(guest: Guest) -> None:
    stalled = await spawn(guest, "yes")
    await until(lambda: sum(len(o.data) for o in stalled._queue) >= 200_000)
    assert await guest.ping(1) < 0.5
    assert (await sh(guest, "echo ok"))[0] == b"ok\n"
    held = sum(len(o.data) for o in stalled._queue)
    assert held <= 256 << 10
    stalled.kill_tree()
    async for _ in stalled.output():
        pass
    assert (await stalled.wait()).signal == 9


async def test_kill_tree_reaches_every_descendant(guest: Guest) -> None:
    command = """
        setsid sh -c 'trap "" TERM; echo $$; while :; do :; done' &
        (setsid sh -c 'echo $$; exec sleep 600' &) &
        setsid env -i setsid sh -c '(echo $(exec sh -c "echo \\$PPID"); exec sleep 600) & exit' &
        echo $$; echo partial; sleep 600
    """
    process = await spawn(guest, command)
    seen = b""
    async for item in process.output():
        seen += item.data
        if len(seen.split()) >= 5:
            break
    pids = [int(word) for word in seen.split() if word.isdigit()]
    assert len(pids) == 4 and b"partial" in seen
    started = time.monotonic()
    process.kill_tree()
    status = await process.wait()
    assert (status.code, status.signal) == (137, 9)
    assert time.monotonic() - started < 1
    assert [p for p in pids if alive(p)] == []


async def test_kill_tree_spares_other_commands(guest: Guest) -> None:
    one, two = await spawn(guest, "sleep 600"), await spawn(guest, "sleep 600 & wait")
    one.kill_tree()
    assert (await one.wait()).signal == 9
    assert alive(two.pid)
    two.signal(signal.SIGTERM)
    assert (await two.wait()).signal == 15


async def test_signals_reach_the_group(guest: Guest) -> None:
    process = await spawn(guest, "trap 'echo got; exit 3' USR1; echo ready; while :; do sleep .02; done")
    await read_until(process, b"ready")
    process.signal(signal.SIGUSR1, scope=Scope.PROCESS)
    assert (await process.wait()).code == 3
    with pytest.raises(InvalidRequestError):
        process.signal(999)


async def test_terminal(guest: Guest) -> None:
    process = await guest.spawn(SpawnSpec(["/bin/sh"], {"PS1": "$ "}, user=ME, pty=True, rows=33, cols=99))
    await process.write(b"stty size; tty\n")
    assert b"/dev/pts/" in await read_until(process, b"/dev/pts/")
    process.resize(40, 120)
    await process.write(b"stty size\n")
    await read_until(process, b"40 120")
    started = time.monotonic()
    await process.write(b"sleep 30\n")
    await until(lambda: any("sleep" in line for line in children(process.pid)))
    await process.write(b"\x03")
    await process.write(b"echo rc=$?\n")
    await read_until(process, b"rc=130")
    assert time.monotonic() - started < 2
    await process.write(b"exit 5\n")
    assert (await process.wait()).code == 5


def children(pid: int) -> list[str]:
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((p / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append((p / "cmdline").read_text())
    return found


async def test_a_terminal_ends_by_end_of_file(guest: Guest) -> None:
    process = await guest.spawn(SpawnSpec(["/bin/cat"], {}, user=ME, pty=True))
    process.close_stdin()
    async with asyncio.timeout(5):
        assert (await process.wait()).code == 0


async def test_a_start_that_is_given_up_leaves_nothing(guest: Guest) -> None:
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(spawn(guest, "sleep 600"))
        await asyncio.sleep(0)
        task.cancel()
    await guest.ping()
    async with asyncio.timeout(5):
        while (await guest.activity()).processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_ended_commands_that_nobody_fetches_do_not_pile_up(wire: Wire) -> None:
    async with plain_agent.attached(wire) as first:
        for _ in range(100):
            (await spawn(first, "echo x")).leave()
        await until(lambda: not children(wire.process.pid))
    async with plain_agent.attached(wire) as second:
        await sh(second, "true")
    async with plain_agent.attached(wire) as third:
        assert third.info is not None and 0 < len(third.info.processes) <= 101


async def test_what_is_abandoned_while_an_epoch_begins_is_ended(guest: Guest) -> None:
    process = await spawn(guest, "sleep 600")
    attaching = asyncio.create_task(guest.attach())
    await asyncio.sleep(0)
    process.abandon()
    await attaching
    async with asyncio.timeout(5):
        while (await guest.activity()).processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await sh(guest, "echo on"))[0] == b"on\n"


async def test_many_at_once(guest: Guest) -> None:
    async with asyncio.TaskGroup() as tg:
        tasks = [tg.create_task(sh(guest, f"echo {i}")) for i in range(60)]
    assert [t.result()[0] for t in tasks] == [b"%d\n" % i for i in range(60)]


async def test_another_daemon_reads_on(wire: Wire) -> None:
    async with asyncio.TaskGroup() as tg:
        first = Guest(*wire.open(), box="test")
        await first.attach(tg)
        process = await spawn(
            first, "echo one; read x; echo two; echo err >&2; exit 9", stdin="pipe", tag=b"req-1"
        )
        await read_until(process, b"one\n")
        first._channel._loop.remove_reader(first._channel._from)  # as dead as a killed daemon

        second = Guest(*wire.open(), box="test")
        info = await second.attach(tg)
        (known,) = info.processes
        assert (known.pid, known.tag, known.exited) == (process.pid, b"req-1", False)
        again = await second.process(known.pid, stdout_offset=4)
        await again.write(b"go\n")
        pieces = [(o.kind, o.offset, o.data) async for o in again.output()]
        assert sorted(pieces) == [("stderr", 0, b"err\n"), ("stdout", 4, b"two\n")]
        assert (await again.wait()).code == 9
        with pytest.raises(NotFoundError):
            await second.process(known.pid)
        await second.close()


async def test_an_exit_is_kept_until_it_is_fetched(wire: Wire) -> None:
    async with asyncio.TaskGroup() as tg:
        first = Guest(*wire.open(), box="test")
        await first.attach(tg)
        process = await spawn(first, "echo out; exit 3")
        await until(lambda: not Path(f"/proc/{process.pid}").exists())  # the agent has collected it
        await first.close()
        second = Guest(*wire.open(), box="test")
        info = await second.attach(tg)
        assert [(p.pid, p.exited, p.code) for p in info.processes] == [(process.pid, True, 3)]
        again = await second.process(process.pid)
        assert [o.data async for o in again.output()] == [b"out\n"]
        assert (await again.wait()).code == 3
        await second.close()


async def test_a_new_epoch_goes_on_without_a_gap(guest: Guest) -> None:
    process = await spawn(guest, "for i in $(seq 20000); do echo line $i; done")
    lines = b""
    async for item in process.output():
        if not lines:
            await guest.attach()
        lines += item.data
    assert lines == b"".join(b"line %d\n" % i for i in range(1, 20001))
    assert (await process.wait()).code == 0


async def test_input_goes_on_without_a_hole(guest: Guest) -> None:
    data = os.urandom(1 << 20) * 4
    process = await guest.spawn(SpawnSpec(["/bin/cat"], {}, user=ME, stdin="pipe"))
    async with asyncio.TaskGroup() as tg:

        async def feed() -> None:
            await process.write(data)
            process.close_stdin()

        tg.create_task(feed())
        got, epochs = b"", 0
        async for item in process.output():
            got += item.data
            if len(got) > (epochs + 1) << 20 and epochs < 3:
                epochs += 1
                await guest.attach()
    assert got == data and epochs == 3


async def test_an_epoch_recovers_from_a_half_written_frame(wire: Wire) -> None:
    to, _ = wire.open()
    head = HEADER.pack(MAGIC, Type.DATA, 0, 0, 1, 65000, 1, 0)
    os.write(to, head + b"x" * 1000)
    async with plain_agent.attached(wire) as guest:
        assert (await sh(guest, "echo ok"))[0] == b"ok\n"


async def test_old_requests_end_with_their_epoch(guest: Guest) -> None:
    async with asyncio.TaskGroup() as tg:
        await guest.quiesce()
        task = tg.create_task(_expect(guest.processes(), UnavailableError))
        await asyncio.sleep(0)
        await guest.attach()
        await task


async def _expect(awaitable, kind: type[ForkyardError]) -> None:
    with pytest.raises(kind):
        await awaitable


async def test_quiet_until_told_otherwise(wire: Wire) -> None:
    async with plain_agent.attached(wire) as guest:
        process = await spawn(guest, "while :; do echo x; sleep .005; done")
        await read_until(process, b"x")
        assert await guest.quiesce(1)
        before = process._seen[1]
        await asyncio.sleep(0.1)
        assert process._seen[1] == before
        await guest.unquiesce()
        async for item in process.output():
            if item.offset > before:
                break
        process.kill_tree()
        await process.wait()


async def test_unknown_frames_are_answered_not_fatal(wire: Wire) -> None:
    async with plain_agent.attached(wire) as guest:
        channel = guest._channel
        answers: list[int] = []

        class Probe:
            def on_frame(self, frame) -> None:
                answers.append(frame.type)

            def fail(self, error) -> None: ...

        for type_, chan in ((200, 0), (Type.OPEN, 999), (Type.OPEN, 1), (Type.OPEN, 36)):
            number = channel.open(Probe())
            channel.send(encode(type_, number, channel.epoch, b"\xff" * 9, chan=chan))
        await guest.ping()
        assert answers == [Type.ERROR, Type.END, Type.END, Type.END]


async def test_damaged_frames_reset_their_stream(wire: Wire) -> None:
    async with plain_agent.attached(wire) as guest:
        process = await guest.spawn(SpawnSpec(["/bin/cat"], {}, user=ME, stdin="pipe"))
        frame = bytearray(encode(Type.DATA, process.stream, guest._channel.epoch, bytes(8) + b"hello"))
        frame[-1] ^= 1
        guest._channel.send(bytes(frame))
        with pytest.raises(ForkyardError):
            await process.wait()
        again = await guest.process(process.pid)
        await again.write(b"fine")
        again.close_stdin()
        assert [o.data async for o in again.output()] == [b"fine"]


async def test_garbage_from_the_guest_is_forgiven_once(wire: Wire, agent: Path) -> None:
    _, back = wire.open()
    async with plain_agent.attached(wire) as guest:
        process = await spawn(guest, "echo a; read x; echo $x", stdin="pipe")
        await read_until(process, b"a\n")
        os.write(back, os.urandom(100))
        await until(lambda: guest._channel._violated_at is not None)
        await until(lambda: not guest._channel._decoder.hunting)
        await process.write(b"still\n")
        assert b"still" in await read_until(process, b"still")
        os.write(back, os.urandom(100))
        with pytest.raises(SandboxLostError) as caught:
            while True:
                await guest.ping(2)
        assert caught.value.cause == "guest"


@pytest.mark.parametrize(
    "frame",
    [
        (Type.DATA, 4001, b"x" * 20),
        (Type.HELLO, 0, b"y" * 30),
        (Type.ATTACH, 0, b""),
        (99, 0, b""),
        (Type.EXIT, 2, b"z" * 80),
    ],
)
async def test_forged_frames_without_a_second_chance(wire: Wire, frame: tuple[int, int, bytes]) -> None:
    _, back = wire.open()
    guest = Guest(*wire.open(), box="test")
    await guest.attach(None)
    os.write(back, encode(frame[0], frame[1], guest._channel.epoch, frame[2]))
    with pytest.raises(SandboxLostError) as caught:
        await guest.ping(2)
        await guest.ping(2)
    assert caught.value.cause == "guest"


async def test_more_output_than_asked_for_is_refused(wire: Wire) -> None:
    _, back = wire.open()
    guest = Guest(*wire.open(), box="test")
    await guest.attach(None)
    process = await spawn(guest, "sleep 30")
    offset = 0
    piece = bytes(60_000)
    for _ in range(6):
        frame = encode(
            Type.DATA, process.stream, guest._channel.epoch, offset.to_bytes(8, "little") + piece, chan=1
        )
        view = memoryview(frame)
        while view and guest.error is None:
            try:
                view = view[os.write(back, view) :]
            except BlockingIOError:
                await asyncio.sleep(0)
        offset += len(piece)
    await until(lambda: guest.error is not None)
    assert isinstance(guest.error, SandboxLostError)
    os.kill(process.pid, signal.SIGKILL)


async def test_lost_ends_everything_that_waits(guest: Guest) -> None:
    process = await spawn(guest, "sleep 30")
    async with asyncio.TaskGroup() as tg:
        assert await guest.quiesce()
        # Only now: its end may not be told before.
        os.kill(process.pid, signal.SIGKILL)
        one = tg.create_task(_expect(guest.processes(), SandboxLostError))
        two = tg.create_task(_expect(process.wait(), SandboxLostError))
        await asyncio.sleep(0)
        guest.lost(SandboxLostError("it died", cause="host"))
        await one
        await two
    with pytest.raises(SandboxLostError):
        await guest.ping()


async def test_a_detached_command_never_waits_for_a_reader(guest: Guest, tmp_path: Path) -> None:
    process = await spawn(guest, f"head -c 5000000 /dev/zero; touch {tmp_path}/done; sleep 600")
    process.detach()
    await until((tmp_path / "done").exists)
    again = await guest.process(process.pid)
    first = await anext(again.output())
    assert first.kind == "gap" and first.missing >= 5_000_000 - (1 << 20)
    again.kill_tree()
    assert (await again.wait()).signal == 9


async def test_identity_and_users(guest: Guest) -> None:
    assert await guest.identify(Identity("name", "0" * 32, "fork-1", fork=True)) == []
    assert (await sh(guest, "echo $FORKYARD_FORK_ID"))[0] == b"fork-1\n"
    root = await guest.lookup_user("root")
    assert (root.uid, root.gid, root.home) == (0, 0, "/root")
    assert (await guest.lookup_user("4242:77")).gid == 77
    with pytest.raises(NotFoundError):
        await guest.lookup_user("no-such-user")
    for bad in (Identity("a b", "", "f"), Identity("a", "xyz", "f")):
        with pytest.raises(InvalidRequestError):
            await guest.identify(bad)


async def test_processes_and_activity(guest: Guest) -> None:
    process = await spawn(guest, "sleep 600 & wait")
    # A child that has not executed its program yet looks like its shell.
    await until(lambda: children(process.pid) == ["sleep\x00600\x00"])
    mine = [p for p in await guest.processes() if p.handle == str(process.pid)]
    assert sorted(p.command.split()[0] for p in mine) == ["/bin/sh", "sleep"]
    assert (await guest.activity()).processes == 2
    process.kill_tree()
    await process.wait()
    assert (await guest.activity()).processes == 0


def test_the_decoder_is_what_the_agent_speaks(wire: Wire) -> None:
    """Before any attach an agent is silent."""
    _, back = wire.open()
    with pytest.raises(BlockingIOError):
        os.read(back, 1)
    assert list(Decoder().feed(b"")) == []
