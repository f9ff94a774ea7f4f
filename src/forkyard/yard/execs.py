"""Commands: run to their end, or held by a stream.

A command outlives the daemon. The agent keeps its output until it is acknowledged, and an
acknowledgement means that the client has it or the spool does, so a new daemon finds
the command by its tag, its output whole, and gives both to the client that asks again with
the same request id. One that nobody asks for within :data:`ORPHAN_S` is ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from forkyard.errors import (
    ConflictError,
    DeadlineError,
    ForkyardError,
    NotFoundError,
    SandboxLostError,
)
from forkyard.guest import ExitStatus, GuestProcess, Scope
from forkyard.requests import (
    Attach,
    Caller,
    Exec,
    ProcessRequest,
    Resize,
    SandboxRequest,
    Signal,
    Spawn,
    StreamEvent,
    WaitProcess,
    Write,
)
from forkyard.types import ExecResult, ProcessInfo
from forkyard.yard.background import begin
from forkyard.yard.capture import Capture, Tally
from forkyard.yard.commands import CODE_TAG, audit_of, check_output, result_of, spec_of, tag_of
from forkyard.yard.context import actor
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.machines import Box
from forkyard.yard.model import Sandbox
from forkyard.yard.spool import Spool

log = logging.getLogger("forkyard.yard")

ORPHAN_S = 30.0
# A killed tree is gone within this, or the sandbox is not well.
KILL_S = 30.0
# How long the agent keeps an ended command's output, for a reply that is on its way.
LINGER_S = 0.3
# So many results of streamed commands are kept for those who ask after the end.
ENDED = 256


@dataclass(slots=True)
class Job:
    """A command that somebody waits for. ``task`` does the work, ``future`` has its result."""

    task: asyncio.Task[None]
    future: asyncio.Future[ExecResult]
    request: Exec
    waiters: int = 0


@dataclass(slots=True)
class Held:
    """A process with a reader in this daemon."""

    process: GuestProcess
    begun: float
    audit: dict[str, Any]
    caller: Caller
    ended: asyncio.Event
    result: ExecResult | None = None
    # Digests of what its reader was given; nothing of it is kept.
    out: Tally = field(default_factory=Tally)
    err: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A command of an earlier daemon's client that may still ask for it."""

    sandbox: str
    pid: int


class Execs:
    """The verbs of commands and processes."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context
        self._jobs: dict[tuple[str, int], Job] = {}
        self._held: dict[tuple[str, int], Held] = {}
        self._ended_held: collections.OrderedDict[tuple[str, int], ExecResult] = collections.OrderedDict()
        self._orphans: dict[bytes, Orphan] = {}
        self._leaving = False

    # -- run to the end ----------------------------------------------------------------

    async def run(
        self, request: Exec, caller: Caller, stdin: AsyncIterator[bytes] | None = None
    ) -> ExecResult:
        """See API: ``exec`` and ``shell``. The same request id joins the command that runs."""
        key = (request.request_id, caller.uid)
        job = self._jobs.get(key) if request.request_id else None
        if job is None:
            check_output(request)
            task, future = begin(self.context.tg, self._work(request, caller, stdin))
            job = Job(task, future, request)
            if request.request_id:
                self._jobs[key] = job
                future.add_done_callback(lambda _: self._jobs.pop(key, None))
        elif (job.request.sandbox, job.request.command, job.request.argv) != (
            request.sandbox,
            request.command,
            request.argv,
        ):
            raise ConflictError(f"request id {request.request_id!r} belongs to another command")
        job.waiters += 1
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            if job.waiters == 1 and not self._leaving:
                job.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([job.task])
            raise
        finally:
            job.waiters -= 1

    async def _work(self, request: Exec, caller: Caller, stdin: AsyncIterator[bytes] | None) -> ExecResult:
        sandbox, box = await self.lifecycle.running(request.sandbox)
        spool = Spool(self.context.machines.box_dir(box.id), request, caller.uid)
        sandbox.active_calls += 1
        begun = time.perf_counter()
        process: GuestProcess | None = None
        out = Capture(request.max_output, request.keep)
        err = Capture(request.max_output, request.keep)
        try:
            process = await self._adopt_orphan(sandbox, box, request, caller, spool, out, err)
            if process is None:
                process = await self._spawn(sandbox, box, request, caller, stdin is not None)
                feeder = self._feed(process, request, stdin)
            else:
                feeder = None
            process.hold()
            timed_out = await self._drain(process, request.timeout_s, out, err, spool)
            if feeder is not None:
                feeder.cancel()
            status = process.status
            assert status is not None
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            if process is not None and not (gone and self._leaving):
                said = audit_of(request, sandbox, self.context.audit.digest)
                self._audit_cut(sandbox, caller, said, "client gone" if gone else "lost", begun, out, err)
                if gone:
                    await self._end(process)
            raise
        finally:
            sandbox.active_calls -= 1
            sandbox.touch()
        disk_full = status.code != 0 and self.context.disks.is_full(box.id)
        duration_ms = (time.perf_counter() - begun) * 1e3
        said = audit_of(request, sandbox, self.context.audit.digest)
        seq = self._audit(sandbox, caller, said, status, duration_ms, out, err, timed_out)
        asyncio.get_running_loop().call_later(LINGER_S, _forget, process, spool)
        return result_of(
            status,
            out,
            err,
            merge=request.merge,
            timed_out=timed_out,
            disk_full=disk_full,
            duration_ms=duration_ms,
            audit_seq=seq,
        )

    async def _spawn(
        self, sandbox: Sandbox, box: Box, request: Exec | Spawn, caller: Caller, streamed: bool
    ) -> GuestProcess:
        tag = tag_of(request, caller.uid) if request.request_id else b""
        wants_stdin = streamed or (isinstance(request, Exec) and request.stdin is not None)
        spec = spec_of(request, sandbox, tag, stdin=wants_stdin)
        await self.lifecycle.note_user(sandbox, spec.user)
        return await box.guest.spawn(spec)

    def _feed(
        self, process: GuestProcess, request: Exec, stdin: AsyncIterator[bytes] | None
    ) -> asyncio.Task[None] | None:
        """Write its stdin while its output is read: either may wait for the other."""
        if stdin is None and request.stdin is None:
            return None

        async def feed() -> None:
            try:
                if request.stdin:
                    await process.write(request.stdin)
                if stdin is not None:
                    async for chunk in stdin:
                        await process.write(chunk)
                process.close_stdin()
            except ForkyardError:
                # It ended without reading all of it, as head does; or it is lost, and the
                # reader of its output says so.
                return

        task, _ = begin(self.context.tg, feed())
        return task

    async def _drain(
        self, process: GuestProcess, timeout_s: float | None, out: Capture, err: Capture, spool: Spool
    ) -> bool:
        """Take all output until the command has ended; whether it had to be ended for its time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._take(process, out, err, spool)
            return False
        except TimeoutError:
            pass
        process.kill_tree()
        try:
            async with asyncio.timeout(KILL_S):
                await self._take(process, out, err, spool)
        except TimeoutError:
            raise SandboxLostError(
                f"a command that ran out of time could not be ended within {KILL_S:g} s", cause="guest"
            ) from None
        return True

    @staticmethod
    async def _take(process: GuestProcess, out: Capture, err: Capture, spool: Spool) -> None:
        async for item in process.output():
            capture = out if item.stream == "stdout" else err
            if item.kind == "gap":
                capture.skip(item.missing)
            else:
                capture.feed(item.data)
            if process.unacknowledged > spool.THRESHOLD:
                spool.write(out, err)
                process.acknowledge()

    async def _end(self, process: GuestProcess) -> None:
        """End a command that nobody waits for any more."""
        with contextlib.suppress(ForkyardError, TimeoutError):
            process.kill_tree()
            async with asyncio.timeout(KILL_S):
                async for _ in process.output():
                    pass
        process.release()

    def _audit(
        self,
        sandbox: Sandbox,
        caller: Caller,
        said: dict[str, Any],
        status: ExitStatus,
        duration_ms: float,
        out: Tally,
        err: Tally,
        timed_out: bool = False,
    ) -> int:
        said |= {"exit_code": status.code, "duration_ms": round(duration_ms, 1), **_output(out, err)}
        for name, flag in (("oom", status.oom), ("process_limit", status.crowded), ("timed_out", timed_out)):
            if flag:
                said[name] = True
        return self.context.audit.append("exec", sandbox.id, actor(caller), said)

    def _audit_cut(
        self,
        sandbox: Sandbox,
        caller: Caller,
        said: dict[str, Any],
        end: str,
        begun: float,
        out: Tally,
        err: Tally,
    ) -> None:
        """A command whose end its client does not see: it was ended, was lost, or runs on."""
        duration_ms = (time.perf_counter() - begun) * 1e3
        said |= {"end": end, "duration_ms": round(duration_ms, 1), **_output(out, err)}
        with contextlib.suppress(ForkyardError):
            self.context.audit.append("exec", sandbox.id, actor(caller), said)

    # -- after a restart of the daemon -------------------------------------------------

    async def recover(self) -> None:
        """Find commands of an earlier daemon's clients, and end those nobody asks for."""
        for sandbox in self.context.sandboxes:
            box = sandbox.box
            if box is None or box.guest.info is None:
                continue
            for known in box.guest.info.processes:
                if known.tag and not known.detached and not known.tag.startswith(CODE_TAG):
                    self._orphans[known.tag] = Orphan(sandbox.id, known.pid)
        if self._orphans:
            log.info("%d commands wait for their clients", len(self._orphans))
            asyncio.get_running_loop().call_later(
                ORPHAN_S, lambda: begin(self.context.tg, self._end_orphans())
            )

    async def _end_orphans(self) -> None:
        while self._orphans:
            _, orphan = self._orphans.popitem()
            sandbox = self.context.sandboxes.find(orphan.sandbox)
            if sandbox is None or sandbox.box is None:
                continue
            with contextlib.suppress(ForkyardError):
                await self._end(await sandbox.box.guest.process(orphan.pid))

    async def _adopt_orphan(
        self,
        sandbox: Sandbox,
        box: Box,
        request: Exec,
        caller: Caller,
        spool: Spool,
        out: Capture,
        err: Capture,
    ) -> GuestProcess | None:
        """The command that an earlier daemon started for this very request, or None."""
        if not self._orphans or not request.request_id:
            return None
        orphan = self._orphans.get(tag_of(request, caller.uid))
        if orphan is None or orphan.sandbox != sandbox.id:
            return None
        del self._orphans[tag_of(request, caller.uid)]
        spool.read(out, err)
        try:
            return await box.guest.process(orphan.pid, stdout_offset=out.total, stderr_offset=err.total)
        except NotFoundError:
            raise SandboxLostError(
                "the command went with the machine that it ran on", cause="host", sandbox=sandbox.id
            ) from None

    def detach_all(self) -> None:
        """From now on a cancelled command runs on, for the next daemon's clients."""
        self._leaving = True

    async def close(self) -> None:
        """Let go of every process; they run on."""
        self._leaving = True

    # -- processes held by a stream ----------------------------------------------------

    async def spawn(self, request: Spawn, caller: Caller) -> AsyncIterator[StreamEvent]:
        """See API: ``spawn``. Closing the iterator ends a command that is not detached."""
        sandbox, box = await self.lifecycle.running(request.sandbox)
        process = await self._spawn(sandbox, box, request, caller, request.stdin or request.pty)
        held = self._hold(sandbox, process, audit_of(request, sandbox, self.context.audit.digest), caller)
        async for event in self._stream(
            sandbox, box, held, end=not request.detach, timeout_s=request.timeout_s
        ):
            yield event

    async def attach(self, request: Attach, caller: Caller) -> AsyncIterator[StreamEvent]:
        """See API: ``attach``. Another reader of the same process loses it. Closing the
        iterator leaves the process alone, unless it was tied to its handle from the start."""
        sandbox, box = await self.lifecycle.running(request.sandbox)
        process = await box.guest.process(
            request.pid, stdout_offset=request.stdout_offset, stderr_offset=request.stderr_offset
        )
        self._orphans = {
            tag: o for tag, o in self._orphans.items() if (o.sandbox, o.pid) != (sandbox.id, process.pid)
        }
        held = self._hold(sandbox, process, {"attached": request.pid}, caller)
        async for event in self._stream(sandbox, box, held, end=request.tied, timeout_s=None):
            yield event

    def _hold(self, sandbox: Sandbox, process: GuestProcess, said: dict[str, Any], caller: Caller) -> Held:
        held = Held(process, time.perf_counter(), said, caller, asyncio.Event())
        self._held[sandbox.id, process.pid] = held
        self._ended_held.pop((sandbox.id, process.pid), None)
        return held

    async def _stream(
        self, sandbox: Sandbox, box: Box, held: Held, *, end: bool, timeout_s: float | None
    ) -> AsyncIterator[StreamEvent]:
        process, loop = held.process, asyncio.get_running_loop()
        timed_out = False

        def out_of_time() -> None:
            nonlocal timed_out
            timed_out = True
            with contextlib.suppress(ForkyardError):
                process.kill_tree()

        timer = loop.call_later(timeout_s, out_of_time) if timeout_s is not None else None
        sandbox.active_calls += 1
        try:
            yield StreamEvent(kind="started", pid=process.pid)
            process.hold()
            async for item in process.output():
                capture = held.out if item.stream == "stdout" else held.err
                if item.kind == "gap":
                    capture.skip(item.missing)
                else:
                    capture.feed(item.data)
                yield StreamEvent(kind=item.kind, data=item.data, offset=item.offset)
                process.acknowledge_older()
            status = process.status
            assert status is not None
            held.result = self._ended(sandbox, box, held, status, timed_out)
            yield StreamEvent(kind="exit", result=_fields(held.result))
        finally:
            if timer is not None:
                timer.cancel()
            sandbox.active_calls -= 1
            sandbox.touch()
            held.ended.set()
            key = (sandbox.id, process.pid)
            if self._held.get(key) is held:
                del self._held[key]
                if held.result is not None:
                    # Its reader has all of it, and the agent forgets it; somebody else may ask how it ended.
                    self._ended_held[key] = held.result
                    if len(self._ended_held) > ENDED:
                        self._ended_held.popitem(last=False)
            if held.result is not None and not self._leaving:
                loop.call_later(LINGER_S, process.release)
            elif not self._leaving:
                why = "client gone" if end else "left"
                if sandbox.box is not box:
                    why = "lost"
                self._audit_cut(sandbox, held.caller, held.audit, why, held.begun, held.out, held.err)
            if process.status is None and not self._leaving:
                if end:
                    begin(self.context.tg, self._end(process))
                else:
                    process.detach()

    def _ended(
        self, sandbox: Sandbox, box: Box, held: Held, status: ExitStatus, timed_out: bool
    ) -> ExecResult:
        duration_ms = (time.perf_counter() - held.begun) * 1e3
        told = held.caller, held.audit, status, duration_ms, held.out, held.err
        seq = self._audit(sandbox, *told, timed_out)
        nothing = Capture(0, "head")
        return result_of(
            status,
            nothing,
            nothing,
            merge=False,
            timed_out=timed_out,
            disk_full=status.code != 0 and self.context.disks.is_full(box.id),
            duration_ms=duration_ms,
            audit_seq=seq,
        )

    # -- what can be done to one -------------------------------------------------------

    async def processes(self, request: SandboxRequest, caller: Caller) -> list[ProcessInfo]:
        """See API: ``processes``; what the guest claims of itself."""
        _, box = await self.lifecycle.running(request.sandbox)
        return await box.guest.processes()

    async def _one(self, request: ProcessRequest) -> tuple[Box, Held]:
        sandbox, box = await self.lifecycle.running(request.sandbox)
        held = self._held.get((sandbox.id, request.pid))
        if held is None:
            raise NotFoundError(
                f"process {request.pid} has no open stream here",
                hint="attach to it first",
                sandbox=sandbox.id,
            )
        return box, held

    async def write(self, request: Write, caller: Caller) -> None:
        """Write to its stdin; ``eof`` closes it."""
        _, held = await self._one(request)
        if request.data:
            await held.process.write(request.data)
        if request.eof:
            held.process.close_stdin()

    async def resize(self, request: Resize, caller: Caller) -> None:
        """Tell its terminal its new size."""
        _, held = await self._one(request)
        held.process.resize(request.rows, request.cols)

    async def signal(self, request: Signal, caller: Caller) -> None:
        """Send a signal to its process group, or to any one process of the guest."""
        sandbox, box = await self.lifecycle.running(request.sandbox)
        held = self._held.get((sandbox.id, request.pid))
        if held is not None:
            held.process.signal(request.signal)
        else:
            await box.guest.signal(request.pid, request.signal, scope=Scope.PROCESS)
        said = {"pid": request.pid, "signal": request.signal}
        self.context.audit.append("process.signalled", sandbox.id, actor(caller), said)

    async def wait(self, request: WaitProcess, caller: Caller) -> ExecResult:
        """Its result, when it has ended; its output stays its reader's.

        Raises:
            DeadlineError: it runs on after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._wait(request)
        except TimeoutError:
            raise DeadlineError(
                f"process {request.pid} runs on after {request.timeout_s} s", retryable=True
            ) from None

    async def _wait(self, request: WaitProcess) -> ExecResult:
        sandbox, box = await self.lifecycle.running(request.sandbox)
        held = self._held.get((sandbox.id, request.pid))
        if held is not None:
            await held.ended.wait()
            if held.result is not None:
                return held.result
        elif (ended := self._ended_held.get((sandbox.id, request.pid))) is not None:
            return ended
        process = await box.guest.process(request.pid)
        # Read without acknowledging, so that whoever attaches next still gets its output.
        process.hold()
        try:
            async for _ in process.output():
                if process.unacknowledged > Spool.THRESHOLD:
                    process.acknowledge()
        finally:
            process.leave()
        assert process.status is not None
        nothing = Capture(0, "head")
        return result_of(
            process.status,
            nothing,
            nothing,
            merge=False,
            timed_out=False,
            disk_full=False,
            duration_ms=0.0,
            audit_seq=0,
        )


def _output(out: Tally, err: Tally) -> dict[str, Any]:
    return {"stdout_sha256": out.digest, "stderr_sha256": err.digest, "bytes": out.total + err.total}


def _forget(process: GuestProcess, spool: Spool) -> None:
    process.release()
    spool.remove()


def _fields(result: ExecResult) -> dict[str, Any]:
    """A result's own fields, without the two that are derived."""
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
