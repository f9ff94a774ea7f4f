"""HumanEval's canonical solutions pass and stubs do not: all 164, or those given.

    python examples/humaneval_oracle.py [0,1,2]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from forkyard.client.aio import AsyncClient
from forkyard.rollouts.grading import grade_files
from forkyard.rollouts.prepare import Preparer
from forkyard.rollouts.suites import humaneval
from forkyard.rollouts.types import Task

PARALLEL = 4


async def score(client: AsyncClient, tasks: list[Task], answer: Callable[[Task], str]) -> int:
    """How many pass; each candidate is in a copy of its own."""
    slots = asyncio.Semaphore(PARALLEL)
    async with Preparer(client).holding(tasks[0]) as prepared:

        async def one(task: Task) -> bool:
            async with slots:
                files = {humaneval.SOLUTION: answer(task)}
                done = await grade_files(client, task, prepared=prepared.snapshot, files=files)
                if done.verdict.message:
                    print(f"  {task.id}: {done.verdict.message[:90]}", file=sys.stderr)
                return done.verdict.passed

        async with asyncio.TaskGroup() as group:
            found = [group.create_task(one(task)) for task in tasks]
    return sum(task.result() for task in found)


async def main() -> int:
    tasks = humaneval.load(sys.argv[1] if len(sys.argv) > 1 else "")
    stubs = {problem["task_id"]: humaneval.stub(problem) for problem in humaneval.problems()}
    async with AsyncClient() as client:
        begun = time.monotonic()
        right = await score(client, tasks, lambda task: dict(task.oracle or {})[humaneval.SOLUTION])  # type: ignore[arg-type]
        middle = time.monotonic()
        wrong = await score(client, tasks, lambda task: stubs[task.id])
        ended = time.monotonic()
    print(f"canonical: {right} of {len(tasks)} in {middle - begun:.1f} s")
    print(f"stub: {wrong} of {len(tasks)} in {ended - middle:.1f} s")
    return 0 if (right, wrong) == (len(tasks), 0) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
