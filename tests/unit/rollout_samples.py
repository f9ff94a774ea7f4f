"""Samples for tests, made up."""

from __future__ import annotations

from typing import Any

from forkyard.rollouts.types import Phases, Sample


def sample(task: str, number: int, outcome: Any = "passed", **fields: Any) -> Sample:
    """One that ended with ``outcome``, its reward 1 if it passed."""
    values: dict[str, Any] = {
        "task": task, "sample": number, "key": f"{task}.{number}", "seed": number, "outcome": outcome,
        "reward": float(outcome == "passed"), "verdict": None, "message": "", "phases": Phases(),
        "retries": 0, "started_at": 10.0 + number, "ended_at": 12.0 + number, "sandbox": "sb_1",
        "transcript": None, "diff": None, "audit": None, "cluster": task,
    }  # fmt: skip
    return Sample(**(values | fields))
