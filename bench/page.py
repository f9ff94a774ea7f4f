"""The report as one page with plots: every metric a bar for each contender, beside its floor and goal."""

from __future__ import annotations

import html
from typing import Any

from bench.report import FLOORS, GOALS, Figure, short

WIDTH = 420
BAR = 14
GAP = 4
LEFT = 190
RIGHT = 120
OURS = "#2563eb"
OTHERS = {"docker": "#d97706", "runsc": "#6b7280", "floor": "#111827"}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #1f2937 }
h2 { font-size: 1rem; margin: 1.6rem 0 .2rem } small { color: #6b7280; font-weight: normal }
svg text { font: 12px system-ui, sans-serif; fill: #374151 } table { border-collapse: collapse }
td { padding: .1rem .8rem .1rem 0; vertical-align: top } .failed { color: #b91c1c }
"""
LEGEND = """A bar is the median; the thin line goes from the least sample to the 99th percentile (the largest,
below 100 samples). The dotted line is the floor: what the host, or the agent alone, needs for the same."""


def page(
    about: dict[str, Any],
    found: dict[str, dict[str, Figure]],
    failures: list[str],
    before: dict[str, dict[str, Figure]],
    before_name: str,
) -> str:
    """One self-contained HTML file.

    Args:
        found: ``{metric|unit: {contender: figure}}``, as :func:`bench.report.figures` gives them.
        before: The same of the last kept run, named ``before_name``.
    """
    facts = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>" for k, v in about.items()
    )
    failed = "".join(f"<p class=failed>failed: {html.escape(failure)}</p>" for failure in failures)
    plots = "\n".join(_plot(key, by, found, before.get(key, {})) for key, by in found.items())
    since = f" Small figures after a bar: the last kept run, {html.escape(before_name)}." if before else ""
    return (
        f"<!doctype html><meta charset=utf-8><title>forkyard: benchmark</title><style>{STYLE}</style>"
        f"<h1>Benchmark</h1><p>{LEGEND}{since}</p><table>{facts}</table>{failed}\n{plots}\n"
    )


def _plot(
    key: str, by: dict[str, Figure], found: dict[str, dict[str, Figure]], before: dict[str, Figure]
) -> str:
    metric, _, unit = key.partition("|")
    goal = f" <small>goal {html.escape(GOALS[metric])}</small>" if metric in GOALS else ""
    floors = {name: floor_of(metric, name, found) for name in by}
    most = max([figure.p99 or figure.high for figure in by.values()] + [f for f in floors.values() if f]) or 1
    height = len(by) * (BAR + GAP)
    parts = []
    for at, (name, figure) in enumerate(by.items()):
        y = at * (BAR + GAP)
        middle = y + BAR / 2

        def x(value: float) -> float:
            return LEFT + WIDTH * value / most

        was = before.get(name)
        text = short(figure.median) + (f" ({short(was.median)})" if was else "")
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{x(figure.median) - LEFT:.1f}" height="{BAR}" {_fill(name)}/>',
            f'<path d="M{x(figure.low):.1f} {middle}H{x(figure.p99 or figure.high):.1f}" stroke="#9ca3af"/>',
            f'<text x="{LEFT + WIDTH + 8}" y="{y + 11}">{text}</text>',
        ]
        if floor := floors[name]:
            parts.append(f'<path d="M{x(floor):.1f} {y}v{BAR}" stroke="#111827" stroke-dasharray="2 2"/>')
    return (
        f"<h2>{html.escape(metric)} <small>{html.escape(unit)}</small>{goal}</h2>"
        f'<svg width="{LEFT + WIDTH + RIGHT}" height="{height}">{"".join(parts)}</svg>'
    )


def floor_of(metric: str, contender: str, found: dict[str, dict[str, Figure]]) -> float | None:
    """The contender's own floor of this metric, or the host's; None if none was measured."""
    floors = found.get(f"{FLOORS.get(metric, '')}|ms", {})
    figure = floors.get(contender) or floors.get("floor")
    return figure.median if figure else None


def _fill(contender: str) -> str:
    color = next((color for name, color in OTHERS.items() if contender.startswith(name)), OURS)
    return f'fill="{color}"'
