"""Suites: lists of tasks that need no network once their packages are here.

``load("humaneval")``, ``load("mutants")``, ``load("harbor:DIRECTORY")``.
"""

from __future__ import annotations

from typing import Any

from forkyard.errors import NotFoundError
from forkyard.rollouts.suites import harbor, humaneval, mutants
from forkyard.rollouts.types import Task

SUITES = {"humaneval": humaneval.load, "mutants": mutants.load, "harbor": harbor.load}

__all__ = ["SUITES", "load"]


def load(name: str, **options: Any) -> list[Task]:
    """The tasks of a suite by name; what stands after a colon is its first argument.

    Raises:
        NotFoundError: no such suite. Others: see the suites' own ``load``.
    """
    kind, _, argument = name.partition(":")
    if kind not in SUITES:
        raise NotFoundError(f"there is no suite {kind!r}", hint=f"there are {', '.join(sorted(SUITES))}")
    return SUITES[kind](*([argument] if argument else []), **options)
