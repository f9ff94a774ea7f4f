"""What of an agent's changes may cross into the copy in which they are graded.

Pure: a diff and rules go in, a smaller diff and the reasons come out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import posixpath
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forkyard.rollouts.types import PROTECTED
from forkyard.types import Change, Diff

# Whatever a task says: byte code and start-up hooks that run unseen, what git runs, and what a
# build makes anew. Relative to the working directory.
NEVER = (
    "**/__pycache__/**",
    "**/*.pyc",
    "**/*.pyo",
    "**/*.pth",
    "**/sitecustomize*",
    "**/usercustomize*",
    "**/.git/config",
    "**/.git/config.worktree",
    "**/.git/hooks/**",
    "**/.git/info/**",
    "**/.git/modules/**",
    "build/**",
    "dist/**",
    "**/*.egg-info/**",
    "**/*.dist-info/**",
    "**/.eggs/**",
    "**/.tox/**",
    "**/.nox/**",
    "**/.pytest_cache/**",
    "**/.mypy_cache/**",
    "**/.ruff_cache/**",
)
# Where the working directory is a home: what programs and shells read by themselves.
HOME_FILES = (".bash*", ".profile", ".cache/**", ".config/**", ".local/**", ".ssh/**", ".gitconfig", ".netrc")
KINDS = ("file", "dir", "link")


@functools.lru_cache(maxsize=1024)
def pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression: ``**`` crosses directories, ``*`` and ``?`` do not. What is
    below a match matches too, so that ``src`` is ``src/**``."""
    out, index = [], 0
    while index < len(glob):
        if glob.startswith("**/", index):
            out.append("(?:.*/)?")
            index += 3
        elif glob.startswith("/**", index) and index + 3 == len(glob):
            index += 3
        elif glob.startswith("**", index):
            out.append(".*")
            index += 2
        else:
            char = glob[index]
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)))
            index += 1
    return re.compile(f"{''.join(out)}(?:/.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rules:
    """``workdir`` is a real path; ``paths`` and ``protected`` are a task's."""

    workdir: str
    paths: Sequence[str] = ()
    protected: Sequence[str] | None = None

    @property
    def pytest_section(self) -> bool:
        """Whether pyproject.toml's pytest section stays as it was."""
        return self.protected is None

    def relative(self, path: str) -> str | None:
        """The path below the working directory, None if it is elsewhere."""
        if path == self.workdir:
            return "."
        top = self.workdir.rstrip("/") + "/"
        return path[len(top) :] if path.startswith(top) else None

    def _matches(self, path: str, globs: Iterable[str]) -> bool:
        below = self.relative(path)
        for glob in globs:
            against = path if glob.startswith("/") else below
            if against is not None and pattern(glob).fullmatch(against):
                return True
        return False

    def inside(self, path: str) -> bool:
        """Whether the task's ``paths`` have it."""
        return self._matches(path, self.paths or ("**",))

    def never(self, path: str) -> bool:
        """Whether it crosses for no task. Under an absolute path of the task's, by the name too."""
        below = self.relative(path)
        if below is None:
            return any(glob.startswith("**/") and pattern(glob).fullmatch(path[1:]) for glob in NEVER)
        return self._matches(path, (*NEVER, *(() if self.paths else HOME_FILES)))

    def protects(self, path: str) -> bool:
        """Whether the task keeps it as it was prepared."""
        return self._matches(path, PROTECTED if self.protected is None else self.protected)

    def may_hold(self, path: str) -> bool:
        """Whether a link may lead to ``path``."""
        return self.relative(path) is not None or (bool(self.paths) and self.inside(path))


@dataclass(frozen=True, slots=True)
class Crossed:
    """``diff`` is what crosses; ``outside`` what was changed elsewhere; ``refused`` says of each
    change inside that stays behind why; ``protected`` are those that a task protects."""

    diff: Diff
    outside: list[str]
    refused: dict[str, str] = field(default_factory=dict)
    protected: list[str] = field(default_factory=list)


def cross(diff: Diff, rules: Rules) -> Crossed:
    """Choose what of ``diff`` crosses. Set-user-id, set-group-id and sticky bits do not."""
    outside: list[str] = []
    refused: dict[str, str] = {}
    protected: list[str] = []
    chosen: list[Change] = []
    blocked: set[str] = set()
    spare: dict[str, Change] = {}
    for change in diff.changes:
        path = change.path
        if change.kind == "dir" and change.mode is not None and change.old_kind in (None, "dir"):
            spare[path] = change
        if any(above in blocked for above in _parents(path)):
            refused[path] = "what it is in does not cross"
        elif not rules.inside(path):
            outside.append(path)
        elif rules.protects(path):
            protected.append(path)
            refused[path] = "protected"
        elif rules.never(path):
            refused[path] = "never crosses"
        elif reason := _unfit(change, rules):
            refused[path] = reason
        else:
            chosen.append(_plain(change))
            continue
        # A directory here that was something else there: what is in it has no place to go.
        if change.old_kind not in (None, change.kind) or change.kind not in KINDS:
            blocked.add(path)
    chosen += _with_parents(chosen, spare)
    return Crossed(_as_diff(chosen, diff), outside, refused, protected)


def _parents(path: str) -> Iterable[str]:
    while (path := posixpath.dirname(path)) not in ("/", ""):
        yield path


def _with_parents(chosen: Sequence[Change], spare: Mapping[str, Change]) -> list[Change]:
    """New directories that only the files in them match."""
    have = {change.path for change in chosen}
    wanted = {above for change in chosen if change.mode is not None for above in _parents(change.path)}
    return [_plain(spare[path]) for path in sorted(wanted - have) if path in spare]


def _unfit(change: Change, rules: Rules) -> str | None:
    if change.mode is None:
        return None
    if change.kind not in KINDS:
        return f"a {change.kind} does not cross"
    if change.kind == "link" and not _stays(change, rules):
        return "a link that leaves the task's paths"
    return None


def _stays(change: Change, rules: Rules) -> bool:
    """Whether a link leads to where changes may cross. ``..`` counts only at its beginning: after
    a name that may be a link it leads nobody knows where."""
    target = change.target or ""
    if target.startswith("/"):
        return posixpath.normpath(target) == target.rstrip("/") and rules.may_hold(target.rstrip("/"))
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if ".." in parts[ups:]:
        return False
    return rules.may_hold(posixpath.normpath(posixpath.join(posixpath.dirname(change.path), target)))


def _plain(change: Change) -> Change:
    return change if change.mode is None else dataclasses.replace(change, mode=change.mode & 0o777)


def _as_diff(changes: Sequence[Change], whole: Diff) -> Diff:
    kept = {change.path for change in changes}
    ordered = sorted(changes, key=lambda change: change.path)
    return Diff(
        added=[one for one in ordered if one.old_kind is None],
        modified=[one for one in ordered if one.mode is not None and one.old_kind is not None],
        deleted=[one for one in ordered if one.mode is None],
        patch=_patch_of(whole.patch, kept),
        complete=not any(one.omitted for one in ordered),
        skipped=whole.skipped,
        frozen_ms=whole.frozen_ms,
        compare_ms=whole.compare_ms,
    )


_HEADER = re.compile(r"^diff --git ", re.M)


def _patch_of(patch: str, kept: set[str]) -> str:
    """The parts of a patch that are about ``kept``."""
    starts = [match.start() for match in _HEADER.finditer(patch)]
    parts = [patch[start:end] for start, end in itertools.pairwise([*starts, len(patch)])]
    heads = tuple(f" b{path}" for path in kept)
    return "".join(part for part in parts if part.partition("\n")[0].endswith(heads)) if heads else ""


def replaced(diff: Diff, changes: Mapping[str, Change | None]) -> Diff:
    """``diff`` with some changes replaced, added or (None) taken out."""
    kept = [change for change in diff.changes if change.path not in changes]
    return _as_diff([*kept, *(change for change in changes.values() if change is not None)], diff)


_TABLE = re.compile(rb"^[ \t]*\[\[?[^\]\n]+\]\]?[ \t]*(?:#[^\n]*)?$", re.M)
_PYTEST = re.compile(rb"^[ \t]*\[+[ \t]*tool[ \t]*\.[ \t]*[\"']?pytest\b")


def with_pytest_section(theirs: bytes, ours: bytes | None) -> bytes | None:
    """A pyproject.toml with ``ours``' pytest section in place of its own; None where that cannot
    be told apart, and the file has to stay as it was."""
    kept, _ = _split(theirs)
    _, section = _split(ours or b"")
    merged = kept if not section else kept.rstrip(b"\n") + b"\n\n" + section
    try:
        said = tomllib.loads(merged.decode()).get("tool", {}).get("pytest")
        meant = tomllib.loads((ours or b"").decode()).get("tool", {}).get("pytest")
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError):
        return None
    return merged if said == meant else None


def _split(text: bytes) -> tuple[bytes, bytes]:
    starts = [0, *(match.start() for match in _TABLE.finditer(text))]
    parts = [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]
    section = b"".join(part for part in parts if _PYTEST.match(part))
    return b"".join(part for part in parts if not _PYTEST.match(part)), section
