"""How results are shown: JSON for programs, aligned text in a pipe, rich tables on a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any


def on_terminal() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON document on stdout, on one line unless a person looks at it."""
    if indent is None and on_terminal():
        indent = 2
    separators = (",", ":") if indent is None else None
    sys.stdout.write(json.dumps(value, indent=indent, separators=separators, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def camel(value: Any) -> Any:
    """Plain data with its field names in camelCase, as the CLI's JSON has them.

    Labels and variables are users' own words and stay as they are.
    """
    if isinstance(value, dict):
        return {
            re.sub(r"_([a-z])", lambda found: found[1].upper(), key):
                item if key in ("labels", "env", "data") else camel(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [camel(item) for item in value]
    return value


def record(item: Any) -> dict[str, Any]:
    """A result of the API as the CLI's JSON shows it."""
    plain: dict[str, Any] = camel(item.to_dict())
    return plain


_STYLES = {"running": "green", "stopped": "yellow", "failed": "red", "creating": "cyan"}


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table on stdout; in a pipe it is never wrapped or cut, and an empty one is only its heading.

    Args:
        empty: What a person is told when there are no rows.
    """
    if not on_terminal():
        print("\n".join(aligned(columns, rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not rows:
        console.print(empty, style="dim", markup=False, highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a plain table, two spaces between columns."""
    cells = [[column.upper() for column in columns], *rows]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells]


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        print(f"{name.ljust(width)}  {value}".rstrip())


def age(at: float | None, *, now: float | None = None) -> str:
    """How long ago ``at`` (seconds since the epoch) was, in one unit: ``12s``, ``5m``, ``3h``, ``2d``."""
    if not at:
        return "-"
    return span((time.time() if now is None else now) - at)


def span(seconds: float) -> str:
    """A length of time in one unit."""
    seconds = max(0.0, seconds)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f}{name}"
    return f"{seconds / 86400:.0f}d"


def size(count: float) -> str:
    """Bytes in the unit that suits them: ``512 B``, ``1.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def ms(value: float) -> str:
    """Milliseconds, with a decimal only where it says something."""
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
