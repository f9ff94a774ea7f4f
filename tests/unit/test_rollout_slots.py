"""How many episodes run at a time."""

from __future__ import annotations

from typing import Any

from forkyard.rollouts.slots import Slots, episodes_at_once, gradings_at_once, room
from forkyard.types import Capacity


class Machine:
    """Has room for so many of each source."""

    def __init__(self, fits: dict[str | None, int]) -> None:
        self.fits = fits

    async def capacity(self, source: str | None = None) -> Capacity:
        return Capacity(self.fits[source], 0, 0, 0, 0)


async def test_a_large_state_leaves_room_for_few() -> None:
    """Half is for what waits to be graded, and gradings have theirs."""
    gradings = gradings_at_once()
    machine: Any = Machine({None: 1000, "large": 6 + gradings, "huge": 1})
    assert await episodes_at_once(machine, "auto", 3) == 3
    slots = Slots(8)
    slots.at_most(await room(machine, "large"))
    assert slots.limit == 3
    slots.at_most(await room(machine, "large", running=4))
    assert slots.limit == 3, "it never rises"
    slots.at_most(await room(machine, "huge"))
    assert slots.limit == 1, "one at a time is tried whatever the figures say"
