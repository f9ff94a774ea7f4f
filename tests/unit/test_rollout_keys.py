"""What changes a key, and what does not; each sample's own seed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.keys import (
    digest,
    policy_version,
    prepared_digest,
    sample_key,
    sample_seed,
    task_digest,
)
from forkyard.rollouts.stored import restored, store_tasks
from forkyard.rollouts.types import Commands, Dockerfile, Limits, Task, Timeouts

TASK = Task("t", Commands(["true"]), "do it", files={"a": "1", "b": b"\0"}, paths=("x/**",))


class Grades:
    name = "g"
    mode = "clean"
    build = None
    files: dict[str, str] = {}

    def __init__(self, key: str) -> None:
        self._key = key

    def key(self) -> str:
        return self._key

    async def grade(self, grading: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "change",
    [
        {"id": "u"}, {"instruction": "do that"}, {"paths": ("y",)}, {"protected": ()}, {"user": "root"},
        {"egress": ("@pip",)}, {"env": {"A": "1"}}, {"timeouts": Timeouts(policy_s=1)},
        {"grader": Grades("1")},
    ],
)  # fmt: skip
def test_what_is_another_task(change: dict[str, Any]) -> None:
    assert task_digest(dataclasses.replace(TASK, **change)) != task_digest(TASK)
    assert task_digest(dataclasses.replace(TASK)) == task_digest(TASK)
    one, other = (task_digest(dataclasses.replace(TASK, grader=Grades(key))) for key in "12")
    assert one != other


def test_metadata_and_cluster_are_not_part_of_it() -> None:
    assert task_digest(dataclasses.replace(TASK, metadata={"x": 1}, cluster="c")) == task_digest(TASK)


def test_what_is_another_preparation(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one")
    tree = {"d": tmp_path}
    seen = {
        prepared_digest("template:1", Commands(["a"]), {}, Limits()),
        prepared_digest("template:2", Commands(["a"]), {}, Limits()),
        prepared_digest("template:1", Commands(["b"]), {}, Limits()),
        prepared_digest("template:1", Commands(["a"]), {"x": "1"}, Limits()),
        prepared_digest("template:1", Commands(["a"]), {"x": b"2"}, Limits()),
        prepared_digest("template:1", Commands(["a"]), {}, Limits(cpus=2)),
        prepared_digest("template:1", Commands(["a"]), tree, Limits()),
    }
    (tmp_path / "f").chmod(0o755)
    seen.add(prepared_digest("template:1", Commands(["a"]), tree, Limits()))
    (tmp_path / "f").write_text("two")
    seen.add(prepared_digest("template:1", Commands(["a"]), tree, Limits()))
    (tmp_path / "f").rename(tmp_path / "g")
    seen.add(prepared_digest("template:1", Commands(["a"]), tree, Limits()))
    assert len(seen) == 10


def test_digests_do_not_run_together() -> None:
    assert digest("ab", "c") != digest("a", "bc") and digest(["a"], "b") != digest("a", ["b"])
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    with pytest.raises(InvalidRequestError, match="not plain data"):
        digest(object())


def test_versions_of_policies() -> None:
    def one(episode: Any) -> None: ...

    def other(episode: Any) -> int:
        return 1

    class Policy:
        def __call__(self, episode: Any) -> None: ...

    kinds: list[Callable[..., Any]] = [one, other, Policy(), functools.partial(one, 1)]
    assert len({policy_version(kind) for kind in kinds}) == 4
    assert policy_version(one) == policy_version(one)
    one.version = "weights-7"  # type: ignore[attr-defined]
    assert policy_version(one) == "weights-7"


def test_keys_and_seeds_are_each_samples_own() -> None:
    keys = {sample_key(t, p, v, Limits(), n) for t in "ab" for p in "ab" for v in "ab" for n in range(5)}
    assert len(keys) == 40
    seeds = {sample_seed(run, task, n) for run in "ab" for task in "ab" for n in range(500)}
    assert len(seeds) == 2000 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seed("r", "t", 3) == sample_seed("r", "t", 3)


def test_tasks_come_back_from_a_run(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    docker = Task("d", Dockerfile(tmp_path, args={"A": "1"}), files={"f": tmp_path / "f"}, protected=("p",))
    stored = store_tasks([TASK, docker], {"old": {"digest": "x"}, "t": {"samples": 9}}, 4, None, "v1")
    assert (stored["t"]["samples"], stored["d"]["samples"]) == (9, 4)
    assert stored["old"] == {"digest": "x"} and stored["t"]["policy"] == "v1"
    for task in (TASK, docker):
        back = restored(task.id, stored[task.id], None)
        assert task_digest(back) == task_digest(task)
        assert prepared_digest("b", back.prepare if task is TASK else None, back.files, back.limits) == (
            prepared_digest("b", task.prepare if task is TASK else None, task.files, task.limits)
        )
