"""Running a template's warm command until what it starts is ready.

What is ready is said by one of:

    8000                 something listens on that TCP port
    "port:8000"          the same
    "log:listening on"   the command's output has that text
    "curl -sf ..."       this command, run again and again, exits with 0
    nothing              the command has ended with 0, or has been idle for a second
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from forkyard.errors import CommandFailedError, DeadlineError, ForkyardError, InvalidRequestError
from forkyard.guest import Guest, GuestProcess, SpawnSpec

if TYPE_CHECKING:
    from forkyard.yard.templates import TemplateDoc

__all__ = ["TIMEOUT_S", "Say", "check", "run"]

TIMEOUT_S = 120.0
Say = Callable[[str, str], None]

_TAIL = 16 << 10
_POLL_S = 0.02
_SLOWEST_POLL_S = 0.25
# Idle: less than this much of a core, over this long.
_IDLE_SHARE = 0.05
_IDLE_S = 1.0
_TAG = b"warm"


def check(ready: str | int | None, timeout_s: float) -> str | int | None:
    """``ready`` in its plain form.

    Raises:
        InvalidRequestError: it is no port, text or command.
    """
    if not 0 < timeout_s < 1e6:
        raise InvalidRequestError(f"ready_timeout_s={timeout_s} is not a positive number of seconds")
    if isinstance(ready, str) and ready.startswith("port:"):
        number = ready.removeprefix("port:").strip()
        ready = int(number) if number.isdigit() else -1
    if isinstance(ready, int) and not 0 < ready < 65536:
        raise InvalidRequestError(f"ready={ready} is no port")
    if isinstance(ready, str) and not ready.removeprefix("log:").strip():
        raise InvalidRequestError("ready is empty", hint="give a port, log:TEXT or a command")
    return ready


class _Output:
    """The end of what the command printed, and whether a text was among it."""

    def __init__(self, process: GuestProcess, say: Say | None, wanted: str | None) -> None:
        self._process = process
        self._say = say
        self._wanted = (wanted or "").encode()
        self.tail = b""
        self.found = False

    async def read(self) -> None:
        async for item in self._process.output():
            if item.kind == "gap":
                continue
            searched = self.tail[-len(self._wanted) :] + item.data if self._wanted else b""
            self.found = self.found or (bool(self._wanted) and self._wanted in searched)
            self.tail = (self.tail + item.data)[-_TAIL:]
            if self._say is not None:
                for line in item.data.decode("utf-8", "replace").splitlines():
                    self._say("output", line)

    def shown(self) -> str:
        text = self.tail[-1500:].decode("utf-8", "replace").strip()
        return f": {text}" if text else ""


async def run(guest: Guest, doc: TemplateDoc, say: Say | None = None) -> None:
    """Start the template's warm command and return when it is ready; it runs on, detached.

    Raises:
        CommandFailedError: it ended too early or with another code than 0; the message has its output.
        DeadlineError: it was not ready within ``ready_timeout_s``.
    """
    assert doc.warm is not None
    shown = doc.warm[2] if doc.warm[:2] == ["/bin/sh", "-c"] and len(doc.warm) == 3 else " ".join(doc.warm)
    if say is not None:
        say("step", f"WARM {shown}")
    process = await guest.spawn(
        SpawnSpec(
            argv=list(doc.warm),
            env=dict(doc.env),
            cwd=doc.workdir,
            user=doc.user,
            merge=True,
            tag=_TAG,
            detached=True,
        )
    )
    log = doc.ready.removeprefix("log:") if isinstance(doc.ready, str) and doc.ready[:4] == "log:" else None
    output = _Output(process, say, log)
    failure: ForkyardError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(output.read())
            try:
                async with asyncio.timeout(doc.ready_timeout_s):
                    await _until_ready(guest, doc, process, output)
            except TimeoutError:
                failure = DeadlineError(
                    f"`{shown}` was not ready within {doc.ready_timeout_s:g} s{output.shown()}",
                    hint="raise ready_timeout_s=, or say by ready= what it is ready by",
                )
            except _EndedError as ended:
                await reader
                failure = CommandFailedError(
                    f"the warm command `{shown}` {ended}{output.shown()}",
                    hint="run it by hand in a sandbox of the template",
                )
            finally:
                reader.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if failure is not None:
        raise failure
    process.detach()
    if say is not None:
        say("note", "ready")


class _EndedError(Exception):
    """The command is no more."""


async def _until_ready(guest: Guest, doc: TemplateDoc, process: GuestProcess, output: _Output) -> None:
    ready, pause = doc.ready, _POLL_S
    idle = _Idle(guest)
    while True:
        status = process.status
        if isinstance(ready, int):
            done = await _listens(guest, ready)
        elif ready is None:
            done = status.code == 0 if status is not None else await idle.reached()
        elif ready.startswith("log:"):
            done = output.found
        else:
            done = await _succeeds(guest, doc, ready)
        if done:
            return
        # One that only starts a server in the background may end with 0 before that is ready.
        if status is not None and (status.code != 0 or (isinstance(ready, str) and ready[:4] == "log:")):
            raise _EndedError(f"ended with {status.code}" + (" before it was ready" if ready else ""))
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _SLOWEST_POLL_S)


async def _listens(guest: Guest, port: int) -> bool:
    """Whether something listens on a TCP port, as the guest's kernel says: the image needs no tool."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            text = (await guest.read_bytes(table)).decode("ascii", "replace")
        except ForkyardError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[1].endswith(wanted) and fields[3] == "0A":
                return True
    return False


async def _succeeds(guest: Guest, doc: TemplateDoc, command: str) -> bool:
    probe = await guest.spawn(
        SpawnSpec(
            argv=["/bin/sh", "-c", command], env=dict(doc.env), cwd=doc.workdir, user=doc.user, detached=True
        )
    )
    try:
        async for _ in probe.output():
            pass
        return (await probe.wait()).code == 0
    except BaseException:
        probe.abandon()
        raise


class _Idle:
    """Whether the guest has used next to no CPU for a while."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._since = time.monotonic()
        self._cpu_ms: float | None = None

    async def reached(self) -> bool:
        used, now = float((await self._guest.activity()).cpu_ms), time.monotonic()
        if self._cpu_ms is None:
            self._cpu_ms, self._since = used, now
        passed = now - self._since
        if passed < _IDLE_S:
            return False
        busy = used - self._cpu_ms > _IDLE_SHARE * passed * 1e3
        self._cpu_ms, self._since = used, now
        return not busy
