"""Disks without root: a box's disk is a copy of its top layer, and a seal is a copy of the disk.

What :class:`forkyard.store.disks.DiskStore` promises the yard, for trees of a few small files:
each layer holds all that is visible in it, so the layers below the top one are only counted.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from forkyard.errors import CapacityError, ConflictError, NotFoundError
from forkyard.host.files import rmtree, tree_bytes
from forkyard.store.disks import BoxDisk, Stray
from forkyard.store.room import Space

T = TypeVar("T")


class CopyDisks:
    """See the module. ``full`` makes the next seals fail as a full disk does."""

    kind = "plain"
    quota = "none"

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "store"
        self.full = False
        self.contents: dict[str, tuple[str, int]] = {}
        self.came: dict[str, tuple[str, int]] = {}

    def content_of(self, layer: str) -> tuple[str, int] | None:
        return self.contents.get(layer)

    def is_content(self, layer: str, sha256: str, size: int) -> bool:
        return (sha256, size) in (self.contents.get(layer), self.came.get(layer))

    async def note_content(self, layer: str, sha256: str, size: int, *, came: bool = False) -> None:
        (self.came if came else self.contents)[layer] = (sha256, size)

    async def open(self) -> None:
        for name in ("layers", "boxes"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    async def close(self, *, unmount: bool | None = None) -> None:
        pass

    def start(self, tg: object) -> None:
        pass

    def space(self) -> Space:
        return Space(shutil.disk_usage(self.root).free >> 20, 0)

    def rootfs(self, box: str) -> Path:
        return self.home / "boxes" / box / "rootfs"

    def layer_path(self, layer: str) -> Path:
        path = self.root / "layers" / layer
        if not path.is_dir():
            raise NotFoundError(f"no layer {layer} in this store")
        return path

    def image_of(self, layer: str) -> Path | None:
        return None

    async def show(self, layers: Iterable[str]) -> None:
        """All are trees."""

    async def import_layer(
        self,
        layer: str,
        source: Path | Callable[[Path], Awaitable[None]],
        above: str | None = None,
        *,
        private: bool = False,
        room: int = 0,
    ) -> int:
        if self.full:
            raise CapacityError("the disk store is full")
        target = self.root / "layers" / layer
        if isinstance(source, Path):
            await _thread(_copy, source, target)
            return await self.layer_bytes(layer)
        with tempfile.TemporaryDirectory(dir=self.root) as scratch:
            up = Path(scratch, "up")
            up.mkdir()
            await source(up)
            up.rename(target)
        return await self.layer_bytes(layer)

    async def create_box(self, box: str, layers: list[str], disk_mb: int) -> BoxDisk:
        for layer in layers:
            self.layer_path(layer)
        await _thread(_copy, self.layer_path(layers[0]), self.rootfs(box))
        return BoxDisk(box, self.rootfs(box), self.rootfs(box), tuple(layers))

    async def remove_box(self, box: str) -> None:
        await _thread(rmtree, self.home / "boxes" / box)

    async def sync_box(self, box: str) -> float:
        return 0.0

    def dirty_mb(self, box: str, cgroup: object = None) -> float:
        return 0.0

    def usage_mb(self, box: str) -> float:
        return tree_bytes(self.rootfs(box)) / (1 << 20)

    def is_full(self, box: str) -> bool:
        return self.full

    async def set_limit(self, box: str, disk_mb: int, layers: Iterable[str] = ()) -> None:
        pass

    async def seal(self, box: str, layer: str) -> None:
        if self.full:
            raise CapacityError("the disk store is full")
        await _thread(_copy, self.rootfs(box), self.root / "layers" / layer)

    async def drop_layer(self, layer: str) -> None:
        await _thread(rmtree, self.root / "layers" / layer)

    async def layer_bytes(self, layer: str) -> int:
        return tree_bytes(self.layer_path(layer))

    def stray(self, known_boxes: Iterable[str], known_layers: Iterable[str]) -> list[Stray]:
        boxes = {path.name for path in (self.home / "boxes").iterdir()} - set(known_boxes)
        layers = {path.name for path in (self.root / "layers").iterdir()} - set(known_layers)
        return [Stray("box", name) for name in sorted(boxes)] + [Stray("layer", n) for n in sorted(layers)]

    async def reap(self, strays: Iterable[Stray]) -> None:
        for stray in strays:
            await (self.remove_box if stray.kind == "box" else self.drop_layer)(stray.name)

    async def sweep(self, known_boxes: Iterable[str], known_layers: Iterable[str]) -> list[Stray]:
        strays = self.stray(known_boxes, known_layers)
        await self.reap(strays)
        return strays


async def _thread(function: Callable[..., T], *args: Any) -> T:
    """A cancellation takes effect when the thread has ended, so that an undo never meets it at work."""
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        raise ConflictError(f"{target} exists already")
    temporary = target.with_name(f"{target.name}.new")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary, symlinks=True)
    temporary.rename(target)
