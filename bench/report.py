"""From samples to figures: medians in a table beside the goals, and every figure with its spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.cases import Row

# p99 of fewer samples is their maximum.
P99_FROM = 100
ABOUT = """A fork's time is that of the whole call, divided by n. `source paused` is what forkyard says of
itself, and the time of `docker commit` and `runsc checkpoint`, which hold their source for about all of it.
Docker's fork and rewind are of the disk alone: a process starts anew, and makes its heap anew."""
GOALS = {
    "create": "<= 70, p99 150",
    "fork n=1, idle": "<= 70",
    "fork n=8, idle": "<= 40 each",
    "source paused, idle": "<= 25",
    "source paused, 100 MB heap": "<= 80",
    "rewind, idle": "<= 40 with a spare, else 80",
    "exec `sh -c true`, in a row": "agent's floor + 2",
    "exec `sh -c true`, after 0.5 s": "agent's floor + 2",
    "file in": ">= 300",
    "file out": ">= 300",
    "destroy": "<= 15",
    "idle memory (PSS)": "<= 15",
    "idle CPU": "0",
}


# What nothing built here can go below, by the floor's own metric.
FLOORS = {
    "exec `true`, in a row": "agent's floor of `true`, in a row",
    "exec `true`, after 0.5 s": "agent's floor of `true`, after 0.5 s",
    "exec `sh -c true`, in a row": "agent's floor of `sh -c true`, in a row",
    "exec `sh -c true`, after 0.5 s": "agent's floor of `sh -c true`, after 0.5 s",
    "file of 1 KB in": "agent's ping",
    "file of 1 KB out": "agent's ping",
    "source paused, 100 MB heap": "100 MB copied in memory",
    "fork n=1, 100 MB heap": "100 MB copied in memory",
    "rewind, 100 MB heap": "100 MB copied in memory",
    "create": "overlay mount",
}


@dataclass(frozen=True)
class Figure:
    """The samples of one metric of one contender, in short."""

    n: int
    median: float
    low: float
    high: float
    p99: float | None

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        p99 = statistics.quantiles(values, n=100)[98] if len(values) >= P99_FROM else None
        return cls(len(values), statistics.median(values), min(values), max(values), p99)


def figures(rows: Iterable[Row]) -> dict[str, dict[str, Figure]]:
    """``{metric: {contender: figure}}`` in the order of the samples."""
    samples: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        samples.setdefault(f"{row.metric}|{row.unit}", {}).setdefault(row.contender, []).append(row.value)
    return {
        metric: {contender: Figure.of(values) for contender, values in by.items()}
        for metric, by in samples.items()
    }


def markdown(
    about: dict[str, Any],
    rows: list[Row],
    failures: list[str],
    before: dict[str, dict[str, Figure]] | None = None,
) -> str:
    """The whole report; ``before`` are the figures of the run that it is compared with."""
    found, before = figures(rows), before or {}
    contenders = list(dict.fromkeys(row.contender for row in rows))
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    if failures:
        lines += ["Failed:", "", *(f"- {failure}" for failure in failures), ""]
    lines += ["## Medians", "", ABOUT]
    lines += ["", _line(["", "unit", *contenders, "goal"]), _line(["---"] * (len(contenders) + 3))]
    for key, by in found.items():
        metric, _, unit = key.partition("|")
        cells = [_cell(by, before.get(key, {}), name) for name in contenders]
        lines.append(_line([metric, unit, *cells, GOALS.get(metric, "")]))
    lines += ["", "## Every figure", "", _line(["", "", "unit", "n", "median", "min", "max", "p99"])]
    lines.append(_line(["---"] * 8))
    for key, by in found.items():
        metric, _, unit = key.partition("|")
        for name, figure in by.items():
            spread = [short(value) for value in (figure.median, figure.low, figure.high)]
            p99 = "" if figure.p99 is None else short(figure.p99)
            lines.append(_line([metric, name, unit, str(figure.n), *spread, p99]))
    return "\n".join(lines) + "\n"


def _cell(by: dict[str, Figure], before: dict[str, Figure], name: str) -> str:
    """The median, and what it was in the last kept run where that differs by more than a tenth."""
    if name not in by:
        return ""
    now = by[name].median
    was = before[name].median if name in before else now
    return short(now) + (f" (was {short(was)})" if abs(now - was) > 0.1 * was else "")


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
