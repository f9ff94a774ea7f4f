"""Suites: lists of tasks that need no network once their packages are here.

``load("humaneval")``, ``load("mutants")``, ``load("harbor:DIRECTORY")``.
"""

from __future__ import annotations

import importlib
from typing import Any

from forkyard.errors import NotFoundError
from forkyard.rollouts.types import Task

SUITES = ("harbor", "humaneval", "mutants")

__all__ = ["SUITES", "load"]


def load(name: str, **options: Any) -> list[Task]:
    """The tasks of a suite by name; what stands after a colon is its first argument.

    Raises:
        NotFoundError: no such suite. Others: see the suites' own ``load``.
    """
    kind, _, argument = name.partition(":")
    if kind not in SUITES:
        raise NotFoundError(f"there is no suite {kind!r}", hint=f"there are {', '.join(SUITES)}")
    suite = importlib.import_module(f"{__name__}.{kind}")
    tasks: list[Task] = suite.load(*([argument] if argument else []), **options)
    return tasks
