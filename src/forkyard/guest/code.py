"""One session that runs code: an interpreter in the guest that goes on between calls.

Its program (``runners/``) is sent to the interpreter's stdin, so an image needs nothing of ours.
The code's output is the process's own stdout and stderr; what the program has to say stands
between it, in frames that begin with NUL and the id of the run. That id is made for one run and
not known before it, so output cannot be taken for a frame by accident. A reader that finds
a session which somebody else began (the source of a fork, an earlier daemon) asks it
for a mark, and forgets what comes before.

Whatever is in a frame is the guest's claim: lengths are capped, JSON is checked by type, names are
cleaned, and nothing of it is looked up on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import re
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import msgspec

from forkyard.errors import ForkyardError, SandboxLostError
from forkyard.guest.languages import Language
from forkyard.guest.process import ExitStatus, GuestProcess
from forkyard.guest.splitter import Splitter
from forkyard.types import Artifact, CodeError
from forkyard.wire import Scope

MAX_ARTIFACTS = 256
MAX_ARTIFACT_BYTES = 32 << 20
# An interpreter that does not begin within this is taken for broken.
START_S = 60.0
# How much later than asked a live one may begin, on a busy machine, before its time counts.
BEGIN_S = 10.0
# From an interrupt to the next step, should the code go on.
INTERRUPT_S = (1.0, 2.0)
KILL_S = 10.0
SETTLE_S = 2.0
PEEK_S = 5.0
ACKNOWLEDGE_AT = 512 << 10

_MARKS = re.compile(rb"\0[0-9a-f]{32}([bf])[0-9a-f]{4}")
_MIME = re.compile(r"[a-z0-9]+/[A-Za-z0-9.+_-]{1,100}")


class _Finish(msgspec.Struct):
    code: int = 0
    exit: bool = False
    cut: bool = False


class _Failure(msgspec.Struct):
    name: str = "Error"
    value: str = ""
    traceback: str = ""


class _Shown(msgspec.Struct):
    mime: str | None = None
    name: str | None = None
    path: str | None = None


_finish = msgspec.json.Decoder(_Finish).decode
_failure = msgspec.json.Decoder(_Failure).decode
_shown = msgspec.json.Decoder(_Shown).decode


@dataclass(slots=True)
class Outcome:
    """What a run came to. ``ended`` is how the session's process ended, if it did; ``code`` is None
    where the run did not finish. ``files`` are paths inside the guest that the code handed over."""

    result: str | None = None
    error: CodeError | None = None
    artifacts: list[Artifact] = field(default_factory=list)
    files: list[tuple[str, str, str]] = field(default_factory=list)
    code: int | None = None
    leaves: bool = False
    ended: ExitStatus | None = None
    timed_out: bool = False
    truncated: bool = False
    room: int = MAX_ARTIFACT_BYTES


class Output(Protocol):
    """What takes a run's output: ``feed`` and ``skip``, as the yard's Capture has them."""

    def feed(self, data: bytes) -> None: ...

    def skip(self, size: int) -> None: ...


class Nowhere:
    """Takes output that nobody wants."""

    def feed(self, data: bytes) -> None:
        pass

    def skip(self, size: int) -> None:
        pass


class CodeSession:
    """A live interpreter. One run at a time: the caller sees to that.

    Args:
        fresh: It was just spawned; nobody else has spoken to it.
    """

    def __init__(self, process: GuestProcess, language: Language, *, fresh: bool) -> None:
        self.process = process
        self.language = language
        self.fresh = fresh
        # Whether what is in the pipes is not known to be the answer to our last request.
        self.astray = not fresh
        process.hold()
        self._splitters = {
            "stdout": Splitter(lambda data: self._out.feed(data), self._on_stdout),
            "stderr": Splitter(lambda data: self._err.feed(data), self._on_stderr),
        }
        self._out: Output = Nowhere()
        self._err: Output = Nowhere()
        self._run = self._mark = ""
        self._outcome = Outcome()
        self._heard = False
        self._begun: Callable[[], None] = lambda: None
        self._marks: set[str] = set()
        self._done: set[str] = set()

    @property
    def ended(self) -> ExitStatus | None:
        return self.process.status

    @property
    def begun(self) -> bool:
        """Whether it ever answered."""
        return not self.fresh

    @property
    def missing(self) -> bool:
        """Whether the image has no such program."""
        return self.fresh and self.ended is not None and self.ended.code in (126, 127)

    @property
    def last_words(self) -> str:
        """What an interpreter that did not begin said on its stderr."""
        return self._splitters["stderr"].dropped.decode("utf-8", "replace").strip()

    async def run(self, run: str, code: str, out: Output, err: Output, timeout_s: float | None) -> Outcome:
        """Run ``code`` as ``run`` (32 hexadecimal digits); a run of that id which goes on, or has
        just ended, is joined. Time counts from the moment the code begins.

        Raises:
            SandboxLostError: the machine died. InternalError: the interpreter does not begin.
        """
        outcome = self._outcome = Outcome()
        self._out, self._err, self._run = out, err, run
        self._done.clear()
        self._marks.clear()
        self._heard = False
        if not self.astray:
            self.process.acknowledge()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience_s(timeout_s)) as limit:

                def begun() -> None:
                    if not limit.expired():
                        limit.reschedule(None if timeout_s is None else loop.time() + timeout_s)

                self._begun = begun
                await self._ask(run, code)
        except TimeoutError:
            if self.fresh:
                await self.kill()
                raise
            outcome.timed_out = True
            await self._stop()
        finally:
            self._begun = lambda: None
        if outcome.leaves and self.ended is None:
            await self._leave()
        outcome.ended = self.ended
        return outcome

    def _patience_s(self, timeout_s: float | None) -> float | None:
        """How long the code may take to begin."""
        if self.fresh:
            return START_S
        return timeout_s if self.astray or timeout_s is None else timeout_s + BEGIN_S

    async def _ask(self, run: str, code: str) -> None:
        if self.astray:
            mark = self._mark = secrets.token_hex(16)
            for splitter in self._splitters.values():
                splitter.listen(run, mark, hunting=True)
            # The empty line ends what another's writer may have left half written.
            await self.process.write(b"\n" + self.language.mark(mark))
            await self._read(lambda: self._marked() or self._finished())
            self.astray = not self._marked()
            if self._finished() or self.ended is not None:
                return
        for splitter in self._splitters.values():
            splitter.listen(run, hunting=self.fresh)
        await self.process.write(self.language.request(run, code))
        await self._read(self._finished)

    def _marked(self) -> bool:
        return self._marks >= {"stdout", "stderr"}

    def _finished(self) -> bool:
        return self._done >= {"stdout", "stderr"}

    async def _read(self, enough: Callable[[], bool]) -> None:
        """Take output until it is enough, or the process has ended."""
        process = self.process
        if enough():
            return
        async with contextlib.aclosing(cast(Any, process.output())) as items:
            async for item in items:
                splitter = self._splitters[item.stream]
                if item.kind == "gap":
                    splitter.gap()
                    if not splitter.hunting:
                        (self._out if item.stream == "stdout" else self._err).skip(item.missing)
                else:
                    splitter.feed(item.data)
                if enough():
                    return
                if process.unacknowledged > ACKNOWLEDGE_AT:
                    process.acknowledge()
        for splitter in self._splitters.values():
            splitter.end()

    # -- what the program says ---------------------------------------------------------

    def _on_stderr(self, letter: bytes, one: str, payload: bytes | None) -> None:
        if one == self._mark:
            self._marks.add("stderr")
        elif letter == b"f":
            self._done.add("stderr")

    def _on_stdout(self, letter: bytes, one: str, payload: bytes | None) -> None:
        outcome = self._outcome
        if one == self._mark:
            self._marks.add("stdout")
            return
        if letter != b"b" and not self._heard:
            outcome.truncated = True  # its beginning was no longer kept
        self._heard = True
        try:
            if letter == b"b":
                self.fresh = False
                self._begun()
            elif letter == b"f":
                finish = _finish(payload or b"{}")
                outcome.code, outcome.leaves = finish.code & 0xFF, finish.exit
                outcome.truncated = outcome.truncated or finish.cut
                self._done.add("stdout")
            elif payload is None:
                outcome.truncated = True
            elif letter == b"r":
                outcome.result = payload.decode("utf-8", "replace")
            elif letter == b"x":
                failure = _failure(payload)
                outcome.error = CodeError(failure.name[:256], failure.value, failure.traceback)
            elif letter == b"d":
                head, _, data = payload.partition(b"\n")
                shown = _shown(head)
                self._keep(mime_of(shown.mime), clean_name(shown.name), data)
            elif letter == b"p":
                shown = _shown(payload) if payload.startswith(b"{") else _Shown(path=_text(payload))
                self._name_file(shown)
        except msgspec.DecodeError:
            # It said something that cannot be: that is lost, and nothing else.
            outcome.truncated = True
            if letter == b"f":
                self._done.add("stdout")

    def _keep(self, mime: str, name: str | None, data: bytes) -> None:
        outcome = self._outcome
        outcome.room -= len(data)
        if outcome.room < 0 or len(outcome.artifacts) >= MAX_ARTIFACTS:
            outcome.truncated = True
        else:
            outcome.artifacts.append(Artifact(mime, data, name))

    def _name_file(self, shown: _Shown) -> None:
        path = shown.path or ""
        if not path.startswith("/") or "\0" in path or len(path) > 4096:
            return
        if len(self._outcome.files) >= MAX_ARTIFACTS:
            self._outcome.truncated = True
            return
        name = clean_name(shown.name or path.rpartition("/")[2])
        mime = mime_of(shown.mime or mimetypes.guess_type(name or "")[0])
        self._outcome.files.append((path, mime, name or "file"))

    # -- how it is stopped -------------------------------------------------------------

    async def _stop(self) -> None:
        """Interrupt what runs, and kill the interpreter where that does not help."""

        def quiet() -> bool:
            return self._marked() if self.astray else self._finished()

        scopes = (Scope.GROUP,) if self.language.group else (Scope.PROCESS, Scope.GROUP)
        for scope, wait_s in zip(scopes, INTERRUPT_S[-len(scopes) :], strict=True):
            self.process.signal(signal.SIGINT, scope=scope)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._read(quiet)
            if quiet():
                self.astray = False
                return
            if self.ended is not None:
                return
        await self.kill()

    async def interrupt(self) -> None:
        """Stop a run that nobody waits for any more; the session lives on if it can."""
        if self.ended is None and not self._finished():
            self._out = self._err = Nowhere()
            await self._stop()

    async def _leave(self) -> None:
        """It said that it ends: wait for that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._read(lambda: False)
                return
        await self.kill()

    async def kill(self) -> None:
        """End the interpreter and all that it started.

        Raises:
            SandboxLostError: it does not end.
        """
        self.process.kill_tree()
        try:
            async with asyncio.timeout(KILL_S):
                await self._read(lambda: False)
        except TimeoutError:
            raise SandboxLostError(
                f"code that ran out of time could not be ended within {KILL_S:g} s", cause="guest"
            ) from None

    async def busy(self, wait_s: float) -> bool:
        """Whether it does not answer within ``wait_s``; for one that nobody waits for."""
        try:
            async with asyncio.timeout(wait_s):
                mark = self._mark = secrets.token_hex(16)
                for splitter in self._splitters.values():
                    splitter.listen(mark, hunting=True)
                self._marks.clear()
                await self.process.write(b"\n" + self.language.mark(mark))
                await self._read(self._marked)
        except TimeoutError:
            return True
        except ForkyardError:
            return False
        self.astray = not self._marked()
        return False


async def peek(process: GuestProcess, run: str, stdout_end: int) -> Literal["mine", "idle", "busy"]:
    """What a session that somebody else began was last at, by what is kept of its output up to
    ``stdout_end``: our own run, nothing, or another's. Takes nothing away; lets go of the process."""
    process.hold()
    data = bytearray()
    whole = False
    try:
        async with asyncio.timeout(PEEK_S), contextlib.aclosing(cast(Any, process.output())) as items:
            async for item in items:
                if item.kind == "stdout":
                    # What came after is of no account: its reader may be on the way.
                    data += item.data[: max(0, stdout_end - item.offset)]
                if item.stream == "stdout" and item.offset + len(item.data) >= stdout_end:
                    whole = True
                    break
    except TimeoutError:
        pass
    finally:
        process.leave()
    if b"\0" + run.encode() in data:
        return "mine"
    marks = _MARKS.findall(data)
    idle = process.status is not None or (whole and marks and marks[-1] == b"f")
    return "idle" if idle else "busy"


def mime_of(said: str | None) -> str:
    """A MIME type as the guest said it, where it is one."""
    return said if said and _MIME.fullmatch(said) else "application/octet-stream"


def clean_name(said: str | None) -> str | None:
    """A file's name without directories and unprintable characters; never one with a meaning."""
    if said is None:
        return None
    name = "".join(c for c in said.replace("\\", "/").rpartition("/")[2] if c.isprintable())[:255]
    return None if name in ("", ".", "..") else name


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
