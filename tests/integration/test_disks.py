from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest
import pytest_asyncio

from forkyard.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    NotFoundError,
    UnsupportedError,
)
from forkyard.host import mounts
from forkyard.store import loopfile
from forkyard.store.disks import DiskStore, Stray

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean_host")]


@dataclasses.dataclass
class _Settings:
    store_gb: int = 2


async def _base(store: DiskStore, name: str = "base") -> str:
    async def fill(directory: Path) -> None:
        (directory / "etc").mkdir()
        (directory / "etc" / "hostname").write_text("base")
        (directory / "gone").write_text("x")
        (directory / "opq").mkdir()
        (directory / "opq" / "old").write_text("1")
        os.chmod(directory, 0o711)

    await store.import_layer(name, fill)
    return name


@pytest_asyncio.fixture(params=["btrfs", "plain"])
async def store(request, tmp_home):
    disks = DiskStore(tmp_home, _Settings(), plain=request.param == "plain")
    await disks.open()
    assert disks.kind == request.param
    yield disks
    for stray in disks.stray([], []):
        await disks.reap([stray])
    await disks.close()


def _sh(script: str, cwd: Path) -> None:
    subprocess.run(["sh", "-ec", script], cwd=cwd, check=True)


async def test_box_seal_fork_and_removal(store):
    base = await _base(store)
    one = await store.create_box("bx1", [base], 500)
    assert mounts.is_mount(one.rootfs) and stat.S_IMODE(one.rootfs.stat().st_mode) == 0o711
    (one.rootfs / "etc" / "hostname").write_text("changed")
    os.unlink(one.rootfs / "gone")
    await store.seal("bx1", "l1")
    (one.rootfs / "later").write_text("not in the fork")
    two = await store.create_box("bx2", ["l1", base], 500)
    assert (two.rootfs / "etc" / "hostname").read_text() == "changed"
    assert sorted(os.listdir(two.rootfs)) == ["etc", "opq"]
    (two.rootfs / "mine").write_text("2")
    assert not (one.rootfs / "mine").exists()
    with pytest.raises(ConflictError):
        await store.create_box("bx1", [base], 500)
    with pytest.raises(ConflictError):
        await store.seal("bx1", "l1")
    assert (one.rootfs / "later").exists()
    for box in ("bx1", "bx2", "bx2", "never"):
        await store.remove_box(box)
    assert not one.volume.exists() and not one.rootfs.parent.exists()
    assert store.layer_path("l1").is_dir()
    await store.drop_layer("l1")
    await store.drop_layer("l1")
    with pytest.raises(NotFoundError):
        store.layer_path("l1")


async def test_a_layer_outlives_in_the_boxes_that_have_it(store):
    base = await _base(store)
    await store.create_box("bx1", [base], 500)
    await store.seal("bx1", "l1")
    two = await store.create_box("bx2", ["l1", base], 500)
    assert (two.rootfs / "gone").read_text() == "x"


async def test_sync_dirty_and_usage(store):
    base = await _base(store)
    box = await store.create_box("bx1", [base], 500)
    (box.rootfs / "big").write_bytes(os.urandom(20 << 20))
    assert store.dirty_mb("bx1") > 0
    assert await store.sync_box("bx1") > 0
    if store.quota == "simple":
        assert store.dirty_mb("bx1") < 1
        assert 20 <= store.usage_mb("bx1") < 22
    assert store.dirty_mb("never") >= 0
    assert not store.is_full("bx1") and not store.is_full("never")
    await store.seal("bx1", "l1")
    assert 20 << 20 <= await store.layer_bytes("l1") < 22 << 20


async def test_quota_binds_the_guest_and_not_the_seal(store):
    if store.quota == "none":
        pytest.skip("no quotas here")
    base = await _base(store)
    box = await store.create_box("bx1", [base], 100)

    def fill() -> int:
        written = 0
        with open(box.rootfs / "big", "wb", buffering=0) as file:
            try:
                while True:
                    written += file.write(b"x" * (1 << 20))
            except OSError:
                return written >> 20

    assert 95 <= fill() <= 100
    assert store.is_full("bx1")
    await store.seal("bx1", "l1")
    # the fork has what is left beside its chain, or the least there is
    fork = await store.create_box("bx2", ["l1", base], 130)
    assert not store.is_full("bx2")
    with pytest.raises(OSError):
        (fork.rootfs / "more").write_bytes(os.urandom(70 << 20))
    await store.set_limit("bx1", 200)
    assert not store.is_full("bx1")
    (box.rootfs / "more").write_bytes(os.urandom(50 << 20))


async def test_what_was_deleted_just_before_a_seal_does_not_bind_the_copy(store):
    """The file system frees later; a layer's size is what is in it."""
    base = await _base(store)
    box = await store.create_box("bx1", [base], 200)
    (box.rootfs / "big").write_bytes(os.urandom(150 << 20))
    (box.rootfs / "small").write_bytes(os.urandom(20 << 20))
    await store.sync_box("bx1")
    (box.rootfs / "big").unlink()
    await store.seal("bx1", "l1")
    fork = await store.create_box("bx2", ["l1", base], 200)
    (fork.rootfs / "more").write_bytes(os.urandom(150 << 20))
    assert not store.is_full("bx2")
    assert await store.layer_bytes("l1") < 30 << 20


async def test_without_quotas_a_watch_tells(tmp_home):
    store = DiskStore(tmp_home, _Settings(), plain=True)
    await store.open()
    over: asyncio.Future[tuple[str, float]] = asyncio.get_running_loop().create_future()
    store.on_over = lambda box, used: None if over.done() else over.set_result((box, used))
    try:
        box = await store.create_box("bx1", [await _base(store)], 64)
        (box.rootfs / "big").write_bytes(os.urandom(70 << 20))
        async with asyncio.TaskGroup() as tg:
            watch = tg.create_task(_watched(tg, store, over))
            await watch
        assert over.result()[0] == "bx1" and over.result()[1] >= 70 and store.is_full("bx1")
    finally:
        await store.remove_box("bx1")
        await store.close()


class _Group:
    """A task group whose tasks can be ended."""

    def __init__(self, tg: asyncio.TaskGroup) -> None:
        self._tg = tg
        self.tasks: list[asyncio.Task] = []

    def create_task(self, coroutine, name=None):
        self.tasks.append(self._tg.create_task(coroutine))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def _watched(tg: asyncio.TaskGroup, store: DiskStore, over: asyncio.Future) -> None:
    group = _Group(tg)
    store.start(group)
    async with asyncio.timeout(20):
        await over
    group.cancel()


async def test_imports(store, tmp_path):
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "tool").write_text("#!")
    (tree / "bin" / "tool").chmod(0o4755)
    os.link(tree / "bin" / "tool", tree / "bin" / "same")
    os.chown(tree / "bin", 12, 34)
    _sh("tar -cf ../t.tar .", tree)
    for layer, source in (("from-dir", tree), ("from-tar", tmp_path / "t.tar")):
        assert await store.import_layer(layer, source) > 0
        up = store.layer_path(layer)
        info = (up / "bin" / "tool").stat()
        assert stat.S_IMODE(info.st_mode) == 0o4755 and info.st_nlink == 2
        assert (up / "bin").stat().st_uid == 12
    with pytest.raises(InternalError, match="tar"):
        await store.import_layer("broken", tree / "bin" / "tool")

    async def fail(directory: Path) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError):
        await store.import_layer("broken", fail)
    assert store.stray([], ["from-dir", "from-tar"]) == []
    assert os.listdir(store.root / "tmp") == []


async def test_references(store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("theirs")
    await store.reference_layer("ext", other)
    box = await store.create_box("bx1", ["ext"], 100)
    assert (box.rootfs / "f").read_text() == "theirs"
    await store.remove_box("bx1")
    (other / "f").unlink()
    other.rmdir()
    with pytest.raises(CorruptSnapshotError, match="gone"):
        store.layer_path("ext")
    await store.drop_layer("ext")
    with pytest.raises(NotFoundError):
        await store.reference_layer("ext", other)


async def test_failures_leave_nothing(store):
    base = await _base(store)
    with pytest.raises(NotFoundError):
        await store.create_box("bx1", ["absent", base], 100)
    (store.home / "boxes" / "bx2").write_text("in the way")
    with pytest.raises(InternalError, match="leftovers"):
        await store.create_box("bx2", [base], 100)
    (store.home / "boxes" / "bx2").unlink(missing_ok=True)
    assert store.stray([], [base]) == []
    assert mounts.mounts_below(store.home / "boxes") == []


async def test_cancelled_creation_leaves_nothing(store):
    base = await _base(store)

    async def create(box: str) -> None:
        await store.create_box(box, [base], 100)

    for turns in range(6):
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(create(f"bx{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        if task.cancelled():
            assert store.stray([], [base]) == []
        else:
            await store.remove_box(f"bx{turns}")


async def test_many_boxes_at_once(store):
    base = await _base(store)
    async with asyncio.TaskGroup() as tg:
        for n in range(20):
            tg.create_task(store.create_box(f"bx{n}", [base], 100))
    async with asyncio.TaskGroup() as tg:
        for n in range(20):
            tg.create_task(store.seal(f"bx{n}", f"l{n}"))
    async with asyncio.TaskGroup() as tg:
        for n in range(20):
            tg.create_task(store.remove_box(f"bx{n}"))
    assert store.stray([], [base, *(f"l{n}" for n in range(20))]) == []


async def test_reopen_remount_and_strays(store):
    base = await _base(store)
    box = await store.create_box("bx1", [base], 100)
    (box.rootfs / "kept").write_text("1")
    await store.create_box("bx2", [base], 100)
    await store.seal("bx1", "l1")
    await store.close()  # boxes are left: it stays mounted, and they go on
    assert mounts.is_mount(box.rootfs)
    await store.open()
    assert (box.rootfs / "kept").read_text() == "1"
    # as after a reboot: nothing is mounted
    for target in mounts.mounts_below(store.home / "boxes"):
        mounts.unmount(target)
    await store.remount_box("bx1", [base])
    assert (box.rootfs / "kept").read_text() == "1"
    assert store.stray(["bx1"], [base]) == [Stray("box", "bx2"), Stray("layer", "l1")]
    assert len(await store.sweep(["bx1"], [base])) == 2
    assert store.stray(["bx1"], [base]) == []


async def test_the_store_grows_in_reserved_steps(tmp_home):
    store = DiskStore(tmp_home, _Settings(store_gb=9))
    await store.open()
    try:
        image = tmp_home / "store.img"
        assert image.stat().st_size == 9 << 30
        assert 1 << 30 <= image.stat().st_blocks * 512 < 3 << 30
        before = store.space()
        assert await store.room.have(5 << 30)
        after = store.space()
        assert after.free_mb > 5000 and after.growth_mb < before.growth_mb
        assert image.stat().st_blocks * 512 >= store.backend.volume.device_bytes()[0]
        assert not await store.room.have(20 << 30)
        with pytest.raises(CapacityError, match="full"):
            raise store.room.full()
    finally:
        await store.close()


async def test_what_writers_were_promised_is_not_free(tmp_home):
    """Or a quick one would find the store full before anybody saw a reason to let it grow."""
    store = DiskStore(tmp_home, _Settings(store_gb=4))
    await store.open()
    try:
        box = await store.create_box("bx1", [await _base(store)], 3000)
        before = store.backend.free_bytes()
        (box.rootfs / "big").write_bytes(bytes(256 << 20))  # into the page cache: nothing is laid out yet
        assert before - store.backend.free_bytes() > 200 << 20
    finally:
        await store.sweep([], [])
        await store.close()


async def test_growing_that_failed_is_tried_again(tmp_home, monkeypatch):
    store = DiskStore(tmp_home, _Settings(store_gb=4))
    await store.open()
    real, failures = store.room.have, [CapacityError("full"), OSError(errno.ENOSPC, "full")]
    grown = asyncio.Event()

    async def fails_first(wanted: int) -> bool:
        if failures:
            raise failures.pop()
        grown.set()
        return await real(wanted)

    monkeypatch.setattr(store.room, "have", fails_first)
    try:
        async with asyncio.TaskGroup() as tg:
            watch = _Group(tg)
            store.start(watch)
            async with asyncio.timeout(20):
                await grown.wait()
            watch.cancel()
    finally:
        await store.close()


@pytest.fixture
def small_host(tmp_home, monkeypatch):
    """A home on a host disk of 700 MiB, and a store that takes it in small steps."""
    for name, value in (("_FIRST", 320), ("_STEP", 64), ("_LEAVE", 100)):
        monkeypatch.setattr(loopfile, name, value << 20)
    host = tmp_home / "host"
    host.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", host], check=True)
    yield host
    # The loop device of the store that was just closed lets go of its file a moment later.
    deadline = time.monotonic() + 20
    while (done := subprocess.run(["umount", host], capture_output=True, text=True)).returncode:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.05)


def _fill(path: Path, megabytes: int = 10_000) -> int:
    """Write until it fails or is enough; returns the errno, or 0."""
    with open(path, "wb", buffering=0) as file:
        try:
            for _ in range(megabytes):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        except OSError as error:
            return error.errno
    return 0


async def test_a_full_host_stops_the_writer_and_not_the_store(small_host):
    store = DiskStore(small_host, _Settings(store_gb=8))
    await store.open()
    try:
        base = await _base(store)
        one = await store.create_box("bx1", [base], 5000)
        two = await store.create_box("bx2", [base], 5000)
        async with asyncio.TaskGroup() as tg:
            watch = _Group(tg)
            store.start(watch)
            assert await asyncio.to_thread(_fill, one.rootfs / "big", 300) == 0  # more than it began with
            assert await asyncio.to_thread(_fill, one.rootfs / "more") == errno.ENOSPC
            watch.cancel()
        assert store.is_full("bx1")
        assert shutil.disk_usage(small_host).free > 50 << 20
        with pytest.raises(CapacityError, match="full"):
            await store.create_box("bx3", [base], 100)
        with pytest.raises(CapacityError, match="full"):
            await store.seal("bx2", "l1")
        assert store.stray(["bx1", "bx2"], [base]) == []
        os.unlink(one.rootfs / "big")
        os.unlink(one.rootfs / "more")
        await store.reclaim()
        async with asyncio.timeout(30):
            while store.space().free_mb < 200:  # noqa: ASYNC110  (only the filesystem tells)
                await asyncio.sleep(0.05)
        (two.rootfs / "after").write_text("still writable")
        await store.seal("bx2", "l1")
    finally:
        await store.sweep([], [])
        await store.close()


async def test_no_room_to_begin_with(small_host):
    assert _fill(small_host / "other", 600) == 0
    store = DiskStore(small_host, _Settings(store_gb=8))
    with pytest.raises(CapacityError, match="free"):
        await store.open()
    assert sorted(os.listdir(small_host)) == ["other"]


async def test_no_loop_devices_means_plain_unless_there_are_disks(tmp_home, monkeypatch):
    def refuse(path: Path) -> tuple[int, str]:
        raise UnsupportedError("no loop devices here")

    monkeypatch.setattr(loopfile, "_attach", refuse)
    store = DiskStore(tmp_home, _Settings())
    await store.open()
    assert store.kind == "plain" and "loop" in store.plain_because
    assert not (tmp_home / "store.img").exists()
    await store.close()
    (tmp_home / "store.img").write_bytes(b"disks of sandboxes")
    with pytest.raises(UnsupportedError):
        await store.open()
    assert (tmp_home / "store.img").read_bytes() == b"disks of sandboxes"


async def test_no_two_files_of_a_chain_have_one_number(tmp_home):
    """An overlay shows btrfs' inode numbers as they are, and gVisor takes equal ones for one file."""
    store = DiskStore(tmp_home, _Settings())
    await store.open()

    async def more(directory: Path) -> None:
        for n in range(40):
            (directory / f"second{n}").write_text(str(n))

    try:
        base = await _base(store)
        await store.import_layer("second", more, above=base)
        chain = ["second", base]
        for n in range(3):
            box = await store.create_box(f"bx{n}", chain, 100)
            for k in range(30):
                (box.rootfs / f"f{n}.{k}").write_bytes(os.urandom(1 << 20 if n == 1 else 10))
            await store.seal(f"bx{n}", f"l{n}")
            chain = [f"l{n}", *box.layers]
            await store.remove_box(f"bx{n}")
        assert len(chain) > 3
        box = await store.create_box("bx", chain, 100)
        for k in range(30):
            (box.rootfs / f"new{k}").write_text("x")
        seen: dict[int, str] = {}
        for path in box.rootfs.rglob("*"):
            if path.is_file():
                assert seen.setdefault(path.stat().st_ino, path.name) == path.name
        assert len(seen) == 2 + 1 + 40 + 90 + 30
        await store.remove_box("bx")
    finally:
        await store.sweep([], [])
        await store.close()


async def test_spares(tmp_home):
    store = DiskStore(tmp_home, _Settings())
    await store.open()

    def spares() -> int:
        return sum(name.startswith("spare-") for name in os.listdir(store.root / "tmp"))

    async def until(count: int) -> None:
        async with asyncio.timeout(10):
            while spares() != count:  # noqa: ASYNC110  (only the directory tells)
                await asyncio.sleep(0.01)

    try:
        base = await _base(store)
        async with asyncio.TaskGroup() as tg:
            group = _Group(tg)
            store.start(group)
            await store.create_box("bx0", [base], 100)
            await until(4)
            box = await store.create_box("bx1", [base], 100)
            assert spares() == 3
            (box.rootfs / "f").write_bytes(os.urandom(1 << 20))
            assert 1 <= store.usage_mb("bx1") < 2 and not store.is_full("bx1")
            assert sorted(os.listdir(box.rootfs)) == ["etc", "f", "gone", "opq"]
            await store.seal("bx1", "l1")
            await store.create_box("bx2", ["l1", *box.layers], 100)
            await until(4)  # none for a sealed layer
            await store.drop_layer(base)
            assert spares() == 0
            group.cancel()
    finally:
        await store.sweep([], [])
        await store.close()
