"""Graders: a command with its report, and pytest with the tests it has to pass."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import posixpath
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from forkyard.client.aio_sandbox import AsyncSandbox
from forkyard.errors import NotFoundError
from forkyard.rollouts.copies import its_own_doing
from forkyard.rollouts.types import GradeMode, Grading, Verdict

# In the grading copy, made by root there. Nobody else may look into DIRECTORY/private.
DIRECTORY = "/var/lib/forkyard-grader"
PRIVATE = f"{DIRECTORY}/private"
# Nobody's report is larger.
MAX_REPORT = 16 << 20
NO_COMMAND = (126, 127)


class GraderError(Exception):
    """The grader itself failed, so that nothing is known of what it should have graded."""


def inside(name: str) -> bytes:
    """The text of a program that runs in the grading copy."""
    return resources.files("forkyard.rollouts").joinpath("inside", name).read_bytes()


def digest_of(*parts: Any) -> str:
    """A digest of plain data, of bytes, and of files of this machine."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            raw = digest_of(*(one for key in sorted(part) for one in (str(key), part[key]))).encode()
        elif isinstance(part, Path) and part.is_dir():
            below = sorted(path for path in part.rglob("*") if path.is_file())
            raw = digest_of(*(one for path in below for one in (str(path.relative_to(part)), path))).encode()
        elif isinstance(part, Path):
            raw = part.read_bytes()
        elif isinstance(part, bytes):
            raw = part
        else:
            raw = json.dumps(part, sort_keys=True, default=list).encode()
        total.update(b"%s %d:" % (type(part).__name__.encode(), len(raw)) + raw)
    return total.hexdigest()


@dataclass(frozen=True)
class CommandGrader:
    """Runs ``command`` in the grading copy; it passes if it exits with 0 *and* its report says so.

    The command is the grader's own, run as ``user`` (root), and writes the report. What it starts of
    the code under test it should start as another user: the report counts only if root owns it.

    Args:
        command: Text for ``/bin/sh -c``, or a list of words. ``$FORKYARD_REPORT`` is ``report``.
        report: Where the report is written: a JSON object with ``"end": true`` and, as wanted, ``reward``
            (default 1 or 0, as ``passed`` says), ``passed`` (default: the reward is at least 1),
            ``message``, ``tests``, ``evidence``. With ``report_format="number"`` the reward alone.
        files: Put into the copy as root's, path -> content, after ``build`` has run.
        build: A command, run as the task's user, before the files arrive.
        need_exit_0: False: the report alone decides.
        keep: In ``final`` mode, names of the agent's processes that are not killed.
        ports: In ``service`` mode, the ports of the agent's machine.
    """

    command: str | Sequence[str]
    report: str = f"{PRIVATE}/report.json"
    report_format: Literal["json", "number"] = "json"
    files: Mapping[str, str | bytes | Path] = field(default_factory=dict)
    build: str | None = None
    mode: GradeMode = "clean"
    user: str = "root"
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    need_exit_0: bool = True
    keep: Sequence[str] = ()
    ports: Sequence[int] = ()
    name: str = "command"

    def key(self) -> str:
        """See ``Grader``."""
        words = self.command if isinstance(self.command, str) else list(self.command)
        settings = [self.report, self.report_format, self.build, self.mode, self.user, self.cwd]
        lists = [self.need_exit_0, list(self.keep), list(self.ports), dict(self.env)]
        return digest_of("command", words, settings, lists, self.files)

    async def grade(self, grading: Grading) -> Verdict:
        """See ``Grader``.

        Raises:
            GraderError: there is no such command, and that is not the agent's doing.
        """
        sandbox: AsyncSandbox = grading.sandbox
        with its_own_doing():
            await _fresh(sandbox, self.report)
        env = {**self.env, "FORKYARD_REPORT": self.report}
        env |= {f"FORKYARD_PORT_{port}": f"127.0.0.1:{port}" for port in grading.ports}
        words = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)
        result = await sandbox.exec(
            words, user=self.user, cwd=self.cwd, env=env, timeout_s=grading.timeout_s, max_output=64 << 10
        )
        output = (result.stdout + result.stderr)[-4000:]
        evidence = {"exit_code": result.exit_code, "output": output}
        if result.timed_out:
            return Verdict(False, 0.0, "grading took too long", evidence=evidence)
        if result.exit_code in NO_COMMAND and not await self._there(grading, words):
            raise GraderError(f"{words[-1]!r} cannot be run: {output.strip()[-500:]}")
        raw = await read_report(sandbox, self.report)
        if raw is None:
            said = f"the grader's command exited with {result.exit_code} and left no $FORKYARD_REPORT"
            return Verdict(False, 0.0, said, evidence=evidence)
        verdict = self._verdict(raw, evidence)
        if result.exit_code and self.need_exit_0:
            said = f"the grader's command exited with {result.exit_code}"
            return Verdict(False, 0.0, said, verdict.tests, verdict.evidence)
        return verdict

    async def _there(self, grading: Grading, words: Sequence[str]) -> bool:
        """Whether the command can be run, or could be but for what the agent did. Code under test may
        exit with any number: that is no error of the grader's, which would leave the sample out."""
        if grading.mode == "final":
            return True
        first = (self.command.split() or [""])[0] if isinstance(self.command, str) else words[0]
        relative = "/" in first and not first.startswith("/")
        changed = [change.path for change in grading.diff.changes] if grading.mode == "clean" else []
        if changed and (relative or any(f"{first}/".startswith(f"{path}/") for path in changed)):
            return True
        look = ["/bin/sh", "-c", 'command -v -- "$0"', first]
        found = await grading.sandbox.exec(look, user=self.user, cwd=self.cwd, env=dict(self.env))
        return bool(found.ok)

    def _verdict(self, raw: bytes, evidence: dict[str, Any]) -> Verdict:
        """What the report says. One that says nothing that can be understood is a failure: what is in it
        may come from the code under test, and to be left out would be worth a try."""
        try:
            if self.report_format == "number":
                said: dict[str, Any] = {"reward": float(raw.decode().strip()), "end": True}
            else:
                said = json.loads(raw)
                if not isinstance(said, dict):
                    raise ValueError('it is no JSON object (a bare number takes report_format="number")')
                if said.get("end") is not True:
                    return Verdict(False, 0.0, "the grader's report is not complete", evidence=evidence)
            reward = float(said.get("reward", 1.0 if said.get("passed") else 0.0))
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
            passed = bool(said.get("passed", reward >= 1.0))
            tests = {str(name): str(outcome) for name, outcome in dict(said.get("tests", {})).items()}
            more = dict(said.get("evidence") or {})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"the grader's report is none: {error}; it begins {raw[:80]!r}"
            return Verdict(False, 0.0, why, evidence=evidence)
        return Verdict(passed, reward, str(said.get("message", "")), tests, {**evidence, **more})


async def _fresh(sandbox: AsyncSandbox, report: str) -> None:
    """No report is there, and the place for it is root's."""
    await sandbox.make_dir(report.rpartition("/")[0] or "/", user="root")
    with contextlib.suppress(NotFoundError):
        await sandbox.remove(report, user="root")


async def read_report(sandbox: AsyncSandbox, path: str) -> bytes | None:
    """A report, if it is a file that root owns and nobody else could write; None otherwise."""
    try:
        info = await sandbox.stat(path, user="root")
        if info.type != "file" or info.uid != 0 or info.mode & 0o022 or info.size > MAX_REPORT:
            return None
        return await sandbox.read_file(path, user="root")
    except NotFoundError:
        return None


@dataclass(frozen=True)
class PytestGrader:
    """Passes if each expected test is reported passed: not missing, skipped, xfailed or deselected.

    pytest runs as the code's user with a configuration of its own; a process of root's writes what
    it reports into a file that only root reads, and ends it with a record. A report without its end
    (``os._exit`` in the code) fails all.

    Args:
        expected: Node ids, relative to ``root``: ``tests/test_x.py::test_y[1]``.
        files: Test files, put into the copy as root's after ``build`` has run; path -> content,
            relative to the working directory (with ``isolate="process"``, to a directory of root's).
        build: A command, run as the task's user, before the files arrive.
        isolate: ``"process"``: the tests run as root, in a process that never imports the code
            under test. What they import from ``modules`` is called in another process, of the code's
            user, which cannot read the tests; arguments and results are plain data.
        modules: With ``isolate="process"``: what is under test.
        root: Where the tests run, relative to the working directory.
        import_paths: Directories of the code, relative to ``root``.
        config: The text of pytest's ini file.
        plugins: Of pytest, by module; others are not loaded.
        python: The interpreter that has pytest and what the code needs.
        user: Whom the code runs as; None is the task's user, or ``nobody`` (whom the workspace then is
            given to) where that is root and with ``isolate="process"``.
    """

    expected: Sequence[str]
    files: Mapping[str, str | bytes | Path] = field(default_factory=dict)
    build: str | None = None
    isolate: Literal["process"] | None = None
    modules: Sequence[str] = ()
    root: str = "."
    import_paths: Sequence[str] = (".",)
    config: str = "[pytest]\n"
    plugins: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    user: str | None = None
    mode: GradeMode = "clean"
    partial: bool = False
    keep: Sequence[str] = ()
    name: str = "pytest"

    def __post_init__(self) -> None:
        if not self.expected:
            raise ValueError("a PytestGrader without expected tests would pass everything")
        if self.isolate and not self.modules:
            raise ValueError('isolate="process" needs modules=, what is under test')
        if self.isolate:
            top = f"{PRIVATE}/tests/"
            private = {top + path.removeprefix(top): data for path, data in self.files.items()}
            object.__setattr__(self, "files", private)

    def key(self) -> str:
        """See ``Grader``."""
        lists = [list(self.expected), list(self.modules), list(self.import_paths), list(self.plugins)]
        settings = [
            self.build,
            self.isolate,
            self.config,
            self.python,
            self.user,
            self.mode,
            self.partial,
            self.root,
        ]
        programs = [inside(name) for name in ("supervise.py", "run_tests.py", "isolate.py")]
        return digest_of("pytest", lists, settings, dict(self.env), self.files, *programs)

    async def ready(self, grading: Grading) -> None:
        """Before anything crosses: find pytest, and keep it as it is where the tests trust it."""
        sandbox: AsyncSandbox = grading.sandbox
        programs = ("supervise.py", "run_tests.py", "isolate.py", "keep.py")
        await sandbox.write_files({f"{DIRECTORY}/{n}": inside(n) for n in programs}, mode=0o644, user="root")
        info = await sandbox.get_sandbox()
        # In a process of their own the tests trust pytest: a build of the agent's must not reach it.
        copy = ["copy"] if self.isolate and (self.build or grading.task.paths) else []
        words = [self.python, f"{DIRECTORY}/keep.py", DIRECTORY, info.workdir, *copy]
        script = f"mkdir -p -m 700 {PRIVATE}/tests && chmod 700 {PRIVATE} && exec {shlex.join(words)}"
        env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
        result = await sandbox.shell(script, user="root", env=env)
        if not result.ok:
            said = result.stderr.strip()[-500:]
            raise GraderError(f"{self.python} has no pytest in the prepared state: {said}")

    async def grade(self, grading: Grading) -> Verdict:
        """See ``Grader``.

        Raises:
            GraderError: pytest did not start, or refused its arguments.
        """
        records, output = await self.run(grading.sandbox, grading.task.user, grading.timeout_s)
        return self._verdict(records, output)

    async def run(
        self, sandbox: AsyncSandbox, owner: str | None, timeout_s: float | None, paths: Sequence[str] = ()
    ) -> tuple[list[dict[str, Any]], str]:
        """Run the expected tests, or with ``paths`` all that are below those; the report's records
        and the end of the output. :meth:`ready` comes first."""
        info = await sandbox.get_sandbox()
        # Beside tests in another process it is one that owns nothing, not even the packages.
        user = self.user or ("nobody" if self.isolate else owner or info.user)
        report = f"{PRIVATE}/report-{secrets.token_hex(8)}.jsonl"
        job = {
            "expected": [] if paths else list(self.expected),
            "paths": list(paths),
            "report": report,
            "user": "nobody" if user in ("root", "0") else user,
            "workdir": posixpath.normpath(posixpath.join(info.workdir, self.root)),
            "isolate": self.isolate,
            "modules": list(self.modules),
            "import_paths": list(self.import_paths),
            "config": self.config,
            "plugins": list(self.plugins),
            "python": self.python,
            "env": dict(self.env),
            "timeout_s": timeout_s,
        }
        path = f"{PRIVATE}/job.json"
        await sandbox.write_file(path, json.dumps(job), 0o600, user="root")
        kept = json.loads(await sandbox.read_file(f"{PRIVATE}/kept.json", user="root"))
        words = [kept["base"], "-I", "-S", f"{DIRECTORY}/supervise.py", path]
        limit = None if timeout_s is None else timeout_s + 10
        result = await sandbox.exec(words, user="root", timeout_s=limit, max_output=64 << 10)
        raw = await read_report(sandbox, report)
        output = (result.stdout + result.stderr)[-4000:]
        if raw is None:
            raise GraderError(f"the tests were not started: {output.strip()[-1000:]}")
        return [json.loads(line) for line in raw.splitlines()], output

    def _verdict(self, records: list[dict[str, Any]], output: str) -> Verdict:
        reported: dict[str, dict[str, Any]] = {}
        for one in records:
            if "test" in one:
                again = {"outcome": "reported twice"} if one["test"] in reported else {}
                reported[str(one["test"])] = {**one, **again}
        finished = next((one["finished"] for one in records if "finished" in one), None)
        end = records[-1].get("end") if records else None
        if end is None:
            raise GraderError(f"the report has no end: {output[-500:]}")
        tests = {name: str(reported.get(name, {}).get("outcome", "missing")) for name in self.expected}
        complete = finished in (0, 1) and end["exit_code"] == finished and not end["timed_out"]
        if not complete:
            tests = {name: "missing" if outcome == "passed" else outcome for name, outcome in tests.items()}
        count = sum(outcome == "passed" for outcome in tests.values())
        passed = complete and count == len(tests)
        reward = 1.0 if passed else count / len(tests) if self.partial and complete else 0.0
        said = [{k: v for k, v in one.items() if k != "test"} for one in records if "collect" in one][:5]
        failed = {
            n: one.get("message", "") for n, one in reported.items() if tests.get(n, "passed") != "passed"
        }
        evidence = {"exit_code": end["exit_code"], "errors": said, "failures": dict(list(failed.items())[:5])}
        if not passed:
            evidence["output"] = output
        if end["timed_out"]:
            message = "the tests took too long"
        elif not complete:
            message = f"the report is not complete: pytest ended with {end['exit_code']}"
        else:
            message = f"{count} of {len(tests)} tests passed"
        return Verdict(passed, reward, message, tests, evidence)
