"""Running a policy over tasks: ``evaluate`` and what it is made of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import (
    CommandFailedError,
    ConflictError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
)
from forkyard.rollouts import journal as jn
from forkyard.rollouts.attempt import WRONG, Attempt, Runner
from forkyard.rollouts.clients import Both, both, run_sync
from forkyard.rollouts.keys import digest, policy_version, sample_key, sample_seed, task_digest
from forkyard.rollouts.losses import HOST
from forkyard.rollouts.numbers import need
from forkyard.rollouts.prepare import DISK_BUDGET_MB, Prepared, Preparer
from forkyard.rollouts.progress import Board, OnProgress, shown
from forkyard.rollouts.report import Report
from forkyard.rollouts.slots import Slots, episodes_at_once, gradings_at_once, room
from forkyard.rollouts.stored import store_tasks
from forkyard.rollouts.types import GradeMode, Phases, Policy, Sample, Task, check_task

RETRIES = 2
# What a task that cannot be prepared as it is written raises: for every sample, and at every try.
MISTAKES = (CommandFailedError, NotFoundError, *WRONG)
# What a grader must have: see types.Grader.
GRADER = ("name", "mode", "build", "files", "key", "grade")


async def aevaluate(
    tasks: Sequence[Task],
    policy: Policy,
    samples: int = 1,
    ks: Sequence[int] = (1,),
    grade: GradeMode | None = None,
    parallel: int | str = "auto",
    out: str | os.PathLike[str] | None = None,
    new: bool = False,
    fleet: Any = None,
    *,
    client: AsyncClient | Client | None = None,
    run: str | None = None,
    version: str | None = None,
    progress: bool | OnProgress | None = None,
    disk_budget_mb: int = DISK_BUDGET_MB,
) -> Report:
    """Let ``policy`` try each task ``samples`` times, each time in a fresh fork, and score what it left.

    Args:
        policy: ``(episode)`` or ``(sandbox, task)``. An async one runs on this loop with an async
            handle; a plain function in a thread with a sync one. What it returns is its transcript.
        ks: For which k the report gives pass@k and pass^k.
        grade: How to grade, instead of as each task's grader says.
        parallel: Episodes at a time; ``"auto"``: what the machine holds.
        out: The run's directory. A run that was interrupted goes on there and repeats nothing that
            ended. None keeps the run in memory.
        new: Begin again; what is in ``out`` is set aside within it.
        client: Default: of this machine's daemon.
        run: The run's id, of which the seeds are made; made up if absent, kept in ``out``.
        version: The policy's version (default: its ``version`` attribute, else a digest of its source).
        progress: A function that is given a ``Progress`` at each change; True or False: show it or
            do not; None: show it where stderr is a terminal.
        disk_budget_mb: What prepared states that are not in use may take.

    Raises:
        ConflictError: ``out`` is in use, or holds samples of another task, preparation, policy or
            limits under the same names. InvalidRequestError: an argument, or two tasks of one id.
            CommandFailedError, NotFoundError: a task's own ``prepare`` is wrong; says which command
            failed and what it printed. The run ends at once; what has ended before is kept in ``out``.
    """
    if fleet is not None:
        raise UnsupportedError("this version runs on one machine", hint="leave fleet out")
    _check(tasks, samples, ks)
    need()
    mine = both(client)
    head = {"run": run or secrets.token_hex(8), "created_at": time.time()}
    where = jn.open_journal(Path(out), head, new=new) if out is not None else _in_memory(head)
    try:
        with where as journal:
            if run is not None and journal.run != run:
                raise ConflictError(
                    f"{out} holds the run {journal.run!r}, not {run!r}",
                    hint="leave run out, or pass new=True",
                )
            going = _Run(mine, journal, list(tasks), policy, samples, grade, version, disk_budget_mb)
            board = Board(len(tasks) * samples)
            with shown(board, progress):
                await going.go(parallel, board)
            return Report.of(journal, list(tasks), ks, going.transcripts, going.parallel)
    finally:
        await mine.close(client)


def evaluate(
    tasks: Sequence[Task],
    policy: Policy,
    samples: int = 1,
    ks: Sequence[int] = (1,),
    grade: GradeMode | None = None,
    parallel: int | str = "auto",
    out: str | os.PathLike[str] | None = None,
    new: bool = False,
    fleet: Any = None,
    **options: Any,
) -> Report:
    """As :func:`aevaluate`, from code that is not async (or from a notebook's cell)."""
    return run_sync(
        lambda: aevaluate(tasks, policy, samples, ks, grade, parallel, out, new, fleet, **options)
    )


@contextlib.contextmanager
def _in_memory(head: dict[str, Any]) -> Iterator[jn.Memory]:
    yield jn.Memory(head)


def _check(tasks: Sequence[Task], samples: int, ks: Sequence[int]) -> None:
    if isinstance(tasks, str | Task):
        what = f"the text {tasks!r}" if isinstance(tasks, str) else "a Task"
        hint = "a suite's are load(name), of forkyard.rollouts.suites; one task is [task]"
        raise InvalidRequestError(f"tasks is {what}, not a list of tasks", hint=hint)
    for task in tasks:
        check_task(task)
    if samples < 1:
        raise InvalidRequestError(f"samples is {samples}", hint="at least 1")
    if any(k < 1 or k > samples for k in ks):
        raise InvalidRequestError(f"ks is {tuple(ks)} with {samples} samples", hint="each k is 1 to samples")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise InvalidRequestError(f"two tasks are called {task.id!r}", hint="ids are unique in a run")
        seen.add(task.id)
        if task.grader is not None:
            _check_grader(task.grader)
        try:
            msgspec.json.encode(task.metadata, enc_hook=jn.shown)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the metadata of task {task.id!r} is not plain data: {error}", hint="it is kept in the run"
            ) from None


def _check_grader(grader: Any) -> None:
    lacking = [name for name in GRADER if not hasattr(grader, name)]
    if lacking:
        raise InvalidRequestError(
            f"the grader {type(grader).__name__} has no {', '.join(lacking)}",
            hint=f"a grader has {', '.join(GRADER)}; CommandGrader and PytestGrader are ready-made",
        )


@dataclass(slots=True)
class _Unit:
    task: Task
    sample: int
    since: float = field(default_factory=time.monotonic)


class _Run:
    def __init__(
        self,
        clients: Both,
        journal: jn.Journal | jn.Memory,
        tasks: list[Task],
        policy: Policy,
        samples: int,
        grade: GradeMode | None,
        version: str | None,
        disk_budget_mb: int,
    ) -> None:
        self._clients = clients
        self._journal = journal
        self._tasks = tasks
        self._samples = samples
        self._version = version or policy_version(policy)
        self._grade: GradeMode | None = grade
        self._preparer = Preparer(clients.aio, disk_budget_mb)
        self._grading = asyncio.Semaphore(gradings_at_once())
        self._runner = Runner(clients.aio, clients.sync, policy, grade, self._grading)
        self._writing = asyncio.Lock()
        # Snapshots whose episodes were seen to have room; None where the caller says how many.
        self._measured: set[str] | None = None
        self.transcripts: dict[str, Any] = {}
        self.parallel = 1

    async def go(self, parallel: int | str, board: Board) -> None:
        """Run what has not ended yet."""
        await self._check_keys()
        stored = store_tasks(self._tasks, self._known_tasks(), self._samples, self._grade, self._version)
        await asyncio.to_thread(self._journal.keep_tasks, stored)
        left = [
            _Unit(task, sample)
            for task in self._tasks
            for sample in range(self._samples)
            if (task.id, sample) not in self._journal.samples
        ]
        before = [
            self._journal.samples[task.id, sample]
            for task in self._tasks
            for sample in range(self._samples)
            if (task.id, sample) in self._journal.samples
        ]
        board.resumed(before)
        if not left:
            return
        self.parallel = await episodes_at_once(self._clients.aio, parallel, len(left))
        self._measured = set() if parallel == "auto" else None
        slots = Slots(self.parallel)
        # As many again as run are got ready: a sample waits for its place, not for its state.
        ahead = asyncio.Semaphore(2 * self.parallel)
        try:
            async with asyncio.TaskGroup() as group:
                for unit in left:
                    await ahead.acquire()
                    group.create_task(self._unit(unit, slots, ahead, board))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None

    async def _narrow(self, snapshot: str, slots: Slots) -> None:
        """So many at a time as the machine holds of what starts from ``snapshot``, which may be large."""
        if self._measured is None or snapshot in self._measured:
            return
        self._measured.add(snapshot)
        slots.at_most(await room(self._clients.aio, snapshot, slots.used))
        self.parallel = min(self.parallel, slots.limit)

    def _known_tasks(self) -> dict[str, Any]:
        if isinstance(self._journal, jn.Memory):
            return {}
        return jn.read_tasks(self._journal.path)

    async def _check_keys(self) -> None:
        """Raises ConflictError where a sample that has ended was made of something else."""
        ended: dict[str, list[Sample]] = {}
        for (task_id, number), sample in self._journal.samples.items():
            if number < self._samples:
                ended.setdefault(task_id, []).append(sample)
        known = self._known_tasks()
        for task in self._tasks:
            if task.id not in ended:
                continue
            prepared = await self._preparer.digest(task)
            for sample in ended[task.id]:
                expected = prepared if sample.prepared is not None else ""
                if sample.key == self._key(task, expected, sample.sample):
                    continue
                raise ConflictError(
                    f"sample {sample.sample} of task {task.id!r} in {self._journal.path} is of another "
                    f"{self._changed(task, known.get(task.id, {}))}",
                    hint="pass new=True to begin again, or regrade() if only the grader is another",
                )

    def _changed(self, task: Task, known: dict[str, Any]) -> str:
        parts = {
            "task or grader": (task_digest(task), known.get("digest")),
            "limits": (digest(task.limits), known.get("limits_digest")),
            "policy": (self._version, known.get("policy")),
            "grade": (self._grade, known.get("mode")),
        }
        return ", ".join(name for name, (now, then) in parts.items() if now != then) or "prepared state"

    def _key(self, task: Task, prepared: str, sample: int) -> str:
        graded = f"{task_digest(task)}{self._grade or ''}"
        return sample_key(graded, prepared, self._version, task.limits, sample)

    async def _unit(self, unit: _Unit, slots: Slots, ahead: asyncio.Semaphore, board: Board) -> None:
        started_at = time.time()
        seed = sample_seed(self._journal.run, unit.task.id, unit.sample)
        tries = _Tries()
        prepared: Prepared | None = None
        try:
            while prepared is None:
                try:
                    async with self._preparer.holding(unit.task) as prepared:
                        await self._narrow(prepared.snapshot, slots)
                        await self._tries(unit, prepared, seed, slots, board, tries)
                except ForkyardError as error:
                    if prepared is not None or isinstance(error, MISTAKES):
                        raise
                    tries.last.failed("infra", f"preparing: {error}", host=isinstance(error, HOST))
                    if not tries.again():
                        break
        finally:
            ahead.release()
        board.ended(await self._write(unit, prepared, seed, started_at, tries))

    async def _tries(
        self, unit: _Unit, prepared: Prepared, seed: int, slots: Slots, board: Board, tries: _Tries
    ) -> None:
        while True:
            waiting = time.monotonic()
            await slots.take()
            tries.queue_s += time.monotonic() - waiting
            board.started()
            place = contextlib.AsyncExitStack()
            place.push_async_callback(slots.give)
            place.callback(board.left)
            async with place:
                tries.last = await self._runner.attempt(unit.task, prepared, unit.sample, seed, place.aclose)
            if not tries.again():
                return
            if tries.last.outcome == "timeout_contended":
                slots.lower()
            # Another process may have evicted it meanwhile.
            prepared = await self._preparer.get(unit.task)

    async def _write(
        self, unit: _Unit, prepared: Prepared | None, seed: int, started_at: float, tries: _Tries
    ) -> Sample:
        task, done = unit.task, tries.last
        key = self._key(task, prepared.digest if prepared else "", unit.sample)
        packed, lost = jn.pack_transcript(done.transcript)
        commands = [command_line(record) for record in done.records]
        story = {
            "task": task.id,
            "sample": unit.sample,
            "log": done.log,
            "commands": commands,
            "outside": done.outside,
            "refused": done.refused,
        }
        transcript = diff = None
        if done.transcript is not None:
            transcript = await asyncio.to_thread(self._journal.keep, "transcripts", key, packed)
            if self._journal.path is None:
                self.transcripts[transcript] = done.transcript
        if done.diff is not None:
            diff = await asyncio.to_thread(self._journal.keep, "diffs", key, jn.pack_diff(done.diff))
        told = json.dumps(story, ensure_ascii=False, default=str).encode(errors="backslashreplace")
        episode = await asyncio.to_thread(self._journal.keep, "episodes", key, told)
        async with self._writing:
            sample = Sample(
                task=task.id,
                sample=unit.sample,
                key=key,
                seed=seed,
                outcome=done.outcome,
                reward=done.reward,
                verdict=done.verdict,
                message=jn.printable("; ".join(filter(None, (done.message, lost)))),
                phases=Phases(
                    tries.queue_s, done.start_s, done.policy_s, done.sandbox_s, done.freeze_s, done.grade_s
                ),
                retries=tries.retries + tries.reruns + done.grade_retries,
                started_at=started_at,
                ended_at=time.time(),
                sandbox=done.sandbox,
                transcript=transcript,
                diff=diff,
                audit=(done.records[0].seq, done.records[-1].seq) if done.records else None,
                cluster=task.cluster or task.id,
                metadata=task.metadata,
                episode=episode,
                trajectory=trajectory(packed, commands),
                suspicions=[_plain(found) for found in done.suspicions],
                prepared=prepared.snapshot if prepared else None,
            )
            await asyncio.to_thread(self._journal.append, sample)
        return sample


@dataclass(slots=True)
class _Tries:
    """The attempts at one sample. Retried is what the host is proven to have lost, and once what
    timed out while the host was starved: never what the policy or its guest did."""

    last: Attempt = field(default_factory=Attempt)
    queue_s: float = 0.0
    retries: int = 0
    reruns: int = 0

    def again(self) -> bool:
        if self.last.host and self.retries < RETRIES:
            self.retries += 1
            return True
        if self.last.outcome == "timeout_contended" and not self.reruns:
            self.reruns += 1
            return True
        return False


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = failed.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def command_line(record: Any) -> dict[str, Any]:
    """One record of the audit, as an episode's file has it."""
    return {"seq": record.seq, "at": record.time, "kind": record.kind, **record.data}


def trajectory(transcript: bytes, commands: list[dict[str, Any]]) -> str:
    """A digest of what the policy returned and ran, and of what that printed."""
    ran = [
        [c.get(name) for name in ("kind", "command", "argv", "code", "exit_code", "stdout_sha256")]
        for c in commands
        if c["kind"] in ("exec", "code", "git") or str(c["kind"]).startswith("file.")
    ]
    return digest(transcript, ran)[:32]


def _plain(found: Any) -> dict[str, Any]:
    return dict(found.to_dict()) if hasattr(found, "to_dict") else dict(found)
