"""What a client may ask of the daemon: one struct per verb, the same on both sides.

The client fills one in, the daemon decodes and validates it by type, and the yard takes
it as its argument. ``request_id`` makes a changing verb idempotent: the daemon keeps the
reply and gives it again to whoever asks with the same id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Labels = dict[str, str]


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Change(Request):
    """A request that changes something; ``request_id`` is made up by the client."""

    request_id: str = ""


class Lease(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Who an ephemeral sandbox lives for: a local process (its pid and start time in
    clock ticks since boot), or a named run."""

    pid: int | None = None
    start_time: int | None = None
    run: str | None = None


class CreateSandbox(Change):
    name: str | None = None
    template: str | None = None
    image: str | None = None
    snapshot: str | None = None
    type: str | None = None
    cpus: float | None = None
    mem_mb: int | None = None
    disk_mb: int | None = None
    env: dict[str, str] = {}
    user: str | None = None
    egress: str | None = None
    egress_allow: list[str] | None = None
    ttl_min: float | None = None
    auto_stop_min: float | None = None
    ephemeral: bool = False
    labels: Labels = {}
    engine: str | None = None
    memory: bool = True
    wait: bool = True
    wait_s: float = 0
    lease: Lease | None = None


class SandboxRequest(Request):
    """A question about one sandbox, by id or name."""

    sandbox: str


class SandboxChange(Change):
    sandbox: str


class ListSandboxes(Request):
    labels: Labels | None = None
    state: str | None = None


class RenameSandbox(SandboxChange):
    name: str


class SetTtl(SandboxChange):
    ttl_min: float | None = None


class SetEgress(SandboxChange):
    egress: str | None = None
    egress_allow: list[str] | None = None


class Adopt(SandboxChange):
    lease: Lease


class ReleaseLease(Change):
    """End every lease that this client took; ephemeral sandboxes among them go."""

    lease: Lease
    sandboxes: list[str]


class WaitSandbox(SandboxRequest):
    state: str = "running"
    timeout_s: float | None = None


class StopSandbox(SandboxChange):
    pass


class StartSandbox(SandboxChange):
    lease: Lease | None = None


class DeleteSandbox(SandboxChange):
    pass


class DeleteSandboxes(Change):
    labels: Labels


class ExecOptions(Change):
    """``argv`` or ``command`` (for ``/bin/sh -c``), one of them."""

    argv: list[str] | None = None
    command: str | None = None
    timeout_s: float | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    login: bool = False


class Exec(ExecOptions):
    """``keep`` says what of an over-long output is kept: its head, its tail or both ends."""

    sandbox: str
    stdin: bytes | None = None
    merge: bool = False
    max_output: int = 10 << 20
    keep: Literal["head", "tail", "both"] = "both"


class ExecMany(Change):
    commands: list[Exec]


class Spawn(ExecOptions):
    sandbox: str
    pty: bool = False
    rows: int = 24
    cols: int = 80
    detach: bool = False
    merge: bool = False


class Attach(Request):
    """``pid`` is the process's number inside the sandbox; output goes on from
    ``stdout_offset`` and ``stderr_offset`` (bytes since the start) where it is still kept."""

    sandbox: str
    pid: int
    stdout_offset: int = 0
    stderr_offset: int = 0


class ProcessRequest(Change):
    sandbox: str
    pid: int


class Write(ProcessRequest):
    data: bytes = b""
    eof: bool = False


class Resize(ProcessRequest):
    rows: int
    cols: int


class Signal(ProcessRequest):
    signal: int


class WaitProcess(ProcessRequest):
    timeout_s: float | None = None


class PathRequest(Request):
    sandbox: str
    path: str
    user: str | None = None


class PathChange(Change):
    sandbox: str
    path: str
    user: str | None = None


class WriteFiles(Change):
    """Small files in one call; a large one goes through the streaming upload route."""

    sandbox: str
    files: dict[str, bytes]
    mode: int | None = None
    user: str | None = None


class ReadFiles(Request):
    sandbox: str
    paths: list[str]
    user: str | None = None


class MoveFile(PathChange):
    to: str


class RemoveFile(PathChange):
    recursive: bool = True


class TakeSnapshot(SandboxChange):
    name: str | None = None
    labels: Labels = {}
    memory: bool = True


class SnapshotRequest(Request):
    snapshot: str


class DeleteSnapshot(Change):
    snapshot: str


class ListSnapshots(Request):
    labels: Labels | None = None


class Fork(Change):
    source: str
    n: int = 1
    prefix: str | None = None
    names: list[str] | None = None
    memory: bool = True
    wait_s: float = 0
    type: str | None = None
    cpus: float | None = None
    mem_mb: int | None = None
    disk_mb: int | None = None
    env: dict[str, str] = {}
    egress: str | None = None
    egress_allow: list[str] | None = None
    ttl_min: float | None = None
    auto_stop_min: float | None = None
    ephemeral: bool | None = None
    labels: Labels | None = None
    lease: Lease | None = None


class TakeCheckpoint(SandboxChange):
    label: str | None = None
    keep_last: int | None = None
    memory: bool = True


class DeleteCheckpoint(SandboxChange):
    checkpoint: str


class Rewind(SandboxChange):
    to: str | None = None


class Tree(Request):
    root: str | None = None


class Audit(Request):
    sandbox: str | None = None
    since: float | None = None
    limit: int = 10_000


class CapacityRequest(Request):
    source: str | None = None


class DeleteTemplate(Change):
    name: str


class Empty(Request):
    pass


class StreamEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a process's stream, daemon to client.

    The first is ``started`` (with ``pid``), then ``stdout`` and ``stderr`` with ``data``
    that begins at ``offset`` bytes, ``gap`` where output was no longer kept, and last
    ``exit`` with ``result`` (the fields of an ExecResult) or ``error`` (see errors.to_wire).
    """

    kind: Literal["started", "stdout", "stderr", "gap", "exit", "error"]
    pid: int = 0
    data: bytes = b""
    offset: int = 0
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
