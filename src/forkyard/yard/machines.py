"""The two primitives: start a machine from layers and an image, freeze a running one.

A *box* is the host's side of one machine: a runtime directory, a disk, a cgroup, the
engine's processes and the channel to the agent. Every step of a start pushes its undo
first, so a failed or cancelled start leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.engines.base import KNOWN, Engine, Machine, MachineSpec
from forkyard.errors import (
    ConflictError,
    DeadlineError,
    ForkyardError,
    InternalError,
    SandboxLostError,
    UnsupportedError,
)
from forkyard.guest import Guest, Identity
from forkyard.host.cgroup import CgroupBox, Cgroups, thread_limit
from forkyard.host.failpoint import failpoint
from forkyard.host.files import rmtree
from forkyard.host.memory import memory_mb
from forkyard.host.trace import span
from forkyard.store.disks import DiskStore
from forkyard.store.images import Images
from forkyard.types import CPU_WEIGHT
from forkyard.yard import names
from forkyard.yard.ahead import Ahead
from forkyard.yard.background import Services, begin, finish
from forkyard.yard.blanks import Blanks, Kind
from forkyard.yard.undo import UNDO_DEADLINE_S, Undo, within

log = logging.getLogger("forkyard.yard")

ATTACH_TIMEOUT_S = 20
QUIESCE_S = 0.25
# The guest runs meanwhile.
SYNC_S = 5.0
PAUSED_S = 2.0
AHEAD_ANSWERS_S = 2.0
# Above this much dirty data a seal would make the paused source wait for the disk.
DIRTY_MB = 16
SYNC_ROUNDS = 3
# Room above mem_mb for the sandbox's own kernel and for the time it takes to act.
RESERVE_MB = 128
AGENT_NAME = "fy-agent"


@dataclass(frozen=True, slots=True)
class Limits:
    """``cpus``, ``cpu_weight`` and ``mem_mb`` bind on the host; ``shape_*`` and ``processes`` are what the
    guest's kernel was booted with, and stay with its memory image; ``engine`` is whose kernel that is."""

    cpus: float
    mem_mb: int
    disk_mb: int
    shape_mem_mb: int
    shape_disk_mb: int
    processes: int
    engine: str
    cpu_weight: int = CPU_WEIGHT
    shape_cpus: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """What to start: read-only ``layers`` (top first), and the memory in ``image`` unless None.

    ``serve`` is given the guest before it is heard, to answer what it asks of its network. ``learn``:
    whether to look what runs in the image, since it may be started ahead if nothing does.
    """

    layers: list[str]
    limits: Limits
    identity: Identity
    agent: str
    image: Path | None = None
    serve: Callable[[Guest], None] = lambda guest: None
    learn: bool = False

    @property
    def kind(self) -> Kind:
        """All that a box made ahead depends on."""
        limits = self.limits
        shape = limits.shape_cpus, limits.shape_mem_mb, limits.shape_disk_mb, limits.processes
        return limits.engine, self.agent, *shape


@dataclass(slots=True)
class Site:
    """The place of a machine on the host; ``prepared`` is the engine's, if it was made ahead."""

    id: str
    cgroup: CgroupBox | None
    spec: MachineSpec
    engine: Engine
    prepared: Any = None

    @property
    def alive(self) -> bool:
        """Whether it is still fit for use."""
        return self.cgroup is None or bool(self.cgroup.pids())


@dataclass(slots=True)
class Box:
    """A running box."""

    id: str
    machine: Machine
    guest: Guest
    cgroup: CgroupBox | None
    layers: list[str]
    engine: Engine
    start_ms: float = 0.0
    steps_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    """One moment of a machine: a sealed layer and, if asked for, a memory image in a
    directory that is still to be published."""

    layer: str
    image: Path | None
    fingerprint: str
    memory_bytes: int
    paused_ms: float
    dirty_mb: float
    quiesced: bool


class Machines:
    """Starts, freezes and ends boxes.

    Args:
        home: The yard's directory, by a path short enough for sockets below it.
        engines: By name, the one that is used by default first.
        tg: Where the channels' readers run.
    """

    def __init__(
        self,
        home: Path,
        engines: Mapping[str, Engine],
        disks: DiskStore,
        images: Images,
        cgroups: Cgroups,
        tg: Services,
    ) -> None:
        self.home = home
        self.engines = engines
        self.disks = disks
        self.images = images
        self.cgroups = cgroups
        self.tg = tg
        self.on_death: Callable[[str], None] = lambda box_id: None
        self.blanks: Blanks[Kind, Site] = Blanks(self._make_blank, self._drop_blank, self._room_for_blank)
        self.ahead = Ahead(self._launch, self._end_ahead, self._room_for_blank)
        # Restores are CPU-bound: more at a time than this only makes each of them slower.
        self.slots = asyncio.Semaphore(max(2, 2 * (os.cpu_count() or 2)))

    def box_dir(self, box: str) -> Path:
        return self.home / "boxes" / box

    def engine(self, name: str) -> Engine:
        """The engine of that name.

        Raises:
            UnsupportedError: this yard does not have it.
        """
        found = self.engines.get(name)
        if found is None:
            there = ", ".join(self.engines)
            if name not in KNOWN:
                raise UnsupportedError(f"there is no engine {name[:80]!r}", hint=f"auto, or one of: {there}")
            words = f"engine {name!r} is not set up here: there is {there}"
            raise UnsupportedError(words, hint=f"forkyard setup --engine {name}")
        return found

    def agent_dir(self, digest: str) -> Path:
        return self.home / "agents" / digest

    async def start(self, start: Start) -> Box:
        """Start a machine and hear its agent.

        Raises:
            CapacityError, CorruptSnapshotError, UnsupportedError, InternalError: see
                :class:`forkyard.engines.base.Engine`; nothing is left behind.
        """
        with self.blanks.starting(), self.ahead.stock.starting():
            async with self.slots:
                with span("start"):
                    return await self._start(start)

    async def _start(self, start: Start) -> Box:
        begun = time.perf_counter()
        with span("take one started ahead"):
            box = await self.ahead.take(start)
        if box is not None:
            box.steps_ms.clear()
            start.serve(box.guest)
            try:
                return await self._hand_over(box, start, begun, waited=True)
            except (SandboxLostError, DeadlineError) as error:
                # It died, or hung, a moment ago: another is started.
                log.info("a machine that was started ahead: %s", error)
        return await self._hand_over(await self._launch(start), start, begun)

    async def _hand_over(self, box: Box, start: Start, begun: float, *, waited: bool = False) -> Box:
        """Give a machine its limits and its name; it is ended if that fails."""
        async with Undo(self.tg) as undo:
            undo.push(self.end, box)
            await failpoint("start.heard")
            named = time.perf_counter()
            if waited:
                await box.guest.ping(AHEAD_ANSWERS_S)
            elif start.learn:
                await self.ahead.learn(start, box)
            if box.cgroup is not None:
                # Before the image's hooks run.
                self._limit(box.cgroup, start.limits)
            with span("identify"):
                await box.guest.identify(start.identity)
            await failpoint("start.identified")
            if box.cgroup is not None:
                # Only now: the quota would make the start itself wait for its next period.
                box.cgroup.update(cpus=start.limits.cpus)
            undo.keep()
        now = time.perf_counter()
        box.steps_ms["agent"] = box.steps_ms.get("agent", 0.0) + (now - named) * 1e3
        box.start_ms = (now - begun) * 1e3
        return box

    async def _launch(self, start: Start) -> Box:
        """Start a machine and hear its agent; it has neither a name nor limits yet."""
        begun = time.perf_counter()
        blank = None
        engine = self.engine(start.limits.engine)
        if start.image is not None and not engine.own_kernel:
            with span("take a blank"):
                blank = await self.blanks.take(start.kind)
        async with Undo(self.tg) as undo:
            marks: dict[str, float] = {}
            if blank is not None and not blank.alive:
                await self._drop_blank(blank)
                blank = None
            if blank is not None:
                site = blank
                undo.push(self._drop_blank, blank)
            else:
                site = self._lay_out(start)
                undo.push(self.remove, site.id)
            if site.cgroup is not None and start.limits.cpu_weight != CPU_WEIGHT:
                # Already now: whoever weighs more also starts while others keep the CPUs busy.
                site.cgroup.update(cpu_weight=start.limits.cpu_weight)
            await failpoint("start.laid_out")
            with span("disk", layers=len(start.layers)):
                create = self.disks.create_image_box if engine.own_kernel else self.disks.create_box
                disk = await create(site.id, start.layers, start.limits.disk_mb)
            await failpoint("start.disk")
            marks["site"] = time.perf_counter()
            with span("engine", blank=blank is not None, memory=start.image is not None):
                if start.image is None:
                    machine = await engine.boot(site.spec)
                else:
                    machine = await engine.restore(site.spec, start.image, site.prepared)
            undo.push(engine.kill, machine)
            await failpoint("start.engine")
            marks["engine"] = time.perf_counter()
            guest = Guest(machine.to_guest, machine.from_guest, box=site.id)
            undo.push(guest.close)
            start.serve(guest)
            with span("hear"):
                await self._hear(machine, guest, engine.boot_timeout_s)
            marks["agent"] = time.perf_counter()
            box = Box(site.id, machine, guest, site.cgroup, list(disk.layers), engine)
            undo.keep()
        if site.cgroup is not None:
            begin(self.tg, self._set_apart(box, site.cgroup))
        last = begun
        for name, mark in marks.items():
            box.steps_ms[name] = (mark - last) * 1e3
            last = mark
        return box

    def _lay_out(self, start: Start) -> Site:
        """Make the place for a machine: a cgroup without limits yet; its disk comes last."""
        box_id = names.box_id()
        cgroup = self.cgroups.create(box_id) if self.cgroups.available else None
        engine = self.engine(start.limits.engine)
        return Site(box_id, cgroup, self._spec(box_id, start, cgroup), engine)

    def _limit(self, cgroup: CgroupBox, limits: Limits) -> None:
        # A kernel that divides its memory itself needs the host's limit only around what holds it.
        reserve_mb = RESERVE_MB * (2 if self.engine(limits.engine).own_kernel else 1)
        cgroup.update(
            mem_mb=limits.mem_mb,
            mem_reserve_mb=reserve_mb + limits.mem_mb // 8,
            cpu_weight=limits.cpu_weight,
            pids=thread_limit(limits.processes),
        )

    async def _set_apart(self, box: Box, cgroup: CgroupBox) -> None:
        """Give the guest's kernel and the agent, which run by now, the CPU before whatever else will
        run in the guest: five hundred busy programs would leave the agent a five-hundredth.
        Nobody waits for it; a box that ends meanwhile needs it no more."""

        def apart() -> None:  # it looks at each of the box's processes
            root = box.engine.guest_root(box.machine, cgroup.pids())
            if root is not None:
                cgroup.set_apart(root)

        with contextlib.suppress(OSError):
            await asyncio.to_thread(apart)

    # -- boxes made ahead --------------------------------------------------------------

    async def _make_blank(self, kind: Kind) -> Site | None:
        engine, agent, cpus, mem_mb, disk_mb, processes = kind
        limits = Limits(0, mem_mb, disk_mb, mem_mb, disk_mb, processes, engine, shape_cpus=cpus)
        async with Undo(self.tg) as undo:
            site = self._lay_out(Start([], limits, names.identity("blank", "", generation=0), agent))
            undo.push(self.remove, site.id)
            with span("make a blank"):
                site.prepared = await self.engine(engine).prepare(site.spec)
            await failpoint("blank.prepared")
            if site.prepared is None:
                return None
            undo.keep()
        return site

    async def _drop_blank(self, site: Site) -> None:
        async def drop() -> None:
            await within(site.engine.discard(site.prepared))
            await self.remove(site.id)

        await finish(self.tg, drop())  # nobody else knows of it

    async def _end_ahead(self, box: Box) -> None:
        await finish(self.tg, self.end(box))

    async def make_ahead(self) -> None:
        """Make what starts to come will need, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.blanks.run())
            group.create_task(self.ahead.stock.run())

    async def drop_ahead(self) -> None:
        """Drop all that was made ahead."""
        await self.ahead.stock.drop_all()
        await self.blanks.drop_all()

    def _room_for_blank(self) -> bool:
        total, available = memory_mb()
        return available > total / 8

    async def end(self, box: Box, why: str | None = None) -> None:
        """Kill a box and remove all of it. Idempotent; every step is tried whatever fails.

        Args:
            why: What those who wait for something in it are told.
        """
        with span("end"):
            if why is not None:
                box.guest.lost(SandboxLostError(why, cause="host"))
            await box.guest.close()
            with span("kill"):
                await within(box.engine.kill(box.machine))
            await within(failpoint("end.killed"))
            await self.remove(box.id)
            await within(failpoint("end.removed"))

    async def remove(self, box_id: str) -> None:
        """Remove what a box whose processes are gone left on the host."""
        await within(self.disks.remove_box(box_id))
        cgroup = self.cgroups.find(box_id)
        if cgroup is not None:
            await within(_drop_group(cgroup))
        await asyncio.to_thread(rmtree, self.box_dir(box_id))

    async def freeze(self, box: Box, layer: str, image: str | None) -> Frozen:
        """Save the memory (unless ``image`` is None) and the disk of ``box`` as of one moment.

        The box goes on afterwards, also when this fails: memory that cannot be saved costs
        the snapshot, never the sandbox.

        Args:
            layer: Id of the layer to make of its disk.
            image: Name of the memory image to make; published by the caller.

        Raises:
            ConflictError: an open file that was deleted is in the way; names the files.
            CapacityError: the disk is full.
            SandboxLostError: the machine died meanwhile.
        """
        try:
            return await self._freeze(box, layer, image)
        except ConflictError as error:
            # Only now: while it is quiesced, the agent sends nothing.
            raise await self._deleted_files(box, error) from error

    async def forget(self, frozen: Frozen, image: str) -> None:
        """Remove what :meth:`freeze` made and nobody can use; ``image`` is its name if it was published."""
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.disks.drop_layer, frozen.layer)
            if frozen.image is not None:
                steps.push_async_callback(asyncio.to_thread, rmtree, frozen.image)
                steps.push_async_callback(self.images.delete_async, image)

    async def _freeze(self, box: Box, layer: str, image: str | None) -> Frozen:
        with span("write out"):
            dirty_mb = await self._write_out(box)
        await failpoint("freeze.written_out")
        quiesced = False
        # One that forged the wire is lost for that, afterwards.
        with span("quiesce"), contextlib.suppress(ForkyardError):
            if box.engine.own_kernel:
                # Whoever starts its disk alone finds on it what the guest believed to have written.
                quiesced = await box.guest.quiesce(SYNC_S, sync=True)
            else:
                quiesced = await box.guest.quiesce(QUIESCE_S, sync=image is None)
        paused = time.perf_counter()
        try:
            done = await finish(self.tg, self._while_paused(box, layer, image))
        except (OSError, InternalError) as error:
            if box.machine.died.is_set():
                raise SandboxLostError("the sandbox died while it was frozen") from error
            raise
        finally:
            paused_ms = (time.perf_counter() - paused) * 1e3
            with span("unquiesce"):
                await self._go_on(box, quiesced)
        memory_bytes = done.size_bytes if done else 0
        return Frozen(
            layer,
            done.dir if done else None,
            done.fingerprint if done else "",
            memory_bytes,
            paused_ms,
            dirty_mb,
            quiesced,
        )

    async def _go_on(self, box: Box, quiesced: bool) -> None:
        """After a freeze. Saving takes bytes that were on their way out of the guest's pipe, so
        a guest that was not silent needs a new epoch: commands go on in it without a gap."""
        with contextlib.suppress(ForkyardError):
            if quiesced:
                await box.guest.unquiesce()
            else:
                # Not for long: whoever froze a guest that never answers has the snapshot, and waits.
                await box.guest.attach(self.tg, timeout_s=PAUSED_S)

    async def _while_paused(self, box: Box, layer: str, image: str | None) -> Any:
        """The part for which the guest stands still; a task of its own, so that no
        cancellation leaves the guest paused."""
        mark = self._paused_mark(box.id)
        mark.touch()
        try:
            with span("pause"):
                await box.engine.pause(box.machine)
        except BaseException:
            mark.unlink(missing_ok=True)
            raise
        try:
            async with Undo(self.tg) as undo:
                await failpoint("freeze.paused")
                saved = None
                if image is not None:
                    directory = self.images.temporary(image)
                    undo.push(asyncio.to_thread, rmtree, directory)
                    # Memory first: saving it writes the guest's cached file data to the disk.
                    with span("save"):
                        saved = await box.engine.save(box.machine, directory)
                    await failpoint("freeze.saved")
                undo.push(self.disks.drop_layer, layer)
                with span("seal"):
                    await self.disks.seal(box.id, layer)
                await failpoint("freeze.sealed")
                undo.keep()
                return saved
        finally:
            with contextlib.suppress(OSError), span("resume"):
                await box.engine.resume(box.machine)
            mark.unlink(missing_ok=True)

    async def _write_out(self, box: Box) -> float:
        """Write the dirty part of the disk while the guest runs; returns what was left, in MiB."""
        dirty = 0.0
        for _ in range(SYNC_ROUNDS):
            dirty = self.dirty_mb(box)
            if dirty < DIRTY_MB:
                break
            await self.disks.sync_box(box.id)
        return min(dirty, self.dirty_mb(box))

    def dirty_mb(self, box: Box) -> float:
        """File data of the box that is not on the disk yet, in MiB."""
        return self.disks.dirty_mb(box.id, box.cgroup)

    async def _deleted_files(self, box: Box, error: ConflictError) -> ConflictError:
        """``error`` with the names of the files and processes that stand in the way."""
        with contextlib.suppress(ForkyardError):
            found = await box.guest.deleted_files()
            if found:
                listed = ", ".join(f"{path} (held by {who} [{pid}])" for path, pid, who in found[:8])
                return ConflictError(
                    f"the memory cannot be saved: deleted files are still open: {listed}",
                    hint="end those processes, keep such files in /tmp, use memory=False, "
                    "or install the newest runsc (forkyard setup --newest)",
                )
        return error

    async def reattach(self, box_id: str, record: dict[str, Any], start: Start) -> Box | None:
        """The box that an earlier daemon left running, or None if it is gone."""
        cgroup = self.cgroups.find(box_id)
        spec = self._spec(box_id, start, cgroup)
        engine = self.engine(start.limits.engine)
        machine = await engine.reattach(spec, record)
        if machine is None:
            return None
        guest = Guest(machine.to_guest, machine.from_guest, box=box_id)
        start.serve(guest)
        try:
            if self._paused_mark(box_id).exists():
                await self._resume_if_paused(engine, machine, guest)
            await self._hear(machine, guest, ATTACH_TIMEOUT_S)
        except BaseException:
            await guest.close()
            await engine.kill(machine)
            raise
        return Box(box_id, machine, guest, cgroup, list(start.layers), engine)

    def _paused_mark(self, box_id: str) -> Path:
        return self.box_dir(box_id) / "paused"

    async def _resume_if_paused(self, engine: Engine, machine: Machine, guest: Guest) -> None:
        """After a daemon that died inside a freeze. Only a guest that does not answer is resumed:
        gVisor's kernel takes the resuming of a running one for a defect of its own, and ends."""
        try:
            await guest.attach(timeout_s=PAUSED_S)
        except DeadlineError:
            await engine.resume(machine)
        self._paused_mark(machine.spec.box).unlink(missing_ok=True)

    async def _hear(self, machine: Machine, guest: Guest, timeout_s: float) -> None:
        """Attach to the agent, or fail as soon as the machine dies."""

        async def watch() -> None:
            await machine.died.wait()
            guest.lost(SandboxLostError("the sandbox's main process ended"))
            self.on_death(machine.spec.box)

        watcher = self.tg.create_task(watch())
        try:
            await guest.attach(self.tg, timeout_s=timeout_s)
        except BaseException:
            watcher.cancel()
            raise

    def _spec(self, box_id: str, start: Start, cgroup: CgroupBox | None) -> MachineSpec:
        limits = start.limits
        own_kernel = self.engine(limits.engine).own_kernel
        return MachineSpec(
            box=box_id,
            dir=self.box_dir(box_id),
            rootfs=self.disks.disk_image(box_id) if own_kernel else self.disks.rootfs(box_id),
            agent=self.agent_dir(start.agent),
            mem_mb=limits.shape_mem_mb,
            disk_mb=limits.shape_disk_mb,
            processes=limits.processes,
            cpus=limits.shape_cpus,
            wrap=cgroup.join_argv if cgroup else list,
        )


async def _drop_group(cgroup: CgroupBox) -> None:
    """Remove the group of a box that was killed. The many stubs of a full guest leave one by one,
    and on a busy host that takes longer than anything else here."""
    try:
        await cgroup.delete()
    except DeadlineError:
        for pid in cgroup.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await cgroup.delete(deadline_s=UNDO_DEADLINE_S - 10)
