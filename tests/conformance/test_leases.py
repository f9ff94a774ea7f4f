"""Who a sandbox lives for, and until when."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from yards import TestYard, until

from forkyard import requests as rq
from forkyard import types as ty
from forkyard.access import HoldLease
from forkyard.errors import ConflictError
from forkyard.host import process
from forkyard.host.failpoint import armed
from forkyard.yard import leases


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked once a second is checked often."""
    monkeypatch.setattr(leases, "TICK_S", 0.02)


@pytest.fixture
def holder() -> Iterator[rq.Lease]:
    """A process that holds a lease, and does nothing else."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield rq.Lease(pid=child.pid, start_time=process.start_time(child.pid))
    finally:
        child.kill()
        child.wait()


def gone(yard: TestYard, ref: str) -> bool:
    return yard.context.sandboxes.find(ref) is None


async def test_a_killed_client_takes_its_sandboxes_along(yard: TestYard, holder: rq.Lease) -> None:
    assert holder.pid is not None
    held = [await yard.create(ephemeral=True, lease=holder) for _ in range(2)]
    (fork,) = (await yard.fork(held[0].id, 1, lease=holder)).forks
    assert fork.ephemeral
    other = await yard.create(name="other")
    os.kill(holder.pid, signal.SIGKILL)
    for one in (*held, fork):
        await until(lambda ref=one.id: gone(yard, ref), "it goes with its holder")
    assert not gone(yard, other.id)


async def test_a_lease_of_a_process_that_is_gone_ends_at_once(yard: TestYard, holder: rq.Lease) -> None:
    gone_already = rq.Lease(pid=holder.pid, start_time=(holder.start_time or 0) - 1)
    with contextlib.suppress(ConflictError):  # it may be deleted before its creation is through
        await yard.create(ephemeral=True, lease=gone_already)
    await until(lambda: len(yard.context.sandboxes) == 0, "it goes at once")


async def test_adopt_and_release(yard: TestYard, holder: rq.Lease) -> None:
    assert holder.pid is not None
    mine = rq.Lease(pid=os.getpid(), start_time=process.start_time(os.getpid()))
    made = await yard.create(ephemeral=True, lease=holder)
    await yard.yard.adopt(rq.Adopt(sandbox=made.id, lease=mine), yard.caller)
    os.kill(holder.pid, signal.SIGKILL)
    await until(lambda: process.start_time(holder.pid or 0) is None, "the old holder is gone")
    assert await yard.out(made.id, "echo here") == "here"
    release = rq.ReleaseLease(lease=holder, sandboxes=[made.id])
    await yard.yard.release_lease(release, yard.caller)
    assert not gone(yard, made.id)
    await yard.yard.release_lease(rq.ReleaseLease(lease=mine, sandboxes=[made.id]), yard.caller)
    assert gone(yard, made.id)


async def test_a_lease_lives_by_its_stream_and_a_while_longer(
    yard: TestYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold(grace_s: float) -> AsyncIterator[ty.Event]:
        request = HoldLease(lease="a-name-of-its-own", grace_s=grace_s)
        stream = yard.yard.hold_lease(request, yard.caller)
        await anext(stream)
        return stream

    lease = rq.Lease(stream="a-name-of-its-own")
    made = await yard.create(ephemeral=True, lease=lease)
    first = await hold(600)
    await first.aclose()
    # Opened again within the grace, by another connection of the client.
    second, third = await hold(600), await hold(0.05)
    (fork,) = (await yard.fork(made.id, 1, lease=lease)).forks
    await second.aclose()
    assert not gone(yard, made.id)
    other = await yard.create(name="other", ephemeral=True, lease=rq.Lease(stream="of-another-client"))
    await third.aclose()
    for one in (made, fork):
        await until(lambda ref=one.id: gone(yard, ref), "it goes after the grace")
    assert not gone(yard, other.id)
    # Whose client never came goes as well.
    monkeypatch.setattr(leases, "GRACE_S", 0.05)
    await yard.yard.adopt(rq.Adopt(sandbox=other.id, lease=rq.Lease(stream="nobody-holds-this")), yard.caller)
    await until(lambda: gone(yard, other.id), "it goes")


async def test_an_ephemeral_one_is_deleted_when_it_stops(yard: TestYard) -> None:
    made = await yard.create(ephemeral=True)
    assert (await yard.stop(made.id)).state == "deleted"
    assert gone(yard, made.id)


async def test_expiry_deletes(yard: TestYard) -> None:
    made, stopped = await yard.create(), await yard.create()
    await yard.stop(stopped.id)
    for one in (made, stopped):
        await yard.yard.set_ttl(rq.SetTtl(sandbox=one.id, ttl_min=0.005), yard.caller)
        await until(lambda ref=one.id: gone(yard, ref), "it has expired")


async def test_using_one_does_not_prolong_it(yard: TestYard) -> None:
    made = await yard.create(ttl_min=5)
    await yard.shell(made.id, "true")
    assert (await yard.info(made.id)).expires_at == made.expires_at


async def test_an_idle_one_naps_and_wakes(yard: TestYard) -> None:
    made = await yard.create(auto_stop_min=0.005)
    sandbox = yard.context.sandboxes.get(made.id)
    pid = await yard.background(made.id, "sleep 600")
    # It is on record as stopped before its machine is ended.
    await until(lambda: sandbox.doc.state == "stopped" and sandbox.box is None, "it naps")
    assert sandbox.doc.napping
    assert await yard.out(made.id, "echo awake") == "awake"
    found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox=made.id), yard.caller)
    assert pid in {one.pid for one in found}
    await until(lambda: sandbox.doc.state == "stopped", "it naps again")
    # Stopped by hand it stays stopped.
    await yard.stop(made.id)
    assert not sandbox.doc.napping


async def test_who_comes_while_it_falls_asleep_is_served(yard: TestYard) -> None:
    await yard.create()
    await until(lambda: yard.yard.templates.images(yard.yard.templates.get("base")), "nothing else is saved")
    with armed("freeze.paused=delay:0.5") as points:
        made = await yard.create(auto_stop_min=0.005)
        sandbox = yard.context.sandboxes.get(made.id)
        await until(lambda: "freeze.paused" in points.reached, "it is being saved")
        assert await yard.out(made.id, "sleep 1; echo served") == "served"
    assert yard.context.snapshots == {} or sandbox.doc.napping  # nothing stays of a nap that was not taken
    await until(lambda: sandbox.doc.napping and sandbox.box is None, "it naps after that")


async def test_a_busy_one_does_not_nap(yard: TestYard) -> None:
    made = await yard.create(auto_stop_min=0.005)
    sandbox = yard.context.sandboxes.get(made.id)
    assert await yard.out(made.id, "sleep 1; echo done") == "done"
    assert sandbox.doc.generation == 1
    pid = await yard.background(made.id, "while :; do :; done")
    begun = time.monotonic()
    await until(lambda: time.monotonic() - begun > 1.2, "four times the period has passed")
    assert sandbox.doc.state == "running"
    await yard.yard.execs.signal(rq.Signal(sandbox=made.id, pid=pid, signal=9), yard.caller)
