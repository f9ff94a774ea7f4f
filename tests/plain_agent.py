"""The real agent as an ordinary process over two FIFOs, and a guest attached to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forkyard.guest import ExitStatus, Guest, SpawnSpec

ROOT = Path(__file__).parents[1]
ME = str(os.getuid())


# As from a parent that ignores every signal, those included that a C library keeps to itself:
# the agent has to undo that for its commands.
_IGNORING = """
import ctypes, os, platform, sys
number = {"x86_64": 13, "aarch64": 134}[platform.machine()]  # rt_sigaction
ignore = (ctypes.c_ulong * 8)(1)
for signal in range(1, 65):
    ctypes.CDLL(None).syscall(number, signal, ignore, None, 8)
os.execv(sys.argv[1], sys.argv[1:])
"""


def build(into: Path) -> Path:
    if not (shutil.which("gcc") or shutil.which("musl-gcc")) or not shutil.which("make"):
        pytest.skip("no C compiler to build the agent with")
    out = into / "agent"
    subprocess.run(["make", "-s", "-C", str(ROOT / "agent"), f"OUT={out}"], check=True, timeout=120)
    return out


class Wire:
    """The FIFOs and the process; ``open()`` gives fresh descriptors as another daemon would have."""

    def __init__(self, agent: Path, dir: Path) -> None:
        self.dir = dir
        for name in ("in", "out"):
            os.mkfifo(dir / name, 0o600)
        ends = [os.open(dir / name, os.O_RDWR) for name in ("in", "out")]
        argv = [sys.executable, "-c", _IGNORING, str(agent), "--plain"]
        self.process = subprocess.Popen(argv, stdin=ends[0], stdout=ends[1])
        for fd in ends:
            os.close(fd)
        self.fds: list[int] = []

    def open(self) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        pair = os.open(self.dir / "in", flags), os.open(self.dir / "out", flags)
        self.fds += pair
        return pair

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for fd in self.fds:
            os.close(fd)


@contextlib.contextmanager
def running(agent: Path, dir: Path) -> Iterator[Wire]:
    wire = Wire(agent, dir)
    try:
        yield wire
    finally:
        wire.close()


@contextlib.asynccontextmanager
async def attached(wire: Wire) -> AsyncIterator[Guest]:
    async with asyncio.TaskGroup() as tg:
        guest = Guest(*wire.open(), box="test")
        await guest.attach(tg)
        try:
            yield guest
        finally:
            await guest.close()


async def run(
    guest: Guest, *argv: str, stdin: bytes | None = None, **options
) -> tuple[bytes, bytes, ExitStatus]:
    """Run to the end: stdout, stderr, status."""
    options.setdefault("user", ME)
    env = options.pop("env", {})
    spec = SpawnSpec(list(argv), env, stdin="pipe" if stdin is not None else "none", **options)
    process = await guest.spawn(spec)
    got = {"stdout": b"", "stderr": b"", "gap": b""}
    async with asyncio.TaskGroup() as tg:
        if stdin is not None:

            async def feed() -> None:
                await process.write(stdin)
                process.close_stdin()

            tg.create_task(feed())
        pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": [], "gap": []}
        async for item in process.output():
            pieces[item.kind].append(item.data)
        got = {kind: b"".join(parts) for kind, parts in pieces.items()}
    return got["stdout"], got["stderr"], await process.wait()


async def sh(guest: Guest, command: str, **options) -> tuple[bytes, bytes, ExitStatus]:
    return await run(guest, "/bin/sh", "-c", command, **options)
