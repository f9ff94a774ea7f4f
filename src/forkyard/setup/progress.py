"""What set-up tells its user: one line a step, a spinner where there is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

__all__ = ["PlainProgress", "Progress", "Step", "TerminalProgress", "progress_for"]


class Progress(Protocol):
    """Shows steps. ``begin`` is called when a step turns out to take time, ``end`` always."""

    def begin(self, name: str, what: str) -> None: ...

    def end(self, name: str, result: str, ms: float) -> None: ...


class Step:
    """One step in progress. ``result`` is what the line at its end says."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self.name = name
        self.result = "already there"

    def doing(self, what: str) -> None:
        """The step has work to do; say what, now."""
        self._progress.begin(self.name, what)
        self.result = "done"


@contextmanager
def step(progress: Progress, name: str) -> Iterator[Step]:
    """Run one step and show how long it took; a failure is shown and goes on."""
    started = time.monotonic()
    it = Step(progress, name)
    try:
        yield it
    except BaseException:
        progress.end(name, "failed", (time.monotonic() - started) * 1000)
        raise
    progress.end(name, it.result, (time.monotonic() - started) * 1000)


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


class PlainProgress:
    """Lines, for pipes and logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, name: str, what: str) -> None:
        print(f"{name}: {what} ...", file=self._stream, flush=True)

    def end(self, name: str, result: str, ms: float) -> None:
        print(f"{name}: {result} ({_duration(ms)})", file=self._stream, flush=True)


class TerminalProgress:
    """A spinner and a clock for each step that takes time, then its line; needs rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream, highlight=False)
        self._bars: Any = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._running: dict[str, Any] = {}

    def begin(self, name: str, what: str) -> None:
        text = f"{name}: {what}"
        if name in self._running:
            self._bars.update(self._running[name], description=text)
            return
        if not self._running:
            self._bars.start()
        self._running[name] = self._bars.add_task(text, total=None)

    def end(self, name: str, result: str, ms: float) -> None:
        task = self._running.pop(name, None)
        if task is not None:
            self._bars.remove_task(task)
        mark = "[red]✗[/]" if result == "failed" else "[green]✓[/]"
        self._console.print(f"{mark} {name}: {result} [dim]({_duration(ms)})[/]")
        if not self._running:
            self._bars.stop()


def progress_for(stream: TextIO = sys.stdout) -> Progress:
    """A spinner on a terminal, if rich is installed; else lines."""
    if stream.isatty():
        try:
            return TerminalProgress(stream)
        except ImportError:
            pass
    return PlainProgress(stream)
