"""A yard in memory, for the tests of the daemon's surface and of the client: its sandboxes are
directories and its commands are the host's own, run there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from memory_files import MemoryFiles

from forkyard import errors, verbs
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.access import HoldLease
from forkyard.daemon.access import Access
from forkyard.daemon.app import App
from forkyard.daemon.server import bind, serving
from forkyard.requests import Caller

CHUNK = 256 << 10


class MemoryReplies:
    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, int], bytes] = {}

    async def get(self, request_id: str, verb: str, uid: int) -> bytes | None:
        return self.kept.get((request_id, verb, uid))

    async def put(self, request_id: str, verb: str, uid: int, body: bytes) -> None:
        self.kept[(request_id, verb, uid)] = body


class Running:
    def __init__(self, process: asyncio.subprocess.Process, detach: bool) -> None:
        self.process = process
        self.detach = detach
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.changed = asyncio.Event()
        self.result: ty.ExecResult | None = None

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryExecs:
    def __init__(self, yard: MemoryYard) -> None:
        self._yard = yard
        self._tasks = yard.tasks
        self.running: dict[int, Running] = {}
        self.kept: dict[str, asyncio.subprocess.Process] = {}
        self.runs = 0
        self.cancelled = 0

    async def _start(
        self, request: rq.Exec | rq.Spawn, stdin: int | None = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        argv = request.argv or ["/bin/sh", "-c", request.command or ""]
        return await asyncio.create_subprocess_exec(
            *argv,
            cwd=self._yard.root(request.sandbox),
            env={**os.environ, **request.env},
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def run(
        self, request: rq.Exec, caller: Caller, stdin: AsyncIterator[bytes] | None = None
    ) -> ty.ExecResult:
        if request.request_id in self.kept:
            process = self.kept.pop(request.request_id)
        else:
            process = await self._start(request)
            self.runs += 1
        assert process.stdin is not None

        async def feed() -> None:
            with contextlib.suppress(ConnectionError):
                if stdin is not None:
                    async for data in stdin:
                        process.stdin.write(data)
                        await process.stdin.drain()
                elif request.stdin:
                    process.stdin.write(request.stdin)
                process.stdin.close()

        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(feed())
                out = group.create_task(process.stdout.read())
                err = group.create_task(process.stderr.read())
                await process.wait()
                feeding.cancel()
        except asyncio.CancelledError:
            if self._yard.keeping:
                self.kept[request.request_id] = process
                raise
            self.cancelled += 1
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return self._result(process.returncode, out.result(), err.result())

    @staticmethod
    def _result(code: int | None, out: bytes = b"", err: bytes = b"") -> ty.ExecResult:
        code = code or 0
        number = -code if code < 0 else None
        return ty.ExecResult(
            ok=code == 0,
            exit_code=128 - code if code < 0 else code,
            signal=number,
            stdout_bytes=out,
            stderr_bytes=err,
        )

    async def spawn(self, request: rq.Spawn, caller: Caller) -> AsyncIterator[rq.StreamEvent]:
        process = await self._start(request)
        running = self.running[process.pid] = Running(process, request.detach)
        self._tasks.create_task(self._collect(running))
        try:
            async for event in self._follow(running, 0, 0):
                yield event
        finally:
            if running.result is None and not request.detach and not self._yard.keeping:
                self.cancelled += 1
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def attach(self, request: rq.Attach, caller: Caller) -> AsyncIterator[rq.StreamEvent]:
        running = self._get(request.pid)
        async for event in self._follow(running, request.stdout_offset, request.stderr_offset):
            yield event

    async def _collect(self, running: Running) -> None:
        async def pull(kind: str, reader: asyncio.StreamReader) -> None:
            while data := await reader.read(CHUNK):
                running.output[kind] += data
                running.wake()

        async with asyncio.TaskGroup() as group:
            group.create_task(pull("stdout", running.process.stdout))
            group.create_task(pull("stderr", running.process.stderr))
        running.result = self._result(await running.process.wait())
        running.wake()

    async def _follow(self, running: Running, out: int, err: int) -> AsyncIterator[rq.StreamEvent]:
        yield rq.StreamEvent(kind="started", pid=running.process.pid)
        at = {"stdout": out, "stderr": err}
        while True:
            changed, ended = running.changed, running.result
            for kind, data in running.output.items():
                if new := bytes(data[at[kind] :]):
                    offset, at[kind] = at[kind], len(data)
                    yield rq.StreamEvent(kind=kind, data=new, offset=offset)
            if ended is not None:
                yield rq.StreamEvent(kind="exit", result=dataclasses.asdict(ended))
                return
            await changed.wait()

    def _get(self, pid: int) -> Running:
        if pid not in self.running:
            raise errors.NotFoundError(f"no process {pid}")
        return self.running[pid]

    async def processes(self, request: rq.SandboxRequest, caller: Caller) -> list[ty.ProcessInfo]:
        self._yard.root(request.sandbox)
        return [
            ty.ProcessInfo(pid=pid, ppid=1, user="user", command="", state="S", handle=str(pid))
            for pid, running in self.running.items()
            if running.result is None
        ]

    async def write(self, request: rq.Write, caller: Caller) -> None:
        stdin = self._get(request.pid).process.stdin
        stdin.write(request.data)
        await stdin.drain()
        if request.eof:
            stdin.close()

    async def resize(self, request: rq.Resize, caller: Caller) -> None:
        raise errors.ConflictError("it has no terminal")

    async def signal(self, request: rq.Signal, caller: Caller) -> None:
        os.killpg(self._get(request.pid).process.pid, request.signal)

    async def wait(self, request: rq.WaitProcess, caller: Caller) -> ty.ExecResult:
        running = self._get(request.pid)
        while running.result is None:
            await running.changed.wait()
        return running.result


class MemoryYard:
    """Sandboxes are directories below ``base``."""

    def __init__(self, base: Path, tasks: asyncio.TaskGroup) -> None:
        self.base = base
        self.tasks = tasks
        self.boxes: dict[str, ty.SandboxInfo] = {}
        self.leases: dict[str, rq.Lease | None] = {}
        self.states: dict[str, str] = {}
        self.creates = 0
        self.undone = 0
        self.gate: asyncio.Event | None = None
        self.keeping = False
        self.fail_reads_after: int | None = None
        self.hostile_tar: bytes | None = None
        self.listeners: set[asyncio.Queue[ty.Event]] = set()
        self.requests: list[rq.Request] = []
        self.callers: list[Caller] = []
        self.records: list[tuple[str, Caller, dict[str, object]]] = []
        self.held: list[HoldLease] = []
        self.execs = MemoryExecs(self)
        self.files = MemoryFiles(self)
        self.replies = MemoryReplies()

    def find(self, ref: str) -> ty.SandboxInfo:
        for info in self.boxes.values():
            if ref in (info.id, info.name):
                return info
        raise errors.NotFoundError(f"no sandbox {ref!r}", hint="list_sandboxes() shows them")

    def root(self, ref: str) -> Path:
        return self.base / self.find(ref).id

    def _emit(self, kind: str, sandbox: str) -> None:
        for queue in self.listeners:
            queue.put_nowait(ty.Event(time=time.time(), kind=kind, sandbox=sandbox))

    async def create_sandbox(self, request: rq.CreateSandbox, caller: Caller) -> ty.SandboxInfo:
        self.requests.append(request)
        self.callers.append(caller)
        self.creates += 1
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.undone += 1
                raise
        name = request.name or f"box{self.creates}"
        if any(info.name == name for info in self.boxes.values()):
            raise errors.ConflictError(f"the name {name!r} is taken")
        info = self._make(name, None, request.ephemeral, request.labels)
        self.leases[info.id] = request.lease
        self._emit("created", info.id)
        return info

    def _make(
        self, name: str, parent: str | None, ephemeral: bool, labels: dict[str, str]
    ) -> ty.SandboxInfo:
        ident = "sb_" + uuid.uuid4().hex[:10]
        (self.base / ident).mkdir()
        info = ty.SandboxInfo(
            id=ident,
            name=name,
            state="running",
            engine="memory",
            host="here",
            template="base",
            snapshot=None,
            parent=parent,
            checkpoint=None,
            type="small",
            cpus=1,
            mem_mb=1024,
            disk_mb=1024,
            user="user",
            workdir="/workspace",
            egress="deny",
            egress_allow=[],
            labels=labels,
            ttl_min=None,
            auto_stop_min=None,
            ephemeral=ephemeral,
            created_at=time.time(),
            last_active_at=time.time(),
            expires_at=None,
            resumed_from=None,
            memory_restored=False,
            tainted=False,
            start_ms=1.0,
        )
        self.boxes[ident] = info
        return info

    async def get_sandbox(self, request: rq.SandboxRequest, caller: Caller) -> ty.SandboxInfo:
        return self.find(request.sandbox)

    async def list_sandboxes(self, request: rq.ListSandboxes, caller: Caller) -> list[ty.SandboxInfo]:
        wanted = (request.labels or {}).items()
        return [info for info in self.boxes.values() if wanted <= info.labels.items()]

    def _set(self, ref: str, **fields: object) -> ty.SandboxInfo:
        info = dataclasses.replace(self.find(ref), **fields)
        self.boxes[info.id] = info
        return info

    async def rename_sandbox(self, request: rq.RenameSandbox, caller: Caller) -> ty.SandboxInfo:
        return self._set(request.sandbox, name=request.name)

    async def set_ttl(self, request: rq.SetTtl, caller: Caller) -> ty.SandboxInfo:
        return self._set(request.sandbox, ttl_min=request.ttl_min)

    async def set_egress(self, request: rq.SetEgress, caller: Caller) -> ty.SandboxInfo:
        egress = request.egress or ("allow" if request.egress_allow else "deny")
        return self._set(request.sandbox, egress=egress, egress_allow=request.egress_allow or [])

    async def adopt(self, request: rq.Adopt, caller: Caller) -> ty.SandboxInfo:
        info = self.find(request.sandbox)
        self.leases[info.id] = request.lease
        return info

    async def release_lease(self, request: rq.ReleaseLease, caller: Caller) -> None:
        for ref in request.sandboxes:
            if ref in self.boxes and self.leases.get(ref) == request.lease:
                await self.delete_sandbox(rq.DeleteSandbox(sandbox=ref), caller)

    async def wait_sandbox(self, request: rq.WaitSandbox, caller: Caller) -> ty.SandboxInfo:
        async with asyncio.timeout(request.timeout_s):
            while self.find(request.sandbox).state != request.state:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.undone += 1
                    raise
        return self.find(request.sandbox)

    async def usage(self, request: rq.SandboxRequest, caller: Caller) -> ty.Usage:
        self.find(request.sandbox)
        return ty.Usage(cpu_ms=1, mem_mb=2, disk_mb=3, processes=4)

    async def stop_sandbox(self, request: rq.StopSandbox, caller: Caller) -> ty.SandboxInfo:
        return self._set(request.sandbox, state="stopped")

    async def start_sandbox(self, request: rq.StartSandbox, caller: Caller) -> ty.SandboxInfo:
        return self._set(request.sandbox, state="running")

    async def delete_sandbox(self, request: rq.DeleteSandbox, caller: Caller) -> ty.SandboxInfo | None:
        try:
            info = self.find(request.sandbox)
        except errors.NotFoundError:
            return None
        del self.boxes[info.id]
        shutil.rmtree(self.base / info.id, ignore_errors=True)
        return dataclasses.replace(info, state="deleted")

    async def delete_sandboxes(self, request: rq.DeleteSandboxes, caller: Caller) -> list[ty.SandboxInfo]:
        found = await self.list_sandboxes(rq.ListSandboxes(labels=request.labels), caller)
        return [await self.delete_sandbox(rq.DeleteSandbox(sandbox=info.id), caller) for info in found]

    async def snapshot(self, request: rq.TakeSnapshot, caller: Caller) -> ty.SnapshotInfo:
        return ty.SnapshotInfo(
            id=str(uuid.uuid4()),
            name=request.name,
            source=self.find(request.sandbox).id,
            labels=request.labels,
            size_bytes=1,
            exclusive_bytes=1,
            memory=request.memory,
            engine="memory",
            created_at=time.time(),
        )

    async def list_snapshots(self, request: rq.ListSnapshots, caller: Caller) -> list[ty.SnapshotInfo]:
        return []

    async def get_snapshot(self, request: rq.SnapshotRequest, caller: Caller) -> ty.SnapshotInfo:
        raise errors.NotFoundError(f"no snapshot {request.snapshot!r}")

    async def delete_snapshot(self, request: rq.DeleteSnapshot, caller: Caller) -> None:
        raise errors.CorruptSnapshotError("its files are gone")

    async def fork(self, request: rq.Fork, caller: Caller) -> ty.ForkResult:
        self.requests.append(request)
        source = self.find(self.states.get(request.source, request.source))
        if request.n > 64:
            raise errors.CapacityError(f"fork of {request.n}: 64 fit", retryable=True)
        taken = {one.name for one in self.boxes.values()}
        free = (name for i in itertools.count(1) if (name := f"{source.name}{i}") not in taken)
        made_up = [f"{request.prefix}{i + 1}" for i in range(request.n)] if request.prefix else None
        names = request.names or made_up or list(itertools.islice(free, request.n))
        forks = [self._make(name, source.id, bool(request.ephemeral), source.labels) for name in names]
        for info in forks:
            self.leases[info.id] = request.lease
            shutil.copytree(self.base / source.id, self.base / info.id, dirs_exist_ok=True)
        state = str(uuid.uuid4())
        self.states[state] = source.id
        return ty.ForkResult(snapshot=state, forks=forks, paused_ms=1, total_ms=2)

    async def checkpoint(self, request: rq.TakeCheckpoint, caller: Caller) -> ty.CheckpointInfo:
        return ty.CheckpointInfo(
            id="ck_1",
            label=request.label,
            sandbox=self.find(request.sandbox).id,
            parent=None,
            memory=True,
            size_bytes=1,
            created_at=1,
        )

    async def list_checkpoints(self, request: rq.SandboxRequest, caller: Caller) -> list[ty.CheckpointInfo]:
        return []

    async def delete_checkpoint(self, request: rq.DeleteCheckpoint, caller: Caller) -> None:
        self.find(request.sandbox)

    async def rewind(self, request: rq.Rewind, caller: Caller) -> ty.SandboxInfo:
        return self.find(request.sandbox)

    async def tree(self, request: rq.Tree, caller: Caller) -> list[ty.TreeNode]:
        return [
            ty.TreeNode(i.id, "sandbox", i.name, i.parent, i.state, i.created_at) for i in self.boxes.values()
        ]

    async def list_templates(self, request: rq.Empty, caller: Caller) -> list[ty.TemplateInfo]:
        return []

    async def delete_template(self, request: rq.DeleteTemplate, caller: Caller) -> None:
        raise RuntimeError("a secret detail")

    async def audit(self, request: rq.Audit, caller: Caller) -> list[ty.AuditRecord]:
        return []

    async def capacity(self, request: rq.CapacityRequest, caller: Caller) -> ty.Capacity:
        return ty.Capacity(1, 2, 3, 4, len(self.boxes))

    async def health(self, request: rq.Empty, caller: Caller) -> ty.Health:
        return ty.Health(
            ok=True,
            pid=os.getpid(),
            version="0",
            wire=verbs.API_VERSION,
            home=str(self.base),
            socket="",
            sandboxes=len(self.boxes),
            engines=["memory"],
        )

    async def events(self, request: rq.Events, caller: Caller) -> AsyncIterator[ty.Event]:
        queue: asyncio.Queue[ty.Event] = asyncio.Queue()
        self.listeners.add(queue)
        try:
            yield ty.Event(time=time.time(), kind="listening", sandbox=None)
            while True:
                yield await queue.get()
        finally:
            self.listeners.discard(queue)

    async def record(self, kind: str, caller: Caller, **data: object) -> None:
        self.records.append((kind, caller, data))

    async def hold_lease(self, request: HoldLease, caller: Caller) -> AsyncIterator[ty.Event]:
        self.held.append(request)
        try:
            yield ty.Event(time.time(), "lease.held", None)
            await asyncio.Event().wait()
        finally:
            self.held.remove(request)

    async def prepare_shutdown(self, sandboxes: str) -> None:
        self.keeping = True

    def kill(self) -> None:
        """End every command that still runs."""
        for running in self.execs.running.values():
            if running.result is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)

    def __getattr__(self, name: str) -> object:
        # Verbs that no test of the surface asks for: the route table wants them to exist.
        if name in {*verbs.VERBS, *verbs.STREAMS, *verbs.FILES}:

            async def missing(request: rq.Request, caller: Caller) -> None:
                raise errors.UnsupportedError(f"the yard in memory has no {name}")

            return missing
        raise AttributeError(name)


class MemoryDaemon:
    """The daemon's surface over a MemoryYard, in this loop, at ``socket``."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="fy"))
        self.socket = self.base / "d.sock"
        self.boxes = self.base / "boxes"
        self.boxes.mkdir()
        self.stopped = asyncio.Event()
        self.access: Access

    @contextlib.asynccontextmanager
    async def up(self, before: MemoryYard | None = None) -> AsyncIterator[MemoryYard]:
        """Serve until the block ends, going on from the yard of a daemon ``before``."""
        async with asyncio.TaskGroup() as group, asyncio.TaskGroup() as tasks:
            yard = before or MemoryYard(self.boxes, group)
            yard.keeping = False
            self.access = Access(self.base, tasks, yard.record)
            app = App(yard, tasks, self.stopped.set, self.access)
            async with self.access.serving(app), serving(app, bind(self.socket), app.drain):
                yield yard
            if before is None:
                yard.kill()

    def clean(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
