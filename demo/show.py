"""How the demo talks: colours and a spinner on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Step:
    """A step in progress: ``note`` is added to its line, ``ms`` replaces the time that passed."""

    note = ""
    ms: float | None = None


class Show:
    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=not self._live)

    def title(self, text: str) -> None:
        self._console.print(f"\n[bold cyan]{escape(text)}[/]")

    def say(self, text: str) -> None:
        self._console.print(f"  [dim]{escape(text)}[/]")

    def draw(self, thing: Any) -> None:
        self._console.print(thing)

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Do something, then say how long it took."""
        step = Step()
        started = time.perf_counter()
        if self._live:
            with self._console.status(f"[dim]{escape(what)} ...[/]", spinner="dots"):
                yield step
        else:
            yield step
        took = step.ms if step.ms is not None else (time.perf_counter() - started) * 1000
        line = f"  [green]✓[/] {escape(what):<48} [bold]{duration(took):>8}[/]"
        self._console.print(f"{line}   [dim]{escape(step.note)}[/]" if step.note else line)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 2))
        for column in columns:
            table.add_column(column, no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)


def duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"
