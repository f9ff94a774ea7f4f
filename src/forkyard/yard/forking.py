"""Snapshot, fork, checkpoint and rewind: what the two primitives are for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from forkyard.errors import (
    CapacityError,
    ConflictError,
    ForkError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
)
from forkyard.host import process
from forkyard.host.failpoint import failpoint
from forkyard.requests import (
    Caller,
    Fork,
    Rewind,
    TakeCheckpoint,
    TakeSnapshot,
)
from forkyard.types import CheckpointInfo, ForkResult, SandboxInfo, SnapshotInfo
from forkyard.yard import names
from forkyard.yard.again import made_sandboxes, made_snapshot, mark_of
from forkyard.yard.background import begin, finish
from forkyard.yard.context import locked
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.model import Sandbox, SnapshotDoc, checkpoint_info
from forkyard.yard.plans import Plan, check_times, from_snapshot, resolve_egress

MAX_FORKS = 1024


class Forking:
    """The verbs that freeze."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context
        self.snapshots = lifecycle.snapshots

    async def _freeze(
        self, sandbox: Sandbox, doc_id: str, kind: str, memory: bool, **fields: Any
    ) -> SnapshotDoc:
        """Freeze a running sandbox, or take a stopped one as it lies; the caller holds its lock
        and saves the record."""
        doc = sandbox.doc
        if doc.state == "stopped" and doc.resume is not None:
            return await self._copy_of_stopped(sandbox, doc_id, kind, memory, **fields)
        box = self.lifecycle.box_of(sandbox)
        frozen = await self.context.machines.freeze(box, _layer_name(doc_id), doc_id if memory else None)
        return await self.snapshots.add(doc, frozen, doc_id, kind, created_at=time.time(), **fields)

    async def _copy_of_stopped(
        self, sandbox: Sandbox, doc_id: str, kind: str, memory: bool, **fields: Any
    ) -> SnapshotDoc:
        kept = self.context.snapshots[sandbox.doc.resume or ""]
        image = None
        if memory and kept.image is not None:
            await self.context.images.link(kept.image, doc_id)
            image = doc_id
        copy = SnapshotDoc(
            id=doc_id,
            kind=kind,
            sandbox=kept.sandbox,
            layers=list(kept.layers),
            image=image,
            fingerprint=kept.fingerprint,
            agent=kept.agent,
            engine=kept.engine,
            size_bytes=kept.size_bytes if image else kept.size_bytes - kept.memory_bytes,
            memory_bytes=kept.memory_bytes if image else 0,
            created_at=time.time(),
            inherits=dict(kept.inherits),
            **fields,
        )
        self.snapshots.hold(copy.layers)
        self.context.snapshots[copy.id] = copy
        return copy

    async def snapshot(self, request: TakeSnapshot, caller: Caller) -> SnapshotInfo:
        """See API: ``snapshot``."""
        if request.name is not None:
            names.check_name(request.name, "snapshot name")
        sandbox = self.context.sandboxes.get(request.sandbox)
        await self._wake(sandbox)
        return await finish(self.context.tg, self._snapshot(sandbox, request, caller))

    async def _snapshot(self, sandbox: Sandbox, request: TakeSnapshot, caller: Caller) -> SnapshotInfo:
        async with locked(sandbox):
            made = made_snapshot(self.context, request, caller, "snapshot")
            if made is not None:
                return self.snapshots.info(made)
            if request.name is not None:
                self.snapshots.check_free(request.name)
            kept = await self._freeze(
                sandbox,
                names.snapshot_id(),
                "snapshot",
                request.memory,
                name=request.name,
                parent=sandbox.doc.checkpoint or sandbox.doc.snapshot,
                labels=dict(request.labels),
                asked=mark_of(request, caller),
            )
            await self._save(kept)
            await self._record(kept, caller, "snapshot.created")
        return self.snapshots.info(kept)

    async def _save(self, kept: SnapshotDoc, *sandboxes: Sandbox, durable: bool = True) -> None:
        try:
            await failpoint("keep.frozen")
            docs = [sandbox.doc for sandbox in sandboxes]
            await self.context.save(snapshots=[kept], sandboxes=docs, durable=durable)
        except BaseException:
            await self.snapshots.discard(kept, save=False)
            raise

    async def _record(self, kept: SnapshotDoc, caller: Caller, kind: str) -> None:
        await failpoint("keep.saved")
        about = {"id": kept.id, "name": kept.name, "paused_ms": kept.paused_ms, "parent": kept.parent}
        if kept.kind == "fork":
            self.context.note(kind, caller, kept.sandbox, **about)
        else:
            await self.context.record(kind, caller, kept.sandbox, **about)

    # -- fork --------------------------------------------------------------------------

    async def fork(self, request: Fork, caller: Caller) -> ForkResult:
        """See API: ``fork``: one freeze and n starts, all or none; the source runs on either way."""
        begun = time.perf_counter()
        if made := made_sandboxes(self.context, request, caller):
            return self._made(made)
        self._names(request)
        check_times(request.ttl_min, request.auto_stop_min)
        async with self.source(request, caller) as (frozen, source):
            plans = [self.plan(request, frozen, source, name) for name in self._names(request)]
            forks = await self._start_all(plans, request, caller)
        await self.context.record(
            "sandbox.forked", caller, frozen.sandbox, snapshot=frozen.id, forks=[fork.id for fork in forks]
        )
        fresh = source is not None
        return ForkResult(
            snapshot=frozen.id,
            forks=[fork.info() for fork in forks],
            paused_ms=frozen.paused_ms if fresh else 0.0,
            total_ms=_ms_since(begun),
            dirty_mb=frozen.dirty_mb if fresh else 0.0,
        )

    async def fork_template(
        self, request: Fork, template: str, caller: Caller, plan: Callable[[str | None], Plan]
    ) -> ForkResult:
        """Copies of a template: as many creations, since there is nothing to freeze."""
        begun = time.perf_counter()
        if made := made_sandboxes(self.context, request, caller):
            return self._made(made)
        plans = [plan(name) for name in self._names(request)]
        forks = await self._start_all(plans, request, caller)
        await self.context.record(
            "sandbox.forked", caller, None, template=template, forks=[fork.id for fork in forks]
        )
        return ForkResult(template, [fork.info() for fork in forks], 0.0, _ms_since(begun))

    def _made(self, forks: list[Sandbox]) -> ForkResult:
        """The result of a fork that was made, and whose reply was lost."""
        doc = forks[0].doc
        kept = self.context.snapshots.get(doc.snapshot or "")
        fresh = kept is not None and kept.kind == "fork"
        return ForkResult(
            snapshot=doc.snapshot or doc.template or "",
            forks=[fork.info() for fork in forks],
            paused_ms=kept.paused_ms if kept is not None and fresh else 0.0,
            total_ms=0.0,
            dirty_mb=kept.dirty_mb if kept is not None and fresh else 0.0,
        )

    @contextlib.asynccontextmanager
    async def source(
        self, request: Fork, caller: Caller
    ) -> AsyncIterator[tuple[SnapshotDoc, Sandbox | None]]:
        """What to start copies from. A hidden snapshot made for this fork goes again if nobody uses it."""
        sandbox = self.context.sandboxes.find(request.source)
        if sandbox is None:
            yield self._kept_source(request.source), None
            return
        await self._wake(sandbox)
        _, freezing = begin(self.context.tg, self._freeze_for_fork(sandbox, request.memory, caller))
        try:
            kept = await asyncio.shield(freezing)
        except asyncio.CancelledError:
            begin(self.context.tg, self._forget_frozen(freezing))
            raise
        try:
            yield kept, sandbox
        finally:
            await finish(self.context.tg, self.snapshots.forget_unused(kept.id))

    async def _forget_frozen(self, freezing: asyncio.Future[SnapshotDoc]) -> None:
        """Drop what a freeze makes that nobody waits for any more."""
        with contextlib.suppress(ForkyardError, OSError):
            await self.snapshots.forget_unused((await freezing).id)

    async def _freeze_for_fork(self, sandbox: Sandbox, memory: bool, caller: Caller) -> SnapshotDoc:
        async with locked(sandbox):
            parent = sandbox.doc.checkpoint or sandbox.doc.snapshot
            kept = await self._freeze(sandbox, names.snapshot_id(), "fork", memory, parent=parent)
            try:
                # On disk with the forks that need it.
                await self._save(kept, durable=False)
                await self._record(kept, caller, "fork.frozen")
            except BaseException:
                await finish(self.context.tg, self.snapshots.forget_unused(kept.id))
                raise
            return kept

    def _kept_source(self, ref: str) -> SnapshotDoc:
        kept = self.snapshots.find(ref)
        if kept is None:
            raise NotFoundError(
                f"no sandbox, snapshot or checkpoint {ref[:140]!r}",
                hint="forkyard ls and snapshots ls show them",
            )
        return kept

    def _names(self, request: Fork) -> list[str | None]:
        """The names asked for, all of them free now; None where one is to be made up."""
        if not 1 <= request.n <= MAX_FORKS:
            raise InvalidRequestError(f"n={request.n} is not between 1 and {MAX_FORKS}")
        if request.names is not None:
            if len(request.names) != request.n:
                raise InvalidRequestError(f"{len(request.names)} names were given for {request.n} forks")
            if len(set(request.names)) != request.n:
                raise InvalidRequestError("two forks were given the same name")
            wanted: list[str | None] = list(request.names)
        elif request.prefix is not None:
            wanted = [f"{request.prefix}{number}" for number in range(1, request.n + 1)]
        else:
            return [None] * request.n
        for name in wanted:
            assert name is not None
            names.check_name(name)
            self.context.sandboxes.check_free(name)
        return wanted

    def plan(self, request: Fork, frozen: SnapshotDoc, source: Sandbox | None, name: str | None) -> Plan:
        origin = source.doc if source is not None else None
        if request.egress is None and request.egress_allow is None and origin is not None:
            egress, allow = origin.egress, list(origin.egress_allow)
        else:
            defaults = self.context.settings.defaults
            egress, allow = resolve_egress(
                request.egress, request.egress_allow, defaults.egress, defaults.egress_allow
            )
        ephemeral = request.ephemeral
        if ephemeral is None:
            ephemeral = origin.ephemeral if origin is not None else False
        labels = request.labels
        if labels is None:
            labels = origin.labels if origin is not None else {}
        auto_stop = request.auto_stop_min
        if auto_stop is None and origin is not None:
            auto_stop = origin.auto_stop_min
        common = {
            "egress": egress,
            "egress_allow": allow,
            "labels": dict(labels),
            "auto_stop_min": auto_stop,
            "ephemeral": ephemeral,
            "lease": request.lease if ephemeral else None,
        }
        plan = from_snapshot(frozen, self.context, self.snapshots, request, name, common, request.memory)
        ttl = request.ttl_min
        if ttl is None and origin is not None:
            ttl = origin.ttl_min
        plan.doc.set_ttl(ttl, process.boot_id())
        return plan

    async def _start_all(self, plans: list[Plan], request: Fork, caller: Caller) -> list[Sandbox]:
        """All or none; a cancelled or failed fork deletes what it had started."""
        n = len(plans)
        need = self.lifecycle.admission.need_mb(plans[0].image_bytes)
        made: list[Sandbox] = []
        try:
            async with self.lifecycle.admission.reserve(n, need, request.wait_s, f"fork of {n}"):
                for plan in plans:
                    plan.doc.asked = mark_of(request, caller)
                made = await self.lifecycle.announce(plans)
                await failpoint("fork.announced")
                async with asyncio.TaskGroup() as group:
                    for sandbox, plan in zip(made, plans, strict=True):
                        group.create_task(self._start_one(sandbox, plan))
            await failpoint("fork.started")
            await self.context.save(sandboxes=[plan.doc for plan in plans])
            for sandbox in made:
                sandbox.half_made = False
            await failpoint("fork.saved")
        except BaseException as error:
            for sandbox in made:
                await finish(self.context.tg, self.lifecycle.delete(sandbox, caller))
            raise _fork_error(error, n) from error
        for sandbox in made:
            self.lifecycle.leases.watch(sandbox)
        return made

    async def _start_one(self, sandbox: Sandbox, plan: Plan) -> None:
        async with locked(sandbox):
            await self.lifecycle.ignite(sandbox, plan)
            await failpoint("fork.one")
        if plan.cold is not None:
            self.lifecycle.templates.warm_behind(plan.cold, plan.limits)

    # -- checkpoint and rewind ---------------------------------------------------------

    async def checkpoint(self, request: TakeCheckpoint, caller: Caller) -> CheckpointInfo:
        """See API: ``checkpoint``: a snapshot in the sandbox's own line."""
        if request.keep_last is not None and request.keep_last < 1:
            raise InvalidRequestError(f"keep_last={request.keep_last} is less than 1")
        if request.label is not None and not 1 <= len(request.label) <= 256:
            raise InvalidRequestError("a checkpoint's label has 1 to 256 characters")
        sandbox = self.context.sandboxes.get(request.sandbox)
        await self._wake(sandbox)
        return await finish(self.context.tg, self._checkpoint(sandbox, request, caller))

    async def _checkpoint(self, sandbox: Sandbox, request: TakeCheckpoint, caller: Caller) -> CheckpointInfo:
        async with locked(sandbox):
            made = made_snapshot(self.context, request, caller, "checkpoint")
            if made is not None:
                return checkpoint_info(made)
            before = sandbox.doc.checkpoint
            kept = await self._freeze(
                sandbox,
                names.checkpoint_id(),
                "checkpoint",
                request.memory,
                name=request.label,
                parent=before,
                asked=mark_of(request, caller),
            )
            sandbox.doc.checkpoint = kept.id
            try:
                await self._save(kept, sandbox)
            except BaseException:
                sandbox.doc.checkpoint = before
                raise
            await self._record(kept, caller, "checkpoint.created")
            if request.keep_last is not None:
                for old in self.snapshots.checkpoints(sandbox)[: -request.keep_last]:
                    await self.snapshots.discard(old)
                    await self.context.record("checkpoint.deleted", caller, sandbox.id, id=old.id)
        return checkpoint_info(kept)

    async def delete_checkpoint(self, sandbox: Sandbox, ref: str, caller: Caller) -> None:
        """Delete one; a state that came after it has its parent as newest ancestor then."""
        await finish(self.context.tg, self._delete_checkpoint(sandbox, ref, caller))

    async def _delete_checkpoint(self, sandbox: Sandbox, ref: str, caller: Caller) -> None:
        async with locked(sandbox):
            gone = self.snapshots.checkpoint(sandbox, ref)
            users = self.snapshots.users(gone)
            if users:
                raise ConflictError(
                    f"checkpoint {gone.id} is in use by {', '.join(users)}", hint="delete those first"
                )
            if sandbox.doc.checkpoint == gone.id:
                sandbox.doc.checkpoint = gone.parent if gone.parent in self.context.snapshots else None
                await self.context.save(sandboxes=[sandbox.doc])
            await self.snapshots.discard(gone)
            await self.context.record("checkpoint.deleted", caller, sandbox.id, id=gone.id)

    async def rewind(self, request: Rewind, caller: Caller) -> SandboxInfo:
        """See API: ``rewind``: same id, older state. The machine of now ends when that of then answers."""
        sandbox = self.context.sandboxes.get(request.sandbox)
        return await finish(self.context.tg, self._rewind(sandbox, request.to, caller, request.memory))

    async def _rewind(self, sandbox: Sandbox, to: str | None, caller: Caller, memory: bool) -> SandboxInfo:
        async with locked(sandbox):
            doc = sandbox.doc
            if to is not None:
                target = self.snapshots.checkpoint(sandbox, to)
            else:
                found = self.context.snapshots.get(doc.checkpoint or "")
                if found is None:
                    raise ConflictError(
                        f"sandbox {doc.name!r} has no checkpoint to rewind to",
                        hint="take one with checkpoint() before a risky step",
                        sandbox=doc.id,
                    )
                target = found
            spent = doc.resume

            def change() -> None:
                doc.checkpoint, doc.resume, doc.napping = target.id, None, False

            await self.lifecycle.restart(sandbox, target, change, memory=memory)
            await failpoint("rewind.restarted")
            if spent is not None and (unused := self.context.snapshots.get(spent)) is not None:
                await self.snapshots.discard(unused)
            await self.context.record("sandbox.rewound", caller, doc.id, to=target.id, label=target.name)
            return sandbox.info()

    async def _wake(self, sandbox: Sandbox) -> None:
        """Wait for one that is being created. A stopped one is copied as it lies."""
        if sandbox.doc.state == "creating":
            async with locked(sandbox):
                pass


def _ms_since(begun: float) -> float:
    return round((time.perf_counter() - begun) * 1e3, 2)


def _layer_name(doc_id: str) -> str:
    return f"s-{doc_id}"


def _fork_error(error: BaseException, n: int) -> BaseException:
    """The first cause in a group of failures, as the error of the whole fork."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, CapacityError | InvalidRequestError | ConflictError):
        return error
    if isinstance(error, ForkyardError):
        return ForkError(
            f"the fork of {n} was undone, the source is unharmed: {error.message}",
            hint=error.hint,
            retryable=error.retryable,
        )
    if isinstance(error, OSError):
        return ForkError(f"the fork of {n} was undone, the source is unharmed: {error}")
    return error
