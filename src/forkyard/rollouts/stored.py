"""Tasks in a run's directory: what grading again needs of them, as JSON."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from forkyard.rollouts.keys import digest, task_digest
from forkyard.rollouts.types import (
    Commands,
    Dockerfile,
    GradeMode,
    Grader,
    Image,
    Limits,
    Prepare,
    Sample,
    Task,
    Timeouts,
)

KINDS: dict[str, Any] = {"image": Image, "dockerfile": Dockerfile, "commands": Commands}


def store_tasks(
    tasks: Sequence[Task], known: Mapping[str, Any], samples: int, mode: GradeMode | None, policy: str
) -> dict[str, Any]:
    """``known`` with these tasks in it, by id. Graders are code: only their names and keys are kept.

    Args:
        samples: How many of each are wanted; a run that was begun with more keeps that.
    """
    stored = dict(known)
    for task in tasks:
        wanted = max(samples, stored.get(task.id, {}).get("samples", 0))
        stored[task.id] = _stored(task) | {"mode": mode, "policy": policy, "samples": wanted}
    return stored


def missing_samples(stored: Mapping[str, Any], samples: Sequence[Sample]) -> int:
    """How many samples a run has still to make."""
    ended = Counter(sample.task for sample in samples)
    return sum(max(entry.get("samples", 0) - ended[task], 0) for task, entry in stored.items())


def _stored(task: Task) -> dict[str, Any]:
    return {
        "digest": task_digest(task),
        "limits_digest": digest(task.limits),
        "prepare": _prepare(task.prepare),
        "instruction": task.instruction,
        "files": {path: _file(data) for path, data in task.files.items()},
        "grader": None if task.grader is None else {"name": task.grader.name, "key": task.grader.key()},
        "paths": list(task.paths),
        "protected": None if task.protected is None else list(task.protected),
        "user": task.user,
        "egress": list(task.egress),
        "env": dict(task.env),
        "limits": asdict(task.limits),
        "timeouts": asdict(task.timeouts),
        "cluster": task.cluster,
        "metadata": msgspec.to_builtins(dict(task.metadata), enc_hook=str),
    }


def restored(task_id: str, entry: Mapping[str, Any], grader: Grader | None) -> Task:
    """The task that an entry of ``tasks.json`` describes, with a grader."""
    return Task(
        id=task_id,
        prepare=_restored_prepare(entry["prepare"]),
        instruction=entry["instruction"],
        files={path: _restored_file(data) for path, data in entry["files"].items()},
        grader=grader,
        paths=tuple(entry["paths"]),
        protected=None if entry["protected"] is None else tuple(entry["protected"]),
        user=entry["user"],
        egress=tuple(entry["egress"]),
        env=entry["env"],
        limits=Limits(**entry["limits"]),
        timeouts=Timeouts(**entry["timeouts"]),
        cluster=entry["cluster"],
        metadata=entry["metadata"],
    )


def _prepare(prepare: Prepare) -> Any:
    if isinstance(prepare, str):
        return prepare
    kind = next(name for name, cls in KINDS.items() if isinstance(prepare, cls))
    fields = asdict(prepare)
    if isinstance(prepare, Dockerfile):
        fields |= {"context": str(Path(prepare.context).resolve()), "args": dict(prepare.args)}
    return {kind: fields}


def _restored_prepare(stored: Any) -> Prepare:
    if isinstance(stored, str):
        return stored
    ((kind, fields),) = stored.items()
    prepare: Prepare = KINDS[kind](**fields)
    return prepare


def _file(data: str | bytes | Path) -> Any:
    if isinstance(data, Path):
        return {"path": str(data.resolve())}
    return data if isinstance(data, str) else {"base64": base64.b64encode(data).decode()}


def _restored_file(stored: Any) -> str | bytes | Path:
    if isinstance(stored, str):
        return stored
    return Path(stored["path"]) if "path" in stored else base64.b64decode(stored["base64"])
