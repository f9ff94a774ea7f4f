"""What nothing built here can go below: the host's own times, and the agent's without what is above it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from bench.cases import FILE_MB, IN_A_ROW, PAUSE_S, SHELL_TRUE, TRUE, Bench
from bench.ours import Forkyard, base_layers, lender
from forkyard.engines.gvisor import Runsc
from forkyard.guest import Guest, SpawnSpec
from forkyard.host import mounts
from forkyard.host.files import rmtree
from forkyard.setup.trial import open_trial

NAME = "floor"


def floors(bench: Bench) -> None:
    """The host's, then the agent's for every build and platform that forkyard is measured with."""
    bench.note("floors")
    layers = base_layers(lender())
    _host(bench, layers)
    _memory(bench)
    for contender in bench.contenders:
        if not isinstance(contender, Forkyard):
            continue
        for index in range(-1, 20 * bench.n):
            with bench.timed("empty HTTP round trip (version)", contender.name, index):
                contender.client.version()
        try:
            asyncio.run(_agent(bench, contender, layers))
        except Exception as error:
            bench.failures.append(f"agent's floor, {contender.name}: {type(error).__name__}: {error}")


def _host(bench: Bench, layers: list[Path]) -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="fybench-", dir="/tmp"))
        stack.callback(rmtree, directory)
        for name in ("up", "wk", "root"):
            (directory / name).mkdir()
        target = directory / "root"
        stack.callback(mounts.unmount, target)
        for index in range(-1, 5 * bench.n):
            with bench.timed("fork+exec of `true` on the host", NAME, index):
                subprocess.run(["/bin/true"], check=True)
            with bench.timed("overlay mount", NAME, index):
                mounts.mount_overlay(layers, directory / "up", directory / "wk", target)
            with bench.timed("overlay unmount", NAME, index):
                mounts.unmount(target)


def _memory(bench: Bench) -> None:
    """What a wire and a memory image cost at least: a byte to another process and back, and a copy."""
    source, copy = memoryview(os.urandom(FILE_MB << 20)), memoryview(bytearray(FILE_MB << 20))
    for index in range(-1, bench.n):
        with bench.timed(f"{FILE_MB} MB copied in memory", NAME, index):
            copy[:] = source
    with subprocess.Popen(["cat", "-u"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as echo:
        assert echo.stdin is not None and echo.stdout is not None
        for index in range(-1, 20 * bench.n):
            with bench.timed("a byte through a pipe and back", NAME, index):
                echo.stdin.write(b"x")
                echo.stdout.read(1)


async def _agent(bench: Bench, contender: Forkyard, layers: list[Path]) -> None:
    runsc = await Runsc.probe(contender.build.path)
    home = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/tmp"))
    try:
        async with open_trial(runsc, contender.platform, home, layers) as trial:
            _, guest = await trial.boot()
            for index in range(-1, bench.n):
                with bench.timed("agent's ping", contender.name, index):
                    await guest.ping()
            for argv in (TRUE, SHELL_TRUE):
                shown = " ".join(argv)
                for index in range(-1, IN_A_ROW * bench.n):
                    with bench.timed(f"agent's floor of `{shown}`, in a row", contender.name, index):
                        await _spawn(guest, argv)
                for index in range(-1, bench.n):
                    await asyncio.sleep(PAUSE_S)
                    with bench.timed(f"agent's floor of `{shown}`, after 0.5 s", contender.name, index):
                        await _spawn(guest, argv)
    finally:
        rmtree(home)


async def _spawn(guest: Guest, argv: list[str]) -> None:
    env = {"PATH": "/opt/forkyard/venv/bin:/usr/local/bin:/usr/bin:/bin"}
    process = await guest.spawn(SpawnSpec(argv=argv, env=env, cwd="/home/user", user="user"))
    status = await process.wait()
    if status.code:
        raise RuntimeError(f"{argv} ended with {status.code}")
