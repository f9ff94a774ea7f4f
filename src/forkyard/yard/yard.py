"""The yard: every verb of the API, as a method that takes a request and a caller."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forkyard
from forkyard import access
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.audit import AuditLog
from forkyard.config import Settings, short
from forkyard.engines import open_engines
from forkyard.engines.base import Engine
from forkyard.errors import (
    ConflictError,
    DeadlineError,
    ForkyardError,
    NotFoundError,
)
from forkyard.host import process, userns
from forkyard.host.cgroup import Cgroups
from forkyard.host.failpoint import failpoint
from forkyard.oci.tools import Tools
from forkyard.store.catalog import Catalog
from forkyard.store.disks import DiskStore
from forkyard.store.images import Images
from forkyard.wire import VERSION as WIRE_VERSION
from forkyard.yard import agents, names
from forkyard.yard.admission import Admission
from forkyard.yard.applying import Applying
from forkyard.yard.auditing import Auditing
from forkyard.yard.background import Services, finish
from forkyard.yard.code import Code
from forkyard.yard.context import Context, Sandboxes, locked
from forkyard.yard.crowds import Crowds
from forkyard.yard.diffs import Diffs
from forkyard.yard.execs import Execs
from forkyard.yard.exploring import Exploring
from forkyard.yard.files import Files
from forkyard.yard.forking import Forking
from forkyard.yard.git import Git
from forkyard.yard.leases import Leases
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.lineage import tree
from forkyard.yard.machines import Machines
from forkyard.yard.making import Making
from forkyard.yard.model import Sandbox, SandboxDoc
from forkyard.yard.moving import Moving
from forkyard.yard.plans import Plan, check_times, for_create, resolve_egress
from forkyard.yard.recovery import Recovery
from forkyard.yard.replies import Replies
from forkyard.yard.snapshots import Snapshots
from forkyard.yard.templates import Templates, limits

log = logging.getLogger("forkyard.yard")


class Yard:
    """Everything on one host. Make one with :func:`open_yard`."""

    def __init__(self, context: Context, tools: Tools) -> None:
        self.context = context
        settings = context.settings
        self.templates = Templates(context)
        self.snapshots = Snapshots(context, self.templates.layers)
        self.templates.drop = self.snapshots.drop_unheld
        self.admission = Admission(self._space_mb, settings.mem_mb, settings.max_sandboxes)
        self.leases = Leases(context)
        self.lifecycle = Lifecycle(context, self.templates, self.snapshots, self.admission, self.leases)
        self.forking = Forking(self.lifecycle)
        self.execs = Execs(self.lifecycle)
        self.code = Code(self.lifecycle)
        self.repositories = Git(self.lifecycle, self.execs)
        self.files = Files(self.lifecycle)
        self.diffs = Diffs(self.lifecycle)
        self.applying = Applying(self.files)
        self.exploring = Exploring(self.forking, self.execs, self.files, self.diffs)
        self.making = Making(context, self.templates, self.snapshots, tools)
        self.moving = Moving(context, self.templates, self.snapshots)
        self.auditing = Auditing(context)
        self.replies = Replies(context.catalog)
        self.leases.delete = lambda sandbox: self.lifecycle.delete(sandbox, None)
        self.leases.nap = lambda sandbox: self.lifecycle.stop(sandbox, None, napping=True)

    # -- sandboxes ---------------------------------------------------------------------

    async def create_sandbox(self, request: rq.CreateSandbox, caller: rq.Caller) -> ty.SandboxInfo:
        return await self.lifecycle.create(await self.making.for_sandbox(request, caller), caller)

    async def get_sandbox(self, request: rq.SandboxRequest, caller: rq.Caller) -> ty.SandboxInfo:
        return self.context.sandboxes.get(request.sandbox).info()

    async def list_sandboxes(self, request: rq.ListSandboxes, caller: rq.Caller) -> list[ty.SandboxInfo]:
        wanted = request.labels or {}
        return sorted(
            (
                sandbox.info()
                for sandbox in self.context.sandboxes
                if request.state in (None, sandbox.doc.state) and wanted.items() <= sandbox.doc.labels.items()
            ),
            key=lambda info: info.created_at,
        )

    async def rename_sandbox(self, request: rq.RenameSandbox, caller: rq.Caller) -> ty.SandboxInfo:
        names.check_name(request.name)
        sandbox = self.context.sandboxes.get(request.sandbox)
        async with locked(sandbox):
            before = sandbox.doc.name
            self.context.sandboxes.rename(sandbox, request.name)
            undo = functools.partial(self.context.sandboxes.rename, sandbox, before)
            await self._saved(sandbox, caller, "sandbox.renamed", undo, before=before, name=request.name)
        return sandbox.info()

    async def set_ttl(self, request: rq.SetTtl, caller: rq.Caller) -> ty.SandboxInfo:
        check_times(request.ttl_min, None)
        sandbox = self.context.sandboxes.get(request.sandbox)
        undo = _back(sandbox.doc, "ttl_min", "boot_id", "expires_at", "deadline")
        sandbox.doc.set_ttl(request.ttl_min, process.boot_id())
        await self._saved(sandbox, caller, "sandbox.ttl", undo, ttl_min=request.ttl_min)
        return sandbox.info()

    async def set_egress(self, request: rq.SetEgress, caller: rq.Caller) -> ty.SandboxInfo:
        sandbox = self.context.sandboxes.get(request.sandbox)
        egress, allow = resolve_egress(request.egress, request.egress_allow)
        async with locked(sandbox):
            doc, network = sandbox.doc, self.lifecycle.network
            undo = functools.partial(network.change, sandbox, doc.egress, doc.egress_allow)
            fields = _back(doc, "egress", "egress_allow")
            try:
                await network.change(sandbox, egress, allow)
                await failpoint("egress.changed")
            except BaseException:
                await finish(self.context.tg, undo())
                raise
            doc.egress, doc.egress_allow = egress, allow
            await self._saved(sandbox, caller, "sandbox.egress", fields, undo, egress=egress, allow=allow)
        return sandbox.info()

    async def expose(self, request: rq.Expose, caller: rq.Caller) -> str:
        sandbox = self.context.sandboxes.get(request.sandbox)
        async with locked(sandbox):
            network = self.lifecycle.network
            known = str(request.port) in sandbox.doc.exposed
            url = await network.expose(sandbox, request.port)
            undo = functools.partial(network.conceal, sandbox, request.port)
            undoes = [] if known else [undo]
            await self._saved(sandbox, caller, "sandbox.exposed", *undoes, port=request.port, url=url)
        return url

    async def adopt(self, request: rq.Adopt, caller: rq.Caller) -> ty.SandboxInfo:
        sandbox = self.context.sandboxes.get(request.sandbox)
        undo, lease = _back(sandbox.doc, "lease"), request.lease
        sandbox.doc.lease = lease
        await self._saved(sandbox, caller, "sandbox.adopted", undo, pid=lease.pid, run=lease.run)
        self.leases.watch(sandbox)
        return sandbox.info()

    async def release_lease(self, request: rq.ReleaseLease, caller: rq.Caller) -> None:
        async with asyncio.TaskGroup() as group:
            for ref in request.sandboxes:
                sandbox = self.context.sandboxes.find(ref)
                if sandbox is not None and sandbox.doc.ephemeral and sandbox.doc.lease == request.lease:
                    group.create_task(self.lifecycle.delete(sandbox, caller))

    async def hold_lease(self, request: access.HoldLease, caller: rq.Caller) -> AsyncIterator[ty.Event]:
        with self.leases.held(request.lease, request.grace_s):
            yield ty.Event(time.time(), "lease.held", None)
            await asyncio.Event().wait()

    async def record(self, kind: str, caller: rq.Caller, **data: Any) -> None:
        """Audit what the daemon itself did."""
        await self.context.record(kind, caller, **data)

    async def wait_sandbox(self, request: rq.WaitSandbox, caller: rq.Caller) -> ty.SandboxInfo:
        sandbox = self.context.sandboxes.find(request.sandbox)
        if sandbox is None:
            if request.state == "deleted":
                raise NotFoundError(f"no sandbox {request.sandbox[:140]!r}")
            sandbox = self.context.sandboxes.get(request.sandbox)
        try:
            async with asyncio.timeout(request.timeout_s):
                while sandbox.doc.state != request.state:
                    if sandbox.doc.state in ("failed", "deleted"):
                        break
                    await sandbox.changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{sandbox.doc.name!r} is {sandbox.doc.state}, not {request.state}, "
                f"after {request.timeout_s} s",
                sandbox=sandbox.id,
                retryable=True,
            ) from None
        if sandbox.doc.state != request.state:
            raise ConflictError(f"{sandbox.doc.name!r} is {sandbox.doc.state}", sandbox=sandbox.id)
        return sandbox.info()

    async def usage(self, request: rq.SandboxRequest, caller: rq.Caller) -> ty.Usage:
        sandbox = self.context.sandboxes.get(request.sandbox)
        box = sandbox.box
        if box is None:
            return ty.Usage(0.0, 0.0, 0.0, 0)
        disk_mb = self.context.disks.usage_mb(box.id)
        cpu_ms, mem_mb, _ = box.cgroup.usage() if box.cgroup else (0.0, 0.0, 0)
        guest = await box.guest.activity()
        return ty.Usage(cpu_ms or guest.cpu_ms, round(mem_mb, 1), round(disk_mb, 1), guest.processes)

    async def stop_sandbox(self, request: rq.StopSandbox, caller: rq.Caller) -> ty.SandboxInfo:
        sandbox = self.context.sandboxes.get(request.sandbox)
        await self.lifecycle.stop(sandbox, caller)
        return sandbox.info()

    async def start_sandbox(self, request: rq.StartSandbox, caller: rq.Caller) -> ty.SandboxInfo:
        sandbox = self.context.sandboxes.get(request.sandbox)
        await self.lifecycle.start(sandbox, caller, request.lease, memory=request.memory)
        return sandbox.info()

    async def delete_sandbox(self, request: rq.DeleteSandbox, caller: rq.Caller) -> ty.SandboxInfo | None:
        sandbox = self.context.sandboxes.find(request.sandbox)
        if sandbox is None:
            return None
        await self.lifecycle.delete(sandbox, caller)
        return sandbox.info()

    async def delete_sandboxes(self, request: rq.DeleteSandboxes, caller: rq.Caller) -> list[ty.SandboxInfo]:
        wanted = request.labels.items()
        chosen = [box for box in self.context.sandboxes if wanted and wanted <= box.doc.labels.items()]
        async with asyncio.TaskGroup() as group:
            for sandbox in chosen:
                group.create_task(self.lifecycle.delete(sandbox, caller))
        return [sandbox.info() for sandbox in chosen]

    # -- code and git ------------------------------------------------------------------

    async def run_code(self, request: rq.RunCode, caller: rq.Caller) -> ty.CodeResult:
        return await self.code.run(request, caller)

    async def git(self, request: rq.Git, caller: rq.Caller) -> ty.ExecResult:
        return await self.repositories.run(request, caller)

    # -- snapshots, forks, checkpoints -------------------------------------------------

    async def snapshot(self, request: rq.TakeSnapshot, caller: rq.Caller) -> ty.SnapshotInfo:
        return await self.forking.snapshot(request, caller)

    async def list_snapshots(self, request: rq.ListSnapshots, caller: rq.Caller) -> list[ty.SnapshotInfo]:
        wanted = (request.labels or {}).items()
        kept = [doc for doc in self.context.snapshots.values() if doc.kind == "snapshot"]
        chosen = [doc for doc in kept if wanted <= doc.labels.items()]
        return [self.snapshots.info(doc) for doc in sorted(chosen, key=lambda doc: doc.created_at)]

    async def get_snapshot(self, request: rq.SnapshotRequest, caller: rq.Caller) -> ty.SnapshotInfo:
        return self.snapshots.info(self.snapshots.get(request.snapshot))

    async def delete_snapshot(self, request: rq.DeleteSnapshot, caller: rq.Caller) -> None:
        doc = self.snapshots.get(request.snapshot)
        users = self.snapshots.users(doc)
        if users:
            raise ConflictError(
                f"snapshot {doc.name or doc.id} is in use by {', '.join(users)}",
                hint="delete those sandboxes first",
            )
        if doc.kind != "snapshot":
            raise ConflictError(f"{doc.id} is a {doc.kind}, not a snapshot", hint="use delete_checkpoint")
        await finish(self.context.tg, self.snapshots.discard(doc))
        await self.context.record("snapshot.deleted", caller, doc.sandbox, id=doc.id, name=doc.name)

    def export_snapshot(self, request: rq.ExportSnapshot, caller: rq.Caller) -> AsyncIterator[bytes]:
        return self.moving.export(request, caller)

    async def import_snapshot(
        self, request: rq.ImportSnapshot, chunks: AsyncIterator[bytes], caller: rq.Caller
    ) -> ty.SnapshotInfo:
        return await self.moving.import_(request, chunks, caller)

    async def fork(self, request: rq.Fork, caller: rq.Caller) -> ty.ForkResult:
        template = self._as_template(request.source)
        if template is not None:
            return await self._fork_template(request, template, caller)
        return await self.forking.fork(request, caller)

    def _as_template(self, source: str) -> str | None:
        known = self.context.sandboxes.find(source) or self.snapshots.find(source)
        return source if known is None and self.templates.find(source) is not None else None

    async def _fork_template(self, request: rq.Fork, template: str, caller: rq.Caller) -> ty.ForkResult:
        def plan(name: str | None) -> Plan:
            create = rq.CreateSandbox(
                name=name,
                template=template,
                type=request.type,
                cpus=request.cpus,
                cpu_weight=request.cpu_weight,
                mem_mb=request.mem_mb,
                disk_mb=request.disk_mb,
                env=request.env,
                egress=request.egress,
                egress_allow=request.egress_allow,
                ttl_min=request.ttl_min,
                auto_stop_min=request.auto_stop_min,
                ephemeral=bool(request.ephemeral),
                labels=request.labels or {},
                lease=request.lease,
            )
            return for_create(create, self.context, self.templates, self.snapshots)

        return await self.forking.fork_template(request, template, caller, plan)

    async def checkpoint(self, request: rq.TakeCheckpoint, caller: rq.Caller) -> ty.CheckpointInfo:
        return await self.forking.checkpoint(request, caller)

    async def list_checkpoints(
        self, request: rq.SandboxRequest, caller: rq.Caller
    ) -> list[ty.CheckpointInfo]:
        return self.snapshots.checkpoint_infos(self.context.sandboxes.get(request.sandbox))

    async def delete_checkpoint(self, request: rq.DeleteCheckpoint, caller: rq.Caller) -> None:
        sandbox = self.context.sandboxes.get(request.sandbox)
        await self.forking.delete_checkpoint(sandbox, request.checkpoint, caller)

    async def rewind(self, request: rq.Rewind, caller: rq.Caller) -> ty.SandboxInfo:
        return await self.forking.rewind(request, caller)

    async def tree(self, request: rq.Tree, caller: rq.Caller) -> list[ty.TreeNode]:
        return tree(self.context, self.templates.all(), request.root)

    # -- what differs, what is best ----------------------------------------------------

    async def diff(self, request: rq.DiffRequest, caller: rq.Caller) -> ty.Diff:
        return await self.diffs.diff(request, caller)

    async def apply(self, request: rq.Apply, caller: rq.Caller) -> ty.Transfer:
        return await self.applying.apply(request, caller)

    def explore(self, request: rq.Explore, caller: rq.Caller) -> AsyncIterator[rq.ExploreEvent]:
        return self.exploring.explore(request, caller)

    async def explore_choose(self, request: rq.ExploreChoice, caller: rq.Caller) -> None:
        await self.exploring.explore_choose(request, caller)

    # -- templates ---------------------------------------------------------------------

    async def list_templates(self, request: rq.Empty, caller: rq.Caller) -> list[ty.TemplateInfo]:
        return [self.templates.info(doc) for doc in self.templates.all()]

    async def delete_template(self, request: rq.DeleteTemplate, caller: rq.Caller) -> None:
        await self.making.delete(request.name, caller)

    async def deposit(self, request: rq.Deposit, chunks: AsyncIterator[bytes], caller: rq.Caller) -> None:
        await self.making.deposit(request, chunks, caller)

    def build_template(self, request: rq.MakeTemplate, caller: rq.Caller) -> AsyncIterator[rq.TemplateEvent]:
        return self.making.make(request, caller)

    def pull_template(self, request: rq.MakeTemplate, caller: rq.Caller) -> AsyncIterator[rq.TemplateEvent]:
        return self.making.make(request, caller)

    def prepare(self, request: rq.Prepare, caller: rq.Caller) -> AsyncIterator[rq.TemplateEvent]:
        return self.making.prepare(request, caller)

    async def warm_template(self, request: rq.WarmTemplate, caller: rq.Caller) -> ty.TemplateInfo:
        doc = self.templates.get(request.name)
        usual = request.type or self.context.settings.defaults.type
        await self.templates.warm(doc, limits(usual, self.context.engine))
        return self.templates.info(doc)

    # -- watching ----------------------------------------------------------------------

    async def audit(self, request: rq.Audit, caller: rq.Caller) -> list[ty.AuditRecord]:
        return await self.auditing.audit(request, caller)

    async def verify_audit(self, request: rq.VerifyAudit, caller: rq.Caller) -> ty.AuditVerdict:
        return await self.auditing.verify_audit(request, caller)

    def events(self, request: rq.Events, caller: rq.Caller) -> AsyncIterator[ty.Event]:
        sandbox = self.context.sandboxes.get(request.sandbox).id if request.sandbox else None
        return self.context.events.listen(sandbox)

    async def capacity(self, request: rq.CapacityRequest, caller: rq.Caller) -> ty.Capacity:
        need = self.admission.need_mb(self._image_bytes(request.source))
        return ty.Capacity(
            fits=self.admission.fits(need),
            mem_free_mb=int(self.admission.free_mb()),
            mem_committed_mb=int(sum(box.doc.mem_mb for box in self.context.sandboxes if box.box)),
            disk_free_mb=self._space_mb(),
            sandboxes=len(self.context.sandboxes),
        )

    def _image_bytes(self, source: str | None) -> int | None:
        if source is None:
            return None
        sandbox = self.context.sandboxes.find(source)
        if sandbox is not None:
            box = sandbox.box
            return int(box.cgroup.usage()[1] * (1 << 20)) if box is not None and box.cgroup else 0
        kept = self.snapshots.find(source)
        if kept is None and self.templates.find(source) is None:
            raise NotFoundError(f"there is no sandbox, snapshot or template {source[:140]!r}")
        return kept.memory_bytes if kept is not None else None

    async def health(self, request: rq.Empty, caller: rq.Caller) -> ty.Health:
        settings, problems = self.context.settings, []
        disk = self._space_mb()
        if disk < 1024:
            problems.append(f"only {disk} MiB are free for disks at {settings.home}")
        if not self.context.machines.cgroups.available:
            problems.append("no cgroup controllers: memory and CPU limits are not enforced")
        if self.templates.find("base") is None:
            problems.append("there is no base template: run forkyard setup")
        return ty.Health(
            ok=not problems,
            pid=os.getpid(),
            version=forkyard.__version__,
            wire=WIRE_VERSION,
            home=str(settings.home),
            socket=str(settings.socket),
            sandboxes=len(self.context.sandboxes),
            engines=list(self.context.engines),
            problems=problems,
        )

    def _space_mb(self) -> int:
        """Room for disks: what is free in the store, and what it may still grow by."""
        space = self.context.disks.space()
        return space.free_mb + space.growth_mb

    # -- the daemon's ------------------------------------------------------------------

    async def prepare_shutdown(self, sandboxes: str) -> None:
        """Before connections are dropped: commands run on (``keep``), or all sandboxes stop or go."""
        self.execs.detach_all()
        self.code.detach_all()
        self.leases.leave_to_next()
        for sandbox in self.context.sandboxes:
            try:
                if sandboxes == "delete":
                    await self.lifecycle.delete(sandbox, None)
                elif sandboxes == "stop" and sandbox.doc.state == "running":
                    await self.lifecycle.stop(sandbox, None)
            except ForkyardError as error:
                log.warning("%s at shutdown: %s", sandbox.id, error)

    async def _saved(
        self, sandbox: Sandbox, caller: rq.Caller, kind: str, *undo: Callable[[], Any], **data: Any
    ) -> None:
        """Write a changed document and audit it; if it cannot be written, take the change back."""

        async def save() -> None:
            try:
                await self.context.save(sandboxes=[sandbox.doc])
            except BaseException:
                for step in undo:
                    if asyncio.iscoroutine(taken := step()):
                        await taken
                raise

        # A save that is cancelled may be done all the same.
        await finish(self.context.tg, save())
        await failpoint("change.saved")
        await self.context.record(kind, caller, sandbox.id, **data)


def _back(doc: SandboxDoc, *names: str) -> Callable[[], None]:
    """What gives the fields of a document the values that they have now."""
    before = {name: getattr(doc, name) for name in names}

    def take_back() -> None:
        for name, value in before.items():
            setattr(doc, name, value)

    return take_back


@contextlib.asynccontextmanager
async def open_yard(
    settings: Settings,
    *,
    engine: Engine | Sequence[Engine] | None = None,
    disks: DiskStore | None = None,
    install: Callable[[list[str]], Awaitable[None]] | None = None,
) -> AsyncIterator[Yard]:
    """The yard in ``settings.home``, recovered and running. Leaving it keeps sandboxes running.

    Args:
        engine: Runs the machines; or several, the usual one first. By default those that set-up chose.
        disks: Keeps the disks; by default what the host can do best.
        install: Installs packages that building and pulling need; by default they are not.

    Raises:
        UnavailableError: it was never set up, or something that it needs is missing; says what.
    """
    # FIFOs and sockets live below it, so its path must be short.
    home = short(settings.home)
    for name in ("boxes", "images", "audit", "templates"):
        (home / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    process.keep_table_large()
    async with contextlib.AsyncExitStack() as stack:
        given = engine if isinstance(engine, Sequence) or engine is None else [engine]
        engines = await open_engines(settings, home) if given is None else {one.name: one for one in given}
        catalog = await Catalog.open(home / "catalog.db")
        stack.push_async_callback(catalog.close)
        audit = AuditLog(home / "audit")
        await audit.open()
        stack.push_async_callback(audit.close)
        disks = disks or DiskStore(home, settings)
        await disks.open()
        images = Images(home / "images")
        cgroups = Cgroups.for_home(settings.home)
        agent = agents.install(home)
        if any(engine.shares_files for engine in engines.values()):
            agents.protect(home)
        sandboxes = Sandboxes()
        userns.keep(home)
        stack.push_async_callback(_leave_host, home, sandboxes, engines, cgroups, disks)
        # Last in, first out: the readers and watches end before what they use.
        tg = await stack.enter_async_context(Services())
        machines = Machines(home, engines, disks, images, cgroups, tg)
        context = Context(
            settings=settings,
            home=home,
            engines=engines,
            catalog=catalog,
            disks=disks,
            images=images,
            audit=audit,
            machines=machines,
            tg=tg,
            agent=agent,
            sandboxes=sandboxes,
        )
        tools = Tools(home / "builds", install)
        tools.open()
        yard = Yard(context, tools)
        await Recovery(yard.lifecycle).run()
        await yard.execs.recover()
        await yard.code.recover()
        tg.create_task(yard.leases.run())
        tg.create_task(yard.replies.prune())
        making_ahead = tg.create_task(machines.make_ahead())
        tg.create_task(Crowds(context).run())
        process.Reaper().start(tg)
        disks.start(tg)
        images.start(tg)
        try:
            yield yard
        finally:
            yard.leases.close()
            yard.lifecycle.network.close()
            yard.making.close()
            yard.code.detach_all()
            await yard.execs.close()
            # First whoever makes them: one that is being made then is undone, and not by somebody in a hurry.
            making_ahead.cancel()
            await asyncio.wait([making_ahead])
            await machines.drop_ahead()


async def _leave_host(
    home: Path, sandboxes: Sandboxes, engines: Mapping[str, Engine], cgroups: Cgroups, disks: DiskStore
) -> None:
    """Take what the yard has on the host with it, unless sandboxes still run on it."""
    empty = not any(sandbox.box for sandbox in sandboxes)
    if empty:
        agents.release(home)
        for engine in engines.values():
            await engine.close()
        cgroups.close()
    await disks.close(unmount=empty)
    if empty:
        userns.leave(home)


__all__ = ["Yard", "open_yard"]
