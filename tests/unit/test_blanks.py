"""Boxes made ahead: how many there are, and who gets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forkyard.errors import InternalError
from forkyard.yard import blanks
from forkyard.yard.blanks import Blanks

KIND, OTHER = ("agent", 1024, 1024, 400), ("agent", 2048, 1024, 400)


class Maker:
    """Makes numbers; while ``gate`` is closed, none is finished."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.dropped: list[int] = []
        self.begun = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False
        self.blanks: Blanks[Any, int] = Blanks(self.make, self.drop, lambda: True)

    async def make(self, kind: object) -> int | None:
        self.begun += 1
        number = self.begun
        await self.gate.wait()
        if self.fails:
            raise InternalError("no")
        self.made.append(number)
        return number

    async def drop(self, blank: int) -> None:
        self.dropped.append(blank)

    @property
    def kept(self) -> int:
        return len(self.made) - len(self.dropped)


@pytest.fixture
async def maker() -> AsyncIterator[Maker]:
    maker = Maker()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(maker.blanks.run())
        yield maker
        running.cancel()


async def until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_burst_is_remembered(maker: Maker) -> None:
    assert [await maker.blanks.take(KIND) for _ in range(8)] == [None] * 8
    await until(lambda: maker.kept == 8)
    assert sorted([await maker.blanks.take(KIND) for _ in range(8)]) == list(range(1, 9))


async def test_not_more_than_are_allowed(maker: Maker) -> None:
    with maker.blanks.starting():
        for _ in range(3 * blanks.MOST):
            assert await maker.blanks.take(KIND) is None
    await until(lambda: maker.kept == blanks.MOST)
    assert await maker.blanks.take(OTHER) is None


async def test_what_a_burst_needed_is_dropped_in_time(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        await maker.blanks.take(KIND)
    await until(lambda: maker.kept == 4)
    monkeypatch.setattr(blanks, "REMEMBERED_S", 0.0)
    assert await maker.blanks.take(OTHER) is None
    await until(lambda: len(maker.dropped) == 3)


async def test_one_that_is_being_made_is_waited_for_by_one(maker: Maker) -> None:
    maker.gate.clear()
    assert await maker.blanks.take(KIND) is None
    await until(lambda: maker.begun == 1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(maker.blanks.take(KIND))
        await asyncio.sleep(0)
        assert await maker.blanks.take(KIND) is None  # there is one only
        maker.gate.set()
    assert first.result() == 1


@pytest.mark.parametrize("late", [False, True])
async def test_one_that_nobody_waits_for_any_more_is_kept(maker: Maker, late: bool) -> None:
    maker.gate.clear()
    assert await maker.blanks.take(KIND) is None
    await until(lambda: maker.begun == 1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(maker.blanks.take(KIND))
        await asyncio.sleep(0)
        if late:  # it has been handed over, and the one who waits has not run since
            maker.gate.set()
            stock = maker.blanks._kinds[KIND]
            waiter = stock.waiting[0]
            waiter.add_done_callback(lambda _: first.cancel())
        else:
            first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        maker.gate.set()
    assert first.cancelled() or first.result() == 1
    if first.cancelled():
        await until(lambda: maker.blanks._kinds[KIND].ready != [])


async def test_a_failure_is_not_repeated_until_somebody_asks(maker: Maker) -> None:
    maker.fails = True
    await maker.blanks.take(KIND)
    await until(lambda: maker.begun == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert maker.begun == 1
    maker.fails = False
    await maker.blanks.take(KIND)
    await until(lambda: maker.kept == 1)


async def test_none_is_begun_while_one_starts(maker: Maker) -> None:
    with maker.blanks.starting():
        await maker.blanks.take(KIND)
        for _ in range(20):
            await asyncio.sleep(0)
        assert maker.begun == 0
    await until(lambda: maker.kept == 1)


async def test_all_are_dropped(maker: Maker) -> None:
    await maker.blanks.take(KIND)
    await until(lambda: maker.kept == 1)
    maker.gate.clear()
    await maker.blanks.take(OTHER)
    await until(lambda: maker.begun == 2)
    await maker.blanks.drop_all()
    maker.gate.set()
    await until(lambda: maker.dropped == maker.made == [1, 2])


async def test_a_kind_that_cannot_be_made_any_more_ends_nothing(maker: Maker) -> None:
    """Two of it are asked for at once, and the first finds that there are none."""
    maker.fails = True
    for _ in range(2):
        assert await maker.blanks.take(KIND) is None
    await until(lambda: not maker.blanks.knows(KIND))
    maker.fails = False
    assert await maker.blanks.take(OTHER) is None
    await until(lambda: maker.kept == 1)


async def test_one_that_cannot_be_dropped_ends_nothing(maker: Maker) -> None:
    real = maker.blanks.drop

    async def drop(_: int) -> None:
        raise OSError("busy")

    assert await maker.blanks.take(KIND) is None
    await until(lambda: maker.blanks.ready != [])
    maker.blanks.drop = drop  # type: ignore[method-assign]
    await maker.blanks.forget(KIND)
    maker.blanks.drop = real  # type: ignore[method-assign]
    assert await maker.blanks.take(OTHER) is None
    await until(lambda: maker.blanks.knows(OTHER) and maker.blanks.ready != [])
