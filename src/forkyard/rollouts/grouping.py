"""A group of rollouts of one task, as policy gradients with a group's baseline need them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import InvalidRequestError
from forkyard.rollouts.advantages import Advantages, Normalize, advantages
from forkyard.rollouts.attempt import Attempt, Runner
from forkyard.rollouts.clients import both, run_sync
from forkyard.rollouts.journal import pack_transcript
from forkyard.rollouts.keys import sample_seed
from forkyard.rollouts.prepare import Prepared, Preparer
from forkyard.rollouts.running import RETRIES, command_line, trajectory
from forkyard.rollouts.slots import Slots, episodes_at_once, gradings_at_once
from forkyard.rollouts.types import UNSCORED, GradeMode, Policy, Task, Verdict, check_task
from forkyard.types import Record

INVALID = (*UNSCORED, "cancelled")


@dataclass(frozen=True, slots=True)
class Rollout(Record):
    """One of a group. ``outcome`` is a sample's, or ``cancelled`` for one that was given up when the
    deadline had passed. ``reward`` is 0.0 where it is not ``valid``; mask it, do not learn from it."""

    number: int
    seed: int
    outcome: str
    reward: float = 0.0
    message: str = ""
    transcript: Any = None
    verdict: Verdict | None = None
    seconds: float = 0.0
    retries: int = 0
    trajectory: str = ""
    log: Sequence[dict[str, Any]] = ()

    @property
    def valid(self) -> bool:
        """Whether it says something about the policy."""
        return self.outcome not in INVALID


@dataclass(frozen=True, slots=True)
class Group(Record):
    """``advantages`` are in the order of ``rollouts``: 0.0 for those that are masked (not ``valid``),
    and for all of them where ``no_variance``: such a group teaches nothing. ``ddof`` is what the
    standard deviation took off the number of valid ones. ``identical`` lists the numbers of
    rollouts that did exactly the same: they count as one in truth."""

    task: str
    rollouts: list[Rollout]
    advantages: list[float]
    normalize: Normalize
    ddof: int
    mean: float
    std: float
    no_variance: bool
    identical: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Of all, 0.0 for those that are masked."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def valid(self) -> list[bool]:
        """The mask: which ones count."""
        return [rollout.valid for rollout in self.rollouts]

    @property
    def transcripts(self) -> list[Any]:
        """What the policy returned, untouched; None for those that were cancelled or failed."""
        return [rollout.transcript for rollout in self.rollouts]


async def agroup_rollouts(
    task: Task,
    policy: Policy,
    n: int,
    *,
    deadline_s: float | None = None,
    min_valid: int | None = None,
    normalize: Normalize = "std",
    ddof: int = 1,
    grade: GradeMode | None = None,
    parallel: int | str = "auto",
    client: AsyncClient | Client | None = None,
    run: str | None = None,
) -> Group:
    """Let ``policy`` try ``task`` n times, each in a fork of the same prepared state, and grade each.

    Args:
        policy: As for ``evaluate``.
        deadline_s: When so long has passed, what still runs is cancelled as soon as ``min_valid``
            (default: two) are in. Those that take long are then missing: where length goes with
            reward, that is a bias, so be generous.
        normalize, ddof: See :func:`forkyard.rollouts.advantages.advantages`.
        grade, parallel, client: As for ``evaluate``.
        run: The seeds are made of it, the task and the rollout's number; made up if absent.

    Raises:
        InvalidRequestError: an argument. What the daemon says while preparing.
    """
    check_task(task)
    least = _check(n, deadline_s, min_valid)
    advantages([0.0] * n, [True] * n, normalize, ddof)
    mine = both(client)
    begun = time.monotonic()
    try:
        async with Preparer(mine.aio).holding(task) as prepared:
            slots = Slots(await episodes_at_once(mine.aio, parallel, n))
            grading = asyncio.Semaphore(gradings_at_once())
            runner = Runner(mine.aio, mine.sync, policy, grade, grading)
            going = _Group(runner, slots, task, prepared, n, run or secrets.token_hex(8), least)
            await going.go(deadline_s)
    finally:
        await mine.close(client)
    return _group(task, going.rollouts, normalize, ddof, time.monotonic() - begun)


def group_rollouts(
    task: Task,
    policy: Policy,
    n: int,
    *,
    deadline_s: float | None = None,
    min_valid: int | None = None,
    normalize: Normalize = "std",
    **options: Any,
) -> Group:
    """As :func:`agroup_rollouts`, from code that is not async (or from a notebook's cell)."""
    made: Group = run_sync(
        lambda: agroup_rollouts(
            task, policy, n, deadline_s=deadline_s, min_valid=min_valid, normalize=normalize, **options
        )
    )
    return made


def _check(n: int, deadline_s: float | None, min_valid: int | None) -> int:
    if n < 1:
        raise InvalidRequestError(f"n={n}", hint="a group has at least one rollout")
    if min_valid is not None and deadline_s is None:
        raise InvalidRequestError(
            f"min_valid={min_valid} without deadline_s",
            hint="say with deadline_s when stragglers may be cancelled: the fastest are no fair sample",
        )
    least = min(2, n) if min_valid is None else min_valid
    if not 1 <= least <= n:
        raise InvalidRequestError(f"min_valid={least} of n={n}", hint="min_valid is 1 to n")
    return least


class _Group:
    def __init__(
        self, runner: Runner, slots: Slots, task: Task, prepared: Prepared, n: int, run: str, least: int
    ) -> None:
        self._runner = runner
        self._slots = slots
        self._task = task
        self._prepared = prepared
        self._least = least
        self._late = False
        self._running: set[asyncio.Task[None]] = set()
        seeds = [sample_seed(run, task.id, number) for number in range(n)]
        self.rollouts = [Rollout(number, seed, "cancelled") for number, seed in enumerate(seeds)]

    async def go(self, deadline_s: float | None) -> None:
        timer = None
        if deadline_s is not None:
            timer = asyncio.get_running_loop().call_later(deadline_s, self._deadline)
        try:
            async with asyncio.TaskGroup() as group:
                for rollout in self.rollouts:
                    self._running.add(group.create_task(self._one(rollout)))
        finally:
            if timer is not None:
                timer.cancel()

    def _deadline(self) -> None:
        self._late = True
        self._give_up()

    def _give_up(self) -> None:
        """Cancel the stragglers, once the time is over and enough are in."""
        if self._late and sum(rollout.valid for rollout in self.rollouts) >= self._least:
            for task in self._running:
                task.cancel()

    async def _one(self, blank: Rollout) -> None:
        begun = time.monotonic()
        retries = 0
        while True:
            await self._slots.take()
            place = contextlib.AsyncExitStack()
            place.push_async_callback(self._slots.give)
            async with place:
                done = await self._runner.attempt(
                    self._task, self._prepared, blank.number, blank.seed, place.aclose
                )
            if not done.host or retries == RETRIES:
                break
            retries += 1
        self.rollouts[blank.number] = _rollout(blank, done, time.monotonic() - begun, retries)
        self._give_up()


def _rollout(blank: Rollout, done: Attempt, seconds: float, retries: int) -> Rollout:
    packed, _ = pack_transcript(done.transcript)
    return Rollout(
        number=blank.number,
        seed=blank.seed,
        outcome=done.outcome,
        reward=0.0 if done.outcome in INVALID else done.reward,
        message=done.message,
        transcript=done.transcript,
        verdict=done.verdict,
        seconds=round(seconds, 4),
        retries=retries + done.grade_retries,
        trajectory=trajectory(packed, [command_line(record) for record in done.records]),
        log=done.log,
    )


def _group(task: Task, rollouts: list[Rollout], normalize: Normalize, ddof: int, seconds: float) -> Group:
    worth: Advantages = advantages(
        [rollout.reward for rollout in rollouts], [rollout.valid for rollout in rollouts], normalize, ddof
    )
    same: dict[str, list[int]] = {}
    for rollout in rollouts:
        if rollout.valid:
            same.setdefault(rollout.trajectory, []).append(rollout.number)
    return Group(
        task=task.id,
        rollouts=rollouts,
        advantages=worth.values,
        normalize=normalize,
        ddof=ddof,
        mean=worth.mean,
        std=worth.std,
        no_variance=worth.no_variance,
        identical=[numbers for numbers in same.values() if len(numbers) > 1],
        seconds=round(seconds, 3),
    )
