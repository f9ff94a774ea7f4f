"""Disks of sandboxes: read-only layers, shared by all, under one writable upper each.

On disk, all of it below the home::

    store.img               the btrfs filesystem, unless the home already lies on one
    store/                  where it is mounted
      layers/<layer>/up     a sealed layer (the volume around it is read-only)
      layers/<layer>.json   what is known about it, or where an external one lies
      boxes/<box>/{up,wk}   a box's upper and overlayfs' work directory
      boxes/<box>/disk.img  instead of a tree: the disk of a machine with a kernel of its own
      images/<digest>/      layers as such a disk
      trees/<layer>/up      a sealed layer that is such a disk as a tree
      tmp/                  whatever a crash leaves here goes at the next start
    boxes/<box>/rootfs      a box's root, mounted: its layers under its upper

The overlays are mounted *volatile*: a guest's fsync costs nothing, because an upper means
nothing after a reboot (its sandbox goes back to its last snapshot), and a snapshot writes
everything out itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from forkyard.errors import CapacityError, ConflictError, InternalError, UnsupportedError
from forkyard.host import files, mounts
from forkyard.host.failpoint import failpoint_in_thread
from forkyard.host.process import TaskStarter
from forkyard.host.threads import in_thread
from forkyard.store import trees
from forkyard.store.backend import DISK_IMAGE, Backend, BtrfsBackend, PlainBackend
from forkyard.store.boxes import BoxDisk, Stray
from forkyard.store.btrfs import Volume, is_btrfs
from forkyard.store.comparing import compare_trees
from forkyard.store.diskimages import DiskImages
from forkyard.store.layers import Layers, Source, inherit
from forkyard.store.loopfile import GIB, LoopFile
from forkyard.store.overlay import Difference, Unreadable
from forkyard.store.room import Room, Space
from forkyard.store.spares import Spares

__all__ = ["BoxDisk", "DiskStore", "Stray"]

T = TypeVar("T")
_MIB = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_LAYERS = 499
_LONG_CHAIN = 32
# below this the store takes no new box and no new seal
_FLOOR = 128 * _MIB
# what a box may write however much of its limit its layers hold already
_LEAST_LIMIT_MB = 64
_MEASURE_S = 1.0


class _Settings(Protocol):
    @property
    def store_gb(self) -> int: ...


class _DirtySource(Protocol):
    def dirty_mb(self) -> float: ...


class DiskStore:
    """All disks of one home.

    Args:
        home: FORKYARD_HOME; it exists, and its lock is held.
        settings: ``store_gb`` is what the store may grow to where it lives in a file.
        plain: Do without btrfs: seals copy, nothing enforces ``disk_mb`` but a watch.

    Attributes:
        kind: ``"btrfs"`` or ``"plain"``, after :meth:`open`.
        plain_because: Why it is plain, for the doctor.
        on_over: Called on the loop with (box, used MiB) when a box is over its limit and no
            quota stops it.
    """

    kind: Literal["btrfs", "plain"]

    def __init__(self, home: Path, settings: _Settings, *, plain: bool = False) -> None:
        self.home = Path(os.path.realpath(home))
        self.root = self.home / "store"
        self.plain_because = "asked for" if plain else ""
        self.on_over: Callable[[str, float], None] = lambda box, used_mb: None
        self._plain = plain
        self._file: LoopFile | None = None
        self._max_bytes = settings.store_gb * GIB
        self._backend: Backend | None = None
        self._layers: Layers | None = None
        self._images: DiskImages | None = None
        self._trees: trees.Trees | None = None
        self._spares: Spares | None = None
        self._limits: dict[str, int] = {}
        self._measured: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._room: Room | None = None

    # -- life

    async def open(self, *, clear: bool = True) -> None:
        """Make and mount the store if need be, and clear what a crash left in ``tmp``.

        Args:
            clear: False beside a daemon, whose ``tmp`` it is.

        Raises:
            CapacityError: no room for the store's file.
            UnsupportedError: mkfs.btrfs is missing (a machine without loop devices or btrfs
                gets a plain store instead).
        """
        self._pool = ThreadPoolExecutor(6, thread_name_prefix="disks")
        backend = None if self._plain else await self._open_btrfs()
        for name in ("layers", "boxes", "images", "trees", "tmp"):
            (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.home / "boxes").mkdir(mode=0o700, exist_ok=True)
        self._backend = backend or PlainBackend(self.root, self.root / "tmp")
        self.kind = self._backend.kind
        self._room = Room(self._backend, self._file, self._thread)
        tmp = self.root / "tmp"
        self._layers = Layers(self.root / "layers", self.root / "trees", tmp, self._backend)
        self._images = DiskImages(self.root / "images", tmp, self._backend, self._layers)
        self._trees = trees.Trees(self.root / "trees", tmp, self._backend, self._layers)
        if clear:
            await self._thread(self._clear_tmp)
        with contextlib.suppress(CapacityError):  # full to the last block: what can be deleted, can be
            await self._room.have(GIB)
        self._spares = Spares(self._backend, self.root / "tmp")

    async def _open_btrfs(self) -> Backend | None:
        if is_btrfs(self.home):
            # the user's own filesystem: its quotas are the user's to turn on
            self.root.mkdir(mode=0o700, exist_ok=True)
            return BtrfsBackend(Volume(self.root), self.root / "tmp")
        self._file = LoopFile(self.home / "store.img", self.root, self._max_bytes)
        try:
            await self._file.ensure()
        except UnsupportedError as error:
            if self._file.path.exists() or "mkfs" in error.message:
                raise  # there are disks in it, or all that is missing is a package
            self._file, self.plain_because = None, str(error)
            return None
        volume = Volume(self.root)
        try:
            await self._thread(volume.enable_quota)
        except BaseException:
            volume.close()
            raise
        return BtrfsBackend(volume, self.root / "tmp")

    async def close(self, *, unmount: bool | None = None) -> None:
        """Let go of the store. By default it is unmounted if no box is left on it. Idempotent."""
        if self._backend is None:
            return
        if self._spares is not None:
            await self._thread(self._spares.drop_all)
        if unmount is None:
            unmount = not any((self.root / "boxes").iterdir())
        self._backend.close()
        self._backend = self._layers = self._spares = self._images = self._trees = self._room = None
        if unmount and self._file is not None:
            await self._thread(self._file.close)
        if self._pool is not None:
            self._pool.shutdown()

    def start(self, tg: TaskStarter) -> None:
        """Keep room ahead of what is written, and watch limits where no quota does, until cancelled."""
        tg.create_task(self.room.keep(), name="room in the store")
        if self.quota == "none":
            tg.create_task(self._watch(), name="disk limits")
        if self._spares is not None and self.kind == "btrfs":
            tg.create_task(self._spares.run(self._thread), name="spare disks")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            await self._measure()

    async def _measure(self) -> None:
        """Measure boxes without quotas, each at most a tenth of the time."""
        for box, limit_mb in list(self._limits.items()):
            begin = time.monotonic()
            used = await self._thread(files.tree_bytes, self._volume(box) / "up")
            if box not in self._limits:
                continue
            self._measured[box] = used
            if used > limit_mb * _MIB:
                self.on_over(box, used / _MIB)
            await asyncio.sleep(9 * (time.monotonic() - begin))

    # -- what the rest needs

    @property
    def backend(self) -> Backend:
        return _opened(self._backend)

    @property
    def layers(self) -> Layers:
        return _opened(self._layers)

    @property
    def images(self) -> DiskImages:
        return _opened(self._images)

    @property
    def trees(self) -> trees.Trees:
        return _opened(self._trees)

    @property
    def quota(self) -> str:
        """What enforces ``disk_mb``: ``simple``, ``groups`` or ``none`` (a watch)."""
        return self.backend.quota

    def _volume(self, box: str) -> Path:
        if not _ID.fullmatch(box):
            raise InternalError(f"not a box id: {box!r}")
        return self.root / "boxes" / box

    def rootfs(self, box: str) -> Path:
        """Where a box's root is mounted."""
        return self.home / "boxes" / box / "rootfs"

    def disk_image(self, box: str) -> Path:
        """The disk of a box made by :meth:`create_image_box`."""
        return self._volume(box) / DISK_IMAGE

    async def _thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` in a thread; cancelled, it ends first, so that who undoes it never meets it."""
        try:
            return await in_thread(function, *args, executor=self._pool)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                if self._room is None:
                    raise CapacityError(f"the disk store is full: {error}") from error
                raise self._room.full(str(error)) from error
            raise

    @property
    def room(self) -> Room:
        """What is free, and growing."""
        return _opened(self._room)

    def space(self) -> Space:
        """Room for disks, for admission."""
        return self.room.space()

    async def reclaim(self) -> None:
        """Hurry the return of deleted space (it otherwise takes seconds)."""
        await self._thread(self.backend.reclaim)

    # -- boxes

    async def create_box(self, box: str, layers: list[str], disk_mb: int) -> BoxDisk:
        """Make a box's disk: an empty upper on ``layers`` (top first), limited and mounted.

        The limit is ``disk_mb`` less what the private layers below hold already.

        Raises:
            NotFoundError, CorruptSnapshotError: a layer is gone.
            CapacityError: no room. Nothing is left behind after any error or cancellation.
        """
        volume = self._volume(box)
        await self.show(layers)
        lowers = [self.layers.path(layer) for layer in layers]
        if not lowers:
            raise InternalError(f"box {box} has no layers")
        if len(lowers) > _MAX_LAYERS:
            raise InternalError(f"box {box} has {len(lowers)} layers, the kernel takes {_MAX_LAYERS}")
        if not await self.room.have(_FLOOR):
            raise self.room.full()
        limit_mb = await self._limit_mb(disk_mb, layers)
        parent = self.layers.volume(layers[0])
        if self._spares is not None and parent is not None and not self.layers.private_bytes(layers[:1]):
            self._spares.ask(layers[0], parent)  # a template's: there will be more
        try:
            self._limits[box] = limit_mb
            below = await self._thread(self._create, volume, layers, lowers, self.rootfs(box), limit_mb)
        except FileExistsError as error:
            raise ConflictError(f"box {box} has a disk already") from error
        except BaseException:
            self._limits.pop(box, None)
            with contextlib.suppress(OSError):
                self._remove(box)
            raise
        return BoxDisk(box, self.rootfs(box), volume, tuple(below))

    async def create_image_box(self, box: str, layers: list[str], disk_mb: int) -> BoxDisk:
        """As :meth:`create_box`, for a machine with a kernel of its own: its disk, ``disk_mb`` large, is the
        file :meth:`disk_image`, a copy of what ``layers`` hold. No layer is below it.

        Raises:
            InvalidRequestError: that does not fit in ``disk_mb``. Others: see :meth:`create_box`.
        """
        volume = self._volume(box)
        if not await self.room.have(_FLOOR):
            raise self.room.full()
        try:
            await self.images.create_box(volume, layers, disk_mb, self._thread)
        except FileExistsError as error:
            raise ConflictError(f"box {box} has a disk already") from error
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(box)
            raise
        return BoxDisk(box, self.disk_image(box), volume, ())

    def _create(
        self, volume: Path, layers: list[str], lowers: list[Path], rootfs: Path, limit_mb: int
    ) -> list[str]:
        # Going on with a copy of the top layer keeps chains short; standing on it instead
        # lets all its forks share its pages in the host's cache, which pays where there are many.
        go_on = self.layers.is_small(layers) or len(layers) > _LONG_CHAIN
        spare = None if go_on or self._spares is None else self._spares.take(layers[0])
        if spare is not None and not volume.exists():
            os.rename(spare, volume)
        else:
            self.backend.create(volume, self.layers.volume(layers[0]), go_on=go_on)
        if go_on:
            lowers = lowers[1:]
        inherit(volume, self.layers.private_bytes(layers[:1]) if go_on else 0)
        try:
            upper = volume / "up"
            # the merged root shows the upper's owner and mode
            root = os.stat(lowers[0])
            os.chown(upper, root.st_uid, root.st_gid)
            os.chmod(upper, stat.S_IMODE(root.st_mode))
            self.backend.set_limit(volume, limit_mb * _MIB)
            rootfs.parent.mkdir(mode=0o700, exist_ok=True)
            rootfs.mkdir(mode=0o755, exist_ok=True)
            failpoint_in_thread("disk.limited")
            mounts.mount_overlay(lowers, upper, volume / "wk", rootfs, volatile=True)
            failpoint_in_thread("disk.mounted")
        except FileExistsError as error:  # not the box's volume: that one is new
            raise InternalError(f"leftovers in {volume}: {error}") from error
        return layers[1:] if go_on else layers

    async def remount_box(self, box: str, layers: list[str]) -> BoxDisk:
        """Mount an existing box's disk again (after a reboot)."""
        lowers = [self.layers.path(layer) for layer in layers]
        await self._thread(self._remount, self._volume(box), lowers, self.rootfs(box))
        return BoxDisk(box, self.rootfs(box), self._volume(box), tuple(layers))

    @staticmethod
    def _remount(volume: Path, lowers: list[Path], rootfs: Path) -> None:
        mounts.unmount(rootfs)
        rootfs.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.rmtree(volume / "wk")  # a volatile mount refuses the work directory of the last one
        (volume / "wk").mkdir(mode=0o700)
        mounts.mount_overlay(lowers, volume / "up", volume / "wk", rootfs, volatile=True)

    async def remove_box(self, box: str) -> None:
        """Unmount and delete a box's disk and its directory in the home. Idempotent."""
        self._limits.pop(box, None)
        self._measured.pop(box, None)
        await self._thread(self._remove, box)

    def _remove(self, box: str) -> None:
        volume = self._volume(box)
        directory = self.home / "boxes" / box
        mounts.unmount(directory / "rootfs")
        self.backend.delete(volume)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.rmdir(directory / "rootfs")  # never a tree: it must be empty now
        files.rmtree(directory)

    async def sync_box(self, box: str) -> float:
        """Write out what a box has dirty, while it runs; returns how long it took in ms."""
        begin = time.perf_counter()
        await self._thread(self.backend.write_out, self._volume(box))
        return (time.perf_counter() - begin) * 1e3

    def dirty_mb(self, box: str, cgroup: _DirtySource | None = None) -> float:
        """MiB of file data of a box that a seal would have to write.

        Exact with quotas. Otherwise what the box's cgroup has dirty, or the whole host if there
        is none: too much rather than too little.
        """
        with contextlib.suppress(OSError):
            dirty = self.backend.dirty(self._volume(box))
            if dirty is not None:
                return dirty / _MIB
        if cgroup is not None:
            return cgroup.dirty_mb()
        with open("/proc/meminfo") as file:
            sizes = [int(line.split()[1]) for line in file if line.startswith(("Dirty:", "Writeback:"))]
        return sum(sizes) / 1024

    def usage_mb(self, box: str) -> float:
        """MiB charged to a box: what it wrote and what it or its snapshots still keep of that."""
        with contextlib.suppress(OSError):
            used = self.backend.usage(self._volume(box))
            if used is not None:
                return used / _MIB
        return self._measured.get(box, 0) / _MIB

    def is_full(self, box: str) -> bool:
        """Whether a write in a box may have failed for want of space (within 2 MiB of its limit)."""
        try:
            limit = self.backend.limit(self._volume(box))
        except OSError:
            return False
        if limit is None:
            limit = self._limits.get(box, 1 << 40) * _MIB
        near = self.usage_mb(box) * _MIB + 2 * _MIB >= limit
        return near or self.backend.free_bytes() < 16 * _MIB

    async def _limit_mb(self, disk_mb: int, layers: Sequence[str]) -> int:
        """What ``disk_mb`` leaves above ``layers``."""
        held = self.layers.private_bytes(layers)
        if held > disk_mb * _MIB // 2:
            held = await self._thread(self.layers.measure, layers)
        return max(disk_mb - held // _MIB, _LEAST_LIMIT_MB)

    async def set_limit(self, box: str, disk_mb: int, layers: Sequence[str] = ()) -> None:
        """Set a box's limit to ``disk_mb`` less what the private ones of ``layers`` hold."""
        limit_mb = await self._limit_mb(disk_mb, layers)
        self._limits[box] = limit_mb
        await self._thread(self.backend.set_limit, self._volume(box), limit_mb * _MIB)

    # -- layers

    async def seal(self, box: str, layer: str) -> None:
        """Make ``layer`` of what a box's upper holds now; it is on disk when this returns.

        Raises:
            CapacityError: no room. ConflictError: there is such a layer. Nothing is left then.
        """
        if not await self.room.have(_FLOOR // 2):
            raise self.room.full()
        await self._thread(self.layers.seal, self._volume(box), layer)

    async def import_layer(
        self,
        layer: str,
        source: Source,
        above: str | None = None,
        *,
        private: bool = False,
        room: int = 0,
    ) -> int:
        """Make ``layer`` from a directory, a tar file, or an async callback that fills a directory.

        Args:
            above: The layer that it will lie on, if it will: their inode numbers must differ.
            private: It counts as written by the sandboxes that start from it, as a sealed one does.
            room: So many bytes it will take, where that is known.

        Returns:
            Its size in bytes.

        Raises:
            CapacityError, ConflictError as :meth:`seal`; InternalError with tar's words.
        """
        if not await self.room.have(_FLOOR + room):
            raise self.room.full(f"a layer needs {room / _MIB:.0f} MiB" if room else "")
        return await self.layers.import_(layer, source, above, self._thread, private=private)

    async def import_image(self, layer: str, fill: Callable[[Path], Awaitable[None]], room: int) -> int:
        """As :meth:`import_layer`, from the disk of a machine with its own kernel: ``fill`` writes it."""
        if not await self.room.have(_FLOOR + room):
            raise self.room.full(f"a disk needs {room / _MIB:.0f} MiB")
        return await self.layers.import_image(layer, fill, self._thread)

    def content_of(self, layer: str) -> tuple[str, int] | None:
        """Checksum and length of the stream that a layer gives (:mod:`forkyard.store.layerstream`), if
        :meth:`note_content` was told."""
        known = self.layers.record(layer).get("packed")
        return None if known is None else (str(known[0]), int(known[1]))

    def is_content(self, layer: str, sha256: str, size: int) -> bool:
        """Whether a layer is known to give this stream, or came as it."""
        record = self.layers.record(layer)
        return any(record.get(key) == [sha256, size] for key in ("packed", "content"))

    async def note_content(self, layer: str, sha256: str, size: int, *, came: bool = False) -> None:
        """Keep a layer's stream: a layer does not change. With ``came`` it is the one that it was made
        of, which need not be the one that it gives."""
        await self._thread(self.layers.note, layer, {"content" if came else "packed": [sha256, size]})

    async def reference_layer(self, layer: str, path: Path) -> None:
        """Make ``layer`` stand for a read-only directory elsewhere, such as another home's layer.

        Raises:
            NotFoundError: ``path`` is no directory.
        """
        await self._thread(self.layers.reference, layer, path)

    async def compare(
        self,
        new: Sequence[str],
        old: Sequence[str],
        take: Callable[[Iterator[Difference]], T],
        *,
        box: str | None = None,
        leave_out: Callable[[str], bool] = lambda path: False,
        unreadable: Unreadable | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """What ``take`` makes, in a thread, of the differences between two stacks of layers (top first).

        Args:
            box: The box whose seal is the top of ``new``, if one is.
            leave_out, unreadable, stop: See :func:`forkyard.store.overlay.compare`.

        Raises:
            NotFoundError, CorruptSnapshotError: a layer is gone. InterruptedError: ``stop`` said so.
        """
        if (top := self.layers.image(new[0])) is not None:
            before = (await self.images.volume(list(old), self._thread)) / DISK_IMAGE
            images = partial(trees.compare, (new[0], top), (old[0], before), take)
            return await self._thread(partial(images, leave_out=leave_out, stop=stop))
        await self.show([*new, *old])
        volume = None if box is None else self._volume(box)
        compared = partial(compare_trees, self.layers, new, old, take, box=volume)
        return await self._thread(partial(compared, leave_out=leave_out, unreadable=unreadable, stop=stop))

    def image_of(self, layer: str) -> Path | None:
        """The image that a layer is; None of a tree."""
        return self.layers.image(layer)

    async def show(self, layers: Iterable[str]) -> None:
        """Make trees of those layers that are images of disks, where there are none yet: what
        :meth:`layer_path` gives from then on.

        Raises:
            CorruptSnapshotError: a guest left one in a state that cannot be read.
        """
        await self.trees.make(layers, self._thread)

    async def drop_layer(self, layer: str) -> None:
        """Delete a layer; boxes that still have it mounted keep it until they go. Idempotent."""
        if self._spares is not None:
            await self._thread(self._spares.drop, layer)
        await self._thread(self.images.drop_of, layer)
        await self._thread(self.trees.drop, layer)
        await self._thread(self.layers.drop, layer)

    def layer_path(self, layer: str) -> Path:
        """The directory to mount as a lower.

        Raises:
            NotFoundError: no such layer. CorruptSnapshotError: an external one whose target is gone.
        """
        return self.layers.path(layer)

    async def layer_bytes(self, layer: str) -> int:
        """Bytes of a layer: exact for imported ones; for sealed ones what was charged to its box
        then, which includes what older snapshots of that box keep."""
        return await self._thread(self.layers.size, layer)

    # -- leftovers

    def _clear_tmp(self) -> None:
        for path in (self.root / "tmp").iterdir():
            self.backend.delete(path)

    def stray(self, known_boxes: Iterable[str], known_layers: Iterable[str]) -> list[Stray]:
        """What nothing owns: boxes on disk or mounted, and layers, other than the known ones."""
        boxes, layers = set(known_boxes), set(known_layers)
        found: set[str] = set()
        for directory in (self.root / "boxes", self.home / "boxes"):
            found.update(path.name for path in directory.iterdir() if path.is_dir())
        result = [Stray("box", name) for name in sorted(found - boxes)]
        result += [Stray("layer", name) for name in sorted(self.layers.all() - layers)]
        result += [Stray("image", name) for name in self.images.strays(layers)]
        return result + [Stray("tree", name) for name in self.trees.strays(layers)]

    async def sweep(self, known_boxes: Iterable[str], known_layers: Iterable[str]) -> list[Stray]:
        """Remove whatever :meth:`stray` finds, and return it; strays' processes must be gone."""
        strays = await self._thread(self.stray, known_boxes, known_layers)
        await self.reap(strays)
        return strays

    async def reap(self, strays: Iterable[Stray]) -> None:
        """Remove strays; their processes must be gone."""
        for stray in strays:
            if stray.kind == "box":
                await self.remove_box(stray.name)
            elif stray.kind == "layer":
                await self.drop_layer(stray.name)
            else:
                await self._thread((self.images if stray.kind == "image" else self.trees).drop, stray.name)


def _opened(part: T | None) -> T:
    if part is None:
        raise InternalError("the disk store is not open")
    return part
