"""Trying several ways at once, each in its own copy, and keeping the best: one freeze, n starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from forkyard.errors import (
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
)
from forkyard.requests import (
    Caller,
    CreateSandbox,
    Exec,
    Explore,
    ExploreChoice,
    ExploreEvent,
    Fork,
    Variant,
    WriteFiles,
)
from forkyard.types import ExecResult, ExploreResult, VariantResult
from forkyard.yard.background import begin, finish
from forkyard.yard.diffs import Caps, Diffs
from forkyard.yard.execs import Execs
from forkyard.yard.files import Files
from forkyard.yard.forking import Forking
from forkyard.yard.model import Sandbox, SnapshotDoc
from forkyard.yard.plans import Plan, check_env, for_create

MAX_VARIANTS = 256
OUTPUT_BYTES = 64 << 10
# A copy waits so long for room that earlier ones, or others, give back.
ROOM_S = 600.0
# One that is slower than the best by less than this may owe it to the clock.
SLACK_S = 0.005

LOST = ("cancelled", "error")

Emit = Callable[[ExploreEvent], None]


@dataclass(slots=True)
class Trial:
    """One variant and how far it is. ``limit`` ends it when it cannot win any more."""

    index: int
    variant: Variant
    limit: asyncio.Timeout | None = None
    begun: float | None = None
    sandbox: Sandbox | None = None
    result: VariantResult | None = None


@dataclass(slots=True)
class Race:
    """All variants, and what is known of the winner so far. Pure: who may still win, and until when."""

    keep: str
    trials: list[Trial]
    best: Trial | None = None
    caps: Caps = field(default_factory=Caps)

    def passed(self, trial: Trial, duration_ms: float) -> None:
        """``trial`` exited with 0: the others have less time now, or none."""
        if self.keep == "choose":
            return
        if self.best is None or self._beats(trial, duration_ms, self.best):
            self.best = trial
        for other in self.trials:
            self.bound(other)

    def _beats(self, trial: Trial, duration_ms: float, best: Trial) -> bool:
        if self.keep == "first":
            return trial.index < best.index
        return best.result is not None and duration_ms < best.result.duration_ms

    def lost(self, trial: Trial) -> bool:
        """Whether one that has not ended can win no more."""
        if self.best is None or self.best is trial or self.best.result is None:
            return False
        if self.keep == "first":
            return trial.index > self.best.index
        now = asyncio.get_running_loop().time()
        return trial.begun is not None and now > self._until(trial)

    def _until(self, trial: Trial) -> float:
        assert trial.begun is not None and self.best is not None and self.best.result is not None
        return trial.begun + self.best.result.duration_ms / 1e3 + SLACK_S

    def bound(self, trial: Trial) -> None:
        """Let a running one end when it cannot win any more."""
        if trial.limit is None or trial.result is not None or self.best is None or self.best is trial:
            return
        if self.keep == "first":
            if trial.index > self.best.index:
                trial.limit.reschedule(0)
        elif trial.begun is not None:
            trial.limit.reschedule(self._until(trial))


class Exploring:
    """The verbs ``explore`` and ``explore_choose``."""

    def __init__(self, forking: Forking, execs: Execs, files: Files, diffs: Diffs) -> None:
        self.forking = forking
        self.lifecycle = forking.lifecycle
        self.context = forking.context
        self.execs = execs
        self.files = files
        self.diffs = diffs
        self._choices: dict[tuple[str, int], asyncio.Future[str | None]] = {}

    async def explore(self, request: Explore, caller: Caller) -> AsyncIterator[ExploreEvent]:
        """See API: ``explore``. Closing the iterator before its end deletes all copies."""
        _check(request)
        queue: asyncio.Queue[ExploreEvent | None] = asyncio.Queue()
        task, future = begin(self.context.tg, self._explore(request, caller, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        heard = False
        try:
            while (event := await queue.get()) is not None:
                yield event
            winner, outcome = await future
            if winner is not None:
                winner.doc.trial = ""
                await self.context.save(sandboxes=[winner.doc])
            yield ExploreEvent(kind="done", outcome=outcome)
            heard = True
        finally:
            task.cancel()
            if not heard and future.done() and not future.cancelled() and not future.exception():
                winner = future.result()[0]
                if winner is not None:
                    begin(self.context.tg, self.lifecycle.delete(winner, caller))

    async def explore_choose(self, request: ExploreChoice, caller: Caller) -> None:
        """Name the winner of one that waits for it."""
        future = self._choices.get((request.explore, caller.uid))
        if future is None or future.done():
            raise NotFoundError(f"no explore {request.explore[:64]!r} waits for a choice")
        future.set_result(request.winner)

    async def _explore(
        self, request: Explore, caller: Caller, emit: Emit
    ) -> tuple[Sandbox | None, ExploreResult]:
        begun = time.perf_counter()
        race = Race(request.keep, [Trial(index, one) for index, one in enumerate(request.variants)])
        race.caps = Caps().share(len(race.trials))
        async with self._plans(request, caller) as (plan, image_bytes, paused_ms):
            admission = self.lifecycle.admission
            need = admission.need_mb(image_bytes)
            async with admission.reserve(1, need, 0, "explore"):
                fits = admission.fits(need) + 1
            at_once = request.parallel or min(fits, max(2, 2 * (os.cpu_count() or 1)))
            emit(ExploreEvent(kind="frozen"))
            try:
                slots = asyncio.Semaphore(at_once)
                async with asyncio.TaskGroup() as group:
                    for trial in race.trials:
                        group.create_task(self._try(request, trial, race, plan, slots, caller, emit))
                if request.keep == "choose":
                    race.best = await self._choice(request, race, caller, paused_ms, begun, emit)
                await self._announce(request, race, caller)
            except BaseException:
                race.best = None
                raise
            finally:
                await finish(self.context.tg, self._delete_all(race, caller))
        return race.best.sandbox if race.best else None, _outcome(race, paused_ms, begun)

    async def _announce(self, request: Explore, race: Race, caller: Caller) -> None:
        """Audit the outcome, and say in the winner's result which sandbox it is."""
        best = race.best
        if best is not None and best.sandbox is not None and best.result is not None:
            info = best.sandbox.info()
            best.result = dataclasses.replace(best.result, id=info.id, sandbox=info)
        await self.context.record(
            "sandbox.explored",
            caller,
            best.sandbox.id if best is not None and best.sandbox is not None else None,
            source=request.source,
            winner=best.variant.name if best is not None else None,
            variants={trial.variant.name: trial.result.state for trial in race.trials if trial.result},
        )

    # -- what copies are made of -------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _plans(
        self, request: Explore, caller: Caller
    ) -> AsyncIterator[tuple[Callable[[], Plan], int | None, float]]:
        """How to plan one copy, its image's size, and how long the source stood still."""
        known = self.context.sandboxes.find(request.source) or self.forking.snapshots.find(request.source)
        if known is None and self.lifecycle.templates.find(request.source) is not None:
            create = CreateSandbox(
                template=request.source, lease=request.lease, ephemeral=bool(request.ephemeral)
            )

            def from_template() -> Plan:
                return for_create(create, self.context, self.lifecycle.templates, self.forking.snapshots)

            yield from_template, from_template().image_bytes, 0.0
            return
        fork = Fork(source=request.source, lease=request.lease, ephemeral=request.ephemeral)
        async with self.forking.source(fork, caller) as (frozen, source):

            def from_frozen() -> Plan:
                return self.forking.plan(fork, frozen, source, None)

            yield from_frozen, _image_bytes(frozen), frozen.paused_ms if source is not None else 0.0

    # -- one variant -------------------------------------------------------------------

    async def _try(
        self,
        request: Explore,
        trial: Trial,
        race: Race,
        plan: Callable[[], Plan],
        slots: asyncio.Semaphore,
        caller: Caller,
        emit: Emit,
    ) -> None:
        async with slots:
            if race.lost(trial):
                trial.result = _cancelled(trial)
            else:
                try:
                    async with asyncio.timeout(None) as trial.limit:
                        race.bound(trial)
                        ended = await self._run(request, trial, race, plan, caller, emit)
                    self._judge(trial, race, ended)
                except TimeoutError:
                    trial.result = _cancelled(trial)
                except ForkyardError as error:
                    trial.result = VariantResult(trial.variant.name, False, "error", error=str(error))
            assert trial.result is not None
            emit(ExploreEvent(kind="result", name=trial.variant.name, result=trial.result))
            if trial.sandbox is not None and trial.result.state not in LOST:
                with contextlib.suppress(ForkyardError):
                    diff = await self.diffs.of(trial.sandbox, None, race.caps)
                    trial.result = dataclasses.replace(trial.result, diff=diff)
            if race.best is not trial and (race.keep != "choose" or trial.result.state in LOST):
                await self._delete(trial, caller)

    async def _run(
        self,
        request: Explore,
        trial: Trial,
        race: Race,
        plan: Callable[[], Plan],
        caller: Caller,
        emit: Emit,
    ) -> ExecResult:
        planned = plan()
        planned.doc.trial = request.request_id or trial.variant.name or "explore"
        trial.sandbox = sandbox = await self.lifecycle.bring_up(planned, caller, wait_s=ROOM_S)
        variant = trial.variant
        if variant.files:
            await self.files.write_files(WriteFiles(sandbox=sandbox.id, files=variant.files), caller)
        emit(ExploreEvent(kind="started", name=variant.name))
        trial.begun = asyncio.get_running_loop().time()
        race.bound(trial)
        command = Exec(
            sandbox=sandbox.id,
            command=variant.command,
            argv=variant.argv,
            env=variant.env,
            timeout_s=request.timeout_s,
            merge=True,
            max_output=OUTPUT_BYTES,
            keep="tail",
        )
        return await self.execs.run(command, caller)

    @staticmethod
    def _judge(trial: Trial, race: Race, ended: ExecResult) -> None:
        assert trial.sandbox is not None
        trial.result = VariantResult(
            name=trial.variant.name,
            ok=ended.ok,
            state="passed" if ended.ok else "timed_out" if ended.timed_out else "failed",
            exit_code=ended.exit_code,
            duration_ms=ended.duration_ms,
            start_ms=trial.sandbox.doc.start_ms,
            output=ended.merged or "",
        )
        if ended.ok:
            race.passed(trial, ended.duration_ms)

    # -- the end -----------------------------------------------------------------------

    async def _choice(
        self, request: Explore, race: Race, caller: Caller, paused_ms: float, begun: float, emit: Emit
    ) -> Trial | None:
        """Let the client choose among the copies."""
        for trial in race.trials:
            if trial.sandbox is not None and trial.result is not None:
                info = trial.sandbox.info()
                trial.result = dataclasses.replace(trial.result, id=info.id, sandbox=info)
        key = (request.request_id, caller.uid)
        future = self._choices[key] = asyncio.get_running_loop().create_future()
        try:
            emit(ExploreEvent(kind="choose", outcome=_outcome(race, paused_ms, begun)))
            name = await future
        finally:
            del self._choices[key]
        for trial in race.trials:
            if trial.result is not None and trial.variant.name != name:
                trial.result = dataclasses.replace(trial.result, id=None, sandbox=None)
        chosen = next((trial for trial in race.trials if trial.variant.name == name), None)
        if name is not None and (chosen is None or chosen.sandbox is None):
            raise InvalidRequestError(f"there is no copy of a variant {name[:140]!r} to keep")
        return chosen

    async def _delete_all(self, race: Race, caller: Caller) -> None:
        """Delete every copy but the winner's."""
        async with asyncio.TaskGroup() as group:
            for trial in race.trials:
                if trial is not race.best:
                    group.create_task(self._delete(trial, caller))

    async def _delete(self, trial: Trial, caller: Caller) -> None:
        sandbox, trial.sandbox = trial.sandbox, None
        if sandbox is not None:
            await finish(self.context.tg, self.lifecycle.delete(sandbox, caller))


def _check(request: Explore) -> None:
    names = [variant.name for variant in request.variants]
    if not 1 <= len(names) <= MAX_VARIANTS:
        raise InvalidRequestError(f"{len(names)} variants are not between 1 and {MAX_VARIANTS}")
    if len(set(names)) != len(names):
        raise InvalidRequestError("two variants have the same name")
    for variant in request.variants:
        check_env(variant.env)
        if (variant.command is None) == (variant.argv is None):
            raise InvalidRequestError(f"variant {variant.name!r} needs a command or an argv, and not both")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise InvalidRequestError(f"timeout_s={request.timeout_s} is not above 0")
    if request.parallel is not None and request.parallel < 1:
        raise InvalidRequestError(f"parallel={request.parallel} is less than 1")


def _cancelled(trial: Trial) -> VariantResult:
    spent = 0.0 if trial.begun is None else asyncio.get_running_loop().time() - trial.begun
    start_ms = trial.sandbox.doc.start_ms if trial.sandbox is not None else 0.0
    return VariantResult(
        trial.variant.name, False, "cancelled", duration_ms=round(spent * 1e3, 3), start_ms=start_ms
    )


def _outcome(race: Race, paused_ms: float, begun: float) -> ExploreResult:
    results = [trial.result for trial in race.trials if trial.result is not None]
    total_ms = round((time.perf_counter() - begun) * 1e3, 2)
    winner = race.best.result if race.best is not None else None
    return ExploreResult(winner, results, paused_ms, total_ms)


def _image_bytes(frozen: SnapshotDoc) -> int | None:
    return frozen.memory_bytes if frozen.image is not None else None


__all__ = ["Exploring", "Race", "Trial"]
