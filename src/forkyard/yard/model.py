"""What the yard knows of each sandbox and snapshot: the part on disk and the part in memory."""

from __future__ import annotations

import asyncio
import platform
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forkyard.requests import Lease
from forkyard.types import CPU_WEIGHT, CheckpointInfo, Failure, SandboxInfo, SnapshotInfo

HOST = platform.node() or "localhost"
LIVE = ("creating", "running", "stopped", "failed")


class SandboxDoc(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sandbox as the catalog keeps it.

    ``layers`` are the read-only layers under its disk, top first, ``origin`` those that it
    started from, kept for as long as it lives; ``checkpoint`` is the newest checkpoint among the
    ancestors of its present state; ``resume`` the hidden snapshot that a stopped sandbox starts
    from; ``napping`` that it was stopped for being idle and that the next call starts it;
    ``trial`` the explore that it may not outlive unless it wins; ``exposed`` which ports of it are
    which of the host's; ``git_hosts`` the hosts that clients had git reach; ``asked`` the
    request that made it (see :mod:`forkyard.yard.again`). ``deadline`` is in seconds of the
    boot-time clock of ``boot_id``.
    """

    id: str
    name: str
    state: str
    engine: str
    template: str | None = None
    snapshot: str | None = None
    parent: str | None = None
    checkpoint: str | None = None
    type: str
    cpus: float
    cpu_weight: int = CPU_WEIGHT
    mem_mb: int
    disk_mb: int
    user: str
    workdir: str
    env: dict[str, str] = {}
    egress: str = "deny"
    egress_allow: list[str] = []
    git_hosts: list[str] = []
    labels: dict[str, str] = {}
    ttl_min: float | None = None
    auto_stop_min: float | None = None
    ephemeral: bool = False
    created_at: float
    expires_at: float | None = None
    deadline: float | None = None
    boot_id: str = ""
    resumed_from: str | None = None
    memory_restored: bool = False
    tainted: bool = False
    start_ms: float = 0.0
    failure: dict[str, str] | None = None
    box: str = ""
    layers: list[str] = []
    origin: list[str] = []
    machine: dict[str, Any] | None = None
    agent: str = ""
    resume: str | None = None
    napping: bool = False
    lease: Lease | None = None
    generation: int = 0
    trial: str = ""
    shape_mem_mb: int = 0
    shape_disk_mb: int = 0
    shape_cpus: int = 1
    processes: int = 0
    exposed: dict[str, int] = {}
    asked: str = ""

    def held(self) -> list[str]:
        """The layers that it needs."""
        return [*self.layers, *self.origin]

    def set_ttl(self, ttl_min: float | None, boot_id: str) -> None:
        """Let it expire ``ttl_min`` minutes from now, or never."""
        self.ttl_min = ttl_min
        self.boot_id = boot_id
        self.expires_at = None if ttl_min is None else time.time() + ttl_min * 60
        self.deadline = None if ttl_min is None else boot_clock() + ttl_min * 60


class SnapshotDoc(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A snapshot as the catalog keeps it; ``kind`` is snapshot, fork, checkpoint or stop.

    ``image`` names its memory image's directory, if it has one. What a sandbox started from
    it inherits (type, limits, env, user) stands in ``inherits``; ``imported`` is the id that the
    snapshot had in the yard that it was exported from.
    """

    id: str
    kind: str
    sandbox: str
    name: str | None = None
    parent: str | None = None
    labels: dict[str, str] = {}
    layers: list[str]
    image: str | None = None
    fingerprint: str = ""
    agent: str = ""
    engine: str
    size_bytes: int = 0
    memory_bytes: int = 0
    created_at: float
    paused_ms: float = 0.0
    dirty_mb: float = 0.0
    quiesced: bool = True
    verified: bool = False
    inherits: dict[str, Any] = {}
    asked: str = ""
    imported: str = ""


@dataclass(slots=True)
class Sandbox:
    """A live sandbox: its document, and what runs of it.

    ``lock`` is held by whatever changes its machine (start, freeze, rewind, stop, delete);
    commands only need the machine to be there. ``doomed`` tells a creation under way that a
    delete waits for it.
    """

    doc: SandboxDoc
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    box: Any = None
    doomed: bool = False
    creating: asyncio.Task[Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_active: float = field(default_factory=time.time)
    active_calls: int = 0
    idle_since: float = field(default_factory=time.monotonic)
    guest_cpu_ms: float = 0.0
    measured_at: float = 0.0
    memory_watch: Any = None
    killing: bool = False
    # Its row says that it is being created.
    half_made: bool = False
    # When a process was last killed to save memory, and how much was used then.
    killed_at: float = float("-inf")
    killed_mb: float = 0.0
    # Commands of the present machine that lost a process to save memory, and how often.
    ooms: dict[int, int] = field(default_factory=dict)
    # Variables that its commands get, unless they have them: where certificates and proxies are.
    net_env: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.doc.id

    def touch(self) -> None:
        """Note that somebody used it."""
        self.last_active = time.time()
        self.idle_since = time.monotonic()

    def signal(self) -> None:
        """Wake everybody who waits for its state to change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def info(self) -> SandboxInfo:
        """The public view."""
        doc = self.doc
        failure = doc.failure
        return SandboxInfo(
            id=doc.id,
            name=doc.name,
            state=doc.state,  # type: ignore[arg-type]
            engine=doc.engine,
            host=HOST,
            template=doc.template,
            snapshot=doc.snapshot,
            parent=doc.parent,
            checkpoint=doc.checkpoint,
            type=doc.type,
            cpus=doc.cpus,
            cpu_weight=doc.cpu_weight,
            mem_mb=doc.mem_mb,
            disk_mb=doc.disk_mb,
            user=doc.user,
            workdir=doc.workdir,
            egress=doc.egress,
            egress_allow=list(doc.egress_allow),
            labels=dict(doc.labels),
            ttl_min=doc.ttl_min,
            auto_stop_min=doc.auto_stop_min,
            ephemeral=doc.ephemeral,
            created_at=doc.created_at,
            last_active_at=self.last_active,
            expires_at=doc.expires_at,
            resumed_from=doc.resumed_from,
            memory_restored=doc.memory_restored,
            tainted=doc.tainted,
            start_ms=doc.start_ms,
            failure=Failure(failure["code"], failure["message"], failure["cause"]) if failure else None,
        )


def snapshot_info(doc: SnapshotDoc, exclusive_bytes: int) -> SnapshotInfo:
    """The public view of a snapshot."""
    return SnapshotInfo(
        id=doc.id,
        name=doc.name,
        source=doc.sandbox,
        labels=dict(doc.labels),
        size_bytes=doc.size_bytes,
        exclusive_bytes=exclusive_bytes,
        memory=doc.image is not None,
        engine=doc.engine,
        created_at=doc.created_at,
        paused_ms=doc.paused_ms,
        dirty_mb=doc.dirty_mb,
        verified=doc.verified,
        imported_from=doc.imported or None,
    )


def checkpoint_info(doc: SnapshotDoc) -> CheckpointInfo:
    """The public view of a checkpoint."""
    return CheckpointInfo(
        id=doc.id,
        label=doc.name,
        sandbox=doc.sandbox,
        parent=doc.parent,
        memory=doc.image is not None,
        size_bytes=doc.size_bytes,
        created_at=doc.created_at,
        paused_ms=doc.paused_ms,
        dirty_mb=doc.dirty_mb,
    )


def boot_clock() -> float:
    """Seconds since boot, suspended time included: what deadlines are measured by."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
