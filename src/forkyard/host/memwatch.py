"""Noticing that a control group uses more memory than it may, before the kernel acts on it.

The kernel tells when usage *with page cache* crosses the limit (version 1: a threshold; version 2:
``memory.high``, which is lifted at once, since it would throttle the very agent that has to help).
From then on what counts is read at intervals that shrink with the distance to the limit, down to
20 ms: a program that fills memory as fast as a core can is seen well within the reserve.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable

from forkyard.host.memory import memory_mb

__all__ = ["MemoryWatch", "V1Watch", "V2Watch"]

_MIB = 1 << 20
_LEAST_S, _MOST_S = 0.02, 1.0
# how fast a sandbox may fill memory: distance divided by it is the time until the next look
_FILL_RATE = 2048 * _MIB
# how often the kernel's limit is raised by another reserve before its killer is let loose: the
# agent of a sandbox full of busy processes takes seconds to act, so more often where the host has room
_RAISES, _RAISES_WITH_ROOM = 3, 16
_ROOM_MB = 2048


def _put(path: str, text: str | int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(text).encode())
    finally:
        os.close(fd)


def _get(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


class MemoryWatch:
    """One watched group. All of it runs on the loop; :meth:`close` ends it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        callback: Callable[[float, float], None],
        measure: Callable[[], int],
        directory: str,
        limit: int,
        reserve: int,
    ) -> None:
        self.loop = loop
        self.callback = callback
        self.measure = measure
        self.directory = directory
        self.limit = limit
        self.reserve = reserve
        self.closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_call = float("-inf")
        self._fds: list[int] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self._look()

    def _open(self) -> None:
        """Have the kernel call :meth:`_look`."""
        raise NotImplementedError

    def _total(self) -> int:
        """Usage with page cache."""
        raise NotImplementedError

    def _rest(self) -> bool:
        """Usage is low again: restore limits. True if the kernel will tell when that changes."""
        raise NotImplementedError

    def _alarm(self) -> None:
        """Usage has crossed the limit."""

    def _make_room(self, used: int) -> None:
        """``used`` cannot be reclaimed: see that the kernel's limit stays clear of it for now."""

    def _look(self) -> None:
        if self.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            used = self.measure()
            total = self._total()
            if total < self.limit - self.reserve // 4:
                if self._rest():
                    return
            else:
                self._alarm()
                self._make_room(used)
        except OSError:  # the group is gone; whoever removed it will close us
            return
        wait = max(_LEAST_S, min(_MOST_S, (self.limit - used) / _FILL_RATE))
        if used > self.limit:
            now = self.loop.time()
            if now - self._last_call >= _LEAST_S * 0.9:
                self._last_call = now
                self.callback(used / _MIB, self.limit / _MIB)
        if not self.closed:
            self._timer = self.loop.call_later(wait, self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError, ValueError):
                self.loop.remove_reader(fd)
            with contextlib.suppress(OSError):
                os.close(fd)


class V1Watch(MemoryWatch):
    """By eventfds: a threshold on usage, and the kernel's word that it is out of memory.

    The kernel's killer is off while we watch: whoever needs memory beyond the hard limit waits, and
    gets another reserve at once, so that the sandbox's own kernel can go on and its agent act. If
    that happens again and again, the killer is switched on. Only page faults can wait: a fork that meets
    the limit fails, and gVisor's kernel ends over that. So room is made before it is needed, too.
    """

    def _open(self) -> None:
        self._raised = 0
        self._usage_path = f"{self.directory}/memory.usage_in_bytes"
        self._limit_path = f"{self.directory}/memory.limit_in_bytes"
        self._oom_path = f"{self.directory}/memory.oom_control"
        self._kernel_path = f"{self.directory}/memory.kmem.usage_in_bytes"
        self._armed = False
        event = self._eventfd()
        self._register(event, self._oom_path, "")
        self._hear(event, self._out_of_memory)
        _put(self._oom_path, 1)
        # a threshold waits for an RCU grace period (10 ms): in a thread, and until then we look
        usage = self._eventfd()
        armed = self.loop.run_in_executor(None, self._register, usage, self._usage_path, str(self.limit))
        armed.add_done_callback(lambda future: self._arm(usage, future))
        if b"under_oom 1" in _get(self._oom_path):  # it waited for us
            self._out_of_memory()

    @staticmethod
    def _eventfd() -> int:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _register(self, event: int, path: str, argument: str) -> None:
        target = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _put(f"{self.directory}/cgroup.event_control", f"{event} {target} {argument}")
        finally:
            os.close(target)

    def _arm(self, event: int, future: asyncio.Future[None]) -> None:
        if self.closed or future.cancelled() or future.exception() is not None:
            os.close(event)  # without it we go on looking
            return
        self._armed = True
        self._hear(event, self._look)
        self._look()

    def _hear(self, event: int, react: Callable[[], None]) -> None:
        def fired() -> None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(event)
            react()

        self._fds.append(event)
        self.loop.add_reader(event, fired)

    def _total(self) -> int:
        return int(_get(self._usage_path))

    def _rest(self) -> bool:
        if self._raised:
            with contextlib.suppress(OSError):  # EBUSY: not low enough yet
                _put(self._limit_path, self.limit + self.reserve)
                _put(self._oom_path, 1)
                self._raised = 0
        return self._armed

    def _out_of_memory(self) -> None:
        if self.closed:
            return
        with contextlib.suppress(OSError):
            if b"under_oom 1" in _get(self._oom_path) and not self._raise():
                _put(self._oom_path, 0)
        self._look()

    def _raise(self) -> bool:
        """Another reserve, if there is one left."""
        if self._raised >= (_RAISES_WITH_ROOM if memory_mb()[1] > _ROOM_MB else _RAISES):
            return False
        self._raised += 1
        _put(self._limit_path, self.limit + (1 + self._raised) * self.reserve)
        return True

    def _make_room(self, used: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # a kernel without this account
            used += int(_get(self._kernel_path))
        if used > self.limit + (0.5 + self._raised) * self.reserve:
            self._raise()

    def close(self) -> None:
        if not self.closed:
            # nobody will come to help any more: better killed than stuck
            with contextlib.suppress(OSError, AttributeError):
                _put(self._oom_path, 0)
        super().close()


class V2Watch(MemoryWatch):
    """By ``memory.events``, which changes when usage meets ``memory.high``."""

    def _open(self) -> None:
        self._armed = False
        self._high_path = f"{self.directory}/memory.high"
        events = os.open(f"{self.directory}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(events)
        self._epoll = select.epoll()
        # kernfs files are always readable: only "changed" counts, and an epoll of its own can tell
        self._epoll.register(events, select.EPOLLPRI | select.EPOLLET)
        os.read(events, 4096)
        self._events = events
        self.loop.add_reader(self._epoll.fileno(), self._changed)

    def _changed(self) -> None:
        self._epoll.poll(0)
        with contextlib.suppress(OSError):
            os.pread(self._events, 4096, 0)
        self._look()

    def _total(self) -> int:
        return int(_get(f"{self.directory}/memory.current"))

    def _rest(self) -> bool:
        if not self._armed:
            _put(self._high_path, self.limit)
            self._armed = True
            return self._total() < self.limit  # False: it got there in between
        return True

    def _alarm(self) -> None:
        if self._armed:
            _put(self._high_path, "max")
            self._armed = False

    def close(self) -> None:
        epoll = getattr(self, "_epoll", None)
        if epoll is not None and not epoll.closed:
            self.loop.remove_reader(epoll.fileno())
            epoll.close()
        super().close()
