"""Layers: sealed, imported, referenced. Each is ``<layer>/up`` and a small record beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from forkyard.errors import (
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    NotFoundError,
)
from forkyard.host import files, process
from forkyard.host.failpoint import failpoint_in_thread
from forkyard.store.backend import DISK_IMAGE, Backend

__all__ = ["Layers", "Source", "inherit", "inherited"]

Source = Path | Callable[[Path], Awaitable[None]]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_IMPORT_TIMEOUT_S = 3600
_SMALL = 16 << 20
_INHERITED = "user.forkyard.inherited"


def inherit(volume: Path, size: int) -> None:
    """Note that a box's volume began as a copy of ``size`` bytes."""
    with contextlib.suppress(OSError):  # where there are no attributes, there are no quotas
        os.setxattr(volume, _INHERITED, str(size).encode())


def inherited(volume: Path) -> int:
    """What :func:`inherit` noted."""
    try:
        return int(os.getxattr(volume, _INHERITED))
    except (OSError, ValueError):
        return 0


class Layers:
    """The layers in one directory. Methods block, except the async ones.

    Args:
        trees: Where layers that are disk images have the trees that they show, by the layers' names.
    """

    def __init__(self, root: Path, trees: Path, tmp: Path, backend: Backend) -> None:
        self.root = root
        self.trees = trees
        self.tmp = tmp
        self.backend = backend
        self._records: dict[str, dict[str, Any]] = {}

    # -- records

    def _directory(self, layer: str) -> Path:
        if not _ID.fullmatch(layer) or layer.endswith(".json"):
            raise InternalError(f"not a layer id: {layer!r}")
        return self.root / layer

    def _record_path(self, layer: str) -> Path:
        return self.root / f"{layer}.json"

    def record(self, layer: str) -> dict[str, Any]:
        """What is known of a layer; empty if nothing is."""
        known = self._records.get(layer)
        if known is None:
            try:
                known = json.loads(self._record_path(layer).read_bytes())
            except (OSError, ValueError):
                return {}
            self._records[layer] = known
        return known

    def _write_record(self, layer: str, record: dict[str, Any], *, durable: bool) -> None:
        files.write_atomic(self._record_path(layer), json.dumps(record), durable=durable)
        self._records[layer] = record

    def note(self, layer: str, facts: dict[str, Any]) -> None:
        """Add what was found out of a layer to its record."""
        if record := self.record(layer):
            self._write_record(layer, {**record, **facts}, durable=False)

    def path(self, layer: str) -> Path:
        """The directory to mount as a lower. See :meth:`DiskStore.layer_path` for what it raises."""
        directory = self.volume(layer) or self._directory(layer)
        reference = self.record(layer).get("ref")
        up = Path(reference) if reference else directory / "up"
        if not up.is_dir():
            if reference:
                raise CorruptSnapshotError(
                    f"layer {layer} refers to {reference}, which is gone",
                    hint="put it back, or build the template again",
                )
            raise NotFoundError(f"no layer {layer} in this store")
        return up

    def all(self) -> set[str]:
        """Ids of all layers, also of those of which only the record is left."""
        found = set()
        for entry in os.scandir(self.root):
            if not entry.name.startswith("."):
                found.add(entry.name.removesuffix(".json"))
        return found

    def size(self, layer: str) -> int:
        """Bytes of a layer; see :meth:`DiskStore.layer_bytes`."""
        record = self.record(layer)
        known = record.get("bytes")
        if known is None:
            image = self.image(layer)
            known = image.stat().st_blocks * 512 if image else files.tree_bytes(self.path(layer))
            if record:
                self._write_record(layer, {**record, "bytes": known}, durable=False)
        return int(known)

    def is_small(self, layers: list[str]) -> bool:
        """Whether the top one is a sealed layer above others, and holds little."""
        record = self.record(layers[0])
        known = record.get("bytes")
        return len(layers) > 1 and bool(record.get("private")) and known is not None and known < _SMALL

    def private_bytes(self, layers: Iterable[str]) -> int:
        """Bytes that the sealed ones among ``layers`` hold together, as far as they are known."""
        records = (self.record(layer) for layer in layers)
        return sum(int(record.get("bytes") or 0) for record in records if record.get("private"))

    def measure(self, layers: Iterable[str]) -> int:
        """:meth:`private_bytes`, by what is there instead of by what was charged when it was sealed:
        what a box had deleted a moment before was still charged to it. Blocks, the first time for long."""
        for layer in layers:
            record = self.record(layer)
            if record.get("private") and not record.get("measured"):
                size = min(int(record.get("bytes") or 0), files.tree_bytes(self.path(layer)))
                self._write_record(layer, {**record, "bytes": size, "measured": True}, durable=False)
        return self.private_bytes(layers)

    def _check_new(self, layer: str) -> Path:
        directory = self._directory(layer)
        if directory.exists() or (self.record(layer).get("ref") and self._record_path(layer).exists()):
            raise ConflictError(f"layer {layer} exists already")
        return directory

    def volume(self, layer: str) -> Path | None:
        """The sealed volume with the tree of a layer that lies in this store."""
        if self.image(layer) is not None:
            return self.trees / layer
        return None if self.record(layer).get("ref") else self._directory(layer)

    def image(self, layer: str) -> Path | None:
        """The disk image that a layer is, or None if it is a tree."""
        image = self._directory(layer) / DISK_IMAGE
        return image if image.exists() else None

    # -- making

    def seal(self, volume: Path, layer: str) -> None:
        """Make ``layer`` of what ``volume`` holds."""
        directory = self._check_new(layer)
        charged = self.backend.usage(volume)
        # What its box began with is charged to the volume that it was copied from.
        size = None if charged is None else charged + inherited(volume)
        # the seal itself commits the record with it, so writing it costs no flush of its own
        self._write_record(layer, {"private": True, "bytes": size}, durable=False)
        try:
            failpoint_in_thread("layer.recorded")
            self.backend.seal(volume, directory)
        except BaseException:
            self._forget(layer)
            raise

    async def import_(
        self,
        layer: str,
        source: Source,
        above: str | None,
        thread: Callable[..., Awaitable[Any]],
        *,
        private: bool = False,
    ) -> int:
        """Make ``layer`` from ``source``; see :meth:`DiskStore.import_layer`."""
        self._check_new(layer)
        volume = self.tmp / f"import-{secrets.token_hex(8)}"
        await thread(self._prepare, volume, above)
        up = volume / "up"
        try:
            if callable(source):
                await source(up)
            elif await thread(source.is_dir):
                argv = ["cp", "-a", "--reflink=auto", "--", f"{source}/.", f"{up}/"]
                await process.run(argv, timeout_s=_IMPORT_TIMEOUT_S, check=True)
            else:
                xattrs = ["--xattrs", "--xattrs-include=*", "--acls"]
                argv = ["tar", "-xpf", f"{source}", "--numeric-owner", "--same-owner", *xattrs, "-C", f"{up}"]
                await process.run(argv, timeout_s=_IMPORT_TIMEOUT_S, check=True)
            return int(await thread(self._finish, volume, layer, {"private": private}))
        except asyncio.CancelledError:
            # A thread is not cancelled: it may have made the layer, which nobody will own.
            await thread(self.drop, layer)
            raise
        finally:
            await thread(self.backend.delete, volume)

    async def import_image(
        self, layer: str, fill: Callable[[Path], Awaitable[None]], thread: Callable[..., Awaitable[Any]]
    ) -> int:
        """Make ``layer`` of the disk image that ``fill`` writes; see :meth:`DiskStore.import_image`."""
        self._check_new(layer)
        volume = self.tmp / f"import-{secrets.token_hex(8)}"
        await thread(self.backend.create, volume)
        try:
            await fill(volume / DISK_IMAGE)
            return int(await thread(self._finish, volume, layer, {"private": True}))
        except asyncio.CancelledError:
            await thread(self.drop, layer)  # see import_
            raise
        finally:
            await thread(self.backend.delete, volume)

    def _prepare(self, volume: Path, above: str | None) -> None:
        """Make an empty volume that counts inodes on from the layer ``above``, and holds nothing of it."""
        parent = None if above is None else self.volume(above)
        self.backend.create(volume, parent)
        if parent is not None:
            (volume / "mark").touch()  # the highest number so far; with it in use, the rest may go
            files.rmtree(volume / "old")

    def _finish(self, volume: Path, layer: str, record: dict[str, Any]) -> int:
        """Seal a filled volume as ``layer``; returns its size."""
        directory = self._check_new(layer)
        image = volume / DISK_IMAGE
        size = image.stat().st_blocks * 512 if image.exists() else files.tree_bytes(volume / "up")
        self._write_record(layer, {**record, "bytes": size}, durable=False)
        try:
            failpoint_in_thread("layer.filled")
            self.backend.seal(volume, directory)
        except BaseException:
            self._forget(layer)
            raise
        return size

    def reference(self, layer: str, path: Path) -> None:
        """Make ``layer`` stand for the directory ``path``."""
        if not path.is_dir():
            raise NotFoundError(f"{path} is no directory that layer {layer} could stand for")
        self._check_new(layer)
        self._write_record(layer, {"ref": os.path.realpath(path), "private": False}, durable=True)

    # -- removing

    def _forget(self, layer: str) -> None:
        self._records.pop(layer, None)
        self._record_path(layer).unlink(missing_ok=True)

    def drop(self, layer: str) -> None:
        """Delete a layer. Idempotent; the target of a reference stays."""
        self.backend.delete(self._directory(layer))
        self._forget(layer)
