"""MicroVMs: what a yard does with them that no other engine's test shows."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
from lives import Life, bury
from yards import Home, TestYard, kinds, new_home, opened, until

from forkyard.errors import (
    CorruptSnapshotError,
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnsupportedError,
)
from forkyard.requests import DiffRequest, ListSnapshots
from forkyard.types import Diff

QEMU = next(param for param in kinds() if param.id == "qemu")
# Under the translator, on a machine that others use too.
PATIENCE_S = 240.0
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
    await yard.snapshot(box, "kept")
    with pytest.raises(InvalidRequestError, match="goes on with just these"):
        await yard.create(snapshot="kept", mem_mb=512)
    with pytest.raises(InvalidRequestError, match="disk_mb=64 is less"):
        await yard.create(snapshot="kept", memory=False, disk_mb=64)
    with pytest.raises(UnsupportedError, match="is not set up"):
        await yard.create(engine="gvisor")


async def test_a_live_program_goes_with_its_disk(yard: TestYard) -> None:
    """Out of the yard, of which nothing stays, and in again."""
    source = (await yard.create(**SMALL)).id
    await yard.out(source, "echo kept > file; head -c 3000000 /dev/urandom > noise")
    noise = await yard.read(source, "noise")
    await yard.background(source, "exec counter /home/user/n")
    await counting(yard, source)
    await yard.snapshot(source, "live")
    archive = await yard.exported("live")
    await yard.empty()
    with pytest.raises(CorruptSnapshotError):
        await yard.imported(archive[:-20_000])
    assert await yard.yard.list_snapshots(ListSnapshots(), yard.caller) == []
    came = await yard.imported(archive, name="came")
    assert (came.engine, came.memory) == ("qemu", True)
    first, second = (fork.id for fork in (await yard.fork("came", 2)).forks)
    for fork in (first, second):
        at = await counting(yard, fork)
        await counting(yard, fork, at)
        assert await yard.out(fork, "cat file") == "kept" and await yard.read(fork, "noise") == noise
    # It is a machine like any other: frozen again, and told apart by its disk.
    await yard.out(first, "echo more > file")
    found = await yard.yard.diff(DiffRequest(sandbox=first, since="came"), yard.caller)
    assert "file /home/user/file" in _told(found)["modified"]
    disk = await yard.create(snapshot="came", memory=False)
    assert await yard.out(disk.id, "cat file") == "kept"


CHANGES = """
printf 'one\ntwo\n' > text; chmod 755 text; head -c 200000 /dev/urandom > binary; ln -s text link
mkdir -p made/below; echo deep > made/below/file; mkfifo pipe; ln text again; : > swapped; echo x > gone
"""
MORE = """
printf 'one\n2\n' > text; rm gone; rm swapped; mkdir swapped; chmod 600 binary; rm link; ln -s binary link
"""


def _told(found: Diff) -> dict[str, list[str]]:
    kinds = {"added": found.added, "modified": found.modified, "deleted": found.deleted}
    return {name: [f"{one.kind} {one.path}" for one in changes] for name, changes in kinds.items()}


async def test_what_changed_on_its_disk(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    diff = partial(yard.yard.diff, caller=yard.caller)
    assert _told(await diff(DiffRequest(sandbox=box))) == {"added": [], "modified": [], "deleted": []}
    await yard.out(box, CHANGES)
    home = "/home/user"
    found = await diff(DiffRequest(sandbox=box))
    assert _told(found) == {
        "added": [
            *(f"file {home}/again", f"file {home}/binary", f"file {home}/gone", f"link {home}/link"),
            *(f"dir {home}/made", f"dir {home}/made/below", f"file {home}/made/below/file"),
            *(f"fifo {home}/pipe", f"file {home}/swapped", f"file {home}/text"),
        ],
        "modified": [],
        "deleted": [],
    }
    by_name = {one.path.removeprefix(f"{home}/"): one for one in found.added}
    assert (by_name["text"].mode, by_name["text"].uid, by_name["link"].target) == (0o755, 1000, "text")
    assert by_name["text"].data == b"one\ntwo\n" and len(by_name["binary"].data or b"") == 200_000
    assert "+two" in found.patch and "new file mode 100755" in found.patch and found.complete
    await yard.checkpoint(box, "then")
    await yard.out(box, MORE)
    found = await diff(DiffRequest(sandbox=box, since="then"))
    changed = ("file binary", "link link", "dir swapped", "file text", "file again")
    told = _told(found)
    assert sorted(told["modified"]) == sorted(one.replace(" ", f" {home}/") for one in changed)
    assert told["added"] == [] and told["deleted"] == [f"file {home}/gone"]
    assert "-two\n+2\n" in found.patch
    was = {one.path.removeprefix(f"{home}/"): one for one in found.modified}
    assert (was["swapped"].old_kind, was["binary"].mode, was["binary"].content) == ("file", 0o600, False)
    # One that was stopped, and a fork since what it was forked from.
    fork = (await yard.fork(box)).forks[0].id
    await yard.out(fork, "echo more > more")
    await yard.stop(fork)
    assert _told(await diff(DiffRequest(sandbox=fork)))["added"] == [f"file {home}/more"]


async def test_a_disk_that_its_root_has_spoilt_is_told(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    # Its own kernel finds no programs on it any more.
    await yard.out(box, "exec dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=notrunc,fsync", user="root")
    with pytest.raises(CorruptSnapshotError, match="cannot be read without its guest's kernel"):
        await yard.yard.diff(DiffRequest(sandbox=box), yard.caller)
    assert (await yard.info(box)).state == "running"


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


async def test_more_than_one_cpu(yard: TestYard) -> None:
    box = (await yard.create(**SMALL, cpus=2)).id
    assert await yard.out(box, "grep -c ^processor /proc/cpuinfo") == "2"
    fork = (await yard.fork(box)).forks[0].id
    spread = "sleep 1 & sleep 1 & wait; grep -c ^processor /proc/cpuinfo"
    assert await yard.out(fork, spread) == "2"
    await yard.snapshot(fork, "two")
    one = await yard.create(snapshot="two", memory=False, cpus=0.5)
    assert await yard.out(one.id, "grep -c ^processor /proc/cpuinfo") == "1"


async def test_the_disk_is_as_large_as_asked_and_gives_back(yard: TestYard) -> None:
    box = (await yard.create(**SMALL)).id
    sectors = int(await yard.out(box, "cat /sys/block/vda/size"))
    assert sectors * 512 == SMALL["disk_mb"] << 20
    image = yard.context.disks.disk_image(yard.context.sandboxes.get(box).box.id)
    await yard.out(box, "dd if=/dev/urandom of=much bs=1M count=32; sync")
    full = image.stat().st_blocks * 512
    await yard.out(box, "rm much; sync")

    def given_back() -> bool:
        return image.stat().st_blocks * 512 < full - (28 << 20)

    await until(given_back, "the space is given back", PATIENCE_S)
    more = await yard.shell(box, f"dd if=/dev/zero of=more bs=1M count={SMALL['disk_mb']}")
    assert more.exit_code == 1 and "No space left" in more.stderr
    assert await yard.out(box, "rm more; echo lives") == "lives"


GVISORS = [param.values[0] for param in kinds() if param.values[0].runsc and not param.values[0].missing]


@pytest.mark.skipif(not GVISORS, reason="no gVisor here: forkyard setup")
async def test_disks_move_between_engines(home: Home) -> None:
    engines = [await kind.engine(home.short) for kind in (home.kind, GVISORS[0])]
    async with opened(home, engines) as yard:
        try:
            await _both_ways(yard)
        finally:
            await _tidy(yard)


async def _both_ways(yard: TestYard) -> None:
    micro = await yard.create(**SMALL, engine="qemu")
    await yard.out(micro.id, "echo kept > file; chmod 751 file; ln -s file link; ln file again; mkfifo p")
    await yard.out(micro.id, "mkdir d; touch d/f; rm -r d; cp /bin/sh tool; chmod u+s tool", user="root")
    await yard.snapshot(micro.id, "disk")
    look = "cat file again link; stat -c '%a %u %h %F' file p; stat -c '%a %u' tool; ls"
    seen = await yard.out(micro.id, look)
    await yard.delete(micro.id)
    there = await yard.create(snapshot="disk", engine="gvisor", memory=False)
    assert (there.engine, there.memory_restored) == ("gvisor", False)
    assert await yard.out(there.id, look) == seen
    await yard.out(there.id, "echo more >> file; rm p; echo new > new")
    found = await yard.yard.diff(DiffRequest(sandbox=there.id), yard.caller)
    told = {name: [one.rpartition("/")[2] for one in paths] for name, paths in _told(found).items()}
    # An overlay copies the name of a file that is written, and not its others.
    assert told == {"added": ["new"], "modified": ["file"], "deleted": ["p"]}
    await yard.snapshot(there.id, "back")
    await yard.delete(there.id)
    again = await yard.create(snapshot="back", engine="qemu", memory=False)
    assert await yard.out(again.id, "cat file new; stat -c %a file; ls p || true") == "kept\nmore\nnew\n751"
    await yard.delete(again.id)
    # An archive of a microVM's disk, and a start from it.
    archive = await yard.exported("disk", memory=False)
    await yard.imported(archive, name="came")
    came = await yard.create(snapshot="came", memory=False)
    assert came.engine == "qemu" and await yard.out(came.id, "cat file") == "kept"


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
