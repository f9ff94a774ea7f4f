"""Machines started ahead: restored, heard, and without a name until somebody asks for one.

A start of a template is a restore of its warm image, in which nothing runs but the agent. One that
was restored a minute ago is the same machine, so that a create need only give it its name and limits: a
few milliseconds instead of a hundred. The same goes for a snapshot in whose memory nothing ran. What
has programs in it is never started ahead: they would have gone on meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forkyard.types import CPU_WEIGHT
from forkyard.yard.blanks import Blanks

if TYPE_CHECKING:
    from forkyard.yard.machines import Box, Start

# Each costs a sandbox's idle memory, so that fewer are kept than of blanks.
KINDS, MOST = 3, 4
# Whoever made a sandbox has the CPUs to themselves at first.
CALM_S = 0.5
# An image of more memory than this is a copy too dear to keep for a perhaps.
LARGEST = 256 << 20

# The memory, the disk, and what binds from within: agent, image, layers, disk_mb, shape.
Key = tuple[str, Path, tuple[str, ...], int, int, int, int]


class Ahead:
    """Keeps machines of the images that starts asked for last.

    Args:
        start: Starts a machine, and neither names nor limits it.
        end: Ends one.
        room: Whether there is memory for another.
    """

    def __init__(
        self,
        start: Callable[[Start], Awaitable[Box]],
        end: Callable[[Box], Awaitable[None]],
        room: Callable[[], bool],
    ) -> None:
        self._start = start
        self._starts: dict[Key, Start] = {}
        self.stock: Blanks[Key, Box] = Blanks(self._make, end, room, kinds=KINDS, most=MOST, calm_s=CALM_S)
        self._quiet: set[str] = set()

    def quiet(self, image: str, size: int) -> None:
        """Note that nothing runs in a memory image of ``size`` bytes but the agent."""
        if size <= LARGEST:
            self._quiet.add(image)

    async def learn(self, start: Start, box: Box) -> None:
        """Look whether anything but the agent runs in what was just restored, before it has a name and
        its hooks run, and have another ready if not."""
        if start.image is None or start.image.name in self._quiet:
            return
        if not (await box.guest.activity()).processes:
            self._quiet.add(start.image.name)
            self.stock.expect(self._note(start))

    def _note(self, start: Start) -> Key:
        key = _key(start)
        self._starts = {known: kept for known, kept in self._starts.items() if self.stock.knows(known)}
        # Nobody's: what it asks of a network meanwhile is not the present sandbox's to answer, nor is
        # its start as urgent as that one's.
        limits = dataclasses.replace(start.limits, cpu_weight=CPU_WEIGHT)
        self._starts[key] = dataclasses.replace(start, serve=lambda guest: None, limits=limits)
        return key

    async def take(self, start: Start) -> Box | None:
        """A machine as that start would make it, now the caller's; None if there is none."""
        if start.image is None or start.image.name not in self._quiet:
            return None
        key = self._note(start)
        while (box := await self.stock.take(key)) is not None:
            if box.guest.error is None and not box.machine.died.is_set():
                return box
            await self.stock.drop(box)
        return None

    async def _make(self, key: Key) -> Box | None:
        start = self._starts.get(key)
        if start is None or start.image is None or not start.image.is_dir():
            return None  # deleted meanwhile
        return await self._start(start)

    async def leave(self, layers: Iterable[str] = (), image: str | None = None) -> None:
        """Drop those that stand on any of these layers, or came from that image, which are to go."""
        gone = set(layers)
        for key in [key for key in self._starts if gone.intersection(key[2]) or key[1].name == image]:
            del self._starts[key]
            self._quiet.discard(key[1].name)
            await self.stock.forget(key)


def _key(start: Start) -> Key:
    limits = start.limits
    assert start.image is not None
    return (
        start.agent,
        start.image,
        tuple(start.layers),
        limits.disk_mb,
        limits.shape_mem_mb,
        limits.shape_disk_mb,
        limits.processes,
    )
