"""Work in threads outlives no caller that was cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forkyard.host.threads import in_thread


async def test_a_cancellation_waits_however_often_it_comes() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(20)
        ended.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait, 20)
        for _ in range(3):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


async def test_results_and_errors_are_the_works() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 1, 0)
