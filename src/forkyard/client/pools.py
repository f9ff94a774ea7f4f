"""Pools: copies made ahead, so that taking one costs no more than a word.

A pool belongs to its client, as the copies in it do: they are ephemeral, and go when the process
goes, however it goes. What it holds counts as sandboxes do: in memory, and in ``list_sandboxes``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
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
_FIXED = {"n", "names", "prefix", "ephemeral", "lease", "request_id", "wait_s"}


class _Stock:
    """What a pool has and lacks, whoever fills it."""

    def __init__(self, source: str, size: int, options: dict[str, Any]) -> None:
        if not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
            raise errors.InvalidRequestError(f"size={size!r} is no number from 1 to {MAX_SIZE}")
        if fixed := _FIXED & options.keys():
            raise errors.InvalidRequestError(f"a pool chooses {min(fixed)} itself")
        self.source = source
        self.size = size
        self.options = options | {"ephemeral": True}
        self.ready: deque[SandboxInfo] = deque()
        self.failure: errors.ForkyardError | None = None
        self.waiting = 0
        self.closed = False
        self.owner = os.getpid()
        self._state: str | None = None

    @property
    def missing(self) -> int:
        """So many copies are to be made now."""
        if self.closed or (self.failure is not None and not self.waiting and not self.failure.retryable):
            return 0
        return self.size + self.waiting - len(self.ready)

    def origin(self) -> str:
        """What to fork: the state of the first time, as long as it is there. A sandbox goes on meanwhile,
        and each new state of it would be a pause."""
        return self._state or self.source

    def add(self, made: ForkResult) -> None:
        self._state = made.snapshot or None
        self.failure = None
        self.ready.extend(made.forks)

    def failed(self, error: errors.ForkyardError) -> bool:
        """Note it; whether to go on at once. The state goes with the last copy of it."""
        if isinstance(error, errors.NotFoundError) and self._state is not None:
            self._state = None
            return True
        self.failure = error
        return False

    def take(self) -> SandboxInfo | None:
        """A copy, or None if there is none yet."""
        if self.closed:
            raise errors.ConflictError("the pool is closed")
        if self.owner != os.getpid():
            raise errors.ConflictError(f"the pool is process {self.owner}'s", hint="make one in this process")
        return self.ready.popleft() if self.ready else None

    def close(self) -> list[SandboxInfo]:
        """What is to be deleted: nothing in a child process, which has but a copy of the list."""
        self.closed = True
        mine = list(self.ready) if self.owner == os.getpid() else []
        self.ready.clear()
        return mine

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
        stock = self._stock
        with self._changed:
            taken = stock.take()
            if taken is None:
                stock.waiting += 1
                stock.failure = None
                self._changed.notify_all()
                try:
                    if not self._changed.wait_for(stock.settled, timeout_s):
                        raise stock.late(timeout_s)
                    taken = stock.answer()
                finally:
                    stock.waiting -= 1
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
            except errors.ForkyardError as error:
                with self._changed:
                    if not stock.failed(error):
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
        if self._stock.owner == os.getpid():
            with self._changed:
                self._changed.notify_all()
            self._thread.join()
        for info in self._stock.close():
            with contextlib.suppress(errors.NotFoundError, errors.UnavailableError):
                self._client.delete_sandbox(info.id)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncPool:
    """Keeps ``size`` copies of ``source`` ready; see :meth:`forkyard.AsyncClient.pool`."""

    def __init__(self, client: AsyncClient, source: str, size: int, options: dict[str, Any]) -> None:
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
        stock = self._stock
        async with self._changed:
            taken = stock.take()
            if taken is None:
                stock.waiting += 1
                stock.failure = None
                self._changed.notify_all()
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait_for(stock.settled)
                    taken = stock.answer()
                except TimeoutError:
                    raise stock.late(timeout_s) from None
                finally:
                    stock.waiting -= 1
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
            except errors.ForkyardError as error:
                async with self._changed:
                    if not stock.failed(error):
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
        if self._stock.owner == os.getpid():
            async with self._changed:
                self._changed.notify_all()
            await self._task
        for info in self._stock.close():
            with contextlib.suppress(errors.NotFoundError, errors.UnavailableError):
                await self._client.delete_sandbox(info.id)

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
