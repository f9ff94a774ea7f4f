"""Scoring what an agent left, where the agent cannot reach.

``clean``: its changes, by content from the disk's layers, cross into a fork of the state it was
given. ``final``: a fork of its own machine, less its processes. ``service``: a clean fork, in which
ports lead to a fork of its machine. The grader's files exist in no copy that the agent had.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import posixpath
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forkyard import errors
from forkyard.client.aio import AsyncClient
from forkyard.rollouts.copies import (
    UnfitError,
    clean_copy,
    content,
    its_own_doing,
    kill,
    own_copy,
    put_files,
    real_path,
)
from forkyard.rollouts.crossing import Crossed, Rules, cross, replaced, with_pytest_section
from forkyard.rollouts.graders import PRIVATE, GraderError
from forkyard.rollouts.journal import printable, shown
from forkyard.rollouts.service import served
from forkyard.rollouts.suspicions import Suspicion, about_changes, about_grades
from forkyard.rollouts.types import GradeMode, Grader, Grading, Task, Verdict
from forkyard.types import Change, Diff, Record, SandboxInfo

__all__ = ["Graded", "GraderError", "UnfitError", "grade", "grade_files", "regrade"]

# Beyond the grader's own time: making copies, carrying changes over.
ROOM_S = 120.0
# Beyond the time that a grader was given: until its last command was seen to end.
END_S = 10.0
# Content that a diff does not carry is fetched up to so much in all.
MAX_FETCHED = 512 << 20
EMPTY = Diff([], [], [])


@dataclass(frozen=True, slots=True)
class Graded(Record):
    """A verdict and what it rests on: ``diff`` is what crossed (or would have), with content;
    ``outside`` are paths that changed beyond the task's; ``refused`` says why others stayed."""

    verdict: Verdict
    diff: Diff
    outside: list[str]
    suspicions: list[Suspicion]
    refused: dict[str, str] = field(default_factory=dict)


async def grade(
    client: AsyncClient,
    task: Task,
    *,
    prepared: str,
    final: str,
    mode: GradeMode | None = None,
    timeout_s: float | None = None,
    audit: bool = False,
) -> Graded:
    """Score the state of the sandbox ``final``, which started from ``prepared``.

    Args:
        mode: None is the grader's own.
        timeout_s: For the grader's commands, build included; None is the task's.
        audit: Also grade in ``final`` mode, and say where the two differ.

    Raises:
        GraderError: the grader itself failed. UnfitError: what was left cannot be graded, and that is a
        failure. SandboxLostError: ``final`` is gone, or a grading copy was lost by the host. Other
        ForkyardErrors as they come: nothing is retried here.
    """
    try:
        whole = await client.diff(final, since=prepared)
    except errors.CapacityError as error:
        return Graded(Verdict(False, 0.0, f"too much changed: {error.message}"), EMPTY, [], [])
    limit = task.timeouts.grader_s if timeout_s is None else timeout_s
    grader = task.grader
    mode = mode or (grader.mode if grader else "clean")
    async with clean_copy(client, task, prepared) as info, _deadline(limit + ROOM_S):
        target = _Target(client, task, info)
        crossed = await target.choose(whole, final)
        suspicions = about_changes(task, whole, crossed)
        verdict = Verdict(True, 0.0, "the task has no grader")
        if grader is not None and mode == "clean":
            verdict = await target.clean(grader, crossed.diff, limit)
        elif grader is not None and mode == "service":
            verdict = await target.service(grader, crossed.diff, limit, final)
    # With the clean copy gone: two at a time would take the room of two.
    if grader is not None and mode == "final":
        verdict = await _final(client, task, grader, final, crossed.diff, limit)
    elif grader is not None and mode == "clean" and audit:
        other = await _final(client, task, grader, final, crossed.diff, limit)
        suspicions += about_grades(verdict, other)
    return Graded(verdict, crossed.diff, crossed.outside, suspicions, crossed.refused)


async def regrade(
    client: AsyncClient,
    task: Task,
    *,
    prepared: str,
    diff: Diff,
    grader: Grader | None = None,
    timeout_s: float | None = None,
) -> Graded:
    """Score a diff that was kept, with ``grader`` (default: the task's), in ``clean`` mode.

    Raises:
        GraderError: as ``grade``; also where there is no grader at all.
    """
    grader = grader or task.grader
    if grader is None:
        raise GraderError(f"task {task.id!r} has no grader to grade it with")
    limit = task.timeouts.grader_s if timeout_s is None else timeout_s
    async with clean_copy(client, task, prepared) as info, _deadline(limit + ROOM_S):
        target = _Target(client, task, info)
        crossed = await target.choose(diff, None)
        verdict = await target.clean(grader, crossed.diff, limit)
    return Graded(verdict, crossed.diff, crossed.outside, about_changes(task, diff, crossed), crossed.refused)


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        if isinstance(error, errors.ForkyardError):
            raise
        raise GraderError(f"grading was not done after {seconds:.0f} s") from None


def _keep(grader: Grader) -> tuple[str, ...]:
    return tuple(getattr(grader, "keep", ()))


async def grade_files(
    client: AsyncClient,
    task: Task,
    *,
    prepared: str,
    files: Mapping[str, str | bytes | Path | None],
    timeout_s: float | None = None,
) -> Graded:
    """Score files as if an agent had left them (None: had deleted), with no agent's machine at all.

    Raises:
        GraderError: as ``grade``; also where there is no grader.
    """
    if task.grader is None:
        raise GraderError(f"task {task.id!r} has no grader to grade it with")
    limit = task.timeouts.grader_s if timeout_s is None else timeout_s
    async with clean_copy(client, task, prepared) as info, _deadline(limit + ROOM_S):
        target = _Target(client, task, info)
        workdir = await real_path(client, info.id, info.workdir, follow=True)
        changes = [await target.change(workdir, path, data) for path, data in files.items()]
        diff = replaced(EMPTY, {change.path: change for change in changes})
        crossed = await target.choose(diff, None)
        verdict = await target.clean(task.grader, crossed.diff, limit)
    return Graded(verdict, crossed.diff, crossed.outside, about_changes(task, diff, crossed), crossed.refused)


class _Target:
    """The grading copy: a fork of the prepared state that no agent had."""

    def __init__(self, client: AsyncClient, task: Task, info: SandboxInfo) -> None:
        self.client = client
        self.task = task
        self.info = info
        self.id = info.id

    async def choose(self, whole: Diff, final: str | None) -> Crossed:
        """What of the diff crosses."""
        workdir = await real_path(self.client, self.id, self.info.workdir, follow=True)
        rules = Rules(workdir, self.task.paths, self.task.protected)
        crossed = cross(whole, rules)
        with its_own_doing():
            if rules.pytest_section:
                crossed = await self._pyprojects(crossed)
            if final is not None and not crossed.diff.complete:
                crossed = await self._fetch(crossed, final)
        return crossed

    async def change(self, workdir: str, path: str, data: str | bytes | Path | None) -> Change:
        """A file that is to be as given, as a change against what is there."""
        real = await real_path(self.client, self.id, posixpath.join(workdir, path))
        try:
            old = await self.client.stat(self.id, real, user="root")
        except errors.NotFoundError:
            kind, mode, owner = None, 0o644, await self.client.stat(self.id, workdir, user="root")
        else:
            kind, mode, owner = old.type, old.mode, old
        if data is None:
            return Change(real, kind or "file", None, kind, mode)
        raw = content(data)
        if isinstance(data, Path):
            mode = data.stat().st_mode & 0o777
        return Change(
            real, "file", mode, kind, mode if kind else None, len(raw), uid=owner.uid, gid=owner.gid, data=raw
        )

    async def _pyprojects(self, crossed: Crossed) -> Crossed:
        for change in crossed.diff.changes:
            if posixpath.basename(change.path) != "pyproject.toml" or not change.content:
                continue
            ours = None
            with contextlib.suppress(errors.NotFoundError, errors.ConflictError):
                ours = await self.client.read_file(self.id, change.path, user="root")
            theirs = change.data if change.kind == "file" and change.mode is not None else None
            merged = theirs and with_pytest_section(theirs, ours)
            if merged == theirs and theirs is not None:
                continue
            if merged is None:
                # Also where it was deleted or is a link now: it cannot be without its section.
                if theirs is None and ours is not None and with_pytest_section(b"", ours) == b"":
                    continue
                crossed.refused[change.path] = "its pytest section cannot be told apart"
            crossed.protected.append(change.path)
            new = merged and dataclasses.replace(change, data=merged, size=len(merged))
            crossed = dataclasses.replace(crossed, diff=replaced(crossed.diff, {change.path: new or None}))
        return crossed

    async def _fetch(self, crossed: Crossed, final: str) -> Crossed:
        """Content that was too large for the diff. It is read through the agent's machine, which
        may say anything: it is its own submission."""
        room = MAX_FETCHED
        others: dict[str, Change | None] = {}
        for change in crossed.diff.changes:
            if not change.omitted:
                continue
            room -= change.size
            data = None
            if room >= 0 and not change.raw_path:
                with contextlib.suppress(errors.NotFoundError):
                    data = await self.client.read_file(final, change.path, user="root")
            if data is None:
                crossed.refused[change.path] = "too large to carry over"
                others[change.path] = None
            else:
                others[change.path] = dataclasses.replace(change, data=data, size=len(data), omitted=False)
        return dataclasses.replace(crossed, diff=replaced(crossed.diff, others))

    async def clean(self, grader: Grader, diff: Diff, limit: float) -> Verdict:
        """Bring the changes in, build, and grade."""
        await self.ready(grader, diff, "clean", limit)
        large = [change for change in diff.changes if change.data and len(change.data) > 4 << 20]
        small = replaced(diff, dict.fromkeys(one.path for one in large))
        with its_own_doing():
            await self.client.apply(self.id, small, user="root")
            for change in large:
                await self.client.write_file(
                    self.id, change.path, change.data or b"", change.mode, user="root"
                )
                owner = f"{change.uid}:{change.gid}"
                await self.client.exec(self.id, ["chown", owner, "--", change.path], user="root", check=True)
        return await self.verdict(grader, diff, "clean", limit)

    async def service(self, grader: Grader, diff: Diff, limit: float, final: str) -> Verdict:
        """Grade the servers of a fork of ``final``, through this copy's own loopback."""
        await self.ready(grader, diff, "service", limit)
        ports = getattr(grader, "ports", ())
        async with served(self.client, final, self.id, ports, _keep(grader)) as urls:
            return await self.verdict(grader, diff, "service", limit, urls)

    async def ready(self, grader: Grader, diff: Diff, mode: GradeMode, limit: float) -> None:
        """Let the grader look at the copy before anything changes in it, if it wants to."""
        if (ready := getattr(grader, "ready", None)) is not None:
            await ready(self._grading(diff, mode, limit))

    def _grading(self, diff: Diff, mode: GradeMode, limit: float, ports: Any = None) -> Grading:
        handle = self.client.sandbox(self.id)
        return Grading(handle, self.task, diff, mode, ports or {}, limit)

    async def verdict(
        self, grader: Grader, diff: Diff, mode: GradeMode, limit: float, ports: Any = None
    ) -> Verdict:
        """Build, bring the grader's files, and grade. What the build leaves running is killed first."""
        begun = time.monotonic()
        try:
            if grader.build:
                before = await self._processes()
                built = await self.client.shell(self.id, grader.build, user=self.task.user, timeout_s=limit)
                await kill(self.client, self.id, lambda one: (one.pid, one.command) in before)
                if not built.ok:
                    why = "took too long" if built.timed_out else f"exited with {built.exit_code}"
                    said = (built.stdout + built.stderr)[-2000:]
                    return Verdict(False, 0.0, f"the build {why}", evidence={"output": said})
            with its_own_doing():
                await self.client.make_dir(self.id, PRIVATE, 0o700, user="root")
                await put_files(self.client, self.id, grader.files)
            left = max(1.0, limit - (time.monotonic() - begun))
            async with _deadline(left + END_S):
                verdict: object = await grader.grade(self._grading(diff, mode, left, ports))
            return _sound(grader, verdict)
        except errors.SandboxLostError as error:
            if error.sandbox in (None, self.id) and error.cause == "guest":
                return Verdict(False, 0.0, f"what was graded destroyed its machine: {error.message}")
            raise
        except (GraderError, UnfitError, errors.ForkyardError, TimeoutError):
            raise
        except Exception as error:
            raise GraderError(f"{grader.name}: {type(error).__name__}: {error}") from error

    async def _processes(self) -> set[tuple[int, str]]:
        return {(one.pid, one.command) for one in await self.client.processes(self.id)}


def _sound(grader: Grader, verdict: object) -> Verdict:
    """A grader's word as a run can keep it. Raises GraderError: it is no verdict, its reward no finite
    number, or a field of it is of another kind."""
    if not isinstance(verdict, Verdict):
        raise GraderError(f"{grader.name}: grade() returned {verdict!r:.200}, not a Verdict")
    try:
        # What a reader of the run will find: nan and the infinities are no JSON.
        plain = dataclasses.replace(
            verdict,
            message=_printable(verdict.message),
            tests=_printable(verdict.tests),
            evidence=_printable(verdict.evidence),
        )
        return msgspec.json.decode(msgspec.json.encode(plain, enc_hook=shown), type=Verdict)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise GraderError(
            f"{grader.name}: a verdict that cannot be kept ({error}): {verdict!r:.200}"
        ) from None


def _printable(value: Any) -> Any:
    """``value`` with its texts as UTF-8 can hold them: what the code under test said is in them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(name): _printable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value]
    return value


async def _final(
    client: AsyncClient, task: Task, grader: Grader, final: str, diff: Diff, limit: float
) -> Verdict:
    """The verdict in a fork of the agent's own machine, less its processes."""
    copy = own_copy(client, final, _keep(grader), grader=grader)
    async with copy as info, _deadline(limit + ROOM_S):
        target = _Target(client, task, info)
        await target.ready(grader, diff, "final", limit)
        verdict = await target.verdict(grader, diff, "final", limit)
    return dataclasses.replace(verdict, trusted=False)
