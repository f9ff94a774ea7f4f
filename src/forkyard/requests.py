"""What a client may ask of the daemon: one struct per verb, the same on both sides.

The client fills one in, the daemon decodes and validates it by type, and the yard takes
it as its argument. ``request_id`` makes a changing verb idempotent: the daemon keeps the
reply and gives it again to whoever asks with the same id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from forkyard.types import Change as PathDifference
from forkyard.types import ExecResult, ExploreResult, State, TemplateInfo, VariantResult

# What no host could mean is refused where it is decoded, so that nothing behind has to reckon with
# what is no number, or with more of it than a kernel's word holds.
Number = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
SignalNumber = Annotated[int, msgspec.Meta(ge=0, le=64)]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

# What is kept, listed and told again is bounded: whoever may ask could else fill the catalog.
Word = Annotated[str, msgspec.Meta(max_length=256)]
"""An id, a name, a user, and the like."""
Line = Annotated[str, msgspec.Meta(max_length=4096)]
"""A path inside, an image, a URL."""
Label = Annotated[str, msgspec.Meta(max_length=1024)]
Labels = Annotated[dict[Word, Label], msgspec.Meta(max_length=64)]
Rules = Annotated[list[Word], msgspec.Meta(max_length=1000)]
ImageFormat = Literal["registry", "oci", "docker-archive", "tar"]
"""Where an image comes from: a registry, or what the client deposited, and in which form."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel says (the socket's peer) or the token, never as the request says.

    ``start_time`` is the peer's start in clock ticks since boot, which together with
    ``pid`` names one process for ever; both are None for a peer that this host cannot see.
    Who comes from another machine has a ``token`` (its id), its ``rights``, and a negative number that is
    no other's as ``uid``: what is kept by request id is kept apart.
    """

    uid: int
    pid: int | None = None
    start_time: int | None = None
    name: str = ""
    token: str | None = None
    rights: frozenset[str] = frozenset()


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


def complaint(error: Exception) -> str:
    """What a failed validation says, the field's name first."""
    what, _, where = str(error).partition(" - at `$")
    field = where.strip("`.")
    return f"{field}: {what}" if field else what


class Change(Request, kw_only=True):
    """A request that changes something; ``request_id`` is made up by the client."""

    request_id: Word = ""


class Lease(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Who an ephemeral sandbox lives for: a local process (its pid and start time in
    clock ticks since boot), whoever holds the ``stream`` of that name open, or a named run."""

    pid: Pid | None = None
    start_time: Offset | None = None
    run: Word | None = None
    stream: Word | None = None


class CreateSandbox(Change, kw_only=True):
    name: Word | None = None
    template: Word | None = None
    image: Line | None = None
    snapshot: Word | None = None
    type: Word | None = None
    cpus: Number | None = None
    cpu_weight: Whole | None = None
    mem_mb: Whole | None = None
    disk_mb: Whole | None = None
    env: dict[str, str] = {}
    user: Word | None = None
    egress: Word | None = None
    egress_allow: Rules | None = None
    ttl_min: Number | None = None
    auto_stop_min: Number | None = None
    ephemeral: bool = False
    labels: Labels = {}
    engine: Word | None = None
    memory: bool = True
    wait: bool = True
    wait_s: Wait = 0
    lease: Lease | None = None
    image_format: ImageFormat = "registry"
    image_deposit: Word | None = None
    auths: dict[Word, str] = {}


class SandboxRequest(Request, kw_only=True):
    """A question about one sandbox, by id or name."""

    sandbox: Word


class SandboxChange(Change, kw_only=True):
    sandbox: Word


class ListSandboxes(Request, kw_only=True):
    labels: Labels | None = None
    state: State | None = None


class RenameSandbox(SandboxChange, kw_only=True):
    name: Word


class SetTtl(SandboxChange, kw_only=True):
    ttl_min: Number | None = None


class SetEgress(SandboxChange, kw_only=True):
    egress: Word | None = None
    egress_allow: Rules | None = None


class Expose(SandboxChange, kw_only=True):
    port: Whole


class Adopt(SandboxChange, kw_only=True):
    lease: Lease


class ReleaseLease(Change, kw_only=True):
    """End every lease that this client took; ephemeral sandboxes among them go."""

    lease: Lease
    sandboxes: list[Word]


class WaitSandbox(SandboxRequest, kw_only=True):
    state: State = "running"
    timeout_s: Number | None = None


class StopSandbox(SandboxChange, kw_only=True):
    pass


class StartSandbox(SandboxChange, kw_only=True):
    """Without ``memory`` its disk is booted afresh."""

    lease: Lease | None = None
    memory: bool = True


class DeleteSandbox(SandboxChange, kw_only=True):
    pass


class DeleteSandboxes(Change, kw_only=True):
    labels: Labels


class ExecOptions(Change, kw_only=True):
    """``argv`` or ``command`` (for ``/bin/sh -c``), one of them."""

    argv: list[str] | None = None
    command: str | None = None
    timeout_s: Number | None = None
    cwd: Line | None = None
    env: dict[str, str] = {}
    user: Word | None = None
    login: bool = False


class Exec(ExecOptions, kw_only=True):
    """``keep`` says what of an over-long output is kept: its head, its tail or both ends.

    ``stdin`` is a short input. A long or endless one is not in the struct: it comes beside
    it as a stream of bytes (the second argument of ``run``), and ``stdin`` is then None.
    """

    sandbox: Word
    stdin: bytes | None = None
    merge: bool = False
    max_output: Whole = 10 << 20
    keep: Literal["head", "tail", "both"] = "both"


class ExecMany(Change, kw_only=True):
    """All at once; each command carries a request id of its own."""

    commands: list[Exec]


class ExecOutcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One place of an ``exec_many`` reply: a result, or why there is none (errors.to_wire)."""

    result: ExecResult | None = None
    error: dict[str, Any] | None = None


class RunCode(Change, kw_only=True):
    """``session`` names an interpreter that goes on between calls; ``user`` is part of what it
    is, and ``cwd`` where it starts."""

    sandbox: Word
    code: str
    language: Word = "python"
    session: Word = "default"
    timeout_s: Number | None = None
    user: Word | None = None
    cwd: Line | None = None


class Git(Change, kw_only=True):
    """One git command. ``path`` is the repository, for ``clone`` the one to make. Passwords are
    never in the sandbox's files, its processes' arguments or the audit."""

    sandbox: Word
    operation: Literal["clone", "fetch", "checkout", "status", "diff", "apply", "add", "commit", "log"]
    path: Line | None = None
    url: Line | None = None
    branch: Word | None = None
    depth: Whole | None = None
    ref: Line | None = None
    create: bool = False
    staged: bool = False
    paths: list[Line] = []
    patch: bytes | None = None
    message: str | None = None
    author: Line | None = None
    all: bool = False
    limit: Whole | None = None
    username: Word | None = None
    password: str | None = None
    grant: bool = True
    timeout_s: Number | None = None
    user: Word | None = None
    max_output: Whole = 10 << 20


class Spawn(ExecOptions, kw_only=True):
    """``stdin=False`` gives it an empty input instead of one that the client writes to."""

    sandbox: Word
    pty: bool = False
    stdin: bool = True
    rows: Whole = 24
    cols: Whole = 80
    detach: bool = False
    merge: bool = False


class Attach(Request, kw_only=True):
    """``pid`` is the process's number inside the sandbox; output goes on from
    ``stdout_offset`` and ``stderr_offset`` (bytes since the start) where it is still kept.
    ``tied``: closing the stream ends the process, as it does for the stream that spawned it."""

    sandbox: Word
    pid: Pid
    stdout_offset: Offset = 0
    stderr_offset: Offset = 0
    tied: bool = False


class ProcessRequest(Change, kw_only=True):
    sandbox: Word
    pid: Pid


class Write(ProcessRequest, kw_only=True):
    data: bytes = b""
    eof: bool = False


class Resize(ProcessRequest, kw_only=True):
    rows: Whole
    cols: Whole


class Signal(ProcessRequest, kw_only=True):
    signal: SignalNumber


class WaitProcess(ProcessRequest, kw_only=True):
    timeout_s: Number | None = None


class PathRequest(Request, kw_only=True):
    sandbox: Word
    path: Line
    user: Word | None = None


class PathChange(Change, kw_only=True):
    sandbox: Word
    path: Line
    user: Word | None = None


class WriteFile(PathChange, kw_only=True):
    """The head of a streamed upload; the bytes follow as the body. Parents are made."""

    mode: Whole | None = None


class MakeDir(PathChange, kw_only=True):
    mode: Whole | None = None
    parents: bool = True


class WriteFiles(Change, kw_only=True):
    """Small files in one call; a large one goes through the streaming upload route."""

    sandbox: Word
    files: dict[str, bytes]
    mode: Whole | None = None
    user: Word | None = None


class ReadFiles(Request, kw_only=True):
    sandbox: Word
    paths: list[Line]
    user: Word | None = None


class MoveFile(PathChange, kw_only=True):
    to: Line


class RemoveFile(PathChange, kw_only=True):
    recursive: bool = True


class TakeSnapshot(SandboxChange, kw_only=True):
    name: Word | None = None
    labels: Labels = {}
    memory: bool = True


class SnapshotRequest(Request, kw_only=True):
    snapshot: Word


class DeleteSnapshot(Change, kw_only=True):
    snapshot: Word


class ExportSnapshot(Request, kw_only=True):
    """``memory``: with it, if there is any; ``template``: with the layers that a template has."""

    snapshot: Word
    memory: bool = True
    template: bool = True


class ImportSnapshot(Change, kw_only=True):
    """The head of an archive, which follows."""

    name: Word | None = None


class ListSnapshots(Request, kw_only=True):
    labels: Labels | None = None


class Fork(Change, kw_only=True):
    source: Word
    n: Whole = 1
    prefix: Word | None = None
    names: list[Word] | None = None
    memory: bool = True
    wait_s: Wait = 0
    type: Word | None = None
    cpus: Number | None = None
    cpu_weight: Whole | None = None
    mem_mb: Whole | None = None
    disk_mb: Whole | None = None
    env: dict[str, str] = {}
    egress: Word | None = None
    egress_allow: Rules | None = None
    ttl_min: Number | None = None
    auto_stop_min: Number | None = None
    ephemeral: bool | None = None
    labels: Labels | None = None
    lease: Lease | None = None


class TakeCheckpoint(SandboxChange, kw_only=True):
    label: Word | None = None
    keep_last: Whole | None = None
    memory: bool = True


class DeleteCheckpoint(SandboxChange, kw_only=True):
    checkpoint: Word


class Rewind(SandboxChange, kw_only=True):
    to: Word | None = None
    memory: bool = True


class DiffRequest(SandboxRequest, kw_only=True):
    """``since``: a snapshot or checkpoint; None is what the sandbox started from."""

    since: Word | None = None


class Apply(SandboxChange, kw_only=True):
    """``paths``: only these, and what is below them."""

    changes: list[PathDifference]
    paths: list[Line] | None = None
    user: Word | None = None


class Variant(Request, kw_only=True):
    """One way to try: ``command`` (for ``/bin/sh -c``) or ``argv``, after ``files`` were written."""

    name: Word
    command: str | None = None
    argv: list[str] | None = None
    files: dict[str, bytes] = {}
    env: dict[str, str] = {}


class Explore(Change, kw_only=True):
    """``keep="choose"``: all copies are kept until an :class:`ExploreChoice` names one."""

    source: Word
    variants: list[Variant]
    timeout_s: Number | None = None
    parallel: Whole | None = None
    keep: Literal["fastest", "first", "choose"] = "fastest"
    ephemeral: bool | None = None
    lease: Lease | None = None


class ExploreChoice(Change, kw_only=True):
    """``explore`` is the request id of the Explore, ``winner`` a variant's name or None."""

    explore: Word
    winner: Word | None = None


class ExploreEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of an explore: ``frozen``, a variant that is ``started`` (its copy runs) or has a
    ``result`` (as yet without a diff), ``choose`` with an outcome to choose from, ``done``."""

    kind: Literal["frozen", "started", "result", "choose", "done"]
    name: str = ""
    result: VariantResult | None = None
    outcome: ExploreResult | None = None


class Tree(Request, kw_only=True):
    root: Word | None = None


class Audit(Request, kw_only=True):
    """With ``seq``, that one record, whatever else is given."""

    seq: Offset | None = None
    sandbox: Word | None = None
    since: Annotated[float, msgspec.Meta(ge=-6e10, le=2.5e11)] | None = None
    limit: Whole = 10_000


class VerifyAudit(Request, kw_only=True):
    """``head``: number and hash of a record that has to be there."""

    head: tuple[int, str] | None = None


class CapacityRequest(Request, kw_only=True):
    source: Word | None = None


class Deposit(Change, kw_only=True):
    """The head of what a template is to be made from; the bytes follow. ``id`` (hexadecimal) is the
    client's, and names it in the request that uses it up."""

    id: Word


class TemplateSpec(Request, kw_only=True):
    """How to make a template: from ``dockerfile`` (its text) and the deposited context, from
    ``image``, or, with neither, the one that is called ``name``.

    ``warm`` is its warm command (for ``/bin/sh -c``, or an argv; true: the image's own), ``ready``
    how it is seen to be ready, ``engine`` what its sandboxes run on unless they say. ``auths`` are
    logins by registry, ``user:password``. ``pull``: ask registries again for images that are there already.
    """

    name: Word | None = None
    dockerfile: str | None = None
    build_args: dict[str, str] = {}
    image: Line | None = None
    format: ImageFormat = "registry"
    deposit: Word | None = None
    pull: bool = False
    auths: dict[Word, str] = {}
    warm: str | list[str] | bool | None = None
    ready: str | int | None = None
    ready_timeout_s: Number | None = None
    engine: str | None = None


class MakeTemplate(Change, kw_only=True):
    spec: TemplateSpec


class Prepare(Change, kw_only=True):
    """All of ``specs``, ``parallel`` at a time; then templates that nothing uses go, least recently
    used first, until those that were built or pulled fit into ``disk_budget_mb``."""

    specs: list[TemplateSpec]
    parallel: Whole | None = None
    disk_budget_mb: Whole | None = None


class TemplateEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event while templates are made: progress (``step``, ``output``, ``note``) with ``text``,
    or the end of the spec at ``index``: ``done`` with ``template``, ``failed`` with ``error``
    (see errors.to_wire)."""

    kind: Literal["step", "output", "note", "done", "failed"]
    index: Whole = 0
    text: str = ""
    template: TemplateInfo | None = None
    error: dict[str, Any] | None = None


class DeleteTemplate(Change, kw_only=True):
    name: Word


class WarmTemplate(Change, kw_only=True):
    """Make the memory image from which sandboxes of ``type`` start."""

    name: Word
    type: Word | None = None


class Events(Request, kw_only=True):
    """What happens from now on, of one sandbox or of all."""

    sandbox: Word | None = None


class Shutdown(Change, kw_only=True):
    """Stop the daemon. ``keep`` leaves sandboxes running for the next daemon to find."""

    sandboxes: Literal["keep", "stop", "delete"] = "keep"


class Empty(Request, kw_only=True):
    pass


class StreamEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a process's stream, daemon to client.

    The first is ``started`` (with ``pid``), then ``stdout`` and ``stderr`` with ``data``
    that begins at ``offset`` bytes, ``gap`` where output was no longer kept, and last
    ``exit`` with ``result`` (the fields of an ExecResult) or ``error`` (see errors.to_wire).
    """

    kind: Literal["started", "stdout", "stderr", "gap", "exit", "error"]
    pid: Pid = 0
    data: bytes = b""
    offset: Offset = 0
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
