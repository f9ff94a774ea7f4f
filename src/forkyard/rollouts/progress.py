"""How far a run is: figures for a callback, a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forkyard.rollouts.types import Sample
from forkyard.types import Record

# Where nobody watches, a line at most so often.
PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress(Record):
    """``done`` of ``total`` samples have ended, ``resumed`` of them in an earlier run. ``score`` is
    the mean reward of the valid ones, ``per_min`` how many ended a minute in this run, ``left_s`` an
    estimate of the time left (None while nothing has ended)."""

    total: int
    done: int
    resumed: int
    running: int
    outcomes: Mapping[str, int]
    score: float | None
    per_min: float
    left_s: float | None
    last: Sample | None = field(default=None)

    def __str__(self) -> str:
        counts = " ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        score = "-" if self.score is None else f"{self.score:.3f}"
        left = "" if self.left_s is None else f", {_time(self.left_s)} left"
        return (
            f"{self.done}/{self.total} samples, {self.running} running, score {score}, "
            f"{self.per_min:.1f}/min{left}" + (f"  [{counts}]" if counts else "")
        )


OnProgress = Callable[[Progress], Any]


class Board:
    """Counts what starts and ends, and tells whoever listens."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.listener: OnProgress | None = None
        self._begun = time.monotonic()
        self._resumed = 0
        self._running = 0
        self._outcomes: Counter[str] = Counter()
        self._reward = 0.0
        self._valid = 0
        self._last: Sample | None = None

    def resumed(self, samples: Sequence[Sample]) -> None:
        """What ended in an earlier run."""
        self._resumed = len(samples)
        for sample in samples:
            self._count(sample)
        if samples:
            self._tell()

    def started(self) -> None:
        self._running += 1
        self._tell()

    def left(self) -> None:
        self._running -= 1

    def ended(self, sample: Sample) -> None:
        self._count(sample)
        self._last = sample
        self._tell()

    def _count(self, sample: Sample) -> None:
        self._outcomes[sample.outcome] += 1
        if sample.valid:
            self._valid += 1
            self._reward += sample.reward

    def now(self) -> Progress:
        """The figures of this moment."""
        done = self._outcomes.total()
        fresh = done - self._resumed
        spent_s = time.monotonic() - self._begun
        return Progress(
            total=self.total,
            done=done,
            resumed=self._resumed,
            running=self._running,
            outcomes=dict(self._outcomes),
            score=self._reward / self._valid if self._valid else None,
            per_min=fresh / spent_s * 60 if spent_s else 0.0,
            left_s=spent_s / fresh * (self.total - done) if fresh else None,
            last=self._last,
        )

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener(self.now())


@contextmanager
def shown(board: Board, progress: bool | OnProgress | None) -> Iterator[None]:
    """Show the board while the block runs; see ``progress`` of ``aevaluate``."""
    if callable(progress):
        board.listener = progress
        yield
        return
    if progress is None:
        progress = sys.stderr.isatty()
    if not progress:
        yield
        return
    if sys.stderr.isatty() and _has_rich():
        with _live(board):
            yield
        return
    lines = _Lines()
    board.listener = lines.on_progress
    yield
    lines.say(board.now())


class _Lines:
    def __init__(self) -> None:
        self._said_at = 0.0
        self._said: int | None = None

    def on_progress(self, progress: Progress) -> None:
        if progress.last is not None and time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self.say(progress)

    def say(self, progress: Progress) -> None:
        """A line, unless as many had ended in the last one."""
        if progress.done == self._said:
            return
        self._said_at, self._said = time.monotonic(), progress.done
        sys.stderr.write(f"{progress}\n")
        sys.stderr.flush()


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None


@contextmanager
def _live(board: Board) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}", markup=False))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("samples", total=board.total, said="")

        def on_progress(progress: Progress) -> None:
            _, _, said = str(progress).partition(" samples, ")
            bar.update(task, completed=progress.done, said=said)

        board.listener = on_progress
        yield


def _time(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h"
