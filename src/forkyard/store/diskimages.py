"""Disks as images of a file system, for machines with a kernel of their own.

A box of such a machine has ``disk.img`` beside its ``up``, where no guest of another kind can put one.
A stack of ordinary layers becomes an image once, by what it consists of; the image goes with the first of
those layers. Everything else is as for any box: one volume, whose seal is a snapshot, and which goes
on with a copy of what it starts from, sharing its blocks.

Nothing here ever reads an image that a guest has written to; :mod:`forkyard.store.trees` does, warily.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from forkyard.errors import CapacityError, InternalError, InvalidRequestError
from forkyard.host import files, mounts, process
from forkyard.host.failpoint import failpoint_in_thread
from forkyard.store.backend import DISK_IMAGE, Backend
from forkyard.store.layers import Layers

__all__ = ["DiskImages"]

_MIB = 1 << 20
_MAKE_TIMEOUT_S = 3600
# A small journal: what matters is made durable by a seal. Tables are written when they are used.
_OPTIONS = ["-q", "-F", "-t", "ext4", "-m", "0", "-J", "size=8", "-I", "256", "-i", "8192"]
_EXTENDED = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,resize=4294967295"


class DiskImages:
    """The images made of layers, in one directory: ``<digest>/disk.img`` and what it is of."""

    def __init__(self, root: Path, tmp: Path, backend: Backend, layers: Layers) -> None:
        self.root = root
        self.tmp = tmp
        self.backend = backend
        self.layers = layers
        self._making: dict[str, asyncio.Lock] = {}

    async def volume(self, layers: list[str], thread: Callable[..., Awaitable[Any]]) -> Path:
        """The volume that a box above ``layers`` (top first) begins as a copy of.

        Raises:
            NotFoundError, CorruptSnapshotError: a layer is gone.
            CapacityError: no room. InternalError: mke2fs's words.
        """
        own = self.layers.image(layers[0])
        if own is not None:
            return own.parent
        paths = [self.layers.path(layer) for layer in layers]
        name = hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:24]
        path = self.root / name
        async with self._making.setdefault(name, asyncio.Lock()):
            if not path.exists():
                await self._make(path, layers, paths, thread)
        return path

    async def _make(
        self, path: Path, layers: list[str], paths: list[Path], thread: Callable[..., Awaitable[Any]]
    ) -> None:
        volume = self.tmp / f"image-{secrets.token_hex(8)}"
        await thread(self.backend.create, volume)
        merged = volume / "merged"
        try:
            source = paths[0]
            if len(paths) > 1:
                merged.mkdir()
                await thread(mounts.mount_overlay, paths, None, None, merged)
                source = merged
            size = await thread(_size_for, source)
            image = volume / DISK_IMAGE
            argv = ["mke2fs", *_OPTIONS, "-E", _EXTENDED, "-d", f"{source}", f"{image}", f"{size >> 10}k"]
            done = await process.run(argv, timeout_s=_MAKE_TIMEOUT_S)
            if done.rc:
                if "No space left" in done.complaint:
                    raise CapacityError("the disk store is full", retryable=True)
                raise InternalError(f"making the disk's image failed: {done.complaint}")
            if source == merged:
                await thread(mounts.unmount, merged)
                merged.rmdir()
            await thread(self._finish, volume, path, layers)
        finally:
            await thread(mounts.unmount, merged)
            await thread(self.backend.delete, volume)

    def _finish(self, volume: Path, path: Path, layers: list[str]) -> None:
        files.write_atomic(self._record(path), json.dumps({"of": layers}), durable=False)
        self.backend.seal(volume, path)

    @staticmethod
    def _record(path: Path) -> Path:
        return path.with_name(f"{path.name}.json")

    async def create_box(
        self, volume: Path, layers: list[str], disk_mb: int, thread: Callable[..., Awaitable[Any]]
    ) -> None:
        """Make a box's volume; see :meth:`forkyard.store.disks.DiskStore.create_image_box`."""
        parent = await self.volume(layers, thread)
        await thread(self._create_box, volume, parent, disk_mb)

    def _create_box(self, volume: Path, parent: Path, disk_mb: int) -> None:
        self.backend.create(volume, parent, go_on=True)
        failpoint_in_thread("disk.limited")
        _enlarge(volume / DISK_IMAGE, disk_mb)
        failpoint_in_thread("disk.mounted")

    def drop_of(self, layer: str) -> None:
        """Delete the images that a layer is part of. Blocks."""
        for name, of in self._all():
            if layer in of:
                self.drop(name)

    def strays(self, known: Iterable[str]) -> list[str]:
        """The images that are not of known layers only."""
        kept = set(known)
        return sorted(name for name, of in self._all() if not of or not kept.issuperset(of))

    def drop(self, name: str) -> None:
        """Delete an image. Blocks."""
        self.backend.delete(self.root / name)
        self._record(self.root / name).unlink(missing_ok=True)

    def _all(self) -> Iterator[tuple[str, list[str]]]:
        """Each image and the layers that it is of; none if that is not known."""
        for record in list(self.root.glob("*.json")):
            of: list[str] = []
            with contextlib.suppress(OSError, ValueError, KeyError):
                of = json.loads(record.read_bytes())["of"]
            yield record.stem, of


def _enlarge(image: Path, size_mb: int) -> None:
    """Make a disk's image as large as the disk is to be; its file system grows when it is mounted.

    Raises:
        InvalidRequestError: what is on it needs more.
    """
    size = os.stat(image).st_size
    if size > size_mb * _MIB:
        raise InvalidRequestError(
            f"disk_mb={size_mb} is less than the {-(-size // _MIB)} MiB of the disk that it starts from",
            hint=f"ask for at least {-(-size // _MIB)}",
        )
    if size < size_mb * _MIB:
        os.truncate(image, size_mb * _MIB)


def _size_for(root: Path) -> int:
    """Bytes of a file system that holds the tree ``root``, and a little more."""
    data = inodes = 0
    todo = [os.fspath(root)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                inodes += 1
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    data += 4096
                else:
                    data += -(-entry.stat(follow_symlinks=False).st_size // 4096) * 4096
    size = max(data + data // 8 + 48 * _MIB, inodes * 8192 * 5 // 4)
    return -(-size // _MIB) * _MIB
