"""Pools: copies made ahead, so that taking one costs no more than a word.

A pool belongs to its client, as the copies in it do: they are ephemeral, and go when the process
goes, however it goes. What it holds counts as sandboxes do: in memory, and in ``list_sandboxes``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forkyard import errors
from forkyard.types import ForkResult, SandboxInfo

if TYPE_CHECKING:
    from forkyard.client.aio import AsyncClient
    from forkyard.client.sync import Client

__all__ = ["AsyncPool", "Pool"]

RETRY_S = 1.0
"""After a refusal for want of room, or a daemon that went."""
MAX_SIZE = 1000
_OPTIONS = {
    *("type", "cpus", "cpu_weight", "mem_mb", "disk_mb", "env", "egress", "egress_allow"),
    *("auto_stop_min", "labels", "memory"),
}


class _Stock:
    """What a pool has and lacks, whoever fills it."""

    def __init__(self, source: str, size: int, options: dict[str, Any]) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
            raise errors.InvalidRequestError(f"size={size!r} is no number from 1 to {MAX_SIZE}")
        if unknown := options.keys() - _OPTIONS:
            raise errors.InvalidRequestError(
                f"a pool takes no {min(unknown)}", hint=f"it takes {', '.join(sorted(_OPTIONS))}"
            )
        self.source = source
        self.size = size
        self.options = options | {"ephemeral": True}
        self.ready: deque[SandboxInfo] = deque()
        self.failure: Exception | None = None
        self.waiting = 0
        self.closed = False
        self.owner = os.getpid()
        self._state: str | None = None
        self._one_by_one = False

    @property
    def missing(self) -> int:
        """So many copies are to be made now."""
        if self.closed or (self.failure is not None and not self.waiting and not self._may_pass):
            return 0
        wanted = self.size + self.waiting - len(self.ready)
        # All or none would be none where fewer fit.
        return min(wanted, 1) if self._one_by_one else wanted

    @property
    def _may_pass(self) -> bool:
        return isinstance(self.failure, errors.ForkyardError) and self.failure.retryable

    def origin(self) -> str:
        """What to fork: the state of the first time, as long as it is there. A sandbox goes on meanwhile,
        and each new state of it would be a pause."""
        return self._state or self.source

    def add(self, made: ForkResult) -> None:
        self._state = made.snapshot or None
        self.failure = None
        self._one_by_one = False
        self.ready.extend(made.forks)

    def failed(self, error: Exception, asked: int) -> bool:
        """Note it; whether to go on at once: the state goes with the last copy of it, and where ``asked``
        do not fit, fewer may."""
        if isinstance(error, errors.NotFoundError) and self._state is not None:
            self._state = None
            return True
        if isinstance(error, errors.CapacityError) and asked > 1:
            self._one_by_one = True
            return True
        self.failure = error
        return False

    def take(self) -> SandboxInfo | None:
        """A copy, or None if there is none yet."""
        self.check_owner()
        if self.closed:
            raise errors.ConflictError("the pool is closed")
        return self.ready.popleft() if self.ready else None

    def check_owner(self) -> None:
        """Raises ConflictError in a child process, in which nobody fills the pool."""
        if self.owner != os.getpid():
            raise errors.ConflictError(f"the pool is process {self.owner}'s", hint="make one in this process")

    def settled(self) -> bool:
        """Whether there is an answer for who waits."""
        return bool(self.ready or self.failure or self.closed)

    def answer(self) -> SandboxInfo:
        """A copy. Raises why there is none."""
        taken = self.take()
        if taken is None:
            assert self.failure is not None
            raise self.failure
        return taken

    @staticmethod
    def usable(now: SandboxInfo) -> bool:
        """Whether a copy is still what was made: meanwhile it was anybody's to stop or to break."""
        return now.state == "running"

    def late(self, timeout_s: float | None) -> errors.DeadlineError:
        return errors.DeadlineError(
            f"no copy of {self.source!r} was ready within {timeout_s} s", retryable=True
        )


class Pool:
    """Keeps ``size`` copies of ``source`` ready; see :meth:`forkyard.Client.pool`. Safe for threads."""

    def __init__(self, client: Client, source: str, size: int, options: dict[str, Any]) -> None:
        self._client = client
        self._stock = _Stock(source, size, options)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name=f"pool of {source}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """How many copies could be had at once."""
        return len(self._stock.ready)

    def acquire(self, timeout_s: float | None = None) -> SandboxInfo:
        """A copy that runs, the caller's from now on; another one is made behind it.

        Args:
            timeout_s: Wait so long where none is ready.

        Raises:
            CapacityError, NotFoundError, ...: none is ready, and none can be made.
            DeadlineError: none was ready in time. ConflictError: the pool is closed.
        """
        self._stock.check_owner()  # before the lock, which a thread of the parent may have held at the fork
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            taken = self._take(timeout_s, deadline)
            try:
                now = self._client.get_sandbox(taken.id)
            except errors.NotFoundError:
                continue  # somebody deleted it
            except BaseException:
                self._stock.ready.appendleft(taken)
                raise
            if self._stock.usable(now):
                return now

    def _take(self, timeout_s: float | None, deadline: float | None) -> SandboxInfo:
        stock = self._stock
        with self._changed:
            taken = stock.take()
            if taken is None:
                stock.waiting += 1
                stock.failure = None
                self._changed.notify_all()
                try:
                    left = None if deadline is None else deadline - time.monotonic()
                    if not self._changed.wait_for(stock.settled, left):
                        raise stock.late(timeout_s)
                finally:
                    stock.waiting -= 1
                taken = stock.answer()
            self._changed.notify_all()
        return taken

    def _fill(self) -> None:
        stock = self._stock
        while True:
            with self._changed:
                self._changed.wait_for(lambda: stock.closed or stock.missing > 0)
                if stock.closed:
                    return
                origin, n = stock.origin(), stock.missing
            try:
                made = self._client.fork(origin, n, **stock.options)
            except Exception as error:  # whoever waits is told
                with self._changed:
                    if not stock.failed(error, n):
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: stock.closed, RETRY_S)
                continue
            with self._changed:
                stock.add(made)
                self._changed.notify_all()

    def close(self) -> None:
        """Delete what is ready. Copies that were acquired stay their owner's."""
        self._client._pools.discard(self)
        self._stock.closed = True
        if self._stock.owner != os.getpid():
            return
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        while self._stock.ready:
            with contextlib.suppress(errors.NotFoundError, errors.UnavailableError):
                self._client.delete_sandbox(self._stock.ready.popleft().id)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncPool:
    """Keeps ``size`` copies of ``source`` ready; see :meth:`forkyard.AsyncClient.pool`."""

    def __init__(self, client: AsyncClient, source: str, size: int, options: dict[str, Any]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise errors.ConflictError(
                "an asynchronous pool is filled by a running event loop, and there is none",
                hint="make it inside of a coroutine",
            ) from None
        self._client = client
        self._stock = _Stock(source, size, options)
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._fill(), name=f"pool of {source}")

    @property
    def ready(self) -> int:
        """How many copies could be had at once."""
        return len(self._stock.ready)

    async def acquire(self, timeout_s: float | None = None) -> SandboxInfo:
        """A copy that runs, the caller's from now on; another one is made behind it.

        Args:
            timeout_s: Wait so long where none is ready.

        Raises:
            CapacityError, NotFoundError, ...: none is ready, and none can be made.
            DeadlineError: none was ready in time. ConflictError: the pool is closed.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            taken = await self._take(timeout_s, deadline)
            try:
                now = await self._client.get_sandbox(taken.id)
            except errors.NotFoundError:
                continue  # somebody deleted it
            except BaseException:
                self._stock.ready.appendleft(taken)
                raise
            if self._stock.usable(now):
                return now

    async def _take(self, timeout_s: float | None, deadline: float | None) -> SandboxInfo:
        stock = self._stock
        async with self._changed:
            taken = stock.take()
            if taken is None:
                stock.waiting += 1
                stock.failure = None
                self._changed.notify_all()
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait_for(stock.settled)
                except TimeoutError:
                    raise stock.late(timeout_s) from None
                finally:
                    stock.waiting -= 1
                taken = stock.answer()
            self._changed.notify_all()
        return taken

    async def _fill(self) -> None:
        stock = self._stock
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: stock.closed or stock.missing > 0)
                if stock.closed:
                    return
                origin, n = stock.origin(), stock.missing
            try:
                made = await self._client.fork(origin, n, **stock.options)
            except Exception as error:  # whoever waits is told
                async with self._changed:
                    if not stock.failed(error, n):
                        self._changed.notify_all()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(RETRY_S):
                                await self._changed.wait_for(lambda: stock.closed)
                continue
            async with self._changed:
                stock.add(made)
                self._changed.notify_all()

    async def close(self) -> None:
        """Delete what is ready. Copies that were acquired stay their owner's."""
        self._client._pools.discard(self)
        self._stock.closed = True
        if self._stock.owner != os.getpid():
            return
        async with self._changed:
            self._changed.notify_all()
        # A caller who is cancelled does not take it along: what it is making would be nobody's.
        await asyncio.shield(self._task)
        while self._stock.ready:
            info = self._stock.ready.popleft()
            try:
                await self._client.delete_sandbox(info.id)
            except (errors.NotFoundError, errors.UnavailableError):
                pass
            except BaseException:
                self._stock.ready.append(info)
                raise

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
