"""Work that must not be cut short by whoever asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("forkyard.yard")

T = TypeVar("T")


class Services:
    """Tasks of the yard's own that live until it closes.

    Unlike in a TaskGroup, one that fails does not end the others: a daemon that carries
    other people's sandboxes goes on, and the failure is logged.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def create_task(self, work: Coroutine[Any, Any, T], /, *, name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a service of the yard failed", exc_info=task.exception())

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(self, *_: object) -> None:
        # What ends may begin something to clean up behind it.
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def begin(tg: Services, work: Coroutine[Any, Any, T]) -> tuple[asyncio.Task[None], asyncio.Future[T]]:
    """Run ``work`` among the services. Its outcome lands in the future, so that a failure is the
    asker's; cancelling the task cancels the work."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    # Somebody may have stopped listening; that is no reason for a warning.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def run() -> None:
        try:
            result = await work
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    task = tg.create_task(run())

    def ended(_: object) -> None:
        if not future.done():  # cancelled before its first step
            work.close()
            future.cancel()

    task.add_done_callback(ended)
    return task, future


async def finish(tg: Services, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even if the caller is cancelled meanwhile."""
    _, future = begin(tg, work)
    return await asyncio.shield(future)


async def insist(tg: Services, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end and wait for that, however often the caller is cancelled meanwhile."""
    _, future = begin(tg, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    await future
