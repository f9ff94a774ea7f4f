"""The report's pictures, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from forkyard.rollouts.types import Sample

WIDTH = 640
COLOURS = {"passed": "var(--good)", "failed": "var(--bad)"}
Bar = tuple[str, float, float, float]


def intervals(bars: Sequence[Bar]) -> str:
    """Named values between 0 and 1 (or as far as they go), each with its interval."""
    known = [v for bar in bars for v in bar[1:] if not math.isnan(v)]
    low, high = min([0.0, *known]), max([1.0, *known])
    left, right, step = 150, WIDTH - 70, 26

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    out = [_line(x(t), 4, x(t), step * len(bars) + 4, "var(--line)") for t in (low, (low + high) / 2, high)]
    for row, (name, value, start, end) in enumerate(bars):
        y = row * step + 18
        out.append(_text(left - 10, y + 4, name, "end"))
        if math.isnan(value):
            out.append(_text(left + 4, y + 4, "no samples"))
            continue
        out.append(_line(x(start), y, x(end), y, "var(--mark)", 3))
        out.append(f'<circle cx="{x(value):.1f}" cy="{y}" r="5" fill="var(--mark)"/>')
        out.append(_text(right + 10, y + 4, f"{value:.3f}"))
    y = step * len(bars) + 20
    out += [_text(x(t), y, f"{t:g}", "middle") for t in (low, (low + high) / 2, high)]
    return _svg(y + 8, out, "rates with their intervals")


def histogram(
    values: Sequence[float], name: str, *, low: float | None = None, high: float | None = None, bins: int = 20
) -> str:
    """How often values fall into each of equal steps."""
    if not values:
        return ""
    start = min(values) if low is None else min(low, *values)
    end = max(values) if high is None else max(high, *values)
    end = end if end > start else start + 1
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - start) / (end - start) * bins))] += 1
    most, tall, wide = max(counts), 80, (WIDTH - 60) / bins
    out = []
    for at, count in enumerate(counts):
        height = tall * count / most
        out.append(
            f'<rect x="{30 + at * wide:.1f}" y="{tall + 8 - height:.1f}" width="{wide - 2:.1f}" '
            f'height="{height:.1f}" fill="var(--mark)"><title>{count}</title></rect>'
        )
    out.append(_line(30, tall + 8, WIDTH - 30, tall + 8, "var(--line)"))
    out += [_text(30, tall + 24, f"{start:.3g}"), _text(WIDTH - 30, tall + 24, f"{end:.3g}", "end")]
    out += [_text(WIDTH / 2, tall + 24, name, "middle"), _text(24, 16, str(most), "end")]
    return _svg(tall + 32, out, f"distribution of {name}")


def timeline(samples: Sequence[Sample]) -> str:
    """Each sample as a bar from its beginning to its end, packed into as few rows as hold them."""
    if not samples:
        return ""
    begin = min(sample.started_at for sample in samples)
    span = max(max(sample.ended_at for sample in samples) - begin, 1e-9)
    ends: list[float] = []
    out: list[str] = []
    step = 9
    for sample in sorted(samples, key=lambda sample: sample.started_at):
        row = next((at for at, end in enumerate(ends) if end <= sample.started_at), len(ends))
        ends[row : row + 1] = [sample.ended_at]
        x = 10 + (sample.started_at - begin) / span * (WIDTH - 20)
        waited = sample.phases.queue_s / span * (WIDTH - 20)
        wide = max(1.0, (sample.ended_at - sample.started_at) / span * (WIDTH - 20))
        waited = min(waited, wide - 0.5)
        y = row * step + 4
        lasted_s = sample.ended_at - sample.started_at
        said = escape(f"{sample.task} #{sample.sample}: {sample.outcome}, {lasted_s:.1f} s")
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{waited:.1f}" height="{step - 2}" fill="var(--line)"/>'
            f'<rect x="{x + waited:.1f}" y="{y}" width="{wide - waited:.1f}" height="{step - 2}" '
            f'fill="{COLOURS.get(sample.outcome, "var(--odd)")}"><title>{said}</title></rect>'
        )
    y = len(ends) * step + 20
    out += [_text(10, y, "0 s"), _text(WIDTH - 10, y, f"{span:.1f} s", "end")]
    return _svg(y + 8, out, "when each sample ran")


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="100%" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
