"""The results of the public API: frozen dataclasses that also read like dicts.

``result["field"]`` and ``result.field`` are the same thing, ``to_dict()`` gives plain
data, and all of them pickle. Times are ``float`` seconds since the epoch (``*_at``) or
milliseconds (``*_ms``); memory and disk are MiB (``*_mb``) or bytes (``*_bytes``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

CPU_WEIGHT = 100
"""What a sandbox weighs that was given no ``cpu_weight``."""

State = Literal["creating", "running", "stopped", "failed", "deleted"]


class Record:
    """Dict-style reading for a frozen dataclass."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        if key in self.__dataclass_fields__:  # type: ignore[attr-defined]
            return getattr(self, key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The field ``key``, or ``default`` if this record has no such field."""
        try:
            return self[key]
        except KeyError:
            return default

    def keys(self) -> list[str]:
        """The names of the fields, so that ``dict(record)`` works."""
        return list(self.__dataclass_fields__)  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, nested records included."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Failure(Record):
    """Why a sandbox is ``failed``: ``cause`` is ``host``, ``guest`` or ``unknown``."""

    code: str
    message: str
    cause: str = "unknown"


@dataclass(frozen=True, slots=True)
class SandboxInfo(Record):
    id: str
    name: str
    state: State
    engine: str
    host: str
    template: str | None
    snapshot: str | None
    parent: str | None
    checkpoint: str | None
    type: str
    cpus: float
    mem_mb: int
    disk_mb: int
    user: str
    workdir: str
    egress: str
    egress_allow: list[str]
    labels: dict[str, str]
    ttl_min: float | None
    auto_stop_min: float | None
    ephemeral: bool
    created_at: float
    last_active_at: float
    expires_at: float | None
    resumed_from: str | None
    memory_restored: bool
    tainted: bool
    start_ms: float
    failure: Failure | None = None
    cpu_weight: int = CPU_WEIGHT


@dataclass(frozen=True, slots=True)
class SnapshotInfo(Record):
    """``size_bytes`` is what the snapshot refers to in all, ``exclusive_bytes`` what
    deleting it would free; ``imported_from`` the id of the snapshot that it is a copy of, if it was
    imported (``source`` is then that one's sandbox)."""

    id: str
    name: str | None
    source: str
    labels: dict[str, str]
    size_bytes: int
    exclusive_bytes: int
    memory: bool
    engine: str
    created_at: float
    paused_ms: float = 0.0
    dirty_mb: float = 0.0
    verified: bool = False
    imported_from: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointInfo(Record):
    id: str
    label: str | None
    sandbox: str
    parent: str | None
    memory: bool
    size_bytes: int
    created_at: float
    paused_ms: float = 0.0
    dirty_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class ForkResult(Record):
    snapshot: str
    forks: list[SandboxInfo]
    paused_ms: float
    total_ms: float
    dirty_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class TemplateInfo(Record):
    """``kind`` is ``recipe`` (set-up made it), ``build`` or ``image`` (of which ``image`` is the
    name). ``warm`` says that sandboxes of the default type start from memory now,
    ``warm_command`` what runs in them then, if anything; ``engine`` what they run on, if it says."""

    name: str
    key: str
    user: str
    workdir: str
    size_bytes: int
    warm: bool
    created_at: float
    env: dict[str, str] = field(default_factory=dict)
    kind: str = "recipe"
    image: str | None = None
    last_used_at: float = 0.0
    warm_command: list[str] | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Progress(Record):
    """What is told while a template is made. ``kind`` is ``step`` (an instruction begins),
    ``output`` (a line that it printed) or ``note``; ``index`` counts the specs of a ``prepare``."""

    kind: str
    text: str
    index: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ExecResult(Record):
    """What a command did. A non-zero exit, a timeout and an OOM kill are results.

    ``stdout`` and ``stderr`` are text (UTF-8, undecodable bytes replaced);
    ``stdout_bytes`` and ``stderr_bytes`` are the bytes as they came. ``signal`` is the
    number of the signal that ended it, or None; ``exit_code`` is then 128 + signal.
    ``process_limit``: it was ended since its processes filled the sandbox, which no longer answered.
    ``truncated`` says that output beyond ``max_output`` was dropped, ``omitted_bytes``
    how much. ``merged`` holds both streams in order of arrival if ``merge=True``.
    """

    ok: bool
    exit_code: int
    signal: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    merged: str | None = None
    timed_out: bool = False
    oom: bool = False
    disk_full: bool = False
    process_limit: bool = False
    truncated: bool = False
    omitted_bytes: int = 0
    duration_ms: float = 0.0
    cpu_ms: float = 0.0
    max_rss_mb: float = 0.0
    audit_seq: int = 0

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    def __getitem__(self, key: str) -> Any:
        if key in ("stdout", "stderr"):
            return getattr(self, key)
        return Record.__getitem__(self, key)

    def keys(self) -> list[str]:
        return [*Record.keys(self), "stdout", "stderr"]

    def to_dict(self) -> dict[str, Any]:
        return {key: self[key] for key in self.keys()}


@dataclass(frozen=True, slots=True)
class ProcessInfo(Record):
    """A process inside a sandbox, as its agent claims it. ``handle`` names one that
    was started through the API and whose output can be attached to."""

    pid: int
    ppid: int
    user: str
    command: str
    state: str
    cpu_ms: float = 0.0
    rss_mb: float = 0.0
    handle: str | None = None
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Artifact(Record):
    """What code showed besides text: a figure, a table, a file. ``name`` is never a path."""

    mime: str
    data: bytes
    name: str | None = None

    def __bytes__(self) -> bytes:
        return self.data

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"Artifact({self.mime!r}{name}, {len(self.data)} bytes)"


@dataclass(frozen=True, slots=True)
class CodeError(Record):
    """What the code raised, as text."""

    name: str
    value: str
    traceback: str


@dataclass(frozen=True, slots=True)
class CodeResult(Record):
    """What a piece of code in a session did. An error, a timeout and an OOM kill are results.

    ``result`` is the text of the last expression's value, or None. ``exit_code`` is 0, or 1
    after an error, as of a script; for shell code that of its last command; where the session
    ended, its process's (128 + ``signal`` if a signal ended it). ``truncated`` says that output,
    or an artifact, was too long to be kept whole.
    """

    ok: bool
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    artifacts: list[Artifact] = field(default_factory=list)
    error: CodeError | None = None
    exit_code: int = 0
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FileInfo(Record):
    """One file inside a sandbox. ``type`` is file, dir, link, fifo, socket, char or block."""

    path: str
    name: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Usage(Record):
    """``cpu_ms`` since the start, the rest now."""

    cpu_ms: float
    mem_mb: float
    disk_mb: float
    processes: int


@dataclass(frozen=True, slots=True)
class TreeNode(Record):
    """One sandbox, snapshot or checkpoint in the lineage."""

    id: str
    kind: Literal["template", "sandbox", "snapshot", "checkpoint"]
    name: str | None
    parent: str | None
    state: str
    created_at: float


@dataclass(frozen=True, slots=True)
class AuditRecord(Record):
    seq: int
    time: float
    kind: str
    sandbox: str | None
    actor: str
    data: dict[str, Any]
    prev: str
    hash: str


@dataclass(frozen=True, slots=True)
class Capacity(Record):
    """``fits`` is how many more sandboxes like the one asked about this host holds."""

    fits: int
    mem_free_mb: int
    mem_committed_mb: int
    disk_free_mb: int
    sandboxes: int


@dataclass(frozen=True, slots=True)
class Health(Record):
    ok: bool
    pid: int
    version: str
    wire: int
    home: str
    socket: str
    sandboxes: int
    engines: list[str]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Event(Record):
    time: float
    kind: str
    sandbox: str | None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionInfo(Record):
    """The daemon's version; ``api`` counts the contract between client and daemon."""

    version: str
    api: int

    def __str__(self) -> str:
        return self.version


@dataclass(frozen=True, slots=True)
class Transfer(Record):
    """What an upload or a download moved. ``skipped`` names what was refused: links that
    leave the tree, devices, sockets and FIFOs."""

    files: int
    size_bytes: int
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change(Record):
    """One path at which two states of a disk differ.

    ``kind`` is file, dir, link, fifo, socket, char or block: what is there now, or what was there
    if it was deleted. ``mode`` (permission bits) is None if it was deleted, ``old_mode`` and
    ``old_kind`` are None if it was added. ``content``: what a file holds or where a link leads
    differs, not only the mode or the owner. ``data`` is then the file's new content; ``omitted``
    says that it was too large to be carried along. ``target`` is where a link leads.
    ``raw_path`` and ``raw_target`` are the bytes of a name that is no UTF-8, which ``path`` and
    ``target`` show with escapes.
    """

    path: str
    kind: str
    mode: int | None
    old_kind: str | None = None
    old_mode: int | None = None
    size: int = 0
    old_size: int = 0
    uid: int = 0
    gid: int = 0
    content: bool = True
    target: str | None = None
    data: bytes | None = None
    omitted: bool = False
    raw_path: bytes = b""
    raw_target: bytes = b""

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Diff(Record):
    """What differs between two states of a disk, by path.

    ``patch`` is a unified diff of the text files, in git's form; other files are named in it.
    ``complete`` is False where a file's new content is not in here (see ``Change.omitted``), so
    that ``apply`` refuses it. ``skipped`` names directories whose paths are too long to be looked
    into. ``frozen_ms`` is how long saving the disk took, ``compare_ms`` how long comparing.
    """

    added: list[Change]
    modified: list[Change]
    deleted: list[Change]
    patch: str = ""
    complete: bool = True
    skipped: list[str] = field(default_factory=list)
    frozen_ms: float = 0.0
    compare_ms: float = 0.0

    @property
    def changes(self) -> list[Change]:
        """All of them, by path."""
        return sorted([*self.added, *self.modified, *self.deleted], key=lambda change: change.path)

    @property
    def paths(self) -> list[str]:
        """The paths of all of them."""
        return [change.path for change in self.changes]

    @property
    def empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.modified or self.deleted)


@dataclass(frozen=True, slots=True)
class VariantResult(Record):
    """How one variant of an ``explore`` went.

    ``state``: ``passed`` (it exited with 0), ``failed``, ``timed_out``, ``cancelled`` (it could
    not win any more) or ``error`` (there was no copy to run it in, or it was lost; see ``error``).
    ``output`` is the end of what it wrote, both streams in order. ``duration_ms`` is its command's
    time, ``start_ms`` that of its copy. ``diff`` is what it changed on its copy's disk, where it
    ran to an end. ``id`` and ``sandbox`` are the copy's, where it is kept.
    """

    name: str
    ok: bool
    state: Literal["passed", "failed", "timed_out", "cancelled", "error"]
    exit_code: int | None = None
    duration_ms: float = 0.0
    start_ms: float = 0.0
    output: str = ""
    diff: Diff | None = None
    id: str | None = None
    sandbox: SandboxInfo | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExploreResult(Record):
    """``winner`` is None if no variant passed; its copy is then the only one that is left.
    ``results`` are in the variants' order."""

    winner: VariantResult | None
    results: list[VariantResult]
    paused_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditVerdict(Record):
    """``seq`` is the first record that is wrong, or the newest one if all are right; ``why`` says
    what is wrong. ``head`` is the newest record's number and hash: kept elsewhere, it proves later
    that nothing was cut off."""

    ok: bool
    seq: int
    why: str = ""
    head: tuple[int, str] | None = None
