"""Work that a cancellation does not leave behind half done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

__all__ = ["in_thread", "waited_out"]

T = TypeVar("T")


async def in_thread(call: Callable[..., T], *args: Any, executor: Executor | None = None) -> T:
    """Run what blocks; see :func:`waited_out`."""
    return await waited_out(asyncio.get_running_loop().run_in_executor(executor, call, *args))


async def waited_out(future: asyncio.Future[T]) -> T:
    """The future's result. A cancellation, however often it comes, takes effect when the future is
    done: whoever undoes the work never meets it still going on."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()
        raise
