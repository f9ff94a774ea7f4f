"""Whether tasks measure what they say: doing nothing must fail, the oracle must pass, every time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import CommandFailedError
from forkyard.rollouts.clients import both, run_sync
from forkyard.rollouts.grading import grade, grade_files
from forkyard.rollouts.prepare import Preparer, limit_fields
from forkyard.rollouts.types import Task, Verdict
from forkyard.types import Record

TIMES = 3
PARALLEL = 2


@dataclass(frozen=True, slots=True)
class Checked(Record):
    """What became of one task. ``state``: ``good``; ``flaky`` (one and the same thing had different
    verdicts); ``passes_empty`` (nothing was done, and it passed); ``oracle_fails``; ``no_oracle``
    (nothing was done, and it failed: no more is known); ``broken`` (it could not be graded)."""

    task: str
    state: str
    message: str = ""
    nothing: Sequence[bool] = ()
    oracle: Sequence[bool] = ()
    tests: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Validation(Record):
    """``tasks`` are those that may be used; ``checked`` says of each why or why not."""

    tasks: list[Task]
    checked: list[Checked] = field(default_factory=list)

    @property
    def dropped(self) -> list[Checked]:
        """Those that may not be used."""
        return [one for one in self.checked if one.state not in ("good", "no_oracle")]

    def __str__(self) -> str:
        lines = [f"{len(self.tasks)} of {len(self.checked)} tasks may be used"]
        lines += [f"  {one.task}: {one.state}  {one.message}" for one in self.dropped]
        return "\n".join(lines)


async def avalidate(
    tasks: Sequence[Task],
    *,
    times: int = TIMES,
    parallel: int = PARALLEL,
    client: AsyncClient | Client | None = None,
) -> Validation:
    """Grade each task ``times`` times with nothing done and with its oracle's work.

    A task whose verdicts vary is flaky: it is named with the tests that do, and dropped, as are those
    that pass with nothing done and those whose oracle fails.
    """
    mine = both(client)
    preparer, slots = Preparer(mine.aio), asyncio.Semaphore(parallel)

    async def check(task: Task) -> Checked:
        async with slots:
            return await _check(mine.aio, preparer, task, times)

    try:
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(check(task)) for task in tasks]
    finally:
        await mine.close(client)
    checked = [one.result() for one in found]
    usable = [task for task, one in zip(tasks, checked, strict=True) if one.state in ("good", "no_oracle")]
    return Validation(usable, checked)


def validate(
    tasks: Sequence[Task],
    *,
    times: int = TIMES,
    parallel: int = PARALLEL,
    client: AsyncClient | Client | None = None,
) -> Validation:
    """As :func:`avalidate`, from code that is not async (or from a notebook's cell)."""
    found: Validation = run_sync(lambda: avalidate(tasks, times=times, parallel=parallel, client=client))
    return found


async def _check(client: AsyncClient, preparer: Preparer, task: Task, times: int) -> Checked:
    if task.grader is None:
        return Checked(task.id, "broken", "it has no grader")
    nothing: list[Verdict] = []
    oracle: list[Verdict] = []
    try:
        async with preparer.holding(task) as prepared:
            for _ in range(times):
                nothing.append(await _verdict(client, task, prepared.snapshot, {}))
            if task.oracle is not None and not any(one.passed for one in nothing):
                for _ in range(times):
                    oracle.append(await _verdict(client, task, prepared.snapshot, task.oracle))
    except Exception as error:
        # A grader's, an oracle's, the daemon's: of this task alone. The others are still to be checked.
        return Checked(task.id, "broken", f"{type(error).__name__}: {error}")
    state, message = _state(task, nothing, oracle)
    unsteady = sorted({*_unsteady(nothing), *_unsteady(oracle)})
    if unsteady and state in ("good", "no_oracle"):
        state, message = "flaky", f"{len(unsteady)} tests vary"
    passes = [one.passed for one in nothing], [one.passed for one in oracle]
    return Checked(task.id, state, message, *passes, unsteady)


def _state(task: Task, nothing: Sequence[Verdict], oracle: Sequence[Verdict]) -> tuple[str, str]:
    for name, verdicts in (("doing nothing", nothing), ("the oracle", oracle)):
        if len({(one.passed, one.reward) for one in verdicts}) > 1:
            count = sum(one.passed for one in verdicts)
            return "flaky", f"{name} passed {count} of {len(verdicts)} times"
    if nothing[0].passed:
        return "passes_empty", "doing nothing passes"
    if task.oracle is None:
        return "no_oracle", ""
    if not oracle[0].passed:
        return "oracle_fails", oracle[0].message
    return "good", ""


def _unsteady(verdicts: Sequence[Verdict]) -> set[str]:
    """Tests that did not always end in the same way."""
    names = {name for one in verdicts for name in one.tests}
    return {name for name in names if len({one.tests.get(name) for one in verdicts}) > 1}


async def _verdict(client: AsyncClient, task: Task, prepared: str, work: Any) -> Verdict:
    assert task.grader is not None
    if not callable(work) and task.grader.mode == "clean":
        return (await grade_files(client, task, prepared=prepared, files=work)).verdict
    made = await client.fork(
        prepared,
        env=dict(task.env),
        egress_allow=list(task.egress),
        ephemeral=True,
        wait_s=task.timeouts.prepare_s,
        **limit_fields(task.limits) if task.limits.type != "small" else {},
    )
    copy = client.sandbox(made.forks[0].id)
    try:
        if callable(work):
            try:
                done = work(copy, task)
                if inspect.isawaitable(done):
                    await done
            except CommandFailedError as error:
                return Verdict(False, 0.0, f"the oracle failed: {error.message}")
        else:
            for path, data in work.items():
                if data is None:
                    await copy.remove(path, user=task.user)
                else:
                    raw = data if isinstance(data, str | bytes) else data.read_bytes()
                    await copy.write_file(path, raw, user=task.user)
        return (await grade(client, task, prepared=prepared, final=copy.id)).verdict
    finally:
        await copy.delete_sandbox()
