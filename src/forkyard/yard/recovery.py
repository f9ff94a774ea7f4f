"""What a new daemon finds: sandboxes that ran on, records of what is gone, and strays.

The rule is one: what the catalog does not know, goes. A start, fork, freeze or rewind that
the daemon's death cut short has its box, layer or image on the host and no row that
names it (or a row that says ``creating``), so sweeping undoes it whatever the step was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from forkyard.errors import ForkyardError, SandboxLostError
from forkyard.host import process
from forkyard.host.files import rmtree
from forkyard.yard import agents, names
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.machines import Start
from forkyard.yard.model import Sandbox, SandboxDoc, SnapshotDoc
from forkyard.yard.snapshots import limits_of_sandbox

log = logging.getLogger("forkyard.yard")

ATTACHES_AT_ONCE = 16


class Recovery:
    """Brings a yard from what is on disk to what it says it is."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context

    async def run(self) -> None:
        """Load, re-attach, fail what is lost, sweep."""
        context, snapshots = self.context, self.lifecycle.snapshots
        sandboxes, kept = await context.catalog.load(SandboxDoc, SnapshotDoc)
        for snapshot in kept:
            context.snapshots[snapshot.id] = snapshot
            snapshots.hold(snapshot.layers)
        half_made = []
        for doc in sandboxes:
            if doc.state == "creating" or doc.trial:
                doc.state = "deleted"
                half_made.append(doc)
                continue
            sandbox = Sandbox(doc)
            context.sandboxes.add(sandbox)
            snapshots.hold(doc.held())
            self.lifecycle.leases.rebase_deadline(sandbox)
        if half_made:
            await context.save(sandboxes=half_made)
        slots = asyncio.Semaphore(ATTACHES_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for sandbox in context.sandboxes:
                if sandbox.doc.state == "running":
                    group.create_task(self._attach(sandbox, slots))
        await self._sweep()
        for snapshot in [doc for doc in context.snapshots.values() if doc.kind == "fork"]:
            await snapshots.forget_unused(snapshot.id)
        await asyncio.to_thread(agents.sweep, context.home, self._agents())
        for sandbox in context.sandboxes:
            self.lifecycle.leases.watch(sandbox)
            self.lifecycle.network.restore(sandbox)

    def _agents(self) -> set[str]:
        """The builds of the guest agent that something may still start with."""
        context = self.context
        used = {context.agent, *(doc.agent for doc in context.snapshots.values())}
        used.update(sandbox.doc.agent for sandbox in context.sandboxes)
        # A snapshot's is in its row; only warm images have none. (A start is not to read every manifest.)
        of_snapshots = {doc.image for doc in context.snapshots.values()}
        for name in (name for name in context.images.names() if name not in of_snapshots):
            with contextlib.suppress(ForkyardError):
                used.add(context.images.manifest(name).agent)
        return used

    async def _attach(self, sandbox: Sandbox, slots: asyncio.Semaphore) -> None:
        doc = sandbox.doc
        start = Start(
            doc.layers,
            limits_of_sandbox(doc),
            names.identity(doc.name, doc.id, generation=doc.generation),
            doc.agent,
            serve=lambda guest: self.lifecycle.network.serve(sandbox, guest),
        )
        try:
            await self.lifecycle.network.prepare(sandbox)
        except ForkyardError as error:
            log.warning("the network of %s stays closed: %s", doc.id, error)
        box = None
        async with slots:
            try:
                if doc.machine is not None:
                    box = await self.context.machines.reattach(doc.box, doc.machine, start)
            except (ForkyardError, OSError) as error:
                log.warning("%s did not answer after the restart: %s", doc.id, error)
        if box is None:
            await self._lost(sandbox)
            return
        self.lifecycle.bind(sandbox, box)
        log.info("%s (%s) runs on", doc.id, doc.name)

    async def _lost(self, sandbox: Sandbox) -> None:
        """It ran when the last daemon did, and does not now: the host's doing, or nobody saw whose."""
        same_boot = sandbox.doc.machine and sandbox.doc.machine.get("boot_id") == process.boot_id()
        cause, why = (
            ("unknown", "it ended while no daemon watched")
            if same_boot
            else ("host", "the host was restarted")
        )
        if sandbox.doc.ephemeral:
            lost = {"code": SandboxLostError.code, "message": why, "cause": cause}
            await self.context.record("sandbox.failed", None, sandbox.id, **lost)
            await self.lifecycle.delete(sandbox, None)
            return
        sandbox.doc.box, sandbox.doc.machine = "", None
        await self.lifecycle._fail(sandbox, SandboxLostError(why, cause=cause, sandbox=sandbox.id), cause)

    async def _sweep(self) -> None:
        """End and remove what no record names."""
        context = self.context
        boxes = {sandbox.doc.box for sandbox in context.sandboxes if sandbox.doc.box}
        for path in _children(context.home / "boxes"):
            if path.name not in boxes:
                await self._sweep_box(path)
        for box in context.machines.cgroups.names():
            if box not in boxes and (cgroup := context.machines.cgroups.find(box)) is not None:
                await _quietly(cgroup.delete())
        layers = set(self.lifecycle.snapshots.holders) | self.lifecycle.templates.layers()
        await context.disks.reap(context.disks.stray(boxes, layers))
        images = {doc.image for doc in context.snapshots.values() if doc.image}
        for image in context.images.names():
            if image not in images and not self.lifecycle.templates.owns(image):
                log.info("sweeping image %s", image)
                await context.images.delete_async(image)

    async def _sweep_box(self, directory: Path) -> None:
        log.info("sweeping box %s", directory.name)
        for engine in self.context.engines.values():
            await _quietly(engine.sweep(directory))
        await _quietly(self.context.machines.remove(directory.name))
        await asyncio.to_thread(rmtree, directory)


async def _quietly(step: object) -> None:
    try:
        await step  # type: ignore[misc]
    except (ForkyardError, OSError) as error:
        log.warning("sweeping: %s", error)


def _children(directory: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(directory.iterdir())
    return []
