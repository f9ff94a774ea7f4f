"""Snapshots and checkpoints as records: found by any name, counted, deleted with their files."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from forkyard.errors import ConflictError, NotFoundError, UnsupportedError
from forkyard.host.failpoint import failpoint
from forkyard.types import CPU_WEIGHT, CheckpointInfo, SnapshotInfo
from forkyard.wire import VERSION, VERSION_MIN
from forkyard.yard.background import finish
from forkyard.yard.context import Context
from forkyard.yard.machines import Frozen, Limits
from forkyard.yard.model import Sandbox, SandboxDoc, SnapshotDoc, checkpoint_info, snapshot_info

# What a sandbox started from a snapshot takes over from the one that was frozen.
INHERITED = (
    *("template", "type", "cpus", "cpu_weight", "mem_mb", "disk_mb"),
    *("shape_mem_mb", "shape_disk_mb", "shape_cpus", "processes"),
    *("user", "workdir", "env", "tainted"),
)


class Snapshots:
    """The records in ``context.snapshots`` and what they hold on disk.

    A layer is dropped with its last holder: a snapshot, a live sandbox or a template.
    """

    def __init__(self, context: Context, template_layers: Callable[[], set[str]]) -> None:
        self.context = context
        self.template_layers = template_layers
        self.holders: collections.Counter[str] = collections.Counter()
        self._unused: set[str] = set()

    def hold(self, layers: Iterable[str]) -> None:
        self.holders.update(layers)

    async def release(self, layers: Iterable[str]) -> None:
        """Give up layers, and drop those that nobody holds any more."""
        self.holders.subtract(layers)
        await self.drop_unheld(layers)

    async def drop_unheld(self, layers: Iterable[str]) -> None:
        """Drop those of ``layers`` that no snapshot, sandbox or template holds."""
        unheld = [layer for layer in layers if self.holders[layer] <= 0]
        if not unheld:
            return
        kept = self.template_layers()
        async with contextlib.AsyncExitStack() as steps:
            for layer in unheld:
                self.holders.pop(layer, None)
                if layer not in kept:
                    steps.push_async_callback(self.context.disks.drop_layer, layer)
            # Called first: nothing may stand on a layer that goes.
            steps.push_async_callback(self.context.machines.ahead.leave, set(unheld) - kept)
            await failpoint("layers.unheld")

    def find(self, ref: str) -> SnapshotDoc | None:
        """The snapshot or checkpoint with this id, or the snapshot with this name."""
        found = self.context.snapshots.get(ref)
        if found is not None:
            return found
        for doc in self.context.snapshots.values():
            if doc.kind == "snapshot" and doc.name == ref:
                return doc
        return None

    def get(self, ref: str) -> SnapshotDoc:
        found = self.find(ref)
        if found is None:
            raise NotFoundError(
                f"no snapshot {ref[:140]!r}", hint="forkyard snapshots ls shows those there are"
            )
        return found

    def check_free(self, name: str) -> None:
        """Raises ConflictError if a snapshot has this name."""
        taken = self.find(name)
        if taken is not None:
            raise ConflictError(f"the snapshot name {name!r} is taken", hint=f"delete {taken.id} first")

    async def add(
        self, source: SandboxDoc, frozen: Frozen, doc_id: str, kind: str, **fields: Any
    ) -> SnapshotDoc:
        """Publish what :meth:`Machines.freeze` made as a record.

        The caller saves it (with whatever else belongs into the same transaction) through
        :meth:`Context.save`; until then a restart forgets it and its files are swept.
        """
        image = None
        layers = [frozen.layer, *source.layers]
        try:
            if frozen.image is not None:
                await self.context.images.publish(
                    doc_id, fingerprint=frozen.fingerprint, agent=source.agent, layers=layers
                )
                image = doc_id
                await failpoint("freeze.published")
            disk_bytes = await self.context.disks.layer_bytes(frozen.layer)
        except BaseException:
            await finish(self.context.tg, self.context.machines.forget(frozen, doc_id))
            raise
        doc = SnapshotDoc(
            id=doc_id,
            kind=kind,
            sandbox=source.id,
            layers=layers,
            image=image,
            fingerprint=frozen.fingerprint,
            agent=source.agent,
            engine=source.engine,
            size_bytes=disk_bytes + frozen.memory_bytes,
            memory_bytes=frozen.memory_bytes,
            paused_ms=round(frozen.paused_ms, 2),
            dirty_mb=round(frozen.dirty_mb, 2),
            quiesced=frozen.quiesced,
            inherits={name: getattr(source, name) for name in INHERITED},
            **fields,
        )
        self.hold(doc.layers)
        self.context.snapshots[doc.id] = doc
        return doc

    def reparent(self, gone: Iterable[SnapshotDoc]) -> tuple[list[SnapshotDoc], Callable[[], None]]:
        """Before some go: give what came after them the newest ancestor that stays.

        Returns:
            What has another parent now, to be saved, and what undoes that.
        """
        parents = {doc.id: doc.parent for doc in gone}
        before = [
            (doc, doc.parent)
            for doc in self.context.snapshots.values()
            if doc.parent in parents and doc.id not in parents
        ]
        for doc, _ in before:
            while doc.parent in parents:
                doc.parent = parents[doc.parent]

        def give_back() -> None:
            for doc, parent in before:
                doc.parent = parent

        return [doc for doc, _ in before], give_back

    async def discard(self, doc: SnapshotDoc, *, save: bool = True) -> None:
        """Remove a record and whatever only it needed. Nothing that started from it is harmed."""
        if self.context.snapshots.pop(doc.id, None) is None:
            return
        children, give_back = self.reparent([doc])
        try:
            if save:
                await self.context.save(snapshots=children, gone=[doc.id])
        except BaseException:
            give_back()
            self.context.snapshots[doc.id] = doc
            raise
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.release, doc.layers)
            if doc.image is not None:
                steps.push_async_callback(self.context.images.delete_async, doc.image)
                steps.push_async_callback(self.context.machines.ahead.leave, image=doc.image)
            await failpoint("discard.saved")

    def users(self, doc: SnapshotDoc) -> list[str]:
        """Names of the live sandboxes that were started from it."""
        return sorted(box.doc.name for box in self.context.sandboxes if box.doc.snapshot == doc.id)

    async def forget_unused(self, snapshot_id: str | None) -> None:
        """Drop a fork's hidden snapshot if its last user is gone; and those that could not be
        dropped before, while the catalog could not be written."""
        for one in {snapshot_id, *self._unused}:
            doc = self.context.snapshots.get(one or "")
            if doc is None or doc.kind != "fork" or self.users(doc):
                continue
            self._unused.add(doc.id)
            await self.discard(doc)
            self._unused.discard(doc.id)

    def exclusive_bytes(self, doc: SnapshotDoc) -> int:
        """What deleting it would free: its image, and its layer if nobody else holds it."""
        held = self.holders[doc.layers[0]] > 1
        return doc.memory_bytes + (0 if held else doc.size_bytes - doc.memory_bytes)

    def info(self, doc: SnapshotDoc) -> SnapshotInfo:
        return snapshot_info(doc, self.exclusive_bytes(doc))

    def checkpoints(self, sandbox: Sandbox) -> list[SnapshotDoc]:
        """A sandbox's checkpoints, oldest first."""
        own = [
            doc
            for doc in self.context.snapshots.values()
            if doc.kind == "checkpoint" and doc.sandbox == sandbox.id
        ]
        return sorted(own, key=lambda doc: doc.created_at)

    def checkpoint(self, sandbox: Sandbox, ref: str) -> SnapshotDoc:
        """One of a sandbox's checkpoints, by id or (the newest with that) label.

        Raises:
            NotFoundError: it has no such checkpoint.
        """
        own = self.checkpoints(sandbox)
        for doc in reversed(own):
            if ref in (doc.id, doc.name):
                return doc
        raise NotFoundError(
            f"sandbox {sandbox.doc.name!r} has no checkpoint {ref[:140]!r}",
            hint="forkyard checkpoints ls shows those there are",
            sandbox=sandbox.id,
        )

    def checkpoint_infos(self, sandbox: Sandbox) -> list[CheckpointInfo]:
        return [checkpoint_info(doc) for doc in self.checkpoints(sandbox)]

    def check_restorable(self, doc: SnapshotDoc) -> None:
        """Check that what this host has can restore the memory of a snapshot that has some.

        Raises:
            UnsupportedError: another engine or CPU saved it, or the agent in it speaks another version of
                the wire. CorruptSnapshotError: its manifest cannot be read.
        """
        if doc.image is None:
            return
        images, ours = self.context.images, self.context.machines.engine(doc.engine).fingerprint()
        if doc.fingerprint != ours:
            why = f"was saved by {doc.fingerprint}, this is {ours}"
        elif not images.exists(doc.image):
            return
        elif not VERSION_MIN <= (spoken := images.manifest(doc.image).wire) <= VERSION:
            why = f"has an agent of wire version {spoken}, this speaks {VERSION_MIN} to {VERSION}"
        else:
            return
        raise UnsupportedError(
            f"the memory of snapshot {doc.id} {why}",
            hint="start it with memory=False: its disk, freshly booted",
        )


def inherited(doc: SnapshotDoc) -> dict[str, Any]:
    """What a sandbox started from it takes over; a snapshot of an earlier release lacks some of it."""
    values = {"cpu_weight": CPU_WEIGHT, "shape_cpus": 1, **doc.inherits}
    return {name: values[name] for name in INHERITED}


def limits_of_sandbox(doc: SandboxDoc) -> Limits:
    """The limits of a sandbox."""
    return limits_of({name: getattr(doc, name) for name in INHERITED}, doc.engine)


def limits_of(values: dict[str, Any], engine: str) -> Limits:
    """The limits in a document's fields, on that engine."""
    return Limits(
        cpus=values["cpus"],
        mem_mb=values["mem_mb"],
        disk_mb=values["disk_mb"],
        shape_mem_mb=values["shape_mem_mb"],
        shape_disk_mb=values["shape_disk_mb"],
        processes=values["processes"],
        engine=engine,
        cpu_weight=values["cpu_weight"],
        shape_cpus=values["shape_cpus"],
    )
