"""Scoring a run again, from the diffs that it kept."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import ForkyardError, InvalidRequestError, NotFoundError
from forkyard.rollouts import grading
from forkyard.rollouts import journal as jn
from forkyard.rollouts.clients import both, run_sync
from forkyard.rollouts.prepare import Prepared, Preparer
from forkyard.rollouts.report import Report
from forkyard.rollouts.slots import gradings_at_once
from forkyard.rollouts.stored import restored
from forkyard.rollouts.types import Grader, Sample, Task

GRADED = ("passed", "failed", "grader_error", "oom")
Graders = Grader | Callable[[Task], Grader]


async def aregrade(
    run: str | os.PathLike[str] | Report,
    grader: Graders | None = None,
    *,
    tasks: Sequence[Task] = (),
    client: AsyncClient | Client | None = None,
) -> Report:
    """The run's report with the verdicts of ``grader``, without running a policy.

    Each kept diff crosses into a fresh copy of the state that its episode started from, which is
    prepared again where it has gone. Samples that were never graded (their policy failed, or their
    sandbox was lost) stay as they are. The run itself is not changed.

    Args:
        run: Its directory, or its report.
        grader: One for all tasks, or a function of the task: where each task has hidden tests of its own,
            ``lambda task: graders[task.id]``. None: each task's own in ``tasks``.
        tasks: The tasks, where they are not in the run, or the graders to use.

    Raises:
        NotFoundError: no such run, or a task of it is neither stored nor given.
        InvalidRequestError: no grader: a run keeps what its tasks were, but not how they were graded.
    """
    if grader is not None and not callable(grader) and not hasattr(grader, "grade"):
        raise InvalidRequestError(
            f"grader={grader!r:.100} is neither a grader nor a function of the task",
            hint="lambda task: graders[task.id]",
        )
    report = run if isinstance(run, Report) else Report.load(run)
    mine = both(client)
    known = {task.id: task for task in (*report.tasks, *tasks)}
    without = {sample.task for sample in report.samples if sample.outcome in GRADED} - {
        name for name, task in known.items() if task.grader is not None
    }
    if grader is None and without:
        raise InvalidRequestError(
            f"no grader for {', '.join(sorted(without)[:3])}: a run does not keep how it was graded",
            hint="pass grader= (one, or a function of the task), or tasks= that have theirs",
        )
    if report.out is not None:
        known = _stored(report.out, grader) | known
    slots = asyncio.Semaphore(gradings_at_once())
    preparer = Preparer(mine.aio)
    made: dict[int, Sample] = {}

    async def one(at: int, sample: Sample) -> None:
        diff = report.diff(sample)
        if sample.task not in known:
            raise NotFoundError(f"the run does not hold task {sample.task!r}", hint="pass tasks=")
        if diff is None or sample.outcome not in GRADED:
            return
        task = known[sample.task]
        chosen: Any = grader or task.grader
        if _is_function(chosen):
            chosen = chosen(task)
        async with slots, preparer.holding(task) as prepared:
            made[at] = await _regraded(mine.aio, sample, task, prepared, diff, chosen)

    try:
        async with asyncio.TaskGroup() as group:
            for at, sample in enumerate(report.samples):
                group.create_task(one(at, sample))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await mine.close(client)
    samples = [made.get(at, sample) for at, sample in enumerate(report.samples)]
    return dataclasses.replace(report, samples=samples)


def regrade(run: str | os.PathLike[str] | Report, grader: Graders | None = None, **options: Any) -> Report:
    """As :func:`aregrade`, from code that is not async."""
    report: Report = run_sync(lambda: aregrade(run, grader, **options))
    return report


async def _regraded(
    client: AsyncClient, sample: Sample, task: Task, prepared: Prepared, diff: Any, grader: Grader
) -> Sample:
    try:
        graded = await grading.regrade(client, task, prepared=prepared.snapshot, diff=diff, grader=grader)
    except grading.UnfitError as error:
        return dataclasses.replace(sample, outcome="failed", reward=0.0, verdict=None, message=str(error))
    except (grading.GraderError, ForkyardError) as error:
        message = f"{type(error).__name__}: {error}"
        return dataclasses.replace(sample, outcome="grader_error", reward=0.0, verdict=None, message=message)
    verdict = graded.verdict
    return dataclasses.replace(
        sample,
        outcome="passed" if verdict.passed else "failed",
        reward=float(verdict.reward),
        verdict=verdict,
        message=verdict.message,
    )


def _stored(path: Path, grader: Graders | None) -> dict[str, Task]:
    entries = jn.read_tasks(path)
    one = None if grader is None or _is_function(grader) else grader
    return {name: restored(name, entry, one) for name, entry in entries.items()}  # type: ignore[arg-type]


def _is_function(grader: Any) -> bool:
    return callable(grader) and not hasattr(grader, "grade")
