"""Named places in the daemon where a test makes it fail, be late, or die.

``await failpoint("fork.saved")`` stands after the step that it is named for. Off, which they are
unless ``FORKYARD_FAILPOINTS`` or a test says otherwise, it costs the look at one global. Armed with
``fork.saved=error,start.engine=delay:0.2``, each acts the first time that it is reached, or every
time if its action ends in ``*``:

=============  =====================================================================
``error``      raises :class:`forkyard.errors.UnavailableError`, retryable
``full``       raises the OSError of a full disk
``readonly``   raises the OSError of a read-only file system
``delay:S``    waits for S seconds
``kill``       ends the daemon by SIGKILL
=============  =====================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Generator, Iterator

from forkyard.errors import InvalidRequestError, UnavailableError

__all__ = ["Armed", "arm_from_environment", "armed", "failpoint", "failpoint_in_thread"]

VARIABLE = "FORKYARD_FAILPOINTS"
_ERRNO = {"full": errno.ENOSPC, "readonly": errno.EROFS}
_ACTIONS = ("error", *_ERRNO, "delay", "kill")


class _Nothing:
    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_NOTHING = _Nothing()
_armed: Armed | None = None


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Armed:
    """What the failpoints do now.

    Args:
        spec: ``name=action`` words, separated by commas.
        die: Ends the daemon, for ``kill``. If it returns, the step goes no further.

    Attributes:
        reached: The names that were reached, in order.
    """

    def __init__(self, spec: str = "", die: Callable[[], None] = _die) -> None:
        self.reached: list[str] = []
        self._die = die
        self._actions: dict[str, tuple[str, float]] = {}
        self._lasting: set[str] = set()
        self._never: asyncio.Future[None] | None = None
        for word in filter(None, (part.strip() for part in spec.split(","))):
            name, _, action = word.partition("=")
            kind, _, seconds = action.removesuffix("*").partition(":")
            try:
                delay_s = float(seconds or 0)
            except ValueError:
                kind = ""
            if kind not in _ACTIONS:
                raise InvalidRequestError(
                    f"{VARIABLE}: {word!r} is no NAME=ACTION", hint=f"actions: {', '.join(_ACTIONS)}"
                )
            self._actions[name] = kind, delay_s
            if action.endswith("*"):
                self._lasting.add(name)

    def _take(self, name: str) -> tuple[str, float]:
        self.reached.append(name)
        kind, delay_s = self._actions.get(name, ("", 0.0))
        if name not in self._lasting:
            self._actions.pop(name, None)
        if kind in _ERRNO:
            raise OSError(_ERRNO[kind], os.strerror(_ERRNO[kind]), f"failpoint {name}")
        if kind == "error":
            raise UnavailableError(f"failpoint {name}", retryable=True)
        return kind, delay_s

    async def hit(self, name: str) -> None:
        kind, delay_s = self._take(name)
        if kind == "delay":
            await asyncio.sleep(delay_s)
        elif kind == "kill":
            self._die()
            # Held, so that the collector does not unwind what waits for it.
            self._never = asyncio.get_running_loop().create_future()
            await self._never

    def hit_in_thread(self, name: str) -> None:
        kind, delay_s = self._take(name)
        if kind == "delay":
            time.sleep(delay_s)
        elif kind == "kill":
            self._die()


def failpoint(name: str) -> Awaitable[None]:
    """The step ``name`` is done."""
    return _NOTHING if _armed is None else _armed.hit(name)


def failpoint_in_thread(name: str) -> None:
    """As :func:`failpoint`, for work in a thread or too short to be waited for: a delay blocks."""
    if _armed is not None:
        _armed.hit_in_thread(name)


@contextlib.contextmanager
def armed(spec: str = "", die: Callable[[], None] = _die) -> Iterator[Armed]:
    """Arm the failpoints of this process while the block runs."""
    global _armed
    before, _armed = _armed, Armed(spec, die)
    try:
        yield _armed
    finally:
        _armed = before


def arm_from_environment() -> None:
    """Arm this daemon's failpoints for life, if its environment says so.

    Raises:
        InvalidRequestError: the variable cannot be understood.
    """
    global _armed
    if spec := os.environ.get(VARIABLE):
        _armed = Armed(spec)
