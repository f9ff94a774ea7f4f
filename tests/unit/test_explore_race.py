"""Who may still win, and until when."""

from __future__ import annotations

import asyncio

from forkyard.requests import Variant
from forkyard.types import VariantResult
from forkyard.yard.exploring import Race, Trial


def _race(keep: str, n: int = 3) -> Race:
    return Race(keep, [Trial(index, Variant(name=str(index), command="true")) for index in range(n)])


def _pass(race: Race, index: int, duration_ms: float) -> None:
    trial = race.trials[index]
    trial.result = VariantResult(str(index), True, "passed", 0, duration_ms)
    race.passed(trial, duration_ms)


async def test_the_fastest_wins_and_bounds_the_others() -> None:
    race = _race("fastest")
    now = asyncio.get_running_loop().time()
    async with asyncio.timeout(None) as limit:
        race.trials[2].begun, race.trials[2].limit = now, limit
        _pass(race, 0, 5000)
        assert 4.9 < limit.when() - now < 5.1 and not race.lost(race.trials[2])
        _pass(race, 1, 3000)
        assert race.best is race.trials[1] and 2.9 < limit.when() - now < 3.1
        assert not race.lost(Trial(9, Variant(name="9", command="true")))  # it may be quicker still
        limit.reschedule(None)
        await asyncio.sleep(0)
        race.trials[2].begun = now - 4
        assert race.lost(race.trials[2])


async def test_a_slower_one_does_not_take_over() -> None:
    race = _race("fastest")
    _pass(race, 2, 10)
    _pass(race, 0, 20)
    assert race.best is race.trials[2]


async def test_the_first_in_order_wins_whatever_the_time() -> None:
    race = _race("first")
    _pass(race, 1, 10)
    assert race.lost(race.trials[2]) and not race.lost(race.trials[0])
    _pass(race, 0, 9000)
    assert race.best is race.trials[0]


async def test_nobody_is_lost_where_the_client_chooses() -> None:
    race = _race("choose")
    _pass(race, 0, 10)
    assert race.best is None and not any(race.lost(trial) for trial in race.trials)
