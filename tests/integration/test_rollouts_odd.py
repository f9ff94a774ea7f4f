"""Policies, graders and disks that do what nobody expects cost their own sample, and not the run."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import rollout_kit as kit
from rollout_kit import Answer
from yard_home import YardHome, client, yard  # noqa: F401

from forkyard import Client, InvalidRequestError
from forkyard.rollouts import CommandGrader, Report, Task, Verdict, evaluate, regrade, validate

pytestmark = [pytest.mark.root, pytest.mark.slow]


class Says(Answer):
    """Gives the verdict that it was made with."""

    def __init__(self, verdict: Any) -> None:
        super().__init__()
        self.verdict = verdict

    async def grade(self, grading: Any) -> Any:
        return self.verdict


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("not even a name")


COMMAND = """printf '{"end": true, "reward": 0, "message": "it said \\\\ud800"}' > $FORKYARD_REPORT"""
GRADERS: dict[str, tuple[Any, str]] = {
    "nan": (Says(Verdict(True, float("nan"))), "grader_error"),
    "infinite": (Says(Verdict(True, float("inf"))), "grader_error"),
    "no number": (Says(Verdict(True, "much")), "grader_error"),  # type: ignore[arg-type]
    "none": (Says(None), "grader_error"),
    "half a character": (CommandGrader(COMMAND), "failed"),
    # Only that no such command is anywhere is the grader's error: the rest is the code's.
    "no command": (CommandGrader("/no/such/program"), "grader_error"),
    "exits as if": (CommandGrader("./run"), "failed"),
    "deleted": (CommandGrader("./there"), "failed"),
    "no report": (CommandGrader("cat answer > $FORKYARD_REPORT"), "failed"),
}


def act(episode: Any) -> Any:
    sandbox, name = episode.sandbox, episode.task.id
    sandbox.write_file("run", "#!/bin/sh\nexit 127\n", mode=0o755)
    sandbox.shell("rm -f there; echo nan > answer", check=True)
    if name == "raises half a character":
        raise OSError(errno.ENOENT, "no such file", "\udc80")
    if name == "returns what has no name":
        return Unspeakable()
    return {"did": name}


def test_odd_verdicts_and_transcripts(client: Client, tmp_path: Path) -> None:  # noqa: F811
    tasks = [
        kit.task(name, grader=grader, files={"there": "true\n"}) for name, (grader, _) in GRADERS.items()
    ]
    tasks += [kit.task(name) for name in ("raises half a character", "returns what has no name")]
    report = evaluate(tasks, act, out=tmp_path / "run", client=client, progress=False)
    expected = {name: outcome for name, (_, outcome) in GRADERS.items()}
    expected |= {"raises half a character": "policy_error", "returns what has no name": "failed"}
    assert {s.task: s.outcome for s in report.samples} == expected
    assert all(s.reward == 0.0 for s in report.samples)
    messages = {s.task: s.message for s in report.samples}
    assert "\\udc80" in messages["raises half a character"] and "\\ud800" in messages["half a character"]
    assert "repr raises RuntimeError" in str(report.transcript(report.samples[-1]))
    # And all of it can be read again, shown and gone on with.
    loaded = Report.load(tmp_path / "run")
    assert {s.task: s for s in loaded.samples} == {s.task: s for s in report.samples}
    assert "no such file" in loaded.to_html() and json.loads(loaded.to_json())["outcomes"] == report.outcomes
    again = evaluate(tasks, act, out=tmp_path / "run", client=client, progress=False)
    assert again.samples == report.samples
    scored = regrade(tmp_path / "run", Says(Verdict(True, float("nan"))), client=client)
    assert set(scored.outcomes) == {"grader_error", "policy_error"}


def test_an_async_policy_that_exits(client: Client) -> None:  # noqa: F811
    async def leaves(episode: Any) -> None:
        raise SystemExit(3)

    report = evaluate([kit.task()], leaves, client=client)
    assert [s.outcome for s in report.samples] == ["policy_error"] and "SystemExit" in report.samples[
        0
    ].message


def test_a_task_that_cannot_be_is_told_before_or_at_once(client: Client) -> None:  # noqa: F811
    with pytest.raises(InvalidRequestError, match="metadata of task 'answer' is not plain"):
        evaluate([kit.task(metadata={"cycle": CYCLE})], kit.solve)
    with pytest.raises(InvalidRequestError):
        evaluate([kit.task(egress=("*",))], kit.solve, client=client)


def test_an_oracle_that_raises_is_one_tasks(client: Client) -> None:  # noqa: F811
    def oracle(sandbox: Any, task: Task) -> None:
        raise LookupError("no idea")

    found = validate(
        [kit.task("bad", oracle=oracle), kit.task("good", oracle={"answer": "42\n"})], times=1, client=client
    )
    assert {one.task: one.state for one in found.checked} == {"bad": "broken", "good": "good"}
    assert "no idea" in found.dropped[0].message
