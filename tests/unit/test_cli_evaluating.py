"""``forkyard eval`` and ``rollout``: what is said of a suite, task or policy that is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cli_client import MemoryClient
from rollout_samples import sample

from forkyard.cli.app import App
from forkyard.cli.evaluating import _matching
from forkyard.cli.main import run
from forkyard.errors import NotFoundError
from forkyard.rollouts import Task
from forkyard.rollouts.journal import open_journal

AGENT = "mine_agent"
MODULE = """
from forkyard.rollouts import Task

task = Task("one", "base")
tasks = [task, Task("two", "base")]
words = ["one"]


def solve(episode):
    return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory, with a module of tasks and a policy."""
    (tmp_path / f"{AGENT}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(AGENT, None)


@pytest.mark.parametrize(
    ("suite", "policy", "code", "said"),
    [
        ("mine_agnt:task", "mine_agent:solve", 3, "no module 'mine_agnt'|did you mean mine_agent?"),
        ("quite_another:task", "mine_agent:solve", 3, "no module 'quite_another'|here are mine_agent"),
        ("mine_agent:tsk", "mine_agent:solve", 3, "'mine_agent' has no 'tsk'|did you mean task?"),
        ("mine_agent:task.idd", "mine_agent:solve", 3, "'mine_agent:task' has no 'idd'"),
        ("mine_agent:tasks", "mine_agent:slve", 3, "'mine_agent' has no 'slve'|did you mean solve?"),
        ("mine_agent:words", "mine_agent:solve", 2, "mine_agent:words has str, not Task"),
        ("humanevl", "mine_agent:solve", 3, "no suite 'humanevl'|did you mean humaneval?"),
        ("mine_agent", "mine_agent:solve", 3, "no suite 'mine_agent'|did you mean mine_agent:NAME?"),
        ("./absent", "mine_agent:solve", 3, "no suite './absent'|a directory of task folders"),
        ("mine_agent:solve", "mine_agent:solve", 2, "mine_agent:solve takes arguments|--policy names"),
        ("mine_agent:tasks", "solve", 2, "'solve' is not MODULE:NAME"),
        ("mine_agent:tasks", "mine_agent:words", 2, "mine_agent:words is list, not something to call"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    here: Path, capfd: pytest.CaptureFixture[str], suite: str, policy: str, code: int, said: str
) -> None:
    assert run(["eval", suite, "--policy", policy], App(MemoryClient())) == code
    told = capfd.readouterr().err
    assert all(part in told for part in said.split("|")), told


def test_a_task_of_a_suite(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["rollout", "mine_agent:tasks::tow", "--policy", "mine_agent:solve"], App(MemoryClient())) == 3
    assert "no task 'tow'" in (said := capfd.readouterr().err) and "did you mean two?" in said
    assert run(["rollout", "mine_agent:tasks", "--policy", "mine_agent:solve"], App(MemoryClient())) == 2
    assert "mine_agent:tasks::one" in capfd.readouterr().err


def test_tasks_by_pattern(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [Task(f"HumanEval/{number}") for number in (1, 2, 10, 11)]
    assert [task.id for task in _matching(tasks, "HumanEval/1?")] == ["HumanEval/10", "HumanEval/11"]
    assert [task.id for task in _matching([*tasks, Task("a[1]")], "a[1]")] == ["a[1]"], "an id is no pattern"
    with pytest.raises(NotFoundError):
        _matching(tasks, "MBPP/*")


@pytest.mark.parametrize(
    ("outcomes", "code", "said"),
    [
        (["grader_error", "infra"], 1, "nothing was scored: 1 grader_error, 1 infra"),
        ([], 1, "nothing was scored: there are no samples"),
        (["grader_error", "failed"], 0, "not scored: 1 grader_error"),
        (["failed", "policy_error"], 0, ""),
    ],
)
def test_a_run_that_scored_nothing_has_failed(
    here: Path, capfd: pytest.CaptureFixture[str], outcomes: list[Any], code: int, said: str
) -> None:
    with open_journal(here / "run", {"run": "r", "created_at": 0.0}) as journal:
        for number, outcome in enumerate(outcomes):
            journal.append(sample("one", number, outcome=outcome))
    assert run(["eval", "report", "run"], App(MemoryClient())) == code
    told = capfd.readouterr()
    assert said in told.err and bool(told.err) == bool(said) and "score" in told.out


def test_a_directory_is_a_suite_of_task_folders(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "folders").mkdir()
    assert run(["eval", "./folders", "--policy", "mine_agent:solve"], App(MemoryClient())) != 0
    assert "no suite" not in (said := capfd.readouterr().err) and "folders" in said
