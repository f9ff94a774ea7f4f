"""Snapshots that leave the yard and come into it: see :mod:`forkyard.store.archive`.

The daemon makes and reads the archive; where it lies is the client's business, and so are the
credentials for that. Both ways one piece is held at a time, and whoever is slow is waited for.

An import builds layers and image under fresh ids that nothing names until its one row is written;
what fails before is undone here, and what a crash leaves is swept as any other half-made thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from forkyard.engines.base import OWN_KERNEL
from forkyard.errors import CorruptSnapshotError, InvalidRequestError
from forkyard.host import files
from forkyard.host.failpoint import failpoint
from forkyard.host.threads import in_thread
from forkyard.requests import Caller, ExportSnapshot, ImportSnapshot
from forkyard.store import archive, layerstream
from forkyard.store.archive import BLOCK, Manifest, Part, Reader
from forkyard.types import SnapshotInfo
from forkyard.yard import agents, names
from forkyard.yard.again import made_snapshot, mark_of
from forkyard.yard.background import finish, insist
from forkyard.yard.coming import Coming, inherited, layer_sum
from forkyard.yard.context import Context
from forkyard.yard.model import SnapshotDoc
from forkyard.yard.snapshots import Snapshots
from forkyard.yard.templates import Templates

__all__ = ["Moving"]


class Moving:
    """The verbs ``export_snapshot`` and ``import_snapshot``."""

    def __init__(self, context: Context, templates: Templates, snapshots: Snapshots) -> None:
        self.context = context
        self.templates = templates
        self.snapshots = snapshots
        self._asked: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    # -- out

    async def export(self, request: ExportSnapshot, caller: Caller) -> AsyncIterator[bytes]:
        """See API: ``export_snapshot``; the archive, piece by piece."""
        doc = self.snapshots.get(request.snapshot)
        layers = list(doc.layers)
        # It may be deleted meanwhile: its layers stay for us, its files as long as they are open.
        self.snapshots.hold(layers)
        try:
            with contextlib.ExitStack() as opened:
                manifest, sources = await self._described(doc, request, opened)
                about = {"id": doc.id, "name": doc.name, "memory": manifest.memory}
                await self.context.record("snapshot.exported", caller, doc.sandbox, **about)
                pieces = archive.write(manifest, lambda part: _content(sources[part.kind, part.name]))
                try:
                    while (piece := await in_thread(next, pieces, None)) is not None:
                        yield piece
                finally:
                    pieces.close()  # type: ignore[attr-defined]
        finally:
            await self.snapshots.release(layers)

    async def _described(
        self, doc: SnapshotDoc, request: ExportSnapshot, opened: contextlib.ExitStack
    ) -> tuple[Manifest, dict[tuple[str, str], Path | int]]:
        """What the archive will hold, and for each part the directory or the open file."""
        context = self.context
        parts: list[Part] = []
        sources: dict[tuple[str, str], Path | int] = {}
        if request.memory and doc.image is not None:
            if context.images.verify_quick(doc.image).boot_id is not None:
                await context.images.settled(doc.image)
            image = context.images.verify_quick(doc.image)
            of_agent = context.home / "agents" / doc.agent / agents.AGENT_NAME
            digest = await in_thread(files.sha256_file, of_agent)
            parts.append(Part(kind="agent", bytes=of_agent.stat().st_size, sha256=digest))
            sources["agent", ""] = _opened(of_agent, opened)
            for name, entry in image.files.items():
                if entry.sha256 is None:
                    raise CorruptSnapshotError(
                        f"the memory of snapshot {doc.id} was written into",
                        hint="export it with memory=False",
                    )
                parts.append(Part(kind="image", name=name, bytes=entry.size, sha256=entry.sha256))
                sources["image", name] = _opened(context.images.path(doc.image) / name, opened)
        of_templates = {layer for template in self.templates.all() for layer in template.layers}
        disk = context.disks.image_of(doc.layers[0]) if parts else None
        if disk is not None:
            # Its kernel has this very file system mounted: no tree would do.
            about = disk.stat()
            digest = await in_thread(files.sha256_file, disk)
            stored = min(about.st_blocks * 512, about.st_size)
            parts.append(
                Part(kind="disk", name=doc.layers[0], bytes=about.st_size, sha256=digest, stored=stored)
            )
            sources["disk", doc.layers[0]] = _opened(disk, opened)
        else:
            await context.disks.show(doc.layers)
        for layer in reversed(doc.layers if disk is None else []):
            sha256, size = await layer_sum(context, layer)
            own = layer not in of_templates
            present = own or request.template
            parts.append(
                Part(kind="layer", name=layer, bytes=size, sha256=sha256, template=not own, present=present)
            )
            sources["layer", layer] = context.disks.layer_path(layer)
        manifest = Manifest(
            id=doc.id,
            name=doc.name,
            sandbox=doc.sandbox,
            labels=doc.labels,
            engine=doc.engine,
            fingerprint=doc.fingerprint,
            agent=doc.agent,
            memory_bytes=doc.memory_bytes if request.memory else 0,
            quiesced=doc.quiesced,
            created_at=doc.created_at,
            inherits=doc.inherits,
            parts=parts,
        )
        return manifest, sources

    # -- in

    async def import_(
        self, request: ImportSnapshot, chunks: AsyncIterator[bytes], caller: Caller
    ) -> SnapshotInfo:
        """See API: ``import_snapshot``. Whatever is wrong with the archive, nothing of it stays."""
        if request.name is not None:
            names.check_name(request.name, "snapshot name")
        mark = mark_of(request, caller)
        # Who asks again while the first is being undone, or done, waits for that.
        lock = self._asked.setdefault(mark, asyncio.Lock()) if mark else asyncio.Lock()
        async with lock:
            made = made_snapshot(self.context, request, caller, "snapshot")
            if made is None:
                made = await self._import(request, Reader(chunks), caller, mark)
            else:
                async for _ in chunks:  # it was read the first time
                    pass
        return self.snapshots.info(made)

    async def _import(
        self, request: ImportSnapshot, reader: Reader, caller: Caller, mark: str
    ) -> SnapshotDoc:
        if request.name is not None:
            self.snapshots.check_free(request.name)
        manifest = await reader.manifest()
        if manifest.memory and (manifest.engine in OWN_KERNEL) != manifest.disk:
            words = f"the archive has the memory of a {manifest.engine} machine, and not the disk of one"
            raise InvalidRequestError(words)
        takes = inherited(manifest)
        coming = Coming(self.snapshots, self.templates, manifest)
        try:
            await coming.receive(reader)
            await failpoint("import.received")
        except BaseException:
            await insist(self.context.tg, coming.undo())
            raise
        return await finish(self.context.tg, self._keep(request, coming, takes, caller, mark))

    async def _keep(
        self, request: ImportSnapshot, coming: Coming, takes: dict[str, object], caller: Caller, mark: str
    ) -> SnapshotDoc:
        try:
            doc = await self._saved(request, coming, takes, mark)
        except BaseException:
            await coming.undo()
            raise
        await failpoint("import.saved")
        manifest = coming.manifest
        about = {"id": doc.id, "name": doc.name, "was": manifest.id, "memory": manifest.memory}
        await self.context.record("snapshot.imported", caller, doc.sandbox, **about)
        return doc

    async def _saved(
        self, request: ImportSnapshot, coming: Coming, takes: dict[str, object], mark: str
    ) -> SnapshotDoc:
        """Make a snapshot of what came: its one row is what makes it be there."""
        context, manifest = self.context, coming.manifest
        memory = await coming.publish()
        top = await context.disks.layer_bytes(coming.layers[0])
        name = request.name
        if name is None and manifest.name is not None and self.snapshots.find(manifest.name) is None:
            name = manifest.name
        elif name is not None:
            self.snapshots.check_free(name)
        doc = SnapshotDoc(
            id=coming.id,
            kind="snapshot",
            sandbox=manifest.sandbox,
            name=name,
            parent=manifest.id if manifest.id in context.snapshots else None,
            labels=manifest.labels,
            layers=coming.layers,
            image=coming.id if manifest.memory else None,
            fingerprint=manifest.fingerprint if manifest.memory else "",
            agent=manifest.agent if manifest.memory else "",
            engine=manifest.engine,
            size_bytes=top + memory,
            memory_bytes=memory,
            created_at=time.time(),
            quiesced=manifest.quiesced,
            inherits=takes,
            asked=mark,
            imported=manifest.id,
        )
        context.snapshots[doc.id] = doc
        try:
            await context.save(snapshots=[doc])
        except BaseException:
            del context.snapshots[doc.id]
            raise
        return doc


def _opened(path: Path, opened: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return fd


def _content(source: Path | int) -> Iterator[bytes]:
    """A part's pieces, from a layer's directory or an open file."""
    if isinstance(source, Path):
        yield from layerstream.pack(source)
        return
    at = 0
    while piece := os.pread(source, BLOCK, at):
        yield piece
        at += len(piece)
