"""The agent as PID 1 under a real runsc: what only gVisor can show."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent_box import Box, write_rootfs

from forkyard.errors import AccessDeniedError, UnavailableError
from forkyard.guest import Guest, Identity, SpawnSpec
from forkyard.setup.borrow import SYSTEM_HOME
from forkyard.setup.runsc import read_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import plain_agent
from plain_agent import run, sh

pytestmark = pytest.mark.root
KNOWN = read_engine(SYSTEM_HOME)
RUNSC = os.environ.get("FORKYARD_RUNSC") or (KNOWN and KNOWN["runsc"])


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not RUNSC or not os.access(RUNSC, os.X_OK):
        pytest.fail("set-up has chosen no runsc: run `make setup` first")
    return plain_agent.build(tmp_path_factory.mktemp("agent"))


@pytest.fixture(params=["systrap", "ptrace"])
def box(agent: Path, tmp_home: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Box]]:
    """A factory of boxes, which are all closed at the end."""
    assert RUNSC
    made: list[Box] = []

    def make(**options) -> Box:
        dir = tmp_home / f"b{len(made)}"
        dir.mkdir()
        made.append(Box(RUNSC, agent, dir, platform=request.param))
        made[-1].start(**options)
        return made[-1]

    yield make
    for one in made:
        one.close()


@asynccontextmanager
async def guest_of(box: Box) -> AsyncIterator[Guest]:
    async with asyncio.TaskGroup() as tg:
        guest = Guest(*box.fds, box="test")
        await guest.attach(tg)
        try:
            yield guest
        finally:
            await guest.close()


def write_hook(root: Path, name: str, text: str) -> None:
    hooks = root / "etc/forkyard/on-fork.d"
    hooks.mkdir(parents=True, exist_ok=True)
    (hooks / name).write_text(text)
    (hooks / name).chmod(0o755)


async def test_users_and_capabilities(box: Callable[..., Box]) -> None:
    async with guest_of(box()) as guest:
        never = sum(1 << n for n in (21, 12, 13, 27, 19, 24, 16, 22))
        for user in ("root", "user"):
            out, _, _ = await sh(guest, "grep ^Cap /proc/self/status", user=user)
            assert all(int(line.split()[1], 16) & never == 0 for line in out.splitlines()), out
        out, _, _ = await sh(guest, "id; pwd; echo $HOME $USER", user="user")
        assert out.decode().splitlines() == [
            "uid=1000(user) gid=1000(user) groups=1000(user),2000(extra)",
            "/home/user",
            "/home/user user",
        ]
        assert (await guest.lookup_user("user")).home == "/home/user"
        with pytest.raises(AccessDeniedError):
            await guest.write_file("/etc/passwd", b"", user="user")


async def test_a_plain_user_cannot_reach_the_wire(box: Callable[..., Box]) -> None:
    tries = (
        "cat /proc/1/fd/0",
        "echo x > /proc/1/fd/1",
        "cat /proc/1/mem",
        "kill -9 1",
    )
    async with guest_of(box()) as guest:
        for command in tries:
            _, err, status = await sh(guest, command, user="user")
            assert status.code != 0, command
            assert b"ermission denied" in err or b"not permitted" in err, (command, err)
        ptrace = (
            "import ctypes, os, sys; c = ctypes.CDLL(None, use_errno=True); "
            "sys.exit(0 if c.ptrace(16, 1, 0, 0) == 0 else ctypes.get_errno())"
        )
        for user in ("user", "root"):
            _, _, status = await run(guest, "python3", "-c", ptrace, user=user)
            assert status.code == 1, user  # EPERM
        assert (await sh(guest, "echo fine"))[0] == b"fine\n"


async def test_identity_of_a_fork(box: Callable[..., Box], tmp_home: Path) -> None:
    first = box()
    write_hook(first.dir / "rootfs", "10-good", "#!/bin/sh\necho $FORKYARD_FORK_ID > /tmp/hooked\n")
    write_hook(first.dir / "rootfs", "20-bad", "#!/bin/sh\nexit 3\n")
    async with guest_of(first) as source:
        await source.identify(Identity("source", "a" * 32, "id-source"))
        assert (await sh(source, "ls /tmp/hooked"))[2].code != 0
        counter = await source.spawn(
            SpawnSpec(["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep .02; done"], {})
        )
        terminal = await source.spawn(SpawnSpec(["sh"], {}, pty=True))
        await terminal.write(b"x=42\n")
        numbers = counter.output()
        await anext(numbers)
        assert await source.quiesce(2)
        first.save(tmp_home / "image")
        await source.unquiesce()
        assert (await anext(numbers)).data

        second = box(root=first.dir / "rootfs", image=tmp_home / "image")
        async with guest_of(second) as fork:
            assert fork.info is not None and fork.info.fork_id == "id-source"
            assert {p.pid for p in fork.info.processes} >= {counter.pid, terminal.pid}
            hooks = await fork.identify(Identity("fork-1", "b" * 32, "id-fork", fork=True))
            assert hooks == [("10-good", 0), ("20-bad", 3)]
            out, _, _ = await sh(
                fork,
                "hostname; cat /etc/hostname /etc/machine-id /run/forkyard/fork /tmp/hooked; "
                "echo $FORKYARD_FORK_ID; getent hosts fork-1 | cut -d' ' -f1",
            )
            assert out.decode().split() == ["fork-1"] * 2 + ["b" * 32] + ["id-fork"] * 3 + ["127.0.1.1"]
            again = await fork.process(counter.pid)
            pieces = again.output()
            assert (await anext(pieces)).data.startswith(b"1\n2\n")
            assert (await anext(pieces)).data
            again.kill_tree()
            shell = await fork.process(terminal.pid)
            await shell.write(b"echo got=$x; exit 7\n")
            seen = b"".join([o.data async for o in shell.output()])
            assert b"got=42" in seen and (await shell.wait()).code == 7
            assert (await sh(fork, "echo still"))[0] == b"still\n"
            entropy = {(await sh(g, "head -c 16 /dev/urandom | od -x"))[0] for g in (source, fork)}
            assert len(entropy) == 2
        counter.kill_tree()
        terminal.kill_tree()


@pytest.mark.parametrize("quiet", [True, False])
async def test_a_fork_in_the_middle_of_an_upload(
    box: Callable[..., Box], tmp_home: Path, quiet: bool
) -> None:
    """A quiet save is no more than a pause; after one that was not, a new epoch has to begin."""
    first = box()
    async with guest_of(first) as source:
        begun = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield bytes(50_000)
                begun.set()
                await asyncio.sleep(0.01)

        async def upload() -> int | None:
            try:
                return (await source.write_file("/tmp/up", slowly())).size
            except UnavailableError:
                return None

        command = await source.spawn(
            SpawnSpec(["sh", "-c", "for i in $(seq 3000); do echo line $i; done"], {})
        )
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(upload())
            await begun.wait()
            if quiet:
                assert await source.quiesce(5)
            await asyncio.to_thread(first.save, tmp_home / "image")
            if quiet:
                await source.unquiesce()
            else:
                await source.attach()
        assert task.result() == (2_000_000 if quiet else None)
        lines = b"".join([o.data async for o in command.output()])
        assert lines == b"".join(b"line %d\n" % i for i in range(1, 3001))
        assert (await sh(source, "ls -A /tmp"))[0] == (b"up\n" if quiet else b"")
        second = box(root=first.dir / "rootfs", image=tmp_home / "image")
        async with guest_of(second) as fork:
            assert (await sh(fork, "ls -A /tmp; echo ok"))[0] == b"ok\n"


async def test_thousands_of_commands_leave_the_image_where_it_was(
    box: Callable[..., Box], tmp_home: Path
) -> None:
    first = box()
    async with guest_of(first) as guest:
        # The agent itself is the static program that made images grow by 82 KB a start.
        argv = ["/.forkyard/agent", "--version"]
        assert (await run(guest, *argv))[2].code == 0
        before = first.save(tmp_home / "before")["checkpoint.img"]
        for _ in range(150):
            await run(guest, *argv)
            await guest.processes()
        after = first.save(tmp_home / "after")["checkpoint.img"]
        assert after < before + (200 << 10), (before, after)


async def test_a_fork_bomb_is_ended(box: Callable[..., Box]) -> None:
    async with guest_of(box(nproc=100)) as guest:
        # Who has forked twice stays, asleep: where a failed fork ends a shell, a bomb of these burns out.
        code = "b() { b & b & exec sleep 600; }; b & exec sleep 600"
        bomb = await guest.spawn(SpawnSpec(["sh", "-c", code], {}, user="user"))
        async with asyncio.timeout(30):
            while (await guest.activity()).processes < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        started = time.monotonic()
        bomb.kill_tree()
        async for _ in bomb.output():
            pass
        assert (await bomb.wait()).signal == 9
        async with asyncio.timeout(25):
            while (await guest.activity()).processes:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert (await sh(guest, "echo ok"))[0] == b"ok\n"
        assert time.monotonic() - started < 25  # of the 600 s that it would sleep


async def test_files_are_fast_enough(box: Callable[..., Box]) -> None:
    async with guest_of(box()) as guest:
        data = os.urandom(1 << 20) * 64
        started = time.monotonic()
        await guest.write_file("/root/big", data)
        assert await guest.read_bytes("/root/big") == data
        assert time.monotonic() - started < 20  # 128 MB; a machine under test load is no benchmark


def test_write_rootfs_is_complete(tmp_path: Path) -> None:
    write_rootfs(tmp_path / "r")
    assert (tmp_path / "r/bin").is_symlink()
