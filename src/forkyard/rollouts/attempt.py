"""One attempt at one task, from the fork to the verdict, and whose doing it was when it went wrong."""

from __future__ import annotations

import asyncio
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import (
    AccessDeniedError,
    CommandFailedError,
    DeadlineError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnsupportedError,
)
from forkyard.rollouts import grading, suspicions
from forkyard.rollouts.contention import Load, contended, load_now
from forkyard.rollouts.episode import Episode, Meter, handle, is_async, wants_episode
from forkyard.rollouts.journal import pack_transcript
from forkyard.rollouts.losses import HOST, Loss, ended_by_oom, is_hosts, killed_for_memory, loss
from forkyard.rollouts.prepare import PREFIX, Prepared, limit_fields
from forkyard.rollouts.types import GradeMode, Limits, Outcome, Policy, Task, Verdict
from forkyard.types import AuditRecord, Diff, SandboxInfo

EPISODE = "forkyard.episode"
QUEUE_S = 120.0
SETTLE_S = 10.0
GRADE_TRIES = 3
# Of so many episodes one is also graded in its own machine, to see whether that says otherwise.
AUDIT_ONE_IN = 10
WRONG = (AccessDeniedError, InvalidRequestError, UnsupportedError)


@dataclass(slots=True)
class Attempt:
    """How it ended. ``host`` says that the daemon proves the loss to be the host's."""

    outcome: Outcome = "passed"
    reward: float = 0.0
    message: str = ""
    host: bool = False
    verdict: Verdict | None = None
    transcript: Any = None
    diff: Diff | None = None
    outside: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    suspicions: list[Any] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    records: list[AuditRecord] = field(default_factory=list)
    sandbox: str | None = None
    start_s: float = 0.0
    policy_s: float = 0.0
    sandbox_s: float = 0.0
    freeze_s: float = 0.0
    grade_s: float = 0.0
    grade_retries: int = 0

    def failed(self, outcome: Outcome, message: str, *, host: bool = False) -> None:
        self.outcome, self.message, self.host, self.reward = outcome, message, host, 0.0


class PolicyExit(Exception):
    """A policy ended by ``sys.exit()``, or because what it waited for was cancelled."""


class Runner:
    """Makes attempts with one policy.

    Args:
        client: Makes the copies; an async policy gets a handle of it.
        sync_client: For the handles of sync policies.
        mode: How to grade, instead of as each grader says.
        grading_slot: Held while grading: a place of its own, not one of the episodes'.
    """

    def __init__(
        self,
        client: AsyncClient,
        sync_client: Client,
        policy: Policy,
        mode: GradeMode | None,
        grading_slot: AbstractAsyncContextManager[Any],
    ) -> None:
        self._client = client
        self._sync = sync_client
        self._policy = policy
        self._mode: GradeMode | None = mode
        self._slot = grading_slot
        self._async = is_async(policy)
        self._episode_only = wants_episode(policy)

    async def attempt(
        self, task: Task, prepared: Prepared, sample: int, seed: int, release: Callable[[], Awaitable[None]]
    ) -> Attempt:
        """Fork, let the policy act, grade, clean up. Raises nothing but what ends the run.

        Args:
            release: Called when the policy is through: what follows needs no episode's place.
        """
        done = Attempt()
        label = {EPISODE: uuid.uuid4().hex}
        begun = time.monotonic()
        try:
            info = await self._start(task, prepared, seed, label)
        except WRONG:
            # The task says what cannot be (a rule, a variable, a limit): no try would do better.
            raise
        except ForkyardError as error:
            # Nothing of the policy has run: whatever stopped it is the host's.
            done.failed("infra", f"no copy could be started: {error}", host=True)
            return done
        except asyncio.CancelledError:
            await self._client.delete_sandboxes(label)
            raise
        done.start_s = time.monotonic() - begun
        done.sandbox = info.id
        try:
            await self._run(done, info, task, sample, seed)
            await release()
            if done.outcome == "passed":
                await self._grade(done, info, task, prepared, seed % AUDIT_ONE_IN == 0)
        except ForkyardError as error:
            done.failed("infra", f"{type(error).__name__}: {error}", host=isinstance(error, HOST))
        finally:
            await self._clean_up(done, info, label)
        self._look(done, task)
        return done

    async def _start(self, task: Task, prepared: Prepared, seed: int, label: dict[str, str]) -> SandboxInfo:
        own = prepared.snapshot.startswith(PREFIX) or task.limits == Limits()
        made = await self._client.fork(
            prepared.snapshot,
            1,
            names=[f"rollout-{label[EPISODE][:12]}"],
            **({} if own else limit_fields(task.limits)),
            env={**task.env, "FORKYARD_SEED": str(seed)},
            egress=None if task.egress else "deny",
            egress_allow=list(task.egress) or None,
            ephemeral=True,
            labels=label,
            wait_s=QUEUE_S,
        )
        return made.forks[0]

    # -- the policy ----------------------------------------------------------------------

    async def _run(self, done: Attempt, info: SandboxInfo, task: Task, sample: int, seed: int) -> None:
        meter = Meter()
        limit_s = task.timeouts.policy_s
        client = self._client if self._async else self._sync
        sandbox = handle(client, info.id, task.user, meter)
        episode = Episode(sandbox, task, sample, seed, time.time() + limit_s, meter)
        args = (episode,) if self._episode_only else (sandbox, task)
        before, begun = load_now(), time.monotonic()
        failure: Exception | None = None
        expired = False
        try:
            async with asyncio.timeout(limit_s) as scope:
                done.transcript = await self._call(args)
        except Exception as error:
            expired, failure = scope.expired(), error
        finally:
            episode.cancel()
            done.policy_s, done.sandbox_s = time.monotonic() - begun, meter.sandbox_s
            done.log = episode.lines
        await self._judge(done, info, failure, expired, meter, before)
        if failure is not None and not expired:
            done.log.append({"at": time.time(), "traceback": "".join(traceback.format_exception(failure))})
            if done.outcome == "policy_error" and (where := _where(failure)):
                done.message += f" ({where})"

    async def _call(self, args: tuple[Any, ...]) -> Any:
        if self._async:
            try:
                return await self._policy(*args)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Nobody cancelled it: something that it waited for was.
                raise PolicyExit(repr(error)) from error
            except SystemExit as error:
                raise PolicyExit(repr(error)) from error
        value = await in_thread(lambda: self._policy(*args))
        return await value if asyncio.iscoroutine(value) else value

    async def _judge(
        self,
        done: Attempt,
        info: SandboxInfo,
        failure: Exception | None,
        expired: bool,
        meter: Meter,
        before: Load,
    ) -> None:
        """What became of the policy's turn; ``done`` stays as it is where there is something to grade."""
        after = load_now()
        lost = await self._loss(info.id, failure)
        if lost is not None:
            done.failed(lost.outcome, lost.message, host=lost.host)
        elif expired:
            used_s = await self._cpu_s(info.id)
            late = f"the policy had not ended after {done.policy_s:.1f} s"
            if contended(before, after, used_s, info.cpus):
                done.failed("timeout_contended", f"{late}, and the host was starved of CPU")
            else:
                done.failed("policy_timeout", late)
        elif isinstance(failure, HOST) and meter.gave(failure):
            done.failed("infra", str(failure), host=True)
        elif failure is not None:
            killed = meter.oom or (isinstance(failure, CommandFailedError) and killed_for_memory(failure))
            name = type(failure).__name__
            done.failed("oom" if killed else "policy_error", f"{name}: {failure}"[:2000])

    async def _cpu_s(self, sandbox: str) -> float:
        try:
            return (await self._client.usage(sandbox)).cpu_ms / 1e3
        except ForkyardError:
            # Nobody can say that it was starved.
            return float("inf")

    # -- losses --------------------------------------------------------------------------

    async def _loss(self, sandbox: str, error: Exception | None) -> Loss | None:
        """Whether the sandbox is gone, and on whose account, by the daemon's own record.

        An error that says it is lost comes before the daemon has written down why: wait for that.
        """
        told = isinstance(error, SandboxLostError | NotFoundError)
        deadline = time.monotonic() + (SETTLE_S if told else 0)
        while True:
            try:
                info = await self._client.get_sandbox(sandbox)
                if info.state not in ("running", "stopped"):
                    return loss(await self._client.audit(sandbox))
            except NotFoundError:
                return loss(await self._client.audit(sandbox))
            except HOST as unreachable:
                return Loss("infra", f"the daemon is gone: {unreachable}", True)
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(0.05)

    # -- the verdict ---------------------------------------------------------------------

    async def _grade(
        self, done: Attempt, info: SandboxInfo, task: Task, prepared: Prepared, audited: bool
    ) -> None:
        begun = time.monotonic()
        async with self._slot:
            begun_grading = time.monotonic()
            try:
                if task.grader is None:
                    done.diff = await self._client.diff(info.id, since=prepared.snapshot)
                else:
                    await self._verdict(done, info, task, prepared, audited)
            except Exception as error:
                await self._not_graded(done, info, error)
            done.grade_s = time.monotonic() - begun_grading
        if done.diff is not None:
            done.freeze_s = min(done.diff.frozen_ms / 1e3, time.monotonic() - begun)
            done.grade_s = max(0.0, done.grade_s - done.freeze_s)

    async def _verdict(
        self, done: Attempt, info: SandboxInfo, task: Task, prepared: Prepared, audited: bool
    ) -> None:
        while True:
            try:
                graded = await grading.grade(
                    self._client,
                    task,
                    prepared=prepared.snapshot,
                    final=info.id,
                    mode=self._mode,
                    timeout_s=task.timeouts.grader_s,
                    audit=audited,
                )
                break
            except ForkyardError as error:
                # The final state is still there: only the grading is done again.
                done.grade_retries += 1
                if not is_hosts(error) or done.grade_retries >= GRADE_TRIES:
                    raise
                if await self._loss(info.id, error) is not None:
                    raise
        verdict = graded.verdict
        done.verdict, done.diff, done.suspicions = verdict, graded.diff, list(graded.suspicions)
        done.outside, done.refused = list(graded.outside), dict(graded.refused)
        done.reward = verdict.reward
        done.message = verdict.message
        if not verdict.passed:
            records = await self._client.audit(info.id, since=info.created_at - 1)
            done.outcome = "oom" if ended_by_oom(records) else "failed"

    async def _not_graded(self, done: Attempt, info: SandboxInfo, error: Exception) -> None:
        lost = await self._loss(info.id, None)
        if lost is not None:
            done.failed(lost.outcome, lost.message, host=lost.host)
        elif isinstance(error, grading.UnfitError):
            done.failed("failed", str(error)[:2000])
        elif isinstance(error, grading.GraderError) or not isinstance(error, ForkyardError):
            done.failed("grader_error", f"{type(error).__name__}: {error}"[:2000])
        elif is_hosts(error):
            done.failed("infra", f"grading: {error}", host=True)
        elif isinstance(error, SandboxLostError | DeadlineError):
            # What was graded did that to the grading copy: an excuse for it would be worth a try.
            done.failed("failed", f"grading: {error}")
        else:
            done.failed("grader_error", f"{type(error).__name__}: {error}"[:2000])

    # -- afterwards ----------------------------------------------------------------------

    def _look(self, done: Attempt, task: Task) -> None:
        """What looks like cheating, besides what the grading saw."""
        done.suspicions += suspicions.about_records(task, done.records)
        if done.outcome == "sandbox_broken":
            done.suspicions += suspicions.about_loss(done.message, "guest")
        if done.transcript is not None and task.metadata.get("canaries"):
            packed, _ = pack_transcript(done.transcript)
            done.suspicions += suspicions.about_text(task, [packed], "the transcript")

    async def _clean_up(self, done: Attempt, info: SandboxInfo, label: dict[str, str]) -> None:
        try:
            done.records = await self._client.audit(info.id, since=info.created_at - 1)
            await self._client.delete_sandbox(info.id)
            # What the policy forked of it.
            await self._client.delete_sandboxes(label)
        except ForkyardError as error:
            # They are ephemeral: the next daemon ends them with this process.
            done.log.append({"at": time.time(), "note": f"not cleaned up: {error}"})


async def in_thread(call: Callable[[], Any]) -> Any:
    """``call()`` in a thread of its own. Cancelled, it returns at once and leaves the thread to end
    by itself; such a thread does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(value)

    def work() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = call()
        except StopIteration as error:
            failure = RuntimeError(f"the policy raised {error!r}")
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = PolicyExit(repr(error))
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            # The run is over, and its loop closed.
            return

    threading.Thread(target=work, daemon=True, name="forkyard-policy").start()
    return await ended


def _where(failure: BaseException) -> str:
    """The innermost line of the policy's own code that a failure came through; "" if there is none."""
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(failure.__traceback__)
    own = [one for one in frames if not one.filename.startswith(ours) and "site-packages" not in one.filename]
    own = [one for one in own if not one.filename.startswith(sysconfig.get_path("stdlib"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
