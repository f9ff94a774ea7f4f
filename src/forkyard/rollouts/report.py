"""What a run came to."""

from __future__ import annotations

import importlib
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from forkyard.errors import NotFoundError, UnsupportedError
from forkyard.rollouts import journal as jn
from forkyard.rollouts.numbers import (
    Comparison,
    Interval,
    Rate,
    Tally,
    cluster_interval,
    compare_runs,
    pass_rates,
    tally,
)
from forkyard.rollouts.stored import missing_samples
from forkyard.rollouts.types import UNSCORED, Sample, Task
from forkyard.types import Diff, Record

TASKS_SHOWN = 10
# As many of the reasons for an outcome are printed.
REASONS = 3


@dataclass(frozen=True, slots=True)
class Score(Record):
    """The mean over tasks of their mean reward. ``value`` leaves out samples that say nothing about
    the policy, ``strict`` counts them as failed with reward 0; both are NaN without a sample."""

    value: float
    interval: Interval
    strict: float
    strict_interval: Interval


@dataclass(frozen=True, slots=True)
class Times(Record):
    """Sums over the samples, in seconds. ``model_s`` is the policies' own time, in which no call to
    a sandbox was open. ``worker_hours`` is how long episodes held a place on the machine,
    ``sandbox_hours`` what of it the sandboxes needed: starts, calls, freezing and grading."""

    queue_s: float
    start_s: float
    policy_s: float
    sandbox_s: float
    model_s: float
    freeze_s: float
    grade_s: float
    worker_hours: float
    sandbox_hours: float


@dataclass(frozen=True, slots=True)
class TaskRow(Record):
    """One task: how many samples there are and how they ended; ``reward`` and ``strict`` as in
    ``Score``; ``identical`` how many samples did exactly what another did."""

    task: str
    cluster: str
    samples: int
    valid: int
    passed: int
    reward: float
    strict: float
    retries: int
    identical: int
    outcomes: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """What ``evaluate`` gives, and ``load`` reads from a run's directory.

    Attributes:
        run: The run's id.
        samples: As they were written, by task and number.
        ks: The k of the rates.
        parallel: How many episodes ran at a time; None for one that was read.
        out: The run's directory, None for a run in memory.
        missing: How many samples the run has still to make: it goes on, or was killed.
    """

    run: str
    samples: Sequence[Sample]
    ks: Sequence[int]
    parallel: int | None
    out: Path | None
    tasks: Sequence[Task] = ()
    _journal: Any = None
    _live: Mapping[str, Any] = field(default_factory=dict)
    missing: int = 0

    @classmethod
    def of(
        cls,
        journal: jn.Journal | jn.Memory,
        tasks: Sequence[Task],
        ks: Sequence[int],
        live: Mapping[str, Any],
        parallel: int,
    ) -> Report:
        """Of these tasks' samples in an open run."""
        order = {task.id: at for at, task in enumerate(tasks)}
        found = sorted(
            (sample for sample in journal.samples.values() if sample.task in order),
            key=lambda sample: (order[sample.task], sample.sample),
        )
        return cls(journal.run, found, tuple(ks), parallel, journal.path, tuple(tasks), journal, dict(live))

    @classmethod
    def load(cls, out: str | os.PathLike[str], ks: Sequence[int] = (1,)) -> Report:
        """Of a run's directory, which may be one that goes on. Raises NotFoundError."""
        path = Path(out)
        head = jn.read_head(path)
        found = sorted(jn.read_samples(path), key=lambda sample: (sample.task, sample.sample))
        missing = missing_samples(jn.read_tasks(path), found)
        return cls(str(head["run"]), found, tuple(ks), None, path, missing=missing)

    # -- figures -------------------------------------------------------------------------

    @property
    def outcomes(self) -> dict[str, int]:
        """How many samples ended how."""
        return dict(Counter(sample.outcome for sample in self.samples))

    @property
    def score(self) -> Score:
        """The mean reward, with and without what was lost to the host or the grader."""
        value, interval = _mean(tally(self.samples))
        strict, strict_interval = _mean(tally(self.samples, invalid_fails=True))
        return Score(value, interval, strict, strict_interval)

    @property
    def rates(self) -> list[Rate]:
        """pass@k and pass^k for each of ``ks``, over valid samples."""
        return pass_rates(self.samples, self.ks)

    @property
    def times(self) -> Times:
        """Where the time went."""

        def total(name: str) -> float:
            return math.fsum(getattr(sample.phases, name) for sample in self.samples)

        start, policy, sandbox = total("start_s"), total("policy_s"), total("sandbox_s")
        freeze, grade = total("freeze_s"), total("grade_s")
        return Times(
            queue_s=total("queue_s"),
            start_s=start,
            policy_s=policy,
            sandbox_s=sandbox,
            model_s=max(0.0, policy - sandbox),
            freeze_s=freeze,
            grade_s=grade,
            worker_hours=(start + policy + freeze + grade) / 3600,
            sandbox_hours=(start + sandbox + freeze + grade) / 3600,
        )

    @property
    def table(self) -> list[TaskRow]:
        """A row per task."""
        strict = {row.task: row.reward for row in tally(self.samples, invalid_fails=True)}
        twins = {task: sum(map(len, groups)) for task, groups in self.identical.items()}
        by_task: dict[str, list[Sample]] = {}
        for sample in self.samples:
            by_task.setdefault(sample.task, []).append(sample)
        rows = []
        for row in tally(self.samples):
            own = by_task[row.task]
            rows.append(
                TaskRow(
                    task=row.task,
                    cluster=row.cluster,
                    samples=row.samples,
                    valid=row.valid,
                    passed=row.passed,
                    reward=row.reward,
                    strict=strict[row.task],
                    retries=sum(sample.retries for sample in own),
                    identical=twins.get(row.task, 0),
                    outcomes=dict(Counter(sample.outcome for sample in own)),
                )
            )
        return rows

    @property
    def identical(self) -> dict[str, list[list[int]]]:
        """By task, the groups of samples that did exactly the same: they count as one trial. A
        policy that is meant to vary has not used its seed; forks share a generator's state."""
        found: dict[str, dict[str, list[int]]] = {}
        for sample in self.samples:
            if sample.trajectory is not None and sample.valid:
                found.setdefault(sample.task, {}).setdefault(sample.trajectory, []).append(sample.sample)
        groups = {task: [g for g in by.values() if len(g) > 1] for task, by in found.items()}
        return {task: same for task, same in groups.items() if same}

    @property
    def suspicions(self) -> list[dict[str, Any]]:
        """What looked like cheating, each with its task and sample, and how often that kind was seen
        in this run (``base_rate``). They change no reward."""
        kinds = Counter(kind for s in self.samples for kind in {str(f.get("kind")) for f in s.suspicions})
        return [
            {"task": sample.task, "sample": sample.sample, **found,
             "base_rate": kinds[str(found.get("kind"))] / len(self.samples)}
            for sample in self.samples
            for found in sample.suspicions
        ]  # fmt: skip

    # -- what samples refer to -----------------------------------------------------------

    def transcript(self, sample: Sample) -> Any:
        """What the policy returned: the very object for a run in memory, else plain data."""
        if sample.transcript is None:
            return None
        if sample.transcript in self._live:
            return self._live[sample.transcript]
        return msgspec.msgpack.decode(self._read(sample.transcript))

    def diff(self, sample: Sample) -> Diff | None:
        """What it changed, None where it was not graded."""
        return None if sample.diff is None else jn.unpack_diff(self._read(sample.diff))

    def episode(self, sample: Sample) -> dict[str, Any]:
        """Its ``log``; its ``commands``, as the daemon's audit has them; which paths it changed
        ``outside`` the task's, and why others were ``refused``."""
        if sample.episode is None:
            return {"log": [], "commands": [], "outside": [], "refused": {}}
        return dict(json.loads(self._read(sample.episode)))

    def _read(self, name: str) -> bytes:
        if self._journal is not None:
            data: bytes = self._journal.read(name)
            return data
        if self.out is None:
            raise NotFoundError(f"{name} was kept in another process's memory", hint="run with out=")
        return jn.read_file(self.out, name)

    def __getstate__(self) -> dict[str, Any]:
        # An open run stays with its process; what it keeps in a directory is read from there.
        kept = self._journal if self.out is None else None
        return self.__dict__ | {"_journal": kept}

    # -- other forms ---------------------------------------------------------------------

    def to_json(self) -> str:
        """All figures and all samples, as JSON; NaN is null."""
        data = {
            "run": self.run,
            "missing": self.missing,
            "outcomes": self.outcomes,
            "score": self.score.to_dict(),
            "rates": [rate.to_dict() | {"name": rate.name} for rate in self.rates],
            "times": self.times.to_dict(),
            "tasks": [row.to_dict() for row in self.table],
            "identical": self.identical,
            "suspicions": self.suspicions,
            "samples": [sample.to_dict() for sample in self.samples],
        }
        return msgspec.json.encode(data, enc_hook=str).decode()

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row per sample, its phases and verdict in columns.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UnsupportedError("to_dataframe needs pandas", hint="pip install pandas") from error
        return pandas.DataFrame([_flat(sample) for sample in self.samples])

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else, also written to ``path`` if it is given."""
        from forkyard.rollouts.report_html import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text)
        return text

    def _reasons(self, outcome: str) -> list[str]:
        """Why samples ended so, the commonest first: for outcomes that need a reason."""
        if outcome in ("passed", "failed"):
            return []
        told = Counter(sample.message.split("\n")[0] for sample in self.samples if sample.outcome == outcome)
        shown = [f"{count} x {textwrap.shorten(why, 150)}" for why, count in told.most_common(REASONS) if why]
        return shown + ([f"... {len(told) - REASONS} other reasons"] if len(told) > REASONS else [])

    def _not_all_passed(self) -> list[str]:
        """The tasks of which some samples did not pass, the worst first."""
        rows = sorted((row for row in self.table if row.passed < row.samples), key=lambda row: row.passed)
        lines = [f"  {row.task}: {row.passed} of {row.samples} passed" for row in rows[:TASKS_SHOWN]]
        more = len(rows) - len(lines)
        return lines + ([f"  ... and {more} other tasks: see report.table"] if more else [])

    def __str__(self) -> str:
        score = self.score
        lines = [f"run {self.run}: {len(self.samples)} samples of {len(self.table)} tasks"]
        if self.missing:
            lines.append(f"  incomplete: {self.missing} more are to come; eval run with this --out goes on")
        for name, count in sorted(self.outcomes.items()):
            lines.append(f"  {name:18} {count}")
            lines += [f"    {line}" for line in self._reasons(name)]
        if ungraded := sum(sample.outcome == "passed" and sample.verdict is None for sample in self.samples):
            lines.append(f"  {ungraded} have no grader: that they passed says that the policy returned")
        lines.append(f"  score              {score.value:.3f} {score.interval}")
        if any(sample.outcome in UNSCORED for sample in self.samples):
            lines.append(f"  with what is not scored as failed  {score.strict:.3f} {score.strict_interval}")
        for rate in self.rates:
            short = f", {len(rate.short)} tasks have too few samples" if rate.short else ""
            lines.append(f"  {rate.name:18} {rate.value:.3f} {rate.interval} over {rate.tasks} tasks{short}")
        if retries := sum(sample.retries for sample in self.samples):
            lines.append(f"  retries            {retries}")
        lines += self._not_all_passed()
        if self.identical:
            lines.append(f"  identical samples in {len(self.identical)} tasks: see report.identical")
        lines.append(f"  note: an interval {score.interval.note}")
        return "\n".join(lines)


def compare(
    a: Report | str | os.PathLike[str] | Sequence[Sample],
    b: Report | str | os.PathLike[str] | Sequence[Sample],
    measure: Literal["passed", "reward"] = "passed",
) -> Comparison:
    """``b`` against ``a``, paired by task: reports, runs' directories or samples. See ``Comparison``."""
    return compare_runs(_samples_of(a), _samples_of(b), measure=measure)


def _samples_of(run: Report | str | os.PathLike[str] | Sequence[Sample]) -> Sequence[Sample]:
    if isinstance(run, str | os.PathLike):
        return Report.load(run).samples
    return run.samples if isinstance(run, Report) else run


def _mean(rows: Sequence[Tally]) -> tuple[float, Interval]:
    known = [row for row in rows if not math.isnan(row.reward)]
    values = [row.reward for row in known]
    bounds = (min([0.0, *values]), max([1.0, *values]))
    interval = cluster_interval(values, [row.cluster for row in known], bounds=bounds)
    return (math.fsum(values) / len(values) if values else math.nan), interval


def _flat(sample: Sample) -> dict[str, Any]:
    row = sample.to_dict()
    phases, verdict = row.pop("phases"), row.pop("verdict")
    row |= dict(phases)
    row["valid"] = sample.valid
    row["verdict"] = verdict and verdict["message"]
    row["audit"] = list(sample.audit) if sample.audit else None
    return row
