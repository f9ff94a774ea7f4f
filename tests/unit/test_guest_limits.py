"""What ends commands: memory or processes that run out (the agent is an ordinary process here), a loss."""

from __future__ import annotations

import asyncio
import os
import signal

import plain_agent
import pytest
from plain_agent import ME, Wire
from test_guest import agent, guest, spawn, wire  # noqa: F401  (fixtures)

from forkyard.errors import SandboxLostError
from forkyard.guest import Guest, SpawnSpec


async def test_out_of_memory_ends_the_whole_one_shot_command(guest: Guest) -> None:  # noqa: F811
    hog = (
        "import os, time\nfor _ in '123':\n  if os.fork() == 0: break\nx = b'x' * (60 << 20)\ntime.sleep(600)"
    )
    process = await guest.spawn(SpawnSpec(["python3", "-c", hog], {"PATH": os.environ["PATH"]}, user=ME))

    async def largest() -> float:
        return max((p.rss_mb for p in await guest.processes() if p.handle == str(process.pid)), default=0)

    async with asyncio.timeout(20):
        while await largest() < 60:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    killed = await guest.kill_largest()
    assert killed is not None and killed.command == process.pid and killed.rss_mb >= 60
    status = await process.wait()
    assert (status.code, status.oom) == (137, True)
    assert (await guest.activity()).processes == 0
    assert await guest.kill_largest() is None


async def test_a_crowd_ends_whole_and_a_smaller_one_stays(guest: Guest) -> None:  # noqa: F811
    assert guest.has_crowds
    small = await spawn(guest, "sleep 600 & sleep 600 & wait")
    crowd = await spawn(guest, "for i in 1 2 3 4 5; do sleep 600 & setsid sleep 600 & done; wait")
    fed = await spawn(guest, "for i in 1 2 3 4 5 6 7; do sleep 600 & done; read line", stdin="pipe")
    async with asyncio.timeout(20):
        while (await guest.activity()).processes < 3 + 11 + 8:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await guest.kill_crowd(12) is None
    killed = await guest.kill_crowd(11)
    assert killed is not None and (killed.command, killed.processes) == (crowd.pid, 11)
    status = await crowd.wait()
    assert (status.code, status.crowded, status.oom) == (137, True, False)
    # What is fed by a pipe keeps its own process.
    killed = await guest.kill_crowd(8)
    assert killed is not None and killed.command == fed.pid
    async with asyncio.timeout(20):
        while (await guest.activity()).processes > 3 + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not small.finished and not fed.finished
    assert await guest.kill_crowd(4) is None


async def test_a_guest_lost_between_two_epochs_ends_what_waits(wire: Wire) -> None:  # noqa: F811
    async with plain_agent.attached(wire) as lost:
        process = await spawn(lost, "sleep 600")
        reading = asyncio.create_task(anext(process.output()))
        wire.process.send_signal(signal.SIGSTOP)
        again = asyncio.create_task(lost.attach(timeout_s=60))
        await asyncio.sleep(0.1)
        lost.lost(SandboxLostError("it is gone", cause="guest"))
        async with asyncio.timeout(5):
            for waiting in (again, reading, process.wait()):
                with pytest.raises(SandboxLostError, match="it is gone"):
                    await waiting
