"""Rollouts and evals: from sandboxes to rewards that can be trusted. Uses the public client alone.

from forkyard.rollouts import Task, evaluate

def policy(sandbox, task):
    sandbox.shell("echo 42 > answer")

report = evaluate([Task("answer", grader=...)], policy, samples=4, out="runs/answer")
print(report)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkyard.rollouts.episode import Episode
    from forkyard.rollouts.progress import Progress
    from forkyard.rollouts.regrading import aregrade, regrade
    from forkyard.rollouts.report import Report, compare
    from forkyard.rollouts.running import aevaluate, evaluate
    from forkyard.rollouts.types import (
        Commands,
        Dockerfile,
        Grader,
        Grading,
        Image,
        Limits,
        Phases,
        Sample,
        Task,
        Timeouts,
        Verdict,
    )

# Looked up when first used: a task's definition needs no client, and a run no statistics.
_HOMES = {
    "Episode": "episode",
    "Progress": "progress",
    "aregrade": "regrading",
    "regrade": "regrading",
    "Report": "report",
    "compare": "report",
    "aevaluate": "running",
    "evaluate": "running",
    "Commands": "types",
    "Dockerfile": "types",
    "Grader": "types",
    "Grading": "types",
    "Image": "types",
    "Limits": "types",
    "Phases": "types",
    "Sample": "types",
    "Task": "types",
    "Timeouts": "types",
    "Verdict": "types",
}

__all__ = [
    "Commands",
    "Dockerfile",
    "Episode",
    "Grader",
    "Grading",
    "Image",
    "Limits",
    "Phases",
    "Progress",
    "Report",
    "Sample",
    "Task",
    "Timeouts",
    "Verdict",
    "aevaluate",
    "aregrade",
    "compare",
    "evaluate",
    "regrade",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
