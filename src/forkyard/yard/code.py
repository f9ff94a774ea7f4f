"""Code that runs in sessions: interpreters that go on between calls.

A session is a command of the guest like any other, with a tag that says which it is. The tag is
all that is remembered: it is in the agent's table, so a fork, a rewound sandbox and a new daemon
find the sessions of the memory they have, and an ended one stays there until somebody was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, field

from forkyard.errors import (
    ForkyardError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
)
from forkyard.guest import ExitStatus, Guest, KnownProcess, SpawnSpec
from forkyard.guest.code import START_S, CodeSession, Outcome, peek
from forkyard.guest.languages import LANGUAGES, Language, check_code
from forkyard.requests import Caller, RunCode
from forkyard.types import Artifact, CodeError, CodeResult
from forkyard.yard.background import begin
from forkyard.yard.capture import Capture
from forkyard.yard.commands import CODE_TAG, resolve
from forkyard.yard.context import actor
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.machines import Box
from forkyard.yard.model import Sandbox

log = logging.getLogger("forkyard.yard")

MAX_OUTPUT = 10 << 20
AUDITED_CODE = 64 << 10
# A session whose client went away with an earlier daemon is interrupted after so long.
ORPHAN_S = 30.0
ANSWER_S = 5.0


@dataclass(slots=True)
class Slot:
    """The place of one session: ``lock`` is held by whoever runs code in it. ``stopping`` is over
    when code that its client left has stopped."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: CodeSession | None = None
    stopping: asyncio.Future[None] | None = None


@dataclass(slots=True)
class BoxSlots:
    """The sessions of one machine. ``spent`` are commands of the agent's table that are over."""

    slots: dict[bytes, Slot] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Orphan:
    """A session of an earlier daemon that may be at a run whose client asks for it again."""

    over: asyncio.Event = field(default_factory=asyncio.Event)


class Code:
    """The verb ``run_code``."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context
        self._boxes: dict[str, BoxSlots] = {}
        self._orphans: dict[tuple[str, bytes], Orphan] = {}
        self._leaving = False

    async def run(self, request: RunCode, caller: Caller) -> CodeResult:
        """See API: ``run_code``.

        Raises:
            InvalidRequestError: an unknown language, or code that cannot be sent.
            UnsupportedError: the image has no interpreter for it.
        """
        language = LANGUAGES.get(request.language)
        if language is None:
            raise InvalidRequestError(
                f"there is no language {request.language[:40]!r}", hint=f"use one of {', '.join(LANGUAGES)}"
            )
        if not 0 < len(request.session) <= 128:
            raise InvalidRequestError("a session's name has 1 to 128 characters")
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise InvalidRequestError(f"timeout_s={request.timeout_s} is not above 0")
        check_code(request.code)
        sandbox, box = await self.lifecycle.running(request.sandbox)
        user = request.user or sandbox.doc.user
        tag = session_tag(request.language, request.session, user)
        slot = self._slot(box, tag)
        sandbox.active_calls += 1
        try:
            while True:
                async with slot.lock:
                    if slot.stopping is not None:
                        await asyncio.wait([slot.stopping])
                        slot.stopping = None
                    orphan = self._orphans.get((box.id, tag))
                    run = run_id(request, caller.uid, sandbox.id)
                    if orphan is None or await self._is_for(run, box, tag):
                        self._settle((box.id, tag))
                        return await self._run_in(slot, language, sandbox, box, request, caller, user)
                await orphan.over.wait()
        finally:
            sandbox.active_calls -= 1
            sandbox.touch()

    async def _run_in(
        self,
        slot: Slot,
        language: Language,
        sandbox: Sandbox,
        box: Box,
        request: RunCode,
        caller: Caller,
        user: str,
    ) -> CodeResult:
        begun = time.perf_counter()
        tag = session_tag(request.language, request.session, user)
        session = slot.session
        if session is None:
            session = slot.session = await self._find(box, tag, language)
        if session is not None and session.ended is not None:
            status = session.ended
            self._forget(box, slot)
            return _told(request.session, status)
        programs = iter(language.programs if session is None else ())
        while True:
            if session is None:
                argv = next(programs, None)
                if argv is None:
                    raise _no_program(language, sandbox)
                session = slot.session = await self._start(argv, language, sandbox, box, request, tag, user)
            out, err = Capture(MAX_OUTPUT, "both"), Capture(MAX_OUTPUT, "both")
            ooms = sandbox.ooms.get(session.process.pid, 0)
            outcome = await self._attempt(slot, session, sandbox, box, request, caller, out, err)
            if session.begun:
                break
            missing, words = session.missing, session.last_words
            self._forget(box, slot)
            if not missing:
                raise UnsupportedError(
                    f"{language.name} does not start in {sandbox.doc.name!r}: {words[-400:]}",
                    sandbox=sandbox.id,
                )
            session = None
        await self._fetch_files(outcome, box.guest, user)
        oom = sandbox.ooms.get(session.process.pid, 0) > ooms
        result = _result(outcome, out, err, oom, (time.perf_counter() - begun) * 1e3)
        if session.ended is not None and not _tells_later(outcome):
            self._forget(box, slot)
        self._audit(sandbox, caller, request, user, result, out, err)
        return result

    async def _attempt(
        self,
        slot: Slot,
        session: CodeSession,
        sandbox: Sandbox,
        box: Box,
        request: RunCode,
        caller: Caller,
        out: Capture,
        err: Capture,
    ) -> Outcome:
        try:
            run = run_id(request, caller.uid, sandbox.id)
            return await session.run(run, request.code, out, err, request.timeout_s)
        except asyncio.CancelledError:
            if not self._leaving:
                _, slot.stopping = begin(self.context.tg, self._abandon(box, slot, session))
            raise
        except TimeoutError:
            self._forget(box, slot)
            raise InternalError(
                f"the {session.language.name} interpreter of {sandbox.doc.name!r} did not begin "
                f"within {START_S:g} s",
                sandbox=sandbox.id,
            ) from None
        except ForkyardError:
            slot.session = None
            raise

    # -- finding and starting ------------------------------------------------------------

    def _slot(self, box: Box, tag: bytes) -> Slot:
        slots = self._boxes.get(box.id)
        if slots is None:
            live = {sandbox.box.id for sandbox in self.context.sandboxes if sandbox.box is not None}
            self._boxes = {one: kept for one, kept in self._boxes.items() if one in live}
            slots = self._boxes[box.id] = BoxSlots()
        return slots.slots.setdefault(tag, Slot())

    async def _find(self, box: Box, tag: bytes, language: Language) -> CodeSession | None:
        """The session in the memory that the machine came with, or None."""
        known = self._known(box, tag)
        if known is None:
            return None
        try:
            process = await box.guest.process(known.pid)
        except ForkyardError:
            return None
        if process.id != known.id:
            process.leave()
            return None
        session = CodeSession(process, language, fresh=False)
        if known.exited:
            async with asyncio.timeout(ANSWER_S):
                await process.wait()
        return session

    def _known(self, box: Box, tag: bytes) -> KnownProcess | None:
        info, slots = box.guest.info, self._boxes.get(box.id, BoxSlots())
        found = [known for known in info.processes if known.tag == tag] if info is not None else []
        found = [known for known in found if known.id not in slots.spent]
        return max(found, key=lambda known: known.id, default=None)

    async def _start(
        self,
        argv: tuple[str, ...],
        language: Language,
        sandbox: Sandbox,
        box: Box,
        request: RunCode,
        tag: bytes,
        user: str,
    ) -> CodeSession:
        doc = sandbox.doc
        await self.lifecycle.note_user(sandbox, user)
        spec = SpawnSpec(
            argv=list(argv),
            env={**sandbox.net_env, **doc.env},
            cwd=resolve(request.cwd, doc.workdir) if request.cwd else doc.workdir,
            user=user,
            stdin="pipe",
            tag=tag,
        )
        process = await box.guest.spawn(spec)
        try:
            await process.write(language.prelude())
        except BaseException:
            process.abandon()
            raise
        return CodeSession(process, language, fresh=True)

    def _spend(self, box: Box, command: int) -> None:
        if (slots := self._boxes.get(box.id)) is not None:
            slots.spent.add(command)

    def _forget(self, box: Box, slot: Slot) -> None:
        """Let go of an ended session: the next call begins a new one."""
        session, slot.session = slot.session, None
        if session is not None:
            self._spend(box, session.process.id)
            session.process.release()

    # -- ends ----------------------------------------------------------------------------

    async def _abandon(self, box: Box, slot: Slot, session: CodeSession) -> None:
        """The client of a run has gone: stop the code, keep the session if that is possible."""
        try:
            if session.begun:
                await session.interrupt()
            else:
                await session.kill()
                self._forget(box, slot)
        except ForkyardError:
            slot.session = None

    async def _fetch_files(self, outcome: Outcome, guest: Guest, user: str) -> None:
        """Read the files that the code handed over, with its user's rights."""
        for path, mime, name in outcome.files:
            try:
                data = await guest.read_bytes(
                    path.encode("utf-8", "surrogateescape"), user=user, max_bytes=max(outcome.room, 0)
                )
            except ForkyardError:
                outcome.truncated = True
                continue
            outcome.room -= len(data)
            outcome.artifacts.append(Artifact(mime, data, name))

    def _audit(
        self,
        sandbox: Sandbox,
        caller: Caller,
        request: RunCode,
        user: str,
        result: CodeResult,
        out: Capture,
        err: Capture,
    ) -> None:
        said = {
            "language": request.language,
            "session": request.session,
            "user": user,
            "code": request.code[:AUDITED_CODE],
            "code_sha256": hashlib.sha256(request.code.encode()).hexdigest(),
            "exit_code": result.exit_code,
            "duration_ms": round(result.duration_ms, 1),
            "stdout_sha256": out.digest,
            "stderr_sha256": err.digest,
            "bytes": out.total + err.total,
            "artifacts": len(result.artifacts),
        }
        if result.error is not None:
            said["error"] = result.error.name
        for name in ("oom", "timed_out"):
            if result[name]:
                said[name] = True
        self.context.audit.append("code", sandbox.id, actor(caller), said)

    # -- the daemon's --------------------------------------------------------------------

    async def recover(self) -> None:
        """Find sessions of an earlier daemon; code that nobody asks for is interrupted in a while."""
        for sandbox in self.context.sandboxes:
            box = sandbox.box
            if box is None or box.guest.info is None:
                continue
            for known in box.guest.info.processes:
                if known.tag.startswith(CODE_TAG) and not known.exited:
                    self._orphans[box.id, known.tag] = Orphan()
        if self._orphans:
            asyncio.get_running_loop().call_later(
                ORPHAN_S, lambda: begin(self.context.tg, self._end_orphans())
            )

    def _settle(self, key: tuple[str, bytes]) -> None:
        if (orphan := self._orphans.pop(key, None)) is not None:
            orphan.over.set()

    async def _is_for(self, run: str, box: Box, tag: bytes) -> bool:
        """Whether a session of an earlier daemon is free, or at this very run."""
        known = self._known(box, tag)
        if known is None:
            return True
        try:
            process = await box.guest.process(known.pid)
        except NotFoundError:
            return True
        return await peek(process, run, known.stdout_end) != "busy"

    async def _end_orphans(self) -> None:
        boxes = {sandbox.box.id: sandbox.box for sandbox in self.context.sandboxes if sandbox.box is not None}
        for key in list(self._orphans):
            box = boxes.get(key[0])
            try:
                if box is not None:
                    await self._end_orphan(box, key[1])
            except (ForkyardError, TimeoutError) as error:
                log.warning("a session of %s: %s", key[0], error)
            finally:
                self._settle(key)

    async def _end_orphan(self, box: Box, tag: bytes) -> None:
        language = LANGUAGES.get(tag[len(CODE_TAG) :].partition(b":")[0].decode("ascii", "replace"))
        slot = self._slot(box, tag)
        async with slot.lock:
            if (box.id, tag) not in self._orphans or slot.session is not None or language is None:
                return
            slot.session = await self._find(box, tag, language)
            if slot.session is not None and await slot.session.busy(ANSWER_S):
                log.info("code that nobody waits for in %s is interrupted", box.id)
                await slot.session.interrupt()

    def detach_all(self) -> None:
        """From now on code whose call is cancelled runs on, for the next daemon's clients."""
        self._leaving = True


def session_tag(language: str, session: str, user: str) -> bytes:
    """The tag of a session's process, at most 64 bytes."""
    digest = hashlib.sha256(f"{session}\0{user}".encode("utf-8", "replace")).hexdigest()[:32]
    return CODE_TAG + f"{language}:{digest}".encode()


def run_id(request: RunCode, uid: int, sandbox: str) -> str:
    """Names a run: the same for the same request of the same caller, also after a restart."""
    if not request.request_id:
        return secrets.token_hex(16)
    return hashlib.sha256(f"code\0{uid}\0{sandbox}\0{request.request_id}".encode()).hexdigest()[:32]


def _no_program(language: Language, sandbox: Sandbox) -> UnsupportedError:
    names = " or ".join(argv[0] for argv in language.programs)
    return UnsupportedError(
        f"sandbox {sandbox.doc.name!r} has no {names} to run {language.name} code with",
        hint="use an image that has it",
        sandbox=sandbox.id,
    )


def _tells_later(outcome: Outcome) -> bool:
    """Whether the end of the session is the next call's to tell: the code itself went well."""
    return outcome.ended is not None and outcome.ended.signal is None and not outcome.timed_out


def _told(session: str, status: ExitStatus) -> CodeResult:
    """The answer of the first call after a session's end. Its code was not run."""
    how = (
        f"was ended by signal {status.signal}" + (", out of memory" if status.oom else "")
        if status.signal
        else f"ended with exit code {status.code}"
    )
    why = f"session {session!r} {how}; its variables are gone, and the next call begins a new one"
    return CodeResult(
        ok=False,
        error=CodeError("SessionEnded", why, ""),
        exit_code=status.code,
        signal=status.signal,
        oom=status.oom,
    )


def _result(outcome: Outcome, out: Capture, err: Capture, oom: bool, duration_ms: float) -> CodeResult:
    status, error, code = outcome.ended, outcome.error, outcome.code
    if status is not None:
        code = status.code
        oom = oom or status.oom
        if status.signal is not None or outcome.timed_out:
            why = (
                "it ran out of time and did not heed an interrupt"
                if outcome.timed_out
                else "out of memory"
                if status.oom
                else f"signal {status.signal}"
            )
            error = CodeError(
                "SessionEnded",
                f"the session was killed: {why}; its variables are gone, and the next call begins a new one",
                "",
            )
    elif outcome.timed_out:
        code = 130
    code = 1 if code is None else code
    return CodeResult(
        ok=code == 0 and error is None and not outcome.timed_out,
        stdout=out.data().decode("utf-8", "replace"),
        stderr=err.data().decode("utf-8", "replace"),
        result=outcome.result,
        artifacts=outcome.artifacts,
        error=error,
        exit_code=code,
        signal=status.signal if status is not None else None,
        timed_out=outcome.timed_out,
        oom=oom,
        truncated=outcome.truncated or out.omitted + err.omitted > 0,
        duration_ms=round(duration_ms, 3),
    )
