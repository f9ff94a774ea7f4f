"""Which tests a bug breaks, and test files without those."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forkyard.client.aio import AsyncClient
from forkyard.rollouts.graders import PytestGrader
from forkyard.rollouts.suites.mutations import Mutation, without
from forkyard.rollouts.types import Commands, Grading, Task
from forkyard.types import Diff

if TYPE_CHECKING:
    from forkyard.rollouts.suites.mutants import Package

RUN_S = 90


@dataclass(frozen=True)
class Found:
    """A bug: ``good`` are the tests that pass without it, ``broken`` those of them that then do
    not, ``hidden`` the test files without these, ``messages`` what these say."""

    file: str
    mutation: dict[str, Any]
    good: list[str]
    broken: list[str]
    hidden: dict[str, str]
    messages: dict[str, str] = field(default_factory=dict)

    def mutation_(self) -> Mutation:
        """The mutation itself."""
        return Mutation(**self.mutation)


def hide(files: Mapping[str, bytes], tests: str, broken: Sequence[str]) -> dict[str, bytes] | None:
    """Test files without the broken tests; None where one of them cannot be found in any."""
    top = tests if not tests.endswith(".py") else tests.rpartition("/")[0]
    sources = {
        path: data for path, data in files.items() if path.startswith(f"{top}/") and path.endswith(".py")
    }
    wanted: dict[str, set[tuple[str, ...]]] = {}
    anywhere: set[tuple[str, ...]] = set()
    for test in broken:
        path, *parts = re.sub(r"\[.*", "", test, flags=re.S).split("::")
        wanted.setdefault(path, set()).add(tuple(parts))
    changed: dict[str, bytes] = {}
    for path, names in wanted.items():
        if path not in sources:
            return None
        changed[path], gone = without(sources[path], names)
        # Inherited: it is defined in another class, of this file or of another.
        anywhere |= {(name[-1],) for name in names - gone}
    if anywhere:
        gone_there: set[tuple[str, ...]] = set()
        for path, data in sources.items():
            text, gone = without(changed.get(path, data), anywhere)
            if gone:
                changed[path] = text
                gone_there |= gone
        if anywhere - gone_there:
            return None
    return {path: data for path, data in changed.items() if data != sources[path]}


class Trial:
    """A sandbox with the package in which its tests are run, with and without bugs."""

    def __init__(
        self, client: AsyncClient, package: Package, files: Mapping[str, bytes], start: Commands
    ) -> None:
        self._client = client
        self._package = package
        self._files = files
        self._start = start
        self._messages: dict[str, str] = {}
        self.said = ""
        self._grader = PytestGrader(
            ["?"], root="repo", import_paths=(package.import_path,), config=package.config
        )

    async def __aenter__(self) -> Self:
        start, client = self._start, self._client
        info = await client.create_sandbox(
            template=start.source, egress_allow=list(start.egress_allow), ephemeral=True, wait_s=600
        )
        self._box = client.sandbox(info.id)
        try:
            for command in start.run:
                await self._box.shell(command, timeout_s=600, check=True)
            await self._box.set_egress("deny")
            await self._write(self._files)
            await self._grader.ready(Grading(self._box, Task("trial"), Diff([], [], []), "clean"))
        except BaseException:
            await self._box.delete_sandbox()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._box.delete_sandbox()

    async def baseline(self) -> list[str]:
        """The tests that pass without a bug, twice."""
        first, second = await self.run({}) or {}, await self.run({}) or {}
        return sorted(name for name, said in first.items() if said == "passed" == second.get(name))

    async def run(self, changes: Mapping[str, bytes]) -> dict[str, str] | None:
        """Outcomes by test with some files changed; None if the run did not come to its end."""
        await self._write(changes)
        try:
            records, self.said = await self._grader.run(self._box, None, RUN_S, [self._package.tests])
        finally:
            await self._write({path: self._files[path] for path in changes})
        end = records[-1]["end"]
        if end["timed_out"] or end["exit_code"] not in (0, 1):
            return None
        tests = [one for one in records if "test" in one]
        self._messages = {one["test"]: one.get("message", "") for one in tests}
        return {one["test"]: one["outcome"] for one in tests}

    async def _write(self, files: Mapping[str, bytes]) -> None:
        if files:
            await self._box.write_files({f"repo/{path}": data for path, data in files.items()})

    def messages(self, tests: Sequence[str]) -> dict[str, str]:
        """What each of the tests said in the last run: the lines with the error alone."""
        return {test: _error(self._messages.get(test, "")) for test in tests}


def _error(message: str) -> str:
    lines = [line[1:].strip() for line in message.splitlines() if line.startswith("E ")]
    return " ".join(lines)[:300]
