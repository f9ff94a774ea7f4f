"""Who gets the CPUs when everybody wants them."""

from __future__ import annotations

import asyncio
import os

import pytest
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client
from forkyard.client.aio import AsyncClient
from forkyard.client.sync_sandbox import Sandbox
from forkyard.rollouts.copies import clean_copy, own_copy
from forkyard.rollouts.graders import CommandGrader
from forkyard.rollouts.types import Task

pytestmark = [pytest.mark.root, pytest.mark.slow]
OWN_MS = 1500.0


def test_a_heavy_sandbox_has_its_cpu_while_others_burn_all(client: Client) -> None:  # noqa: F811
    """Forked while every CPU is busy. Without a weight, it would get what each of the others gets."""
    first = client.sandbox(client.create_sandbox(mem_mb=256).id)
    first.spawn(["python3", "-c", "while True: pass"], detach=True)
    forks = first.fork(2 * (os.cpu_count() or 1) + 1).forks
    others = [first, *(client.sandbox(fork.id) for fork in forks)]
    heavy = client.sandbox(first.fork(cpu_weight=10_000).forks[0].id)
    assert heavy.get_sandbox().cpu_weight == 10_000 and first.get_sandbox().cpu_weight == 100
    boxes = [heavy, *others]
    until(lambda: min(used(boxes)) > 100, 60)

    before = used(boxes)
    until(lambda: used([heavy])[0] - before[0] > OWN_MS, 60)
    took = [now - then for now, then in zip(used(boxes), before, strict=True)]
    assert took[0] > 3 * max(took[1:]), took


def test_copies_for_grading_weigh_most(yard: YardHome, client: Client) -> None:  # noqa: F811
    source = client.create_sandbox(mem_mb=256).id
    task = Task("t", source, grader=CommandGrader("true"))

    async def main() -> list[int]:
        async with (
            AsyncClient(home=yard.home) as own,
            clean_copy(own, task, source) as clean,
            own_copy(own, source) as final,
        ):
            return [clean.cpu_weight, final.cpu_weight]

    assert asyncio.run(main()) == [10_000, 10_000]
    assert client.get_sandbox(source).cpu_weight == 100


def used(boxes: list[Sandbox]) -> list[float]:
    """What each has had of the CPUs, in milliseconds."""
    return [box.usage().cpu_ms for box in boxes]
