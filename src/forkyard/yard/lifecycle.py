"""The life of a sandbox: created, running, stopped, failed, deleted.

    creating ──> running <──> stopped
        │          │ │           │
        │          │ └─> failed ─┤
        └──────────┴─────────────┴──> deleted

Whatever changes a sandbox's machine holds its lock. The catalog is written before a reply
and after the machine is as it says; what the catalog does not know is swept at the next
start of the daemon, so a crash in between leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forkyard.errors import (
    ConflictError,
    CorruptSnapshotError,
    ForkyardError,
    InternalError,
    NotFoundError,
    SandboxLostError,
    UnsupportedError,
)
from forkyard.host.failpoint import failpoint
from forkyard.requests import Caller, CreateSandbox, Lease
from forkyard.types import SandboxInfo
from forkyard.yard import names, overuse, warmup
from forkyard.yard.admission import Admission
from forkyard.yard.again import made_sandboxes, mark_of
from forkyard.yard.ahead import LARGEST
from forkyard.yard.background import begin, finish
from forkyard.yard.commands import is_root
from forkyard.yard.context import Context, locked
from forkyard.yard.leases import Leases
from forkyard.yard.machines import Box, Start
from forkyard.yard.model import Sandbox, SandboxDoc, SnapshotDoc
from forkyard.yard.names import snapshot_id
from forkyard.yard.network import Network
from forkyard.yard.plans import Plan, for_create
from forkyard.yard.snapshots import Snapshots, limits_of_sandbox
from forkyard.yard.templates import Templates

log = logging.getLogger("forkyard.yard")

__all__ = ["Lifecycle"]


class Lifecycle:
    """Creates, stops, starts and deletes; notices deaths."""

    def __init__(
        self,
        context: Context,
        templates: Templates,
        snapshots: Snapshots,
        admission: Admission,
        leases: Leases,
    ) -> None:
        self.context = context
        self.templates = templates
        self.snapshots = snapshots
        self.admission = admission
        self.leases = leases
        self.network = Network(context, self._machine_of)
        self._boxes: dict[str, Sandbox] = {}
        # Of sandboxes that never came to be, while the catalog could not be written.
        self._rows_to_delete: list[SandboxDoc] = []
        context.machines.on_death = self._died
        context.disks.on_over = self._over_disk

    # -- coming into being -------------------------------------------------------------

    async def create(self, request: CreateSandbox, caller: Caller) -> SandboxInfo:
        """See API: ``create_sandbox``. Cancelling it undoes it."""
        for made in made_sandboxes(self.context, request, caller):
            return made.info()
        plan = for_create(request, self.context, self.templates, self.snapshots)
        plan.doc.asked = mark_of(request, caller)
        if request.wait:
            sandbox = await self.bring_up(plan, caller, wait_s=request.wait_s)
            return sandbox.info()
        (sandbox,) = await self.announce([plan])
        self._launch(sandbox, plan, caller, request.wait_s, keep_failed=True)
        return sandbox.info()

    async def bring_up(self, plan: Plan, caller: Caller, *, wait_s: float) -> Sandbox:
        """Turn a plan into a running sandbox, or into nothing."""
        (sandbox,) = await self.announce([plan])
        future = self._launch(sandbox, plan, caller, wait_s, keep_failed=False)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            if sandbox.doomed and not _cancelling():
                raise ConflictError(
                    f"{sandbox.doc.name!r} was deleted while it was being created", sandbox=sandbox.id
                ) from None
            # Ends a start under way, and is there for one that had not begun.
            await finish(self.context.tg, self.delete(sandbox, caller))
            raise
        return sandbox

    async def announce(self, plans: Sequence[Plan]) -> list[Sandbox]:
        """Put the sandboxes to be on record, all or none, so that whoever comes after a death of
        this daemon knows what to look for."""
        announced: list[Sandbox] = []
        try:
            for plan in plans:
                sandbox = Sandbox(plan.doc, half_made=True)
                self.context.sandboxes.add(sandbox)
                self.snapshots.hold(plan.doc.held())
                announced.append(sandbox)
            gone = list(self._rows_to_delete)
            # One that is being made does not outlive the machine anyway.
            await self.context.save(sandboxes=[*gone, *(plan.doc for plan in plans)], durable=False)
            self._rows_to_delete = [doc for doc in self._rows_to_delete if doc not in gone]
            await failpoint("create.announced")
        except BaseException:
            await finish(self.context.tg, self._unannounce(announced))
            raise
        return announced

    async def _unannounce(self, announced: list[Sandbox]) -> None:
        docs = [sandbox.doc for sandbox in announced]
        for sandbox in announced:
            self.context.sandboxes.drop(sandbox)
            sandbox.doc.state = "deleted"
        # A cancelled save may have been done all the same.
        try:
            await self.context.save(sandboxes=docs)
        except (ForkyardError, OSError):
            self._rows_to_delete += docs
        for doc in docs:
            await self.snapshots.release(doc.held())

    def _launch(
        self, sandbox: Sandbox, plan: Plan, caller: Caller, wait_s: float, *, keep_failed: bool
    ) -> asyncio.Future[None]:
        work = self._bring_up(sandbox, plan, caller, wait_s, keep_failed)
        sandbox.creating, future = begin(self.context.tg, work)
        return future

    async def _bring_up(
        self, sandbox: Sandbox, plan: Plan, caller: Caller, wait_s: float, keep_failed: bool
    ) -> None:
        context, doc = self.context, plan.doc
        async with sandbox.lock:
            if sandbox.doomed:
                raise ConflictError(f"{doc.name!r} was deleted while it was being created", sandbox=doc.id)
            try:
                need = self.admission.need_mb(plan.image_bytes)
                async with self.admission.reserve(1, need, wait_s, f"creating {doc.name!r}"):
                    await self.ignite(sandbox, plan)
                await failpoint("create.ignited")
                await context.save(sandboxes=[doc])
                sandbox.half_made = False
                await failpoint("create.saved")
                self.leases.watch(sandbox)
                await context.record("sandbox.created", caller, doc.id, name=doc.name, **_origin(doc))
            except BaseException as error:
                if keep_failed and isinstance(error, ForkyardError):
                    await self._fail(sandbox, error, "host")
                else:
                    await finish(context.tg, self._erase(sandbox))
                raise
            finally:
                sandbox.creating = None
        if plan.cold is not None:
            self.templates.warm_behind(plan.cold, plan.limits)

    async def ignite(self, sandbox: Sandbox, plan: Plan) -> None:
        """Start the plan's machine and make it the sandbox's; the caller holds the lock and saves."""
        doc = sandbox.doc
        network = await self.network.prepare(sandbox)
        await failpoint("ignite.network")
        doc.generation += 1
        await self._sound_image(sandbox, plan)
        fork = plan.image is not None
        who = names.identity(doc.name, doc.id, generation=doc.generation, fork=fork, network=network)
        image = plan.image_path(self.context)
        if image is not None and plan.quiet:
            self.context.machines.ahead.quiet(image.name, plan.image_bytes or 0)
        named = plan.start_from is not None and plan.start_from.kind == "snapshot"
        learn = named and (plan.image_bytes or 0) <= LARGEST
        serve = functools.partial(self.network.serve, sandbox)
        start = Start(doc.layers, plan.limits, who, plan.agent, image, serve, learn)
        started = await self.context.machines.start(start)
        self.bind(sandbox, started)
        if started.layers != doc.layers:
            # Its disk goes on with a copy of the top layer: that one is not below it.
            await self._move_layers(sandbox, started.layers)
        try:
            await failpoint("ignite.bound")
            await self.network.equip(sandbox)
            await failpoint("ignite.equipped")
            if plan.cold is not None and plan.cold.warm is not None:
                # There is no image that fits: what it would hold is made here.
                await warmup.run(started.guest, plan.cold)
        except BaseException:
            await finish(self.context.tg, self.release(sandbox))
            raise
        doc.agent = plan.agent
        doc.state = "running"
        doc.start_ms = round(started.start_ms, 2)
        if plan.start_from is not None:
            plan.start_from.verified = True
        sandbox.signal()

    async def _sound_image(self, sandbox: Sandbox, plan: Plan) -> None:
        """Check a plan's image. A template's is a cache: if it is damaged, the start is a cold one."""
        image = plan.image
        if image is None:
            return
        try:
            await self.context.images.verify(image)
        except (CorruptSnapshotError, NotFoundError, UnsupportedError) as error:
            if plan.template is None:
                raise
            log.warning("%s: it is made anew", error)  # or gone: another start found it first
            await self.context.machines.ahead.leave(image=image)
            await self.context.images.delete_async(image)
            plan.image, plan.cold, plan.quiet = None, plan.template, False
            if sandbox.doc.layers != plan.template.layers:  # what the warm command wrote
                await self._move_layers(sandbox, plan.template.layers)

    async def _machine_of(self, sandbox: Sandbox) -> Box:
        return (await self.running(sandbox.id))[1]

    # -- the machine of a sandbox ------------------------------------------------------

    def bind(self, sandbox: Sandbox, box: Box) -> None:
        """Make ``box`` the machine of ``sandbox``."""
        sandbox.box = box
        sandbox.doc.box = box.id
        sandbox.doc.machine = box.machine.record()
        sandbox.doc.failure = None
        self._boxes[box.id] = sandbox
        self.admission.running = len(self._boxes)
        sandbox.touch()
        sandbox.measured_at = 0.0
        if box.cgroup is not None and not box.engine.own_kernel:
            sandbox.memory_watch = box.cgroup.watch_memory(
                asyncio.get_running_loop(),
                lambda used, limit: overuse.of_memory(self.context, sandbox, box, used),
            )
        box.guest.on_lost = lambda error: self._channel_lost(box.id, error)
        if box.machine.died.is_set():  # while it was nobody's
            self._died(box.id)

    async def release(self, sandbox: Sandbox, why: str | None = None) -> None:
        """End the sandbox's machine, if it has one; ``why`` is what those in it are told."""
        box, sandbox.box = sandbox.box, None
        if sandbox.memory_watch is not None:
            sandbox.memory_watch.close()
            sandbox.memory_watch = None
        if box is not None:
            self._boxes.pop(box.id, None)
            self.admission.running = len(self._boxes)
            await self.context.machines.end(box, why and f"sandbox {sandbox.doc.name!r} {why}")
        sandbox.doc.box = ""
        sandbox.doc.machine = None

    def _over_disk(self, box_id: str, used_mb: float) -> None:
        sandbox = self._boxes.get(box_id)
        if sandbox is not None:
            overuse.of_disk(self.context, sandbox, used_mb)

    # -- deaths ------------------------------------------------------------------------

    def _died(self, box_id: str) -> None:
        sandbox = self._boxes.get(box_id)
        if sandbox is not None:
            begin(self.context.tg, self._lost(sandbox, box_id, None))

    def _channel_lost(self, box_id: str, error: ForkyardError) -> None:
        sandbox = self._boxes.get(box_id)
        if sandbox is not None:
            begin(self.context.tg, self._lost(sandbox, box_id, error))

    async def _lost(self, sandbox: Sandbox, box_id: str, error: ForkyardError | None) -> None:
        async with sandbox.lock:
            box = sandbox.box
            if box is None or box.id != box_id or sandbox.doc.state != "running":
                return
            cause, why = _cause(box, error)
            oom = box.cgroup is not None and bool(box.cgroup.oom_kills())
            await self.release(sandbox)
            if sandbox.doc.ephemeral:
                # Its row goes with it: the audit is where its owner can read why.
                lost = {"code": SandboxLostError.code, "message": why, "cause": cause, "oom": oom}
                await self.context.record("sandbox.failed", None, sandbox.id, **lost)
                await self._delete_locked(sandbox, None)
            else:
                await self._fail(sandbox, SandboxLostError(why, cause=cause, sandbox=sandbox.id), cause)

    async def _fail(self, sandbox: Sandbox, error: ForkyardError, cause: str) -> None:
        doc = sandbox.doc
        doc.state = "failed"
        doc.failure = {"code": error.code, "message": error.message, "cause": cause}
        sandbox.signal()
        await self.context.save(sandboxes=[doc])
        sandbox.half_made = False
        await self.context.record("sandbox.failed", None, doc.id, **doc.failure)

    # -- stop, start, delete -----------------------------------------------------------

    async def stop(self, sandbox: Sandbox, caller: Caller | None, *, napping: bool = False) -> None:
        """Save memory and disk and leave no process. An ephemeral sandbox is deleted instead."""
        await finish(self.context.tg, self._stop(sandbox, caller, napping))

    async def _stop(self, sandbox: Sandbox, caller: Caller | None, napping: bool) -> None:
        async with locked(sandbox):
            doc = sandbox.doc
            if doc.state == "stopped":
                doc.napping = doc.napping and napping
                return
            if napping and sandbox.active_calls:
                return
            idle_since = sandbox.idle_since
            if doc.ephemeral:
                await self._delete_locked(sandbox, caller)
                return
            box = self.box_of(sandbox)
            stop_id = snapshot_id()
            frozen = await self.context.machines.freeze(box, f"s-{stop_id}", stop_id)
            kept = await self.snapshots.add(doc, frozen, stop_id, "stop", created_at=time.time())
            if napping and (sandbox.active_calls or sandbox.idle_since != idle_since):
                # Somebody came while it was being saved, and works in the machine that is to go.
                await self.snapshots.discard(kept, save=False)
                return
            before = msgspec.structs.asdict(doc)
            doc.state, doc.resume, doc.napping = "stopped", kept.id, napping
            doc.box, doc.machine = "", None
            doc.layers = list(kept.layers)
            try:
                await failpoint("stop.frozen")
                await self.context.save(sandboxes=[doc], snapshots=[kept])
            except BaseException:
                _restore(doc, before)
                await finish(self.context.tg, self.snapshots.discard(kept, save=False))
                raise
            # From here on it is stopped: a death before its machine is gone leaves a stray.
            async with contextlib.AsyncExitStack() as steps:
                self.snapshots.hold(doc.layers)
                steps.push_async_callback(self.snapshots.release, before["layers"])
                steps.push_async_callback(self.release, sandbox, "was stopped")
                sandbox.signal()
                await failpoint("stop.saved")
            kind = "sandbox.napped" if napping else "sandbox.stopped"
            await self.context.record(kind, caller, doc.id, memory_bytes=kept.memory_bytes)

    async def start(
        self, sandbox: Sandbox, caller: Caller | None, lease: Lease | None = None, *, memory: bool = True
    ) -> None:
        """Go on where it stopped; a failed one goes on from its newest checkpoint. Without ``memory``
        its disk is booted afresh."""
        await finish(self.context.tg, self._start(sandbox, caller, lease, memory))

    async def _start(
        self, sandbox: Sandbox, caller: Caller | None, lease: Lease | None, memory: bool
    ) -> None:
        async with locked(sandbox):
            await self._start_locked(sandbox, caller, lease, memory)

    async def _start_locked(
        self, sandbox: Sandbox, caller: Caller | None, lease: Lease | None = None, memory: bool = True
    ) -> None:
        doc = sandbox.doc
        if doc.state == "running":
            return
        source = self.context.snapshots.get(doc.resume or doc.checkpoint or "")
        if source is None:
            raise ConflictError(
                f"sandbox {doc.name!r} is {doc.state} and has nothing to start from",
                hint="delete it and create another; checkpoints survive such a loss",
                sandbox=doc.id,
            )
        resumed = doc.resume

        def change() -> None:
            doc.resume, doc.napping = None, False
            if lease is not None and doc.ephemeral:
                doc.lease = lease

        await self.restart(sandbox, source, change, memory=memory)
        self.leases.watch(sandbox)
        if resumed is not None and (spent := self.context.snapshots.get(resumed)) is not None:
            await self.snapshots.discard(spent)
        await self.context.record("sandbox.started", caller, doc.id, source=source.id)

    async def restart(
        self, sandbox: Sandbox, source: SnapshotDoc, change: Callable[[], None], *, memory: bool = True
    ) -> None:
        """Start the sandbox from ``source`` under its own id. The new machine has answered, and is
        in the catalog, before the old one, if there is one, is ended.

        Args:
            change: Makes what else changes in its document, to be written with it.
            memory: Restore it, if ``source`` has any; otherwise its disk is booted afresh.
        """
        doc = sandbox.doc
        image = source.image if memory else None
        if image is not None:
            self.snapshots.check_restorable(source)
        plan = Plan(
            doc,
            limits_of_sandbox(doc),
            source.agent if image else self.context.agent,
            image=image,
            image_bytes=source.memory_bytes if image else None,
            start_from=source,
        )
        old_box, before = sandbox.box, msgspec.structs.asdict(doc)
        doc.layers = list(source.layers)
        self.snapshots.hold(doc.layers)
        try:
            need = self.admission.need_mb(plan.image_bytes)
            async with self.admission.reserve(1, need, 0, f"starting {doc.name!r}"):
                await failpoint("restart.reserved")
                if old_box is not None:
                    self._unbind(sandbox)
                await self.ignite(sandbox, plan)
            doc.memory_restored = image is not None
            doc.resumed_from = source.name or source.id
            change()
            await failpoint("restart.ignited")
            await self.context.save(sandboxes=[doc])
        except BaseException:
            await finish(self.context.tg, self._go_back(sandbox, old_box, before))
            raise
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.snapshots.release, before["layers"])
            if old_box is not None:
                why = "was rewound: what ran before is gone, what the checkpoint has runs"
                told = f"sandbox {doc.name!r} {why}"
                steps.push_async_callback(self.context.machines.end, old_box, told)
            await failpoint("restart.saved")

    async def _go_back(self, sandbox: Sandbox, old_box: Box | None, before: dict[str, Any]) -> None:
        """After a restart that failed: the machine and the document of before."""
        doc = sandbox.doc
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.snapshots.release, list(doc.layers))
            if sandbox.box is not None and sandbox.box is not old_box:
                await self.release(sandbox)
        _restore(doc, before)
        if old_box is not None and old_box.id not in self._boxes:
            self.bind(sandbox, old_box)  # also where none took its place: its death is to be heard of
        sandbox.signal()

    def _unbind(self, sandbox: Sandbox) -> None:
        """Take the machine from the sandbox without ending it."""
        if sandbox.memory_watch is not None:
            sandbox.memory_watch.close()
            sandbox.memory_watch = None
        if sandbox.box is not None:
            self._boxes.pop(sandbox.box.id, None)

    async def _move_layers(self, sandbox: Sandbox, layers: list[str]) -> None:
        self.snapshots.hold(layers)
        old, sandbox.doc.layers = sandbox.doc.layers, list(layers)
        await self.snapshots.release(old)

    async def delete(self, sandbox: Sandbox, caller: Caller | None) -> None:
        """Remove it and everything that only it needs. Safe while it is being created."""
        sandbox.doomed = True
        if sandbox.creating is not None:
            sandbox.creating.cancel()
        await finish(self.context.tg, self._delete(sandbox, caller))

    async def _delete(self, sandbox: Sandbox, caller: Caller | None) -> None:
        async with sandbox.lock:
            if sandbox.doc.state != "deleted":
                await self._delete_locked(sandbox, caller)

    async def _delete_locked(self, sandbox: Sandbox, caller: Caller | None) -> None:
        await self._erase(sandbox)
        await self.context.record("sandbox.deleted", caller, sandbox.id, name=sandbox.doc.name)

    async def _erase(self, sandbox: Sandbox) -> None:
        doc = sandbox.doc
        self.leases.unwatch(sandbox)
        owned = [
            kept
            for kept in self.context.snapshots.values()
            if kept.sandbox == doc.id and kept.kind in ("checkpoint", "stop")
        ]
        before, doc.state = doc.state, "deleted"
        children, give_back = self.snapshots.reparent(owned)
        try:
            # The row first: cut short from here on, the rest is swept as what no record names.
            await self.context.save(sandboxes=[doc], snapshots=children, gone=[kept.id for kept in owned])
        except BaseException as error:
            if not sandbox.half_made or not isinstance(error, ForkyardError | OSError):
                doc.state = before
                give_back()
                raise
            # Its row says so, and no daemon takes such a one up: it goes all the same.
            self._rows_to_delete.append(doc)
        # From here on it is gone: whatever fails, every other step is done.
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.snapshots.forget_unused, doc.snapshot)
            steps.push_async_callback(self._give_up_layers, doc)
            for kept in owned:
                steps.push_async_callback(self.snapshots.discard, kept, save=False)
            steps.push_async_callback(self.release, sandbox, "was deleted")
            self.context.sandboxes.drop(sandbox)
            sandbox.signal()
            self.network.forget(doc.id)
            await failpoint("delete.saved")

    async def _give_up_layers(self, doc: SandboxDoc) -> None:
        held, doc.layers, doc.origin = doc.held(), [], []
        await self.snapshots.release(held)

    # -- for those who use a sandbox ---------------------------------------------------

    async def note_user(self, sandbox: Sandbox, user: str) -> None:
        """Something is about to run as ``user``: from root's first command on it is tainted."""
        if is_root(user) and not sandbox.doc.tainted:
            sandbox.doc.tainted = True
            await self.context.save(sandboxes=[sandbox.doc])

    async def running(self, ref: str) -> tuple[Sandbox, Box]:
        """The sandbox and its machine, started if it stopped for being idle.

        Raises:
            NotFoundError, ConflictError, SandboxLostError: it is not there, stopped, or lost.
        """
        sandbox = self.context.sandboxes.get(ref)
        sandbox.touch()
        if sandbox.box is not None and sandbox.doc.state == "running":
            return sandbox, sandbox.box
        return await finish(self.context.tg, self._woken(sandbox))

    async def _woken(self, sandbox: Sandbox) -> tuple[Sandbox, Box]:
        async with locked(sandbox):
            if sandbox.doc.napping:
                await self._start_locked(sandbox, None)
            return sandbox, self.box_of(sandbox)

    def box_of(self, sandbox: Sandbox) -> Box:
        doc = sandbox.doc
        if doc.state == "running" and sandbox.box is not None:
            return sandbox.box
        if doc.state == "failed" and doc.failure:
            raise SandboxLostError(
                f"sandbox {doc.name!r} failed: {doc.failure['message']}",
                cause=doc.failure["cause"],
                sandbox=doc.id,
            )
        if doc.state == "stopped":
            raise ConflictError(
                f"sandbox {doc.name!r} is stopped", hint=f"forkyard start {doc.name}", sandbox=doc.id
            )
        raise InternalError(f"sandbox {doc.name!r} is {doc.state} without a machine", sandbox=doc.id)


def _restore(doc: SandboxDoc, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(doc, name, value)


def _cause(box: Box, error: ForkyardError | None) -> tuple[str, str]:
    """Whose fault a loss was, by what the host saw, and the words for it."""
    if isinstance(error, SandboxLostError) and error.cause == "guest":
        return "guest", error.message
    if box.cgroup is not None and box.cgroup.oom_kills():
        return "guest", "the sandbox used more memory than it may, faster than it could be stopped"
    status = box.machine.exit_status
    if status is not None and status >= 0:
        return "guest", "the agent inside ended: something in the sandbox killed it"
    if status is not None:
        return "host", f"the sandbox's process was ended by signal {-status}"
    return "unknown", "the sandbox's process is gone"


def _origin(doc: object) -> dict[str, object]:
    return {name: value for name in ("template", "snapshot", "parent") if (value := getattr(doc, name))}


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
