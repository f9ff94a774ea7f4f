"""A snapshot on its way into the yard: its layers and its memory, held and undone together."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from forkyard.errors import CapacityError, CorruptSnapshotError, InvalidRequestError, UnsupportedError
from forkyard.host import files
from forkyard.host.threads import in_thread
from forkyard.store import layerstream
from forkyard.store.archive import Manifest, Part, Reader
from forkyard.types import CPU_WEIGHT
from forkyard.yard import agents, names
from forkyard.yard.context import Context
from forkyard.yard.plans import check_env, check_limits
from forkyard.yard.snapshots import INHERITED, Snapshots
from forkyard.yard.templates import Templates

__all__ = ["Coming", "inherited", "layer_sum"]

_MAX_AGENT = 64 << 20
# How far two layers' sizes may be apart that are worth comparing: one counts blocks, the other bytes.
_ALIKE = 64 << 20
# Home and store stay usable, however large an archive says that it is.
_FLOOR = 128 << 20
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Inherits(msgspec.Struct, kw_only=True):
    """What a sandbox started from a snapshot takes over (:data:`INHERITED`), as an archive may say it."""

    template: _Text | None
    type: str
    cpus: float
    mem_mb: _Size
    disk_mb: _Size
    shape_mem_mb: _Size
    shape_disk_mb: _Size
    processes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    user: _Text
    workdir: _Text
    env: dict[str, str]
    tainted: bool
    # An earlier release's archive has neither.
    cpu_weight: int = CPU_WEIGHT
    shape_cpus: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class Coming:
    """A snapshot that is being received.

    Attributes:
        layers: Those that are here so far, top first; each is held.
    """

    def __init__(self, snapshots: Snapshots, templates: Templates, manifest: Manifest) -> None:
        self.snapshots = snapshots
        self.templates = templates
        self.context = snapshots.context
        self.manifest = manifest
        self.id = names.snapshot_id()
        self.layers: list[str] = []
        self._agent: bytes | None = None
        self._image: Path | None = None

    async def undo(self) -> None:
        """Remove what came."""
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.snapshots.release, self.layers)
            steps.push_async_callback(self.context.images.delete_async, self.id)
            if self._image is not None:
                steps.push_async_callback(in_thread, files.rmtree, self._image)

    async def receive(self, reader: Reader) -> None:
        """Read the archive to its end."""
        known = len(await self._known())
        self._check_room(known)
        layers = 0
        for part in self.manifest.parts:
            if part.kind == "agent":
                self._agent = await self._read_agent(part, reader)
            elif part.kind == "image":
                await self._image_file(part, reader)
            elif part.kind == "disk":
                await self._disk(part, reader)
            elif layers >= known:
                await self._layer(part, reader)
            elif part.present:
                await reader.skip()
            layers += part.kind == "layer"
        await reader.end()

    def _check_room(self, known: int) -> None:
        """Raises CapacityError before anything is written that would not fit."""
        parts = self.manifest.parts
        disk = sum([part.bytes for part in parts if part.kind == "layer"][known:])
        disk += sum(part.stored for part in parts)
        memory = sum(part.bytes for part in parts if part.kind == "image")
        space = self.context.disks.space()
        # Zeros take nothing: what the memory takes is known only when it is here.
        likely = min(memory, self.manifest.memory_bytes)
        for what, needed, free in (
            ("disk", disk, (space.free_mb + space.growth_mb) << 20),
            ("memory", likely, shutil.disk_usage(self.context.home).free),
        ):
            if needed + _FLOOR > free:
                raise CapacityError(
                    f"the snapshot's {what} needs {needed >> 20} MiB, {free >> 20} MiB are free",
                    hint="delete sandboxes and snapshots, or raise store_gb",
                    retryable=True,
                )

    # -- layers

    async def _known(self) -> list[str]:
        """Layers of this yard, from the lowest up, that are the lowest of the archive's, by content.

        Each is held from now on. Only neighbours that lie on each other here as well are taken: a layer's
        inode numbers go on from those below it.
        """
        context, snapshots = self.context, self.snapshots
        parts = [part for part in self.manifest.parts if part.kind == "layer"]
        if not parts:
            return []
        chains = [template.layers for template in self.templates.all()]
        if parts[0].template:
            for layer in {chain[-1] for chain in chains}:
                # Mostly the yards' templates are the same. What is much smaller or larger is not read.
                size = await context.disks.layer_bytes(layer)
                if (
                    context.disks.content_of(layer) is None
                    and abs(size - parts[0].bytes) < size // 2 + _ALIKE
                ):
                    await layer_sum(context, layer)
        chains += [doc.layers for doc in context.snapshots.values()]
        chains += [box.doc.layers for box in context.sandboxes]
        known: list[str] = []
        for chain in chains:
            same = []
            for layer, part in zip(reversed(chain), parts, strict=False):
                if not context.disks.is_content(layer, part.sha256, part.bytes):
                    break
                same.append(layer)
            known = max(known, same, key=len)
        snapshots.hold(known)
        self.layers = known[::-1]
        return known

    async def _layer(self, part: Part, reader: Reader) -> None:
        if not part.present:
            raise UnsupportedError(
                "the archive was made without its template's layers, and no template here has the one"
                f" called {part.name[:140]!r}",
                hint="export it again with template=True, or bring that template here first",
            )
        layer, disks = f"s-{self.id}-{len(self.layers)}", self.context.disks

        async def fill(up: Path) -> None:
            filler = layerstream.Filler(up)
            try:
                async for piece in reader.content(part):
                    await in_thread(filler.feed, piece)
                filler.finish()
            finally:
                filler.close()

        above = self.layers[0] if self.layers else None
        with _full_disk("the disk store"):
            await disks.import_layer(layer, fill, above, private=not part.template, room=part.bytes)
        self.snapshots.hold([layer])
        self.layers.insert(0, layer)
        await disks.note_content(layer, part.sha256, part.bytes, came=True)

    async def _disk(self, part: Part, reader: Reader) -> None:
        """The disk that the machine has mounted, as it is."""
        layer = f"s-{self.id}-0"

        async def fill(image: Path) -> None:
            await self._file(image, part, reader)

        with _full_disk("the disk store"):
            await self.context.disks.import_image(layer, fill, part.stored)
        self.snapshots.hold([layer])
        self.layers.insert(0, layer)

    async def _file(self, path: Path, part: Part, reader: Reader, *, floor: int = 0) -> None:
        """A new file of a part's content, without its zeros. ``floor`` bytes stay free where it lies: for
        the disk store, which may still grow, its own room is kept by itself."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            at = 0
            async for piece in reader.content(part):
                await in_thread(layerstream.write_sparse, fd, piece, at)
                at += len(piece)
                if floor and shutil.disk_usage(path.parent).free < floor:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, part.bytes)
        finally:
            os.close(fd)

    # -- memory

    async def _read_agent(self, part: Part, reader: Reader) -> bytes:
        if part.bytes > _MAX_AGENT:
            raise InvalidRequestError(f"the archive's guest agent is {part.bytes >> 20} MiB long")
        return b"".join([piece async for piece in reader.content(part)])

    async def _image_file(self, part: Part, reader: Reader) -> None:
        if self._image is None:
            self._image = self.context.images.temporary(self.id)
            self._image.mkdir(mode=0o700)
        with _full_disk("the disk of the memory images"):
            await self._file(self._image / part.name, part, reader, floor=_FLOOR)

    async def publish(self) -> int:
        """Make an image of what came of the memory; its bytes. It is on disk when this returns."""
        if self._image is None:
            return 0
        context, manifest = self.context, self.manifest
        assert self._agent is not None
        await in_thread(agents.add, context.home, manifest.agent, self._agent)
        if context.engine.shares_files:
            agents.protect(context.home)
        made = await context.images.publish(
            self.id, fingerprint=manifest.fingerprint, agent=manifest.agent, layers=self.layers
        )
        self._image = None
        await context.images.settled(self.id)
        entries = context.images.manifest(self.id).files
        for part in manifest.parts:
            if part.kind == "image" and entries[part.name].sha256 != part.sha256:
                raise CorruptSnapshotError(
                    "this machine's disk did not keep the snapshot's memory as it came"
                )
        # It will take what it took, zeros that are left out here included.
        logical = sum(part.bytes for part in manifest.parts if part.kind == "image")
        return max(made.bytes, min(manifest.memory_bytes, logical))


def inherited(manifest: Manifest) -> dict[str, object]:
    """What its sandboxes inherit, if all of that can be.

    Raises:
        InvalidRequestError: not so; or a name, label or id of it is none.
    """
    try:
        known = msgspec.convert(manifest.inherits, _Inherits)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequestError(f"the archive's manifest is malformed: {error}") from None
    check_limits(known.type, known.cpus, known.mem_mb, known.disk_mb, known.cpu_weight)
    check_env(known.env)
    if manifest.name is not None:
        names.check_name(manifest.name, "snapshot name")
    words = [manifest.id, manifest.sandbox, manifest.engine, manifest.agent, manifest.fingerprint]
    words += [known.user, known.workdir, known.template or ""]
    if not all(len(word) <= 1024 and word.isprintable() for word in words):
        raise InvalidRequestError("the archive's manifest is malformed: it has words that nothing here has")
    return {name: getattr(known, name) for name in INHERITED}


@contextlib.contextmanager
def _full_disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InvalidRequestError(f"the archive has a file that is too large for {what}") from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(
            f"{what} is full: the snapshot was not imported",
            hint="delete sandboxes and snapshots",
            retryable=True,
        ) from error


async def layer_sum(context: Context, layer: str) -> tuple[str, int]:
    """Checksum and length of a layer's stream: worked out once."""
    known = context.disks.content_of(layer)
    if known is not None:
        return known
    digest, size = hashlib.sha256(), 0
    pieces = layerstream.pack(context.disks.layer_path(layer))

    def more() -> int:
        piece = next(pieces, b"")
        digest.update(piece)
        return len(piece)

    try:
        while count := await in_thread(more):
            size += count
    finally:
        pieces.close()  # type: ignore[attr-defined]
    await context.disks.note_content(layer, digest.hexdigest(), size)
    return digest.hexdigest(), size
