"""Tasks and policies for the tests of rollouts. Each task wants 42 in a file called ``answer``."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from forkyard.rollouts import Grading, Limits, Task, Timeouts, Verdict


class Answer:
    """Wants ``wanted`` in the file."""

    name = "answer"
    mode = "clean"
    build = None
    files: dict[str, str] = {}

    def __init__(self, wanted: str = "42") -> None:
        self.wanted = wanted

    def key(self) -> str:
        return self.wanted

    async def grade(self, grading: Grading) -> Verdict:
        said = await grading.sandbox.shell("cat answer")
        passed = said.stdout.strip() == self.wanted
        return Verdict(passed, float(passed), f"it says {said.stdout.strip()!r}", {"answer": str(passed)})


def task(name: str = "answer", **fields: Any) -> Task:
    return Task(name, **({"grader": Answer(), "timeouts": Timeouts(policy_s=60)} | fields))


def several() -> list[Task]:
    """What ``evaluate`` is given in another process."""
    return [task(f"t{number}") for number in range(3)]


def solve(sandbox: Any, task: Task) -> dict[str, Any]:
    """Passes."""
    sandbox.shell("echo 42 > answer", check=True)
    return {"did": task.id}


def fail(sandbox: Any, task: Task) -> None:
    sandbox.shell("echo 41 > answer", check=True)


def slow(episode: Any) -> str:
    """Passes after a while; every beginning is a line in the file that ``KIT_BEGUN`` names."""
    with Path(os.environ["KIT_BEGUN"]).open("a") as file:
        file.write(f"{episode.task.id} {episode.sample}\n")
    episode.sandbox.shell("echo 42 > answer; sleep 0.3", check=True)
    return "done"


slow.version = "1"  # type: ignore[attr-defined]


def misbehave(sandbox: Any, task: Task) -> Any:
    """Ends as its task is called."""
    if task.id == "passed":
        return solve(sandbox, task)
    if task.id == "failed":
        return fail(sandbox, task)
    if task.id == "policy_error":
        raise ValueError("the model spoke in tongues")
    if task.id == "policy_timeout":
        return sandbox.shell("sleep 1000")
    if task.id == "oom":
        hog = "x = []\nwhile True: x.append(bytearray(8 << 20))"
        return sandbox.exec(["python3", "-c", hog], check=True)
    if task.id == "sandbox_broken":
        sandbox.shell("kill -9 1", user="root")
        return sandbox.shell("true")
    raise AssertionError(task.id)


def misbehaving() -> list[Task]:
    names = ("passed", "failed", "policy_error", "oom", "sandbox_broken")
    tasks = [task(name, limits=Limits(mem_mb=256)) for name in names]
    return [*tasks, task("policy_timeout", timeouts=Timeouts(policy_s=2))]


def roll(episode: Any) -> float:
    """A number from a generator that was seeded before the forks."""
    random.seed()
    return float(episode.sandbox.run_code("random.random()", timeout_s=60).result)


def until(condition: Any, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.02)
