"""``forkyard diff``: what changed on a sandbox's disk."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import on_terminal, print_json, record, size
from forkyard.cli.params import json_option, sandbox_argument

if TYPE_CHECKING:
    from forkyard.types import Change, Diff

_BOLD, _RED, _GREEN, _CYAN, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


@click.command("diff", epilog="""\b
Examples:
  forkyard diff work
  forkyard diff work --since before --stat
  forkyard diff work | git apply --directory=copy""")
@sandbox_argument()
@click.option("--since", metavar="X", help="A snapshot or checkpoint to compare with (default: what the "
                                           "sandbox started from).")
@click.option("--stat", is_flag=True, help="One line for each path, with how much changed.")
@click.option("--name-only", is_flag=True, help="Only the paths, one a line.")
@json_option()
@pass_app
def diff_verb(app: App, sandbox: str, since: str | None, stat: bool, name_only: bool, as_json: bool) -> None:
    """Show what changed on the disk of SANDBOX as a patch.

    It is computed from the disk itself; the sandbox is not asked. /tmp and /var/tmp are no part of it.
    """
    if stat + name_only + as_json > 1:
        raise click.UsageError("--stat, --name-only and --json exclude each other")
    diff = app.client.diff(sandbox, since)
    if as_json:
        print_json(plain(diff))
    elif name_only:
        sys.stdout.write("".join(f"{_safe(change.path)}\n" for change in diff.changes))
    elif stat:
        sys.stdout.write("".join(f"{line}\n" for line in summary(diff)))
    else:
        sys.stdout.write(coloured(diff.patch) if on_terminal() else diff.patch)
    for path in diff.skipped:
        note(f"not looked into: {_safe(path)}")


def plain(diff: Diff) -> dict[str, Any]:
    """A diff as the CLI's JSON shows it: without the content of files."""
    shown = record(diff)
    for kind in ("added", "modified", "deleted"):
        for change in shown[kind]:
            for key in ("data", "rawPath", "rawTarget"):
                change.pop(key)
    return shown


def summary(diff: Diff) -> Iterator[str]:
    """One line for each path, and one for all."""
    counts = _counts(diff.patch)
    rows = [(_mark(change), _safe(change.path), _extent(change, counts)) for change in diff.changes]
    width = max((len(path) for _, path, _ in rows), default=0)
    for mark, path, extent in rows:
        yield f"{mark} {path.ljust(width)}  {extent}".rstrip()
    added = sum(plus for plus, _ in counts.values())
    removed = sum(minus for _, minus in counts.values())
    yield (f"{len(diff.added)} added, {len(diff.modified)} modified, {len(diff.deleted)} deleted; "
           f"{added} lines more, {removed} lines less")


def _mark(change: Change) -> str:
    if change.mode is None:
        return "D"
    return "A" if change.old_kind is None else "M"


def _extent(change: Change, counts: dict[str, tuple[int, int]]) -> str:
    words = []
    if change.path in counts:
        plus, minus = counts[change.path]
        words.append(f"+{plus} -{minus}")
    elif change.kind == "file" and change.content:
        words.append(f"{size(change.old_size)} -> {size(change.size)}")
    if change.old_kind and change.mode is not None and change.old_kind != change.kind:
        words.append(f"{change.old_kind} -> {change.kind}")
    elif change.old_mode is not None and change.mode not in (None, change.old_mode):
        words.append(f"mode {change.old_mode:04o} -> {change.mode:04o}")
    if change.kind != "file":
        words.append(f"({change.kind})")
    return " ".join(words)


def _counts(patch: str) -> dict[str, tuple[int, int]]:
    """Lines that came and went, by path, for the files that the patch shows."""
    counts: dict[str, tuple[int, int]] = {}
    for part in patch.split("\ndiff --git "):
        head, _, hunks = part.partition("\n@@ ")
        name = head.split("\n")[0].removeprefix("diff --git ")
        if hunks and not name.startswith('"'):
            # "a/NAME b/NAME": two names of one length
            path = name[len(name) // 2 + 3 :]
            lines = hunks.split("\n")[1:]
            plus, minus = counts.get(f"/{path}", (0, 0))
            counts[f"/{path}"] = (plus + sum(line.startswith("+") for line in lines),
                                  minus + sum(line.startswith("-") for line in lines))
    return counts


def coloured(patch: str) -> str:
    """A patch for a terminal. What would steer the terminal is shown instead."""
    out = []
    inside = False
    for line in patch.split("\n"):
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", line)
        if line.startswith("diff --git "):
            inside = False
        elif line.startswith("@@ "):
            inside = True
        style = ""
        if not inside:
            style = _BOLD
        elif line.startswith("@@ "):
            style = _CYAN
        elif line.startswith("+"):
            style = _GREEN
        elif line.startswith("-"):
            style = _RED
        out.append(f"{style}{text}{_PLAIN}" if style and text else text)
    return "\n".join(out)


def _safe(path: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", path.replace("\n", "\\n"))
