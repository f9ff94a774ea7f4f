"""A report as one page: no script, no font, no picture from anywhere else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from forkyard.errors import ForkyardError
from forkyard.rollouts import charts
from forkyard.rollouts.tree import Tree
from forkyard.rollouts.types import UNSCORED

if TYPE_CHECKING:
    from forkyard.rollouts.report import Report
    from forkyard.rollouts.types import Sample

# Of one episode; the rest is in the run's directory.
SHOWN_COMMANDS = 200
SHOWN_PATCH = 60_000
SHOWN_TEXT = 20_000

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #667; --line: #d8dce2; --paper: #fff;
  --band: #f4f6f8; --good: #2a8a57; --bad: #c0453e; --odd: #b07c1b; --mark: #3a6ea8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa3ad; --line: #3a4047;
  --paper: #16191c; --band: #1f2429; --good: #58b984; --bad: #e2766f; --odd: #d9aa55; --mark: #7fb0e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--band); padding: .6rem; overflow-x: auto; font-size: .8rem; white-space: pre-wrap; }
summary { cursor: pointer; padding: .2rem 0; } details { border-bottom: 1px solid var(--line); }
.soft { color: var(--soft); } .passed { color: var(--good); } .failed { color: var(--bad); }
.odd { color: var(--odd); } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .85rem; }
"""


def page(report: Report) -> str:
    """The whole report."""
    parts = [
        f"<h1>Run {escape(report.run)}</h1>",
        _summary(report),
        "<h2>Rates</h2>",
        _rates(report),
        "<h2>Rewards and times</h2>",
        _distributions(report),
        "<h2>Timeline</h2>",
        charts.timeline(report.samples),
        "<h2>Tasks</h2>",
        _tasks(report),
        _suspicions(report),
        "<h2>Episodes</h2>",
        *(_episode(report, sample) for sample in report.samples),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Run {escape(report.run)}</title><style>{STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _summary(report: Report) -> str:
    times = report.times
    rows = [[_outcome(name), str(count)] for name, count in sorted(report.outcomes.items())]
    hours = f"{times.worker_hours:.3f} worker-hours, of which {times.sandbox_hours:.3f} the sandboxes' own"
    spent = " · ".join(
        f"{name} {getattr(times, f'{name}_s'):.1f} s"
        for name in ("queue", "start", "sandbox", "model", "freeze", "grade")
    )
    retries = sum(sample.retries for sample in report.samples)
    return (
        f"<p>{len(report.samples)} samples of {len(report.table)} tasks, {retries} retries. {hours}.</p>"
        f'<p class="soft">Summed over samples: {spent}.</p>' + _table(["Outcome", "#Samples"], rows)
    )


def _rates(report: Report) -> str:
    score = report.score
    bars = [("score", score.value, score.interval.low, score.interval.high)]
    if report.outcomes.keys() & set(UNSCORED):
        strict = score.strict_interval
        bars.append(("score, losses failed", score.strict, strict.low, strict.high))
    bars += [(rate.name, rate.value, rate.interval.low, rate.interval.high) for rate in report.rates]
    notes = {score.interval.note, *(rate.interval.note for rate in report.rates)}
    short = sorted({task for rate in report.rates for task in rate.short})
    few = f"<p class=odd>Too few valid samples for some k: {escape(', '.join(short))}.</p>" if short else ""
    caption = "95 % intervals. " + " ".join(sorted(notes))
    return f"<figure>{charts.intervals(bars)}<figcaption>{escape(caption)}</figcaption></figure>{few}"


def _distributions(report: Report) -> str:
    valid = [sample for sample in report.samples if sample.valid]
    rewards = charts.histogram([sample.reward for sample in valid], "reward", low=0.0, high=1.0)
    lasted = charts.histogram([s.phases.policy_s for s in report.samples], "seconds of the policy")
    sandbox = charts.histogram([s.phases.sandbox_s for s in report.samples], "seconds of sandbox calls")
    return f"<figure>{rewards}{lasted}{sandbox}</figure>"


def _tasks(report: Report) -> str:
    head = ["Task", "Cluster", "#Samples", "#Valid", "#Passed", "#Reward", "#Losses failed", "#Retries"]
    head.append("Identical")
    rows = [
        [
            escape(row.task),
            escape(row.cluster),
            str(row.samples),
            str(row.valid),
            str(row.passed),
            _number(row.reward),
            _number(row.strict),
            str(row.retries),
            f'<span class="odd">{row.identical} samples did the same</span>' if row.identical else "",
        ]
        for row in report.table
    ]
    return _table(head, rows)


def _suspicions(report: Report) -> str:
    found = report.suspicions
    if not found:
        return ""
    rows = [
        [
            escape(f"{one['task']} #{one['sample']}"),
            escape(str(one.get("kind", ""))),
            escape(str(one.get("severity", ""))),
            escape(str(one.get("message", ""))),
            f"{one['base_rate']:.0%}",
        ]
        for one in found
    ]
    head = ["Sample", "Kind", "Severity", "What", "#Of all samples"]
    return "<h2>Suspicions</h2><p>None of these changes a reward.</p>" + _table(head, rows)


def _episode(report: Report, sample: Sample) -> str:
    head = (
        f"<summary>{escape(sample.task)} #{sample.sample} {_outcome(sample.outcome)} "
        f'<span class="soft">reward {_number(sample.reward)}, {sample.phases.policy_s:.1f} s, '
        f"seed {sample.seed}</span></summary>"
    )
    body = [f"<p>{escape(sample.message)}</p>"] if sample.message else []
    if sample.verdict is not None:
        body.append(_verdict(sample))
    try:
        story, diff = report.episode(sample), report.diff(sample)
    except ForkyardError as error:
        return f'<details>{head}{"".join(body)}<p class="odd">{escape(str(error))}</p></details>'
    body.append(_commands(story["commands"]))
    trees = [tree for line in story["log"] if (tree := _tree(line.get("tree")))]
    body += [f"<h4>Search tree</h4><figure>{tree}</figure>" for tree in trees]
    if story["log"]:
        lines = "\n".join(json.dumps(line, ensure_ascii=False, default=str) for line in story["log"])
        body.append(f"<h4>Log</h4><pre>{escape(_cut(lines, SHOWN_TEXT))}</pre>")
    left = [f"{path}: {why}" for path, why in story["refused"].items()]
    left += [f"{path}: outside the task's paths" for path in story["outside"][:50]]
    if left:
        body.append(f"<h4>Not graded</h4><pre>{escape(chr(10).join(left))}</pre>")
    if diff is not None:
        names = ", ".join(diff.paths[:50]) + (" ..." if len(diff.paths) > 50 else "")
        body.append(f"<h4>Diff</h4><p>{escape(names) or 'nothing changed'}</p>")
        if diff.patch:
            body.append(f"<pre>{escape(_cut(diff.patch, SHOWN_PATCH))}</pre>")
    return f"<details>{head}{''.join(body)}</details>"


def _tree(rows: Any) -> str:
    """The picture of a search that a policy logged, as its tree's ``to_dict`` gave it; "" if it is none."""
    if not isinstance(rows, list) or not rows:
        return ""
    try:
        return Tree.from_dict(rows).to_svg()
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def _verdict(sample: Sample) -> str:
    verdict = sample.verdict
    assert verdict is not None
    tests = "".join(
        f"<tr><td>{escape(name)}</td><td>{_outcome(said)}</td></tr>" for name, said in verdict.tests.items()
    )
    trust = "" if verdict.trusted else ' <span class="odd">(the agent\'s machine took part: untrusted)</span>'
    evidence = json.dumps(dict(verdict.evidence), indent=1, ensure_ascii=False, default=str)
    shown = f"<pre>{escape(_cut(evidence, SHOWN_TEXT))}</pre>" if verdict.evidence else ""
    return f"<h4>Verdict{trust}</h4>" + (f"<table>{tests}</table>" if tests else "") + shown


def _commands(commands: Sequence[dict[str, Any]]) -> str:
    rows = []
    for command in commands[:SHOWN_COMMANDS]:
        said = command.get("command") or command.get("argv") or command.get("code") or command.get("path")
        text = " ".join(said) if isinstance(said, list) else str(said or "")
        marks = [name for name in ("timed_out", "oom") if command.get(name)]
        code = command.get("exit_code")
        rows.append(
            [
                time.strftime("%H:%M:%S", time.localtime(float(command["at"]))),
                escape(str(command["kind"])),
                f"<code>{escape(_cut(text, 2000))}</code>",
                " ".join(["" if code is None else str(code), *marks]),
                f"{float(command['duration_ms']):.0f} ms" if "duration_ms" in command else "",
            ]
        )
    more = f"<p>... and {len(commands) - SHOWN_COMMANDS} more</p>" if len(commands) > SHOWN_COMMANDS else ""
    return "<h4>Commands</h4>" + _table(["Time", "Kind", "What", "Exit", "#Took"], rows) + more


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; a column whose head begins with # holds numbers."""
    number = [name.startswith("#") for name in head]
    kinds = [' class="n"' if n else "" for n in number]
    top = "".join(
        f"<th{kind}>{escape(name.lstrip('#'))}</th>" for name, kind in zip(head, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _outcome(name: str) -> str:
    kind = name if name in ("passed", "failed") else "odd"
    return f'<span class="{kind}">{escape(name)}</span>'


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n... {len(text) - limit} characters more"
