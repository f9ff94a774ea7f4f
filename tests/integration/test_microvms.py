"""MicroVMs: what a yard does with them that no other engine's test shows."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from lives import Life, bury
from yards import Home, TestYard, kinds, new_home, opened, until

from forkyard.errors import (
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnsupportedError,
)
from forkyard.requests import DiffRequest, ExportSnapshot

QEMU = next(param for param in kinds() if param.id == "qemu")
# Under the translator, on a machine that others use too.
PATIENCE_S = 90.0
SMALL = {"mem_mb": 256, "disk_mb": 512}


@pytest.fixture(scope="module", params=[QEMU])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    with new_home(request.param, store_gb=4) as made:
        yield made


@pytest.fixture
async def yard(home: Home) -> AsyncIterator[TestYard]:
    async with opened(home) as made:
        yield made
        await _tidy(made)


async def _tidy(yard: TestYard) -> None:
    await yard.empty()
    await until(yard._nothing_left, lambda: f"nothing is left: {yard._left()}", PATIENCE_S)


async def counting(yard: TestYard, ref: str, above: int = 0) -> int:
    async def look() -> int:
        with contextlib.suppress(NotFoundError, ValueError):  # it is about to write it
            found = await yard.count(ref, "n")
            return found if found > above else 0
        return 0

    return await until(look, f"the counter of {ref} is above {above}", PATIENCE_S)


async def test_live_programs_are_forked_rewound_and_stopped(yard: TestYard) -> None:
    made = await yard.create(**SMALL)
    assert made.engine == "qemu"
    box = made.id
    await yard.write(box, file=b"kept")
    await yard.background(box, "exec counter /home/user/n")
    await counting(yard, box)
    forks = [one.id for one in (await yard.fork(box, 2)).forks]
    at = await counting(yard, forks[0])
    # The clock stood still in the image, and the two began with the same one.
    now = [float(await yard.out(one, "date +%s.%N")) for one in forks]
    assert all(abs(one - time.time()) < PATIENCE_S for one in now)
    randoms = {(await yard.shell(one, "head -c 16 /dev/urandom")).stdout_bytes for one in [box, *forks]}
    assert len(randoms) == len({await yard.out(one, "hostname") for one in [box, *forks]}) == 3
    assert await yard.read(forks[0], "file") == b"kept"
    await yard.write(forks[0], file=b"changed")
    # A fork of a fork, whose memory is in no file.
    deep = (await yard.fork(forks[0])).forks[0].id
    assert await counting(yard, deep, at) > at
    assert await yard.read(deep, "file") == b"changed"
    assert await yard.read(box, "file") == b"kept"
    await yard.checkpoint(deep, "safe")
    await yard.shell(deep, "rm file")
    await yard.rewind(deep)
    assert await yard.read(deep, "file") == b"changed"
    await yard.stop(deep)
    assert (await yard.start(deep)).memory_restored
    there = await yard.count(deep, "n")
    assert await counting(yard, deep, there) > there


async def test_a_disk_alone_has_what_was_written(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    await yard.write(box, file=b"kept")
    await yard.snapshot(box, "disk", memory=False)
    await yard.snapshot(box, "both")
    for name in ("disk", "both"):
        cold = await yard.create(snapshot=name, memory=False, disk_mb=600)
        assert not cold.memory_restored
        assert await yard.read(cold.id, "file") == b"kept"
        await yard.delete(cold.id)


async def test_root_has_a_kernel_of_its_own(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    inside = "mkdir /m && mount -t tmpfs none /m && echo x > /m/f && umount /m && ls /m"
    assert await yard.out(box, inside, user="root") == ""
    assert (await yard.shell(box, "mkdir m; mount -t tmpfs none m")).exit_code != 0
    # Its kernel divides its memory itself.
    hog = await yard.shell(box, 'x=x; while :; do x="$x$x"; done', timeout_s=PATIENCE_S)
    assert (hog.exit_code, hog.oom) == (137, True)
    assert await yard.out(box, "echo lives") == "lives"


async def test_what_it_cannot_do_is_refused(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    with pytest.raises(UnsupportedError, match="no diff"):
        await yard.yard.diff(DiffRequest(sandbox=box), yard.caller)
    await yard.snapshot(box, "kept")
    with pytest.raises(UnsupportedError, match="does not look into"):
        async for _ in yard.yard.export_snapshot(ExportSnapshot(snapshot="kept"), yard.caller):
            pass
    with pytest.raises(InvalidRequestError, match="goes on with just these"):
        await yard.create(snapshot="kept", mem_mb=512)
    with pytest.raises(InvalidRequestError, match="disk_mb=64 is less"):
        await yard.create(snapshot="kept", memory=False, disk_mb=64)
    with pytest.raises(UnsupportedError, match="is not set up"):
        await yard.create(engine="gvisor")


async def test_one_that_dies_is_told(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    sandbox = yard.context.sandboxes.get(box)
    os.kill(sandbox.box.machine.pid, signal.SIGKILL)
    await until(lambda: sandbox.doc.state == "failed", "its death is noticed")
    with pytest.raises(SandboxLostError, match=r"signal 9|is gone"):
        await yard.out(box, "true")


async def test_forks_share_their_memory(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    await yard.shell(box, "head -c 60000000 /dev/urandom > /dev/shm/much")
    first = (await yard.fork(box, 4)).forks
    for one in first:
        assert await yard.out(one.id, "cat /dev/shm/much | wc -c") == "60000000"
    each = [_memory(yard, one.id) for one in first]
    for shared, own in each:
        # What they read of it is one copy on the host; what is theirs is what they changed.
        assert own < 110 and shared >= 57, each


def _memory(yard: TestYard, ref: str) -> tuple[float, float]:
    """Of a machine's process: what it shares with others, and what is its own, in MiB."""
    pid = yard.context.sandboxes.get(ref).box.machine.pid
    fields: dict[str, int] = {}
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            words = line.split()
            if words[-1] == "kB":
                fields[words[0]] = int(words[1])
    return (fields["Shared_Clean:"] + fields["Shared_Dirty:"]) / 1024, fields["Anonymous:"] / 1024


def test_the_next_daemon_goes_on_with_them(home: Home) -> None:
    first = Life(home)
    try:
        made = first.run(first.yard.create(**SMALL))
        first.run(first.yard.background(made.id, "exec counter /home/user/n"))
        at = first.run(counting(first.yard, made.id))
        gone = first.run(first.yard.create(**SMALL))
        pid = first.yard.context.sandboxes.get(gone.id).box.machine.pid
        first.die()
        os.kill(pid, signal.SIGKILL)
        second = Life(home)
        assert second.run(counting(second.yard, made.id, at)) > at
        assert second.run(second.yard.info(gone.id)).state == "failed"
        fork = second.run(second.yard.fork(made.id)).forks[0]
        assert second.run(counting(second.yard, fork.id, at)) > at
        second.run(_tidy(second.yard))
        second.close()
    finally:
        bury()
