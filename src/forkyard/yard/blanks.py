"""Boxes made ahead: a cgroup and an engine that waits for a disk and a memory.

More than half of a start depends on neither: ``runsc create`` takes 50 ms before 40 ms of
restore. A blank has that behind it, and serves any start of its kind: a create, a fork of a
snapshot that did not exist a moment ago, a rewind. As many are kept as the last minute's bursts
needed, each for the engine's 12 to 24 MiB. They are made when no start is under way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from forkyard.errors import ForkyardError

log = logging.getLogger("forkyard.yard")

# Kinds that are kept, and blanks in all.
KINDS, MOST = 4, 16
# Starts this close to each other are one burst; what a burst needed is kept ready for so long.
BURST_S, REMEMBERED_S = 1.0, 60.0
# Making one is mostly waiting for the kernel.
AT_ONCE = 2

K = TypeVar("K")
S = TypeVar("S")
# The engine, the agent, and what the guest's kernel is told of memory, disk and processes.
Kind = tuple[str, str, int, int, int, int]


@dataclass(slots=True)
class _Stock(Generic[S]):
    """The blanks of one kind, those on their way and who waits for them, and how many starts of
    it came at once lately."""

    ready: list[S] = field(default_factory=list)
    coming: int = 0
    waiting: collections.deque[asyncio.Future[S | None]] = field(default_factory=collections.deque)
    recent: collections.deque[float] = field(default_factory=collections.deque)
    peak: int = 1
    peak_at: float = 0.0

    def asked(self) -> None:
        now = time.monotonic()
        self.recent.append(now)
        while now - self.recent[0] > BURST_S:
            self.recent.popleft()
        if len(self.recent) >= self.wanted():
            self.peak, self.peak_at = len(self.recent), now

    def wanted(self) -> int:
        return self.peak if time.monotonic() - self.peak_at < REMEMBERED_S else 1

    def came(self, blank: S | None) -> None:
        """One has been made (None: it failed): for who waits longest, or for later."""
        self.coming -= 1
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(blank)
                return
        if blank is not None:
            self.ready.append(blank)


class Blanks(Generic[K, S]):
    """Keeps blanks of the last kinds of start.

    Args:
        make: Makes a blank of a kind, or None if the engine has nothing to do ahead.
        drop: Takes one away again.
        room: Whether there is memory for another.
        kinds: How many kinds are kept.
        most: How many blanks are kept in all.
        calm_s: How long no start may have been under way before one is made.
    """

    def __init__(
        self,
        make: Callable[[K], Awaitable[S | None]],
        drop: Callable[[S], Awaitable[None]],
        room: Callable[[], bool],
        *,
        kinds: int = KINDS,
        most: int = MOST,
        calm_s: float = 0.0,
    ) -> None:
        self._make = make
        self.drop = drop
        self._room = room
        self._most_kinds = kinds
        self._most = most
        self._calm_s = calm_s
        self._kinds: collections.OrderedDict[K, _Stock[S]] = collections.OrderedDict()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._starts = 0
        self._began = 0

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around a start: no blank is begun meanwhile."""
        self._starts += 1
        self._began += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._starts -= 1
            if not self._starts:
                self._idle.set()

    def expect(self, kind: K) -> _Stock[S]:
        """Count a start of that kind: its like will come again."""
        stock = self._kinds.setdefault(kind, _Stock())
        self._kinds.move_to_end(kind)
        stock.asked()
        self._wake.set()
        return stock

    async def take(self, kind: K) -> S | None:
        """A blank of that kind, now the caller's; one that is being made is waited for."""
        stock = self.expect(kind)
        if stock.ready:
            return stock.ready.pop()
        if stock.coming <= len(stock.waiting):
            return None
        waiter: asyncio.Future[S | None] = asyncio.get_running_loop().create_future()
        stock.waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and (blank := waiter.result()) is not None:
                stock.ready.append(blank)
                if self._kinds.get(kind) is not stock:  # all were dropped meanwhile
                    await self._empty(stock, 0)
            raise

    def knows(self, kind: K) -> bool:
        """Whether it is one of the kinds that are kept."""
        return kind in self._kinds

    @property
    def ready(self) -> list[S]:
        """All that wait."""
        return [blank for stock in self._kinds.values() for blank in stock.ready]

    async def run(self) -> None:
        """Make what is wanted and drop what no longer is, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REMEMBERED_S / 4):
                    await self._wake.wait()
            self._wake.clear()
            # After the burst: a start that somebody waits for needs the CPUs more.
            await self._calm()
            await self._thin_out()
            missing = self._missing()
            if missing and self._room():
                async with asyncio.TaskGroup() as group:
                    for kind, stock in missing[:AT_ONCE]:
                        group.create_task(self._fill(kind, stock))
                self._wake.set()

    async def _calm(self) -> None:
        while True:
            await self._idle.wait()
            began = self._began
            await asyncio.sleep(self._calm_s)
            if self._began == began and self._idle.is_set():
                return

    async def _thin_out(self) -> None:
        while len(self._kinds) > self._most_kinds:
            _, stock = self._kinds.popitem(last=False)
            await self._empty(stock, 0)
        for stock in list(self._kinds.values()):
            await self._empty(stock, stock.wanted())

    async def _empty(self, stock: _Stock[S], left: int) -> None:
        while len(stock.ready) > left:
            blank = stock.ready.pop()
            try:
                await self.drop(blank)
            except (ForkyardError, OSError) as error:
                log.warning("dropping what was made ahead: %s", error)

    def _missing(self) -> list[tuple[K, _Stock[S]]]:
        """What to make, the kind asked for last first."""
        room = self._most - sum(len(stock.ready) for stock in self._kinds.values())
        kinds = [
            (kind, stock)
            for kind, stock in reversed(self._kinds.items())
            for _ in range(stock.wanted() - len(stock.ready))
        ]
        return kinds[: max(0, room)]

    async def _fill(self, kind: K, stock: _Stock[S]) -> None:
        stock.coming += 1
        blank = None
        try:
            blank = await self._make(kind)
        except (ForkyardError, OSError) as error:
            log.info("no blank could be made: %s", error)
        finally:
            stock.came(blank)
        if blank is None and self._kinds.get(kind) is stock:
            # Not again until a start asks for it: it would go as this one did.
            del self._kinds[kind]
        if self._kinds.get(kind) is not stock:  # forgotten meanwhile
            await self._empty(stock, 0)

    async def forget(self, kind: K) -> None:
        """Drop those of one kind; one that is being made is dropped when it comes."""
        stock = self._kinds.pop(kind, None)
        if stock is not None:
            await self._empty(stock, 0)

    async def drop_all(self) -> None:
        """Drop all."""
        while self._kinds:
            _, stock = self._kinds.popitem()
            await self._empty(stock, 0)
