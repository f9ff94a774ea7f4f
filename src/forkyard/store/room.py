"""Room in the store: what is free, what it may grow by, and growing before somebody writes more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forkyard.errors import CapacityError
from forkyard.store.backend import Backend, BtrfsBackend
from forkyard.store.loopfile import GIB, LoopFile

__all__ = ["Room", "Space"]

_LOOK_S = 0.25

log = logging.getLogger("forkyard.store")


@dataclass(frozen=True, slots=True)
class Space:
    """Room for disks, in MiB: free now, and what the store may still grow by."""

    free_mb: int
    growth_mb: int


class Room:
    """The room of one open store.

    Args:
        file: Where the store lies in, if that can grow.
        thread: Runs what blocks.
    """

    def __init__(self, backend: Backend, file: LoopFile | None, thread: Callable[..., Any]) -> None:
        self._backend = backend
        self._file = file
        self._thread = thread
        self._growing = asyncio.Lock()

    async def have(self, wanted: int) -> bool:
        """Whether ``wanted`` bytes can be written, after growing if that helps.

        Raises:
            CapacityError, OSError: it had to grow and could not.
        """
        if self._backend.free_bytes() >= wanted:
            return True
        if self._file is None or not isinstance(self._backend, BtrfsBackend):
            return False
        async with self._growing:
            grown: bool = await self._thread(self._file.grow, self._backend.volume, wanted)
            return grown

    def space(self) -> Space:
        """For admission."""
        growth = 0
        if self._file is not None and isinstance(self._backend, BtrfsBackend):
            growth = self._file.growth_bytes(self._backend.volume)
        return Space(self._backend.free_bytes() >> 20, growth >> 20)

    def full(self, why: str = "") -> CapacityError:
        """What to raise where there is none."""
        space = self.space()
        words = f"the disk store is full: {space.free_mb} MiB free, it may grow by {space.growth_mb} MiB"
        return CapacityError(
            f"{words}; {why}" if why else words,
            hint="delete sandboxes and snapshots, or raise store_gb",
            retryable=True,
        )

    async def keep(self) -> None:
        """Keep room ahead of what is written, until cancelled."""
        free, said = self._backend.free_bytes(), ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                # A writer fills the host's page cache at gigabytes a second: what the last look cost,
                # eight times over, is two seconds' worth.
                await self.have(max(GIB, 8 * (free - self._backend.free_bytes())))
                free = self._backend.free_bytes()
            except (OSError, CapacityError) as error:
                if (why := str(error)) != said:
                    said = why
                    log.warning("the disk store could not grow, which is tried again: %s", why)
