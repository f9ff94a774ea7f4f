"""The contract between client and daemon: every verb, its types, and how bodies are framed.

``POST /v1/<verb>`` with the msgpack (or JSON) of ``request``, answered by the same encoding
of ``reply``, or by ``STATUS[code]`` with the data of :func:`forkyard.errors.to_wire`.
:data:`STREAMS` answer with frames that go on until the end; :data:`FILES` carry raw bytes.
Every reply has the header ``forkyard-wire``; it is :data:`API_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from forkyard import access
from forkyard import requests as rq
from forkyard import types as ty

API_VERSION = 1
VERSION_HEADER = "forkyard-wire"
RESTARTING_HEADER = "forkyard-restarting"
"""On a 503: the daemon goes, the same request may be made of the next one."""

RETRY_AFTER_HEADER = "retry-after"
"""On a 429: nothing was begun, and the same request may be made after so many seconds."""

MSGPACK = "application/msgpack"
JSON = "application/json"
EXEC_STREAM = "application/vnd.forkyard.exec-stream"
"""Body of an ``exec`` whose stdin follows: one frame with the msgpack request, then raw bytes."""

MAX_BODY = 32 << 20
"""The longest request body that is not a stream."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        at: Attribute of the yard that has the method: ``yard`` itself, ``execs`` or ``files``; or ``daemon``,
            or ``access`` (tokens and the listener).
        method: The method's name there.
        changes: It takes a ``request_id`` and is done once for each.
        gone: What becomes of it when its last client goes away: ``finish`` it or ``cancel`` it.
        keep: The reply is stored and given again to who repeats the request id.
    """

    request: type[rq.Request]
    reply: Any
    changes: bool = False
    gone: Literal["finish", "cancel"] = "finish"
    keep: bool = True
    at: Literal["yard", "execs", "files", "daemon", "access"] = "yard"
    method: str = ""


VERBS: dict[str, Verb] = {
    # about the daemon
    "version": Verb(rq.Empty, ty.VersionInfo, at="daemon"),
    "health": Verb(rq.Empty, ty.Health),
    "capacity": Verb(rq.CapacityRequest, ty.Capacity),
    "shutdown": Verb(rq.Shutdown, None, changes=True, keep=False, at="daemon"),
    "listen": Verb(access.Listen, access.Listening, changes=True, keep=False, at="access"),
    # The reply holds the token itself: it is never kept.
    "new_token": Verb(access.NewToken, access.MadeToken, changes=True, keep=False, at="access"),
    "list_tokens": Verb(rq.Empty, list[access.TokenInfo], at="access"),
    "revoke_token": Verb(access.RevokeToken, access.TokenInfo, changes=True, keep=False, at="access"),
    # sandboxes
    "create_sandbox": Verb(rq.CreateSandbox, ty.SandboxInfo, changes=True, gone="cancel"),
    "get_sandbox": Verb(rq.SandboxRequest, ty.SandboxInfo),
    "list_sandboxes": Verb(rq.ListSandboxes, list[ty.SandboxInfo]),
    "rename_sandbox": Verb(rq.RenameSandbox, ty.SandboxInfo, changes=True),
    "set_ttl": Verb(rq.SetTtl, ty.SandboxInfo, changes=True),
    "set_egress": Verb(rq.SetEgress, ty.SandboxInfo, changes=True),
    "expose": Verb(rq.Expose, str, changes=True),
    "adopt": Verb(rq.Adopt, ty.SandboxInfo, changes=True),
    "release_lease": Verb(rq.ReleaseLease, None, changes=True),
    "wait_sandbox": Verb(rq.WaitSandbox, ty.SandboxInfo, gone="cancel"),
    "usage": Verb(rq.SandboxRequest, ty.Usage),
    "stop_sandbox": Verb(rq.StopSandbox, ty.SandboxInfo, changes=True),
    "start_sandbox": Verb(rq.StartSandbox, ty.SandboxInfo, changes=True),
    "delete_sandbox": Verb(rq.DeleteSandbox, ty.SandboxInfo | None, changes=True),
    "delete_sandboxes": Verb(rq.DeleteSandboxes, list[ty.SandboxInfo], changes=True),
    # running things
    "exec": Verb(rq.Exec, ty.ExecResult, changes=True, gone="cancel", keep=False, at="execs", method="run"),
    "exec_many": Verb(
        rq.ExecMany, list[rq.ExecOutcome], changes=True, gone="cancel", keep=False, at="daemon"
    ),
    "run_code": Verb(rq.RunCode, ty.CodeResult, changes=True, gone="cancel", keep=False),
    "git": Verb(rq.Git, ty.ExecResult, changes=True, gone="cancel", keep=False),
    "processes": Verb(rq.SandboxRequest, list[ty.ProcessInfo], at="execs"),
    "write": Verb(rq.Write, None, changes=True, keep=False, at="execs"),
    "resize": Verb(rq.Resize, None, changes=True, keep=False, at="execs"),
    "signal": Verb(rq.Signal, None, changes=True, keep=False, at="execs"),
    "wait_process": Verb(
        rq.WaitProcess, ty.ExecResult, changes=True, gone="cancel", keep=False, at="execs", method="wait"
    ),
    # files
    "write_files": Verb(rq.WriteFiles, None, changes=True, keep=False, at="files"),
    "read_files": Verb(rq.ReadFiles, dict[str, bytes], at="files"),
    "list_files": Verb(rq.PathRequest, list[ty.FileInfo], at="files"),
    "stat": Verb(rq.PathRequest, ty.FileInfo, at="files"),
    "make_dir": Verb(rq.MakeDir, None, changes=True, at="files"),
    "move": Verb(rq.MoveFile, None, changes=True, at="files"),
    "remove": Verb(rq.RemoveFile, None, changes=True, at="files"),
    # snapshots, forks, checkpoints
    "snapshot": Verb(rq.TakeSnapshot, ty.SnapshotInfo, changes=True),
    "list_snapshots": Verb(rq.ListSnapshots, list[ty.SnapshotInfo]),
    "get_snapshot": Verb(rq.SnapshotRequest, ty.SnapshotInfo),
    "delete_snapshot": Verb(rq.DeleteSnapshot, None, changes=True),
    "fork": Verb(rq.Fork, ty.ForkResult, changes=True, gone="cancel"),
    "checkpoint": Verb(rq.TakeCheckpoint, ty.CheckpointInfo, changes=True),
    "list_checkpoints": Verb(rq.SandboxRequest, list[ty.CheckpointInfo]),
    "delete_checkpoint": Verb(rq.DeleteCheckpoint, None, changes=True),
    "rewind": Verb(rq.Rewind, ty.SandboxInfo, changes=True),
    "tree": Verb(rq.Tree, list[ty.TreeNode]),
    # what differs, what is best
    "diff": Verb(rq.DiffRequest, ty.Diff, gone="cancel"),
    "apply": Verb(rq.Apply, ty.Transfer, changes=True, keep=False),
    "explore_choose": Verb(rq.ExploreChoice, None, changes=True, keep=False),
    # templates, watching
    "list_templates": Verb(rq.Empty, list[ty.TemplateInfo]),
    "delete_template": Verb(rq.DeleteTemplate, None, changes=True),
    "audit": Verb(rq.Audit, list[ty.AuditRecord]),
    "verify_audit": Verb(rq.VerifyAudit, ty.AuditVerdict, gone="cancel"),
}

STREAMS: dict[str, Verb] = {
    "spawn": Verb(rq.Spawn, rq.StreamEvent, changes=True, at="execs"),
    "attach": Verb(rq.Attach, rq.StreamEvent, at="execs"),
    "events": Verb(rq.Events, ty.Event),
    "hold_lease": Verb(access.HoldLease, ty.Event),
    "build_template": Verb(rq.MakeTemplate, rq.TemplateEvent, changes=True),
    "pull_template": Verb(rq.MakeTemplate, rq.TemplateEvent, changes=True),
    "prepare": Verb(rq.Prepare, rq.TemplateEvent, changes=True),
    "explore": Verb(rq.Explore, rq.ExploreEvent, changes=True, gone="cancel"),
}
"""Replies are frames, each the encoding of one ``reply``; closing the connection ends them."""

FILES: dict[str, Verb] = {
    "read_file": Verb(rq.PathRequest, bytes, at="files", method="read_stream"),
    "write_file": Verb(rq.WriteFile, None, changes=True, at="files", method="write_stream"),
    "download": Verb(rq.PathRequest, bytes, at="files", method="download_tar"),
    "upload": Verb(rq.PathChange, None, changes=True, at="files", method="upload_tar"),
    "deposit": Verb(rq.Deposit, None, changes=True),
    "export_snapshot": Verb(rq.ExportSnapshot, bytes),
    "import_snapshot": Verb(rq.ImportSnapshot, ty.SnapshotInfo, changes=True),
}
"""Those that change something take one frame with the request and then raw bytes; the others
take the request as every verb does and reply with frames of raw bytes. Tar archives hold
paths relative to ``path``."""

STATUS: dict[str, int] = {
    "invalid_request": 400,
    "access_denied": 403,
    "not_found": 404,
    "conflict": 409,
    "sandbox_lost": 410,
    "corrupt_snapshot": 422,
    "capacity": 429,
    "internal": 500,
    "fork_failed": 500,
    "command_failed": 500,
    "unsupported": 501,
    "unavailable": 503,
    "deadline": 504,
}

_ERROR_BIT = 0x8000_0000
END_FRAME = b"\0\0\0\0"


def frame(data: bytes | bytearray | memoryview) -> bytes:
    """``data`` as one frame: its length in 4 bytes, big end first, and itself. Empty data is
    the end of the stream, so a caller with nothing to say sends nothing."""
    return b"".join((len(data).to_bytes(4, "big"), data))


def error_frame(data: bytes) -> bytes:
    """The last frame of a stream that failed: the encoding of :func:`forkyard.errors.to_wire`."""
    return (len(data) | _ERROR_BIT).to_bytes(4, "big") + data


class FrameReader:
    """Takes a stream of frames apart, however the transport cut it.

    ``feed`` gives payloads: whole frames, or with ``partial=True`` pieces of them as they come
    (views of what was fed, so nothing is copied). ``ended`` is set by the end frame, and
    ``error`` holds the body of an error frame.
    """

    def __init__(self, *, partial: bool = False, limit: int = MAX_BODY) -> None:
        self.ended = False
        self.error: bytes | None = None
        self._partial = partial
        self._limit = limit
        self._head = bytearray()
        self._left = 0
        self._parts: list[memoryview] = []
        self._in_error = False

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = []
        view = memoryview(data)
        at, size = 0, len(data)
        while at < size and not self.ended:
            if not self._left:
                take = min(4 - len(self._head), size - at)
                self._head += view[at : at + take]
                at += take
                if len(self._head) < 4:
                    break
                self._begin()
                continue
            piece = view[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._partial and not self._in_error:
                out.append(piece)
                continue
            self._parts.append(piece)
            if not self._left:
                whole = b"".join(self._parts)
                self._parts.clear()
                if self._in_error:
                    self.error, self.ended = whole, True
                else:
                    out.append(whole)
        return out

    def _begin(self) -> None:
        size = int.from_bytes(self._head, "big")
        self._head.clear()
        self._in_error = bool(size & _ERROR_BIT)
        self._left = size & ~_ERROR_BIT
        if self._left > self._limit:
            raise ValueError(f"a frame of {self._left} bytes is longer than {self._limit}")
        if not self._left:
            self.ended = True
