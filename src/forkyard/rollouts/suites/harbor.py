"""Task folders of Harbor and of Terminal-Bench, graded as upstream: in the agent's final state.

A Harbor task has task.toml, instruction.md, environment/, tests/test.sh and solution/solve.sh; its
verifier writes a reward under /logs/verifier. A Terminal-Bench task has task.yaml, a Dockerfile,
run-tests.sh, tests/ and solution.sh; every test that pytest names has to pass. Tasks of several
services are not supported: they are counted and named in a warning.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.client.aio_sandbox import AsyncSandbox
from forkyard.errors import InvalidRequestError, NotFoundError, UnsupportedError
from forkyard.rollouts.graders import GraderError, digest_of
from forkyard.rollouts.types import Dockerfile, GradeMode, Grading, Image, Limits, Task, Timeouts, Verdict

REWARDS = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S+)", re.M)


@dataclass(frozen=True)
class FolderGrader:
    """Runs a folder's tests as upstream does, as root in the final state.

    Args:
        tests: The directory that becomes /tests.
        script: Run with bash, below /tests.
        extra: More files below /tests, by name.
        reward_files: The verifier writes a reward (Harbor); else pytest's summary decides.
        egress: What the grading copy may reach: many such scripts install their tools.
        keep: The agent's processes that are not killed, by name.
    """

    tests: Path
    script: str
    extra: Mapping[str, Path] = field(default_factory=dict)
    reward_files: bool = True
    egress: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] = ()
    build: str | None = None
    mode: GradeMode = "final"
    name: str = "harbor"

    @property
    def files(self) -> Mapping[str, str | bytes | Path]:
        """What arrives in the grading copy."""
        there: dict[str, str | bytes | Path] = {"/tests": self.tests} if self.tests.is_dir() else {}
        return there | {f"/tests/{name}": path for name, path in self.extra.items()}

    def key(self) -> str:
        """See ``Grader``."""
        settings = [self.script, self.reward_files, list(self.egress), list(self.keep), self.mode]
        return digest_of("folder", settings, dict(self.env), dict(self.files))

    async def grade(self, grading: Grading) -> Verdict:
        """See ``Grader``.

        Raises:
            GraderError: there is no bash, or the reward is none.
        """
        sandbox: AsyncSandbox = grading.sandbox
        await sandbox.shell("rm -rf /logs/verifier; mkdir -p /logs/verifier", user="root", check=True)
        words = ["bash", f"/tests/{self.script}"]
        env = {"TEST_DIR": "/tests", **self.env}
        result = await sandbox.exec(words, user="root", env=env, timeout_s=grading.timeout_s)
        output = result.stdout + result.stderr
        evidence = {"exit_code": result.exit_code, "output": output[-4000:]}
        if result.timed_out:
            return Verdict(False, 0.0, "the tests took too long", evidence=evidence)
        if result.exit_code == 127 and "bash" in output:
            raise GraderError(f"the tests cannot be run: {output.strip()[-300:]}")
        if self.reward_files:
            return await self._rewarded(sandbox, evidence)
        tests = {name: outcome.lower() for outcome, name in _OUTCOME.findall(output)}
        passed = bool(tests) and all(outcome == "passed" for outcome in tests.values())
        count = sum(outcome == "passed" for outcome in tests.values())
        return Verdict(passed, float(passed), f"{count} of {len(tests)} tests passed", tests, evidence)

    async def _rewarded(self, sandbox: AsyncSandbox, evidence: Mapping[str, Any]) -> Verdict:
        for path in REWARDS:
            try:
                raw = await sandbox.read_text(path, user="root")
            except NotFoundError:
                continue
            try:
                said = json.loads(raw) if path.endswith(".json") else float(raw)
                reward = float(said.get("reward", said) if isinstance(said, dict) else said)
            except (ValueError, TypeError):
                raise GraderError(f"{path} holds no reward: {raw[:80]!r}") from None
            return Verdict(reward >= 1.0, reward, "", evidence=evidence)
        return Verdict(False, 0.0, "the tests wrote no reward", evidence=evidence)


def load(directory: str | Path, *, egress: Sequence[str] = ()) -> list[Task]:
    """The tasks of a directory of task folders, or of one such folder, by name.

    Args:
        egress: What agents and graders may reach (``("@pip", "@apt")``); nothing if not given.

    Raises:
        NotFoundError: there is no task. InvalidRequestError: a folder is not complete.
    """
    top = Path(directory)
    folders = [path for path in [top, *sorted(top.iterdir())] if path.is_dir() and _kind(path)]
    if not folders:
        raise NotFoundError(f"{top} has no task folders", hint="a task has a task.toml or a task.yaml")
    tasks, several = [], []
    for folder in folders:
        try:
            tasks.append(task(folder, egress=egress))
        except UnsupportedError as error:
            several.append(f"{folder.name} ({error.message})")
    if several:
        warnings.warn(
            f"{len(several)} of {len(folders)} tasks are left out: {', '.join(several)}", stacklevel=2
        )
    return tasks


def task(folder: Path, *, egress: Sequence[str] = ()) -> Task:
    """One folder as a task.

    Raises:
        UnsupportedError: it takes several services, or a YAML reader that is not installed.
        InvalidRequestError: something is missing.
    """
    folder = folder.resolve()
    kind = _kind(folder)
    if kind == "harbor":
        return _harbor(folder, tuple(egress))
    if kind == "terminal-bench":
        return _terminal_bench(folder, tuple(egress))
    raise InvalidRequestError(
        f"{folder} is no task folder", hint="it has neither a task.toml nor a task.yaml"
    )


def _kind(folder: Path) -> str | None:
    if (folder / "task.toml").is_file():
        return "harbor"
    return "terminal-bench" if (folder / "task.yaml").is_file() else None


def _harbor(folder: Path, egress: tuple[str, ...]) -> Task:
    try:
        said = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{folder / 'task.toml'}: {error}") from None
    environment = said.get("environment", {})
    verifier, agent = said.get("verifier", {}), said.get("agent", {})
    _one_service(folder / "environment")
    prepare: Dockerfile | Image
    if (folder / "environment/Dockerfile").is_file():
        prepare = Dockerfile(folder / "environment")
    elif "docker_image" in environment:
        prepare = Image(str(environment["docker_image"]))
    else:
        raise InvalidRequestError(f"{folder} has neither environment/Dockerfile nor a docker_image")
    return Task(
        folder.name,
        prepare,
        _text(folder / "instruction.md"),
        grader=FolderGrader(
            _there(folder / "tests/test.sh").parent,
            "test.sh",
            egress=egress,
            env={str(name): str(value) for name, value in verifier.get("env", {}).items()},
        ),
        user=agent.get("user"),
        egress=egress,
        limits=Limits(
            cpus=environment.get("cpus"),
            mem_mb=_mb(environment, "memory_mb", "memory"),
            disk_mb=_mb(environment, "storage_mb", "storage"),
        ),
        timeouts=Timeouts(
            float(agent.get("timeout_sec", 600)),
            float(verifier.get("timeout_sec", 300)),
            float(environment.get("build_timeout_sec", 1800)),
        ),
        metadata=said.get("metadata", {}),
        oracle=functools.partial(_solve, folder / "solution", "solve.sh")
        if (folder / "solution/solve.sh").is_file()
        else None,
    )


def _terminal_bench(folder: Path, egress: tuple[str, ...]) -> Task:
    said = _yaml(folder / "task.yaml")
    _one_service(folder)
    _there(folder / "Dockerfile")
    known = ("instruction", "max_agent_timeout_sec", "max_test_timeout_sec")
    return Task(
        folder.name,
        Dockerfile(folder),
        str(said.get("instruction", "")),
        grader=FolderGrader(
            folder / "tests",
            "run-tests.sh",
            {"run-tests.sh": _there(folder / "run-tests.sh")},
            reward_files=False,
            egress=egress,
            name="terminal-bench",
        ),
        egress=egress,
        timeouts=Timeouts(
            float(said.get("max_agent_timeout_sec", 600)), float(said.get("max_test_timeout_sec", 300))
        ),
        metadata={name: value for name, value in said.items() if name not in known},
        oracle=functools.partial(_solve, folder, "solution.sh")
        if (folder / "solution.sh").is_file()
        else None,
    )


async def _solve(solution: Path, script: str, sandbox: AsyncSandbox, task: Task) -> None:
    """Run a folder's own solution, as upstream's oracle does."""
    if script == "solve.sh":
        await sandbox.upload(solution, "/solution", user="root")
    else:
        await sandbox.write_file(f"/solution/{script}", (solution / script).read_bytes(), user="root")
    words = ["bash", f"/solution/{script}"]
    await sandbox.exec(words, user=task.user, timeout_s=task.timeouts.policy_s, check=True)


def _one_service(folder: Path) -> None:
    for name in COMPOSE:
        if (folder / name).is_file():
            services = _yaml(folder / name).get("services") or {}
            if len(services) > 1:
                raise UnsupportedError(f"{len(services)} services in {name}")


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError(
            f"{path.name} needs a YAML reader", hint="pip install 'forkyard[rollouts]'"
        ) from None
    try:
        said = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    if not isinstance(said, dict):
        raise InvalidRequestError(f"{path} is no mapping")
    return said


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InvalidRequestError(f"{path} is missing")
    return path


def _text(path: Path) -> str:
    return _there(path).read_text()


def _mb(environment: Mapping[str, Any], number: str, text: str) -> int | None:
    """MiB, of ``memory_mb = 2048`` or of ``memory = "2G"``."""
    if number in environment:
        return int(environment[number])
    if text not in environment:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(environment[text]).strip(), re.I)
    if found is None:
        raise InvalidRequestError(f"{text} = {environment[text]!r} is no size", hint='write "2G"')
    in_mib = {"": 1 / (1 << 20), "K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}
    return int(float(found[1]) * in_mib[found[2].upper()])
