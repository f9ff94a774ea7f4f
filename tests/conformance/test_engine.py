"""The engine protocol itself: what every engine does for one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator

import pytest
from bench_of_machines import Bench, bench_of, out
from yards import Home, Kind, until

from forkyard.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    ForkyardError,
    SandboxLostError,
)
from forkyard.guest import Guest, GuestProcess, SpawnSpec
from forkyard.host import mounts, process

IMAGE = "checkpoint.img"


@pytest.fixture
async def bench(home: Home) -> AsyncIterator[Bench]:
    async with bench_of(home) as bench:
        yield bench
    shutil.rmtree(home.path / "image", ignore_errors=True)
    await until(lambda: not home.leftovers(), lambda: f"nothing is left: {home.leftovers()}")


async def start_counter(guest: Guest) -> GuestProcess:
    started = await guest.spawn(SpawnSpec(["/usr/local/bin/counter", "/home/user/n"], {}, user="user"))
    await until(lambda: count(guest), "the counter has begun")
    return started


async def count(guest: Guest) -> int:
    with contextlib.suppress(ForkyardError):
        return int((await guest.read_bytes("/home/user/n")).strip() or 0)
    return 0


async def test_boot_and_run(bench: Bench) -> None:
    machine, guest = await bench.boot()
    assert not machine.died.is_set()
    assert guest.info is not None and guest.info.processes == []
    assert await out(guest, "echo hello; whoami", user="user") == "hello\nuser"
    assert await out(guest, "exit 0; false") == ""
    await guest.write_file("/tmp/f", b"data", user="user")
    assert await out(guest, "cat /tmp/f") == "data"


async def test_a_pause_stops_time(bench: Bench) -> None:
    machine, guest = await bench.boot()
    await start_counter(guest)
    await bench.engine.pause(machine)
    with pytest.raises(ForkyardError):
        await guest.ping(0.3)
    await bench.engine.resume(machine)
    # What was asked while it stood still is answered first; then the counter goes on from where it was.
    before = await count(guest)
    await until(lambda: _above(guest, before), "it counts on")


async def _above(guest: Guest, number: int) -> bool:
    return await count(guest) > number


async def test_time_does_not_pass_in_a_pause(bench: Bench, kind: Kind) -> None:
    machine, guest = await bench.boot()
    await guest.spawn(SpawnSpec(["sh", "-c", "while :; do sleep 0.05; echo x >> /tmp/ticks; done"], {}))
    await until(lambda: _size(guest, 2), "it ticks")
    await bench.engine.pause(machine)
    begun = asyncio.get_running_loop().time()
    await asyncio.sleep(0.6)  # the time whose passing is looked for
    stood_s = asyncio.get_running_loop().time() - begun
    await bench.engine.resume(machine)
    size = (await guest.stat("/tmp/ticks")).size // 2
    await until(lambda: _size(guest, size + 2), "it ticks on")
    assert stood_s >= 0.6
    # Twelve ticks would have fit into the pause; a real kernel may catch up one that was due.
    assert size <= 6 if not kind.real else size <= 8


async def _size(guest: Guest, lines: int) -> bool:
    with contextlib.suppress(ForkyardError):
        return (await guest.stat("/tmp/ticks")).size >= lines * 2
    return False


async def test_the_source_of_a_save_goes_on(bench: Bench) -> None:
    machine, guest = await bench.boot()
    counter = await start_counter(guest)
    await bench.freeze(machine, guest, "image")
    before = await count(guest)
    await until(lambda: _above(guest, before), "the source counts on")
    assert counter.status is None
    assert await out(guest, "echo alive") == "alive"


async def test_two_machines_from_one_image(bench: Bench) -> None:
    machine, guest = await bench.boot()
    counter = await start_counter(guest)
    image, layers = await bench.freeze(machine, guest, "image")
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(bench.restore(image, layers)) for _ in range(2)]
    for copy, its_guest in [start.result() for start in starts]:
        assert (copy.pid, copy.start_time) != (machine.pid, machine.start_time)
        known = its_guest.info.processes if its_guest.info else []
        assert [row.pid for row in known] == [counter.pid]
        assert not known[0].exited
        before = await count(its_guest)
        assert before > 0
        await until(lambda g=its_guest, n=before: _above(g, n), "the copy counts on")
        copied = await its_guest.process(counter.pid)
        copied.kill_tree()
        assert (await copied.wait()).signal == 9
        assert await its_guest.processes() == []
    assert counter.status is None
    assert [row.pid for row in await guest.processes() if row.pid == counter.pid] == [counter.pid]


@pytest.mark.only(lambda kind, linked: not linked or kind.name != "qemu")  # mounts nothing on its disk
@pytest.mark.parametrize("linked", [False, True])
async def test_what_is_prepared_serves_a_disk_that_comes_later(bench: Bench, linked: bool) -> None:
    spec = await bench.spec()
    if linked:  # a directory that the engine mounts on
        (spec.rootfs / "var").mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (spec.rootfs / "var/tmp").rmdir()
        (spec.rootfs / "var/tmp").symlink_to("/tmp")
    machine = await bench.engine.boot(spec)
    guest = await bench.hear(machine)
    await guest.write_file("/home/user/f", b"of the source", user="user")
    image, layers = await bench.freeze(machine, guest, "image")
    copies = [await bench.restore_prepared(image, layers) for _ in range(2)]
    for number, (copy, its_guest) in enumerate(copies):
        assert await out(its_guest, "cat /home/user/f") == "of the source"
        await its_guest.write_file("/home/user/own", b"%d" % number, user="user")
        await its_guest.write_file("/tmp/own", b"%d" % number, user="user")
        if not bench.engine.own_kernel:
            assert (copy.spec.rootfs / "home/user/own").read_bytes() == b"%d" % number
    for number, (_, its_guest) in enumerate(copies):
        assert await out(its_guest, "cat /home/user/own /tmp/own") == f"{number}{number}"
    if not bench.engine.own_kernel:
        assert not (spec.rootfs / "home/user/own").exists()


async def test_output_that_nobody_took_is_in_the_copy(bench: Bench) -> None:
    machine, guest = await bench.boot()
    command = await guest.spawn(SpawnSpec(["sh", "-c", "echo one; cat; echo three"], {}, stdin="pipe"))
    first = await anext(command.output())
    assert first.data == b"one\n"
    image, layers = await bench.freeze(machine, guest, "image")
    _, copy = await bench.restore(image, layers)
    again = await copy.process(command.pid, stdout_offset=0)
    await again.write(b"two\n")
    again.close_stdin()
    said = [(item.offset, item.data) async for item in again.output()]
    assert b"".join(data for _, data in said).endswith(b"two\nthree\n")
    assert (await again.wait()).code == 0


async def test_copies_do_not_share_a_disk(bench: Bench) -> None:
    machine, guest = await bench.boot()
    await guest.write_file("/root/f", b"before")
    image, layers = await bench.freeze(machine, guest, "image")
    await guest.write_file("/root/f", b"source")
    _, copy = await bench.restore(image, layers)
    assert await copy.read_bytes("/root/f") == b"before"
    await copy.write_file("/root/f", b"copy")
    assert await guest.read_bytes("/root/f") == b"source"


async def test_kill_is_idempotent_and_leaves_no_process(bench: Bench) -> None:
    machine, guest = await bench.boot()
    await start_counter(guest)
    await guest.close()
    await bench.engine.kill(machine)
    assert machine.died.is_set()
    await bench.engine.kill(machine)
    assert [line for line in bench.home.leftovers() if line.startswith(("process", "toy"))] == []
    assert await bench.engine.reattach(machine.spec, machine.record()) is None


async def test_a_death_is_noticed(bench: Bench) -> None:
    machine, guest = await bench.boot()
    machine.died.clear()
    await bench.engine.sweep(machine.spec.dir)
    await asyncio.wait_for(machine.died.wait(), 10)
    guest.lost(SandboxLostError("it died"))
    with pytest.raises(SandboxLostError):
        await guest.ping(5)


async def test_reattach(bench: Bench) -> None:
    machine, guest = await bench.boot()
    counter = await start_counter(guest)
    await guest.close()
    again = await bench.engine.reattach(machine.spec, machine.record())
    assert again is not None
    assert (again.pid, again.start_time) == (machine.pid, machine.start_time)
    other = await bench.hear(again)
    assert [row.pid for row in other.info.processes] == [counter.pid]
    before = await count(other)
    await until(lambda: _above(other, before), "it counts on")
    gone = machine.record() | {"pid": 1 << 22, "start_time": 1}
    assert await bench.engine.reattach(machine.spec, gone) is None


async def test_damaged_images_are_refused(bench: Bench, kind: Kind) -> None:
    machine, guest = await bench.boot()
    image, layers = await bench.freeze(machine, guest, "image")
    damage = image / ("state" if kind.name == "qemu" else IMAGE)
    whole = damage.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:10], b""):
        damage.write_bytes(damaged)
        with pytest.raises(CorruptSnapshotError):
            await bench.engine.restore(await bench.spec(layers), image)
    for at in (40, len(whole) // 2):
        damage.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            made = await bench.engine.restore(await bench.spec(layers), image)
        except CorruptSnapshotError:
            continue
        # gVisor does not look at every byte: that is what the image's checksums are for.
        await bench.engine.kill(made)
        assert kind.real
    damage.unlink()
    with pytest.raises(CorruptSnapshotError, match="lacks"):
        await bench.engine.restore(await bench.spec(layers), image)
    assert await out(guest, "echo unharmed") == "unharmed"
    damage.write_bytes(whole)
    _, copy = await bench.restore(image, layers)
    assert await out(copy, "echo whole") == "whole"


@pytest.mark.root
async def test_a_full_disk_costs_the_image_alone(bench: Bench) -> None:
    machine, guest = await bench.boot()
    small = bench.home.path / "small"
    small.mkdir()
    await process.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(small)], check=True)
    try:
        (small / "fill").write_bytes(bytes(3000))
        await bench.engine.pause(machine)
        with pytest.raises(CapacityError):
            await bench.engine.save(machine, small / "image")
        await bench.engine.resume(machine)
        assert await out(guest, "echo alive") == "alive"
    finally:
        mounts.unmount(small)
        small.rmdir()
    image, layers = await bench.freeze(machine, guest, "image")
    _, copy = await bench.restore(image, layers)
    assert await out(copy, "echo too") == "too"


# gVisor's kernel pauses by itself; the yard always pauses first.
@pytest.mark.only(lambda kind: not kind.real)
async def test_a_machine_that_runs_is_not_saved(bench: Bench) -> None:
    machine, _ = await bench.boot()
    with pytest.raises(ConflictError):
        await bench.engine.save(machine, bench.home.path / "image")


@pytest.mark.parametrize("what", ["boot", "restore"])
async def test_a_cancelled_start_leaves_nothing(bench: Bench, what: str) -> None:
    machine, guest = await bench.boot()
    image, layers = await bench.freeze(machine, guest, "image")
    mine = {line for line in bench.home.leftovers() if line.startswith(("process", "toy"))}
    begun = asyncio.get_running_loop().time()
    whole = await bench.engine.boot(await bench.spec())
    took_s = asyncio.get_running_loop().time() - begun
    await bench.engine.kill(whole)
    for part in (0.0, 0.05, 0.3, 0.6, 0.9):
        spec = await bench.spec(layers if what == "restore" else None)
        work = bench.engine.boot(spec) if what == "boot" else bench.engine.restore(spec, image)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(part * took_s)
        task.cancel()
        try:
            done = await task
        except asyncio.CancelledError:
            await until(lambda: _only(bench, mine), "no process is left")
            assert not (spec.dir / "in").exists() and not (spec.dir / "st").exists()
        else:
            await bench.engine.kill(done)
    assert await out(guest, "echo unharmed") == "unharmed"


def _only(bench: Bench, mine: set[str]) -> bool:
    return {line for line in bench.home.leftovers() if line.startswith(("process", "toy"))} == mine


async def test_the_fingerprint_tells_engines_apart(bench: Bench) -> None:
    mark = bench.engine.fingerprint()
    assert mark.startswith(bench.engine.name) and mark == bench.engine.fingerprint()


async def test_a_machine_is_found_by_its_own_record_only(bench: Bench) -> None:
    machine, _ = await bench.boot()
    record = machine.record()
    assert record["boot_id"] == process.boot_id()
    stranger = record | {"pid": os.getpid(), "start_time": 7}
    assert await bench.engine.reattach(machine.spec, stranger) is None
