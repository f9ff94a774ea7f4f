"""A small client that keeps its sandboxes in memory and runs their commands on this machine.

It answers as API.md says a client does, for the verbs that the command line's own logic
needs; what a sandbox is, the integration tests show on the real one.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkyard.errors import CapacityError, ConflictError, InvalidRequestError, NotFoundError
from forkyard.requests import StreamEvent
from forkyard.types import (
    AuditRecord,
    CheckpointInfo,
    ExecResult,
    FileInfo,
    ForkResult,
    SandboxInfo,
    SnapshotInfo,
    TemplateInfo,
    TreeNode,
    Usage,
)


def box(number: int, name: str | None = None, **fields: Any) -> SandboxInfo:
    """A sandbox as it is right after its creation."""
    values: dict[str, Any] = {
        "id": f"sb_{number:010d}", "name": name or f"box-{number}", "state": "running", "engine": "gvisor",
        "host": "here", "template": "base", "snapshot": None, "parent": None, "checkpoint": None,
        "type": "small", "cpus": 1, "mem_mb": 1024, "disk_mb": 10240, "user": "user",
        "workdir": "/home/user", "egress": "deny", "egress_allow": [], "labels": {}, "ttl_min": None,
        "auto_stop_min": None, "ephemeral": False, "created_at": time.time(), "last_active_at": time.time(),
        "expires_at": None, "resumed_from": None, "memory_restored": False, "tainted": False,
        "start_ms": 71.4,
    }
    return SandboxInfo(**(values | fields))


class LocalProcess:
    """A command on this machine, behind the interface of ``Process``."""

    def __init__(
        self, argv: list[str], timeout_s: float | None, cwd: str | None, env: dict[str, str]
    ) -> None:
        self._timeout_s = timeout_s
        self._timed_out = False
        self._child = subprocess.Popen(
            argv, cwd=cwd, env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True)
        self._events: queue.SimpleQueue[StreamEvent | None] = queue.SimpleQueue()
        self.signals: list[int] = []

    @property
    def pid(self) -> int:
        return self._child.pid

    def _read(self, kind: Any, stream: Any) -> None:
        while data := os.read(stream.fileno(), 65536):
            self._events.put(StreamEvent(kind=kind, data=data))
        self._events.put(None)

    def _expire(self) -> None:
        self._timed_out = True
        os.killpg(self._child.pid, signal.SIGKILL)

    def stream(self) -> Iterator[StreamEvent]:
        timer = threading.Timer(self._timeout_s, self._expire) if self._timeout_s else None
        readers = [threading.Thread(target=self._read, args=pair) for pair in
                   (("stdout", self._child.stdout), ("stderr", self._child.stderr))]
        for thread in [*readers, *([timer] if timer else [])]:
            thread.daemon = True
            thread.start()
        left = len(readers)
        while left:
            event = self._events.get()
            if event is None:
                left -= 1
            else:
                yield event
        if timer:
            timer.cancel()
        for stream in (self._child.stdout, self._child.stderr):
            assert stream is not None
            stream.close()

    def write(self, data: bytes) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(data)
        self._child.stdin.flush()

    def close_stdin(self) -> None:
        assert self._child.stdin is not None
        if self._child.poll() is not None:
            raise NotFoundError("the process has ended")
        self._child.stdin.close()

    def resize(self, rows: int, cols: int) -> None:
        raise AssertionError("no terminal here")

    def signal(self, number: int) -> None:
        self.signals.append(int(number))
        os.killpg(self._child.pid, number)

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        code = self._child.wait(timeout_s)
        signalled = -code if code < 0 else None
        return ExecResult(ok=code == 0, exit_code=128 - code if code < 0 else code, signal=signalled,
                          timed_out=self._timed_out, duration_ms=1.0)


class MemoryClient:
    """See the module. ``calls`` lists what was asked, as ``(name, arguments)``."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.boxes: dict[str, SandboxInfo] = {}
        self.snaps: dict[str, SnapshotInfo] = {}
        self.points: dict[str, CheckpointInfo] = {}
        self.files: dict[tuple[str, str], bytes | None] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.processes: list[LocalProcess] = []
        self.closed = False
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self.closed = True

    def _find(self, sandbox: str) -> SandboxInfo:
        for one in self.boxes.values():
            if sandbox in (one.id, one.name):
                return one
        raise NotFoundError(f"no sandbox {sandbox!r}", hint="forkyard ls shows them", sandbox=sandbox)

    def _set(self, info: SandboxInfo, **fields: Any) -> SandboxInfo:
        self.boxes[info.id] = replace(info, **fields)
        return self.boxes[info.id]

    def _make(self, name: str | None, **fields: Any) -> SandboxInfo:
        if len(self.boxes) >= self.room:
            raise CapacityError(f"{self.room} sandboxes are the most", hint="delete some")
        if any(one.name == name for one in self.boxes.values()):
            raise ConflictError(f"the name {name!r} is taken")
        made = box(next(self._numbers), name, **fields)
        self.boxes[made.id] = made
        return made

    def create_sandbox(self, name: str | None = None, **options: Any) -> SandboxInfo:
        self.calls.append(("create_sandbox", {"name": name, **options}))
        for rule in options.get("egress_allow", []):
            if " " in rule:
                raise InvalidRequestError(f"{rule!r} is no host")
        snapshot = options.get("snapshot")
        known = {"type", "cpus", "mem_mb", "disk_mb", "labels", "ttl_min", "egress_allow", "user", "template"}
        return self._make(
            name, **{key: value for key, value in options.items() if key in known}, snapshot=snapshot,
            memory_restored=snapshot is not None and options.get("memory", True), resumed_from=snapshot)

    def get_sandbox(self, sandbox: str) -> SandboxInfo:
        return self._find(sandbox)

    def list_sandboxes(
        self, labels: dict[str, str] | None = None, state: str | None = None
    ) -> list[SandboxInfo]:
        return [one for one in self.boxes.values()
                if (labels or {}).items() <= one.labels.items() and state in (None, one.state)]

    def rename_sandbox(self, sandbox: str, name: str) -> SandboxInfo:
        return self._set(self._find(sandbox), name=name)

    def stop_sandbox(self, sandbox: str) -> SandboxInfo:
        return self._set(self._find(sandbox), state="stopped")

    def start_sandbox(self, sandbox: str, memory: bool = True) -> SandboxInfo:
        return self._set(self._find(sandbox), state="running", memory_restored=memory)

    def delete_sandbox(self, sandbox: str) -> SandboxInfo | None:
        try:
            return self.boxes.pop(self._find(sandbox).id)
        except NotFoundError:
            return None

    def delete_sandboxes(self, labels: dict[str, str]) -> None:
        for one in self.list_sandboxes(labels):
            del self.boxes[one.id]

    def usage(self, sandbox: str) -> Usage:
        self._find(sandbox)
        return Usage(cpu_ms=12.0, mem_mb=20.0, disk_mb=1.0, processes=2)

    def spawn(self, sandbox: str, command: str | list[str], *, timeout_s: float | None = None,
              cwd: str | None = None, env: dict[str, str] | None = None, **options: Any) -> LocalProcess:
        self._find(sandbox)
        self.calls.append(("spawn", {"sandbox": sandbox, "command": command, "timeout_s": timeout_s,
                                     "cwd": cwd, "env": env, **options}))
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        self.processes.append(LocalProcess(argv, timeout_s, cwd, env or {}))
        return self.processes[-1]

    def stat(self, sandbox: str, path: str) -> FileInfo:
        key = (self._find(sandbox).id, path.rstrip("/"))
        if key not in self.files:
            raise NotFoundError(f"no file {path!r}", sandbox=sandbox)
        data = self.files[key]
        return FileInfo(path=path, name=Path(path).name, type="dir" if data is None else "file",
                        size=len(data or b""), mode=0o644, uid=0, gid=0, mtime=0)

    def write_file(self, sandbox: str, path: str, data: bytes, **options: Any) -> None:
        self.files[self._find(sandbox).id, path] = data

    def read_file(self, sandbox: str, path: str, **options: Any) -> bytes:
        self.stat(sandbox, path)
        data = self.files[self._find(sandbox).id, path]
        assert data is not None
        return data

    def upload(self, sandbox: str, local: str, remote: str, **options: Any) -> None:
        data = None if Path(local).is_dir() else Path(local).read_bytes()
        self.files[self._find(sandbox).id, remote] = data

    def download(self, sandbox: str, remote: str, local: str, **options: Any) -> None:
        Path(local).write_bytes(self.read_file(sandbox, remote))

    def snapshot(self, sandbox: str, name: str | None = None, **options: Any) -> SnapshotInfo:
        source = self._find(sandbox)
        made = SnapshotInfo(
            id=f"0c9d3f0e-58b1-4d51-93a5-{len(self.snaps):012x}", name=name, source=source.id,
            labels=options.get("labels", {}), size_bytes=4096, exclusive_bytes=1024,
            memory=options.get("memory", True), engine="gvisor", created_at=time.time(), paused_ms=21.04)
        self.snaps[made.id] = made
        return made

    def list_snapshots(self, labels: dict[str, str] | None = None) -> list[SnapshotInfo]:
        return list(self.snaps.values())

    def delete_snapshot(self, snapshot: str) -> None:
        for one in list(self.snaps.values()):
            if snapshot in (one.id, one.name):
                del self.snaps[one.id]
                return
        raise NotFoundError(f"no snapshot {snapshot!r}")

    def fork(self, source: str, n: int = 1, **options: Any) -> ForkResult:
        self.calls.append(("fork", {"source": source, "n": n, **options}))
        parent = self._find(source)
        prefix = options.get("prefix")
        names = options.get("names") or [f"{prefix}{at}" if prefix else None for at in range(1, n + 1)]
        forks = [self._make(name, parent=parent.id, memory_restored=True) for name in names]
        return ForkResult(snapshot="0c9d3f0e-58b1-4d51-93a5-3a1e8c1a6a4b", forks=forks, paused_ms=20.0,
                          total_ms=40.0 * n)

    def checkpoint(
        self, sandbox: str, label: str | None = None, keep_last: int | None = None
    ) -> CheckpointInfo:
        source = self._find(sandbox)
        made = CheckpointInfo(
            id=f"ck_{next(self._numbers):010d}", label=label, sandbox=source.id, parent=source.checkpoint,
            memory=True, size_bytes=4096, created_at=time.time(), paused_ms=20.0)
        self.points[made.id] = made
        self._set(source, checkpoint=made.id)
        return made

    def list_checkpoints(self, sandbox: str) -> list[CheckpointInfo]:
        source = self._find(sandbox)
        return [point for point in self.points.values() if point.sandbox == source.id]

    def delete_checkpoint(self, sandbox: str, checkpoint: str) -> None:
        if self.points.pop(checkpoint, None) is None:
            raise NotFoundError(f"no checkpoint {checkpoint!r}")

    def rewind(self, sandbox: str, to: str | None = None, memory: bool = True) -> SandboxInfo:
        source = self._find(sandbox)
        if source.checkpoint is None:
            raise ConflictError(f"{sandbox} has no checkpoint")
        return self._set(source, checkpoint=to or source.checkpoint, memory_restored=memory)

    def tree(self, root: str | None = None) -> list[TreeNode]:
        return [TreeNode(id="base", kind="template", name="base", parent=None, state="ready", created_at=0),
                *(TreeNode(id=one.id, kind="sandbox", name=one.name, parent=one.parent or "base",
                           state=one.state, created_at=one.created_at) for one in self.boxes.values())]

    def list_templates(self) -> list[TemplateInfo]:
        return [TemplateInfo(name="base", key="k", user="user", workdir="/home/user", size_bytes=1 << 28,
                             warm=True, created_at=time.time())]

    def delete_template(self, name: str) -> None:
        if name != "base":
            raise NotFoundError(f"no template {name!r}")
        raise ConflictError("base is used by sandboxes")

    def audit(self, sandbox: str | None = None, since: float | None = None) -> list[AuditRecord]:
        return [AuditRecord(seq=1, time=1.5, kind="exec", sandbox="sb_1", actor="uid:0",
                            data={"command": "echo a\nb", "exit_code": 0}, prev="", hash="")]
