"""What was run, as digests: of a task, of a policy, of one sample; and each sample's own seed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import stat
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.types import Limits, Policy, Prepare, Task


def digest(*parts: Any) -> str:
    """A SHA-256 of plain data; mappings count in the order of their keys."""
    return hashlib.sha256(msgspec.msgpack.encode([plain(part) for part in parts])).hexdigest()


def plain(value: Any) -> Any:
    """``value`` as what msgpack holds. A path stands for what the file or the tree holds.

    Raises:
        InvalidRequestError: there is no such path, or a value is not plain data.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Path):
        return path_digest(value)
    if isinstance(value, Mapping):
        return [[str(key), plain(value[key])] for key in sorted(value, key=str)]
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, plain(named)]
    raise InvalidRequestError(
        f"{type(value).__name__} {str(value)[:80]!r} is not plain data, so that no key can be made of it",
        hint="use text, numbers, bytes, paths, lists and mappings in a task",
    )


def path_digest(path: Path) -> str:
    """Of a file's content and exec bit, or of a tree's files and links by name."""
    if not path.exists():
        raise InvalidRequestError(f"{path} does not exist", hint="give a path on this machine")
    total = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        name = str(file.relative_to(path)).encode()
        if file.is_symlink():
            total.update(b"l%d:%s%s\0" % (len(name), name, str(file.readlink()).encode()))
        elif file.is_file():
            with file.open("rb") as data:
                content = hashlib.file_digest(data, "sha256").digest()
            mode = b"x" if file.stat().st_mode & stat.S_IXUSR else b"-"
            total.update(b"f%s%d:%s%s" % (mode, len(name), name, content))
    return total.hexdigest()


def prepared_digest(
    base: str, prepare: Prepare | None, files: Mapping[str, Any], limits: Limits, owner: str | None = None
) -> str:
    """Of a prepared state: ``base`` is the key of the template or snapshot it stands on, ``owner``
    whose the files are."""
    return digest("prepared", 1, base, prepare, files, limits, owner)


def task_digest(task: Task) -> str:
    """Of what a policy is told and may do, and of what decides its verdict; preparing counts apart."""
    return digest(
        "task",
        1,
        task.id,
        task.instruction,
        None if task.grader is None else [task.grader.name, task.grader.key()],
        list(task.paths),
        None if task.protected is None else list(task.protected),
        task.user,
        list(task.egress),
        task.env,
        task.timeouts,
    )


def policy_version(policy: Policy) -> str:
    """What is the same while the policy is: its ``version`` attribute, or a digest of its source.

    A digest sees the function's (or the class's) own text only, not what it calls: give a policy
    that loads weights or asks a model a ``version``.
    """
    named = getattr(policy, "version", None)
    if named is not None:
        return str(named)
    bound: list[Any] = []
    while isinstance(policy, functools.partial):
        bound.append([repr(policy.args), repr(sorted(policy.keywords.items()))])
        policy = policy.func
    target = policy if inspect.isroutine(policy) or inspect.isclass(policy) else type(policy)
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):
        text = ""
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"
    return digest("policy", name, text, bound)[:16]


def sample_key(task: str, prepared: str, policy: str, limits: Limits, sample: int) -> str:
    """Of one sample: two samples with the same key are the same experiment."""
    return digest("sample", task, prepared, policy, limits, sample)[:32]


def sample_seed(run: str, task: str, sample: int) -> int:
    """``H(run, task, i)``: 63 bits, the same whenever it is asked."""
    return int.from_bytes(hashlib.sha256(f"{run}\0{task}\0{sample}".encode()).digest()[:8]) >> 1
