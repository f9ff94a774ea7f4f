"""Functions that a caller hands in, sync or async, called with the kind of handle that they can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.rollouts.attempt import in_thread
from forkyard.rollouts.episode import is_async


class Callbacks:
    """An async function gets an async handle and runs in the loop, any other a sync handle and a
    thread of its own, so that it may block."""

    def __init__(self, aio: AsyncClient, sync: Client) -> None:
        self._aio = aio
        self._sync = sync

    async def on_sandbox(self, function: Callable[..., Any], sandbox: str, *args: Any) -> Any:
        """``function(handle, *args)``."""
        if is_async(function):
            return await function(self._aio.sandbox(sandbox), *args)
        return await in_thread(partial(function, self._sync.sandbox(sandbox), *args))

    async def plain(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``."""
        if is_async(function):
            return await function(*args)
        return await in_thread(partial(function, *args))
