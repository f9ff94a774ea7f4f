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
    from forkyard.rollouts.graders import CommandGrader, GraderError, PytestGrader
    from forkyard.rollouts.grouping import Group, Rollout, agroup_rollouts, group_rollouts
    from forkyard.rollouts.numbers import Comparison, Interval, pass_at_k, pass_hat_k
    from forkyard.rollouts.progress import Progress
    from forkyard.rollouts.regrading import aregrade, regrade
    from forkyard.rollouts.report import Report, compare
    from forkyard.rollouts.running import aevaluate, evaluate
    from forkyard.rollouts.search import abeam, abest_of_n, amcts, beam, best_of_n, mcts
    from forkyard.rollouts.search_options import Budget
    from forkyard.rollouts.suspicions import Suspicion
    from forkyard.rollouts.tool_env import ToolEnvironment
    from forkyard.rollouts.tree import Node, SearchResult
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
    from forkyard.rollouts.validating import Validation, avalidate, validate

# Looked up when first used: a task's definition needs no client, and a run no statistics.
_HOMES = {
    "Episode": "episode",
    "CommandGrader": "graders",
    "GraderError": "graders",
    "PytestGrader": "graders",
    "Group": "grouping",
    "Rollout": "grouping",
    "agroup_rollouts": "grouping",
    "group_rollouts": "grouping",
    "Comparison": "numbers",
    "Interval": "numbers",
    "pass_at_k": "numbers",
    "pass_hat_k": "numbers",
    "Progress": "progress",
    "aregrade": "regrading",
    "regrade": "regrading",
    "Report": "report",
    "compare": "report",
    "aevaluate": "running",
    "evaluate": "running",
    "abeam": "search",
    "abest_of_n": "search",
    "amcts": "search",
    "beam": "search",
    "best_of_n": "search",
    "mcts": "search",
    "Budget": "search_options",
    "Suspicion": "suspicions",
    "ToolEnvironment": "tool_env",
    "Node": "tree",
    "SearchResult": "tree",
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
    "Validation": "validating",
    "avalidate": "validating",
    "validate": "validating",
}

__all__ = [
    "Budget",
    "CommandGrader",
    "Commands",
    "Comparison",
    "Dockerfile",
    "Episode",
    "Grader",
    "GraderError",
    "Grading",
    "Group",
    "Image",
    "Interval",
    "Limits",
    "Node",
    "Phases",
    "Progress",
    "PytestGrader",
    "Report",
    "Rollout",
    "Sample",
    "SearchResult",
    "Suspicion",
    "Task",
    "Timeouts",
    "ToolEnvironment",
    "Validation",
    "Verdict",
    "abeam",
    "abest_of_n",
    "aevaluate",
    "agroup_rollouts",
    "amcts",
    "aregrade",
    "avalidate",
    "beam",
    "best_of_n",
    "compare",
    "evaluate",
    "group_rollouts",
    "mcts",
    "pass_at_k",
    "pass_hat_k",
    "regrade",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
