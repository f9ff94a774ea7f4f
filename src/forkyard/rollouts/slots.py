"""How many episodes run at a time."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType

from forkyard.client.aio import AsyncClient
from forkyard.errors import InvalidRequestError

# Episodes mostly wait, for a model or for each other's commands.
EPISODES_PER_CPU = 4


class Slots:
    """Places for episodes, first come first served, whose number may fall while they are in use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._changed = asyncio.Condition()

    async def take(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.used < self.limit)
            self.used += 1

    async def give(self) -> None:
        async with self._changed:
            self.used -= 1
            self._changed.notify_all()

    def lower(self) -> None:
        """Half as many from now on."""
        self.at_most(self.limit // 2)

    def at_most(self, limit: int) -> None:
        """No more than so many from now on, but one."""
        self.limit = max(1, min(self.limit, limit))

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.give()


async def episodes_at_once(client: AsyncClient, parallel: int | str, wanted: int) -> int:
    """``parallel``, or for ``"auto"`` what the machine holds: as many again may wait to be graded,
    and gradings have copies of their own.

    Raises:
        InvalidRequestError: it is neither a positive number nor ``"auto"``.
    """
    if parallel == "auto":
        return max(1, min(await room(client), EPISODES_PER_CPU * (os.cpu_count() or 1), wanted))
    if not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1:
        raise InvalidRequestError(f"parallel is {parallel!r}", hint='give a positive number, or "auto"')
    return parallel


async def room(client: AsyncClient, source: str | None = None, running: int = 0) -> int:
    """How many episodes that start from ``source`` the machine holds, beside nothing but gradings.

    Args:
        running: Episodes that run now, and may be as large.
    """
    return ((await client.capacity(source)).fits + running - gradings_at_once()) // 2


def gradings_at_once() -> int:
    """One for each CPU. Episodes do not wait in the same queue, and are held back while it is long."""
    return max(2, os.cpu_count() or 1)
