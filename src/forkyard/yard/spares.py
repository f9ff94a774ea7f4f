"""Boxes made ahead: a disk, a cgroup and an engine that waits for its memory.

Half of a start from an image does not depend on the image: ``runsc create`` takes 50 ms
before 40 ms of restore. A spare has that behind it. One is kept for what was started last (a
template, a snapshot that is started from again and again), a few in all: each costs the
engine's 12 MiB. They are made one at a time, when no start is under way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, Protocol, TypeVar

from forkyard.errors import ForkyardError

log = logging.getLogger("forkyard.yard")

KEYS = 6


class Site(Protocol):
    """What is kept: something on layers."""

    @property
    def layers(self) -> list[str]: ...


S = TypeVar("S", bound=Site)
Key = tuple[tuple[str, ...], str, int, int, int]


class Spares(Generic[S]):
    """Keeps one spare for each of the last :data:`KEYS` kinds of start.

    Args:
        make: Makes a spare of a kind, or None if the engine has nothing to do ahead.
        drop: Takes one away again.
        room: Whether there is memory for another.
    """

    def __init__(
        self,
        make: Callable[[Key], Awaitable[S | None]],
        drop: Callable[[S], Awaitable[None]],
        room: Callable[[], bool],
    ) -> None:
        self._make = make
        self._drop = drop
        self._room = room
        self._kept: collections.OrderedDict[Key, S | None] = collections.OrderedDict()
        self._making: Key | None = None
        self._made = asyncio.Event()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._starts = 0

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around a start: no spare is begun meanwhile."""
        self._starts += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._starts -= 1
            if not self._starts:
                self._idle.set()

    async def take(self, key: Key) -> S | None:
        """A spare of that kind, now the caller's; one that is being made is waited for."""
        while self._making == key:
            await self._made.wait()
        spare = self._kept.get(key)
        if spare is not None:
            self._kept[key] = None
        return spare

    def want(self, key: Key) -> None:
        """Keep a spare of that kind from now on, instead of the kind that was asked for longest ago."""
        self._kept.setdefault(key, None)
        self._kept.move_to_end(key)
        self._wake.set()

    async def run(self) -> None:
        """Make what is wanted, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # After the burst: a start that somebody waits for needs the CPUs more.
            await self._idle.wait()
            while len(self._kept) > KEYS:
                _, spare = self._kept.popitem(last=False)
                if spare is not None:
                    await self._drop(spare)
            missing = [key for key in reversed(self._kept) if self._kept[key] is None]
            if missing and self._room():
                await self._fill(missing[0])
                if len(missing) > 1:
                    self._wake.set()

    async def _fill(self, key: Key) -> None:
        self._making, self._made = key, asyncio.Event()
        try:
            spare = await self._make(key)
        except (ForkyardError, OSError) as error:
            log.info("no spare could be made: %s", error)
            spare = None
        finally:
            self._making = None
            self._made.set()
        if spare is None:
            self._kept.pop(key, None)
        elif key in self._kept:
            self._kept[key] = spare
        else:
            await self._drop(spare)

    async def forget(self, layer: str) -> None:
        """Drop the spares that stand on a layer, which is about to go."""
        for key in [key for key in self._kept if layer in key[0]]:
            spare = self._kept.pop(key)
            if spare is not None:
                await self._drop(spare)

    async def drop_all(self) -> None:
        """Drop all."""
        while self._kept:
            _, spare = self._kept.popitem()
            if spare is not None:
                await self._drop(spare)
