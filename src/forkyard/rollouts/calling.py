"""Functions that a caller hands in, sync or async, and one event loop for calls that are sync."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client

T = TypeVar("T")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose call is async
    )


class Callbacks:
    """Calls functions with sandboxes: an async one gets an async handle and runs in the loop, any
    other a sync handle and a thread of its own, so that it may block."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._sync: Client | None = None

    def sync_client(self) -> Client:
        """A client for functions that block; it connects by itself."""
        if self._sync is None:
            self._sync = _twin(self._client, Client)
        return self._sync

    async def on_sandbox(self, function: Callable[..., Any], sandbox: str, *args: Any) -> Any:
        """``function(handle, *args)``."""
        if is_async(function):
            return await function(self._client.sandbox(sandbox), *args)
        return await asyncio.to_thread(function, self.sync_client().sandbox(sandbox), *args)

    async def plain(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``."""
        if is_async(function):
            return await function(*args)
        return await asyncio.to_thread(function, *args)

    async def close(self) -> None:
        if self._sync is not None:
            await asyncio.to_thread(self._sync.close)


def run_with(client: Client, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
    """``work`` with an async client of the same daemon, to its end, also below a running loop."""

    async def with_client() -> T:
        async with _twin(client, AsyncClient) as aio:
            return await work(aio)

    return run_here(with_client())


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. Where this thread has a loop already (a notebook), in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    ended: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(asyncio.run(work))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="forkyard-rollouts")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return ended[0]


def _twin(client: Client | AsyncClient, kind: Any) -> Any:
    # As unpickling does: the same daemon, connections and leases of its own.
    made = kind.__new__(kind)
    made.__setstate__(client.__getstate__())
    return made
