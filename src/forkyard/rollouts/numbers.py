"""Rates with intervals that can be trusted: pass@k, pass^k, and what a difference is worth.

Tasks of one cluster are not independent, so whole clusters are resampled. An interval speaks of
the population that the clusters stand for, and its ``note`` says so.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from forkyard.errors import InvalidRequestError, UnsupportedError
from forkyard.rollouts.types import Sample
from forkyard.types import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

HOW = "pip install '/path/to/forkyard[rollouts]' (the checkout)"
FEW_CLUSTERS = 30
DRAWS = 10_000
LEVEL = 0.95
# Draws made at once: bounds the memory of a resampling over many clusters.
BLOCK = 500


@dataclass(frozen=True, slots=True)
class Interval(Record):
    """Where a rate or a difference lies, at 95 %. ``method`` is ``bca`` (bias-corrected and
    accelerated bootstrap over clusters), ``clopper-pearson`` (exact, where all clusters agree) or
    ``none`` (no data; both ends are NaN). ``note`` says what it speaks of, and what to beware of."""

    low: float
    high: float
    method: Literal["bca", "clopper-pearson", "none"]
    note: str = ""

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Rate(Record):
    """One pass@k or pass^k over ``tasks`` tasks. ``value`` is NaN where no task has k samples.
    ``short`` are the tasks with fewer than k: not in ``value``, since it cannot be known for them."""

    kind: Literal["pass@k", "pass^k"]
    k: int
    value: float
    interval: Interval
    tasks: int
    short: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As people write it: ``pass@1``, ``pass^4``."""
        return f"{self.kind[:-1]}{self.k}"


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """``b`` against ``a``, task by task: ``difference`` is the mean over the ``tasks`` that both
    have of b's score less a's. ``b_higher``, ``a_higher`` and ``same`` count them. ``only_a`` and
    ``only_b`` are tasks of one run alone, ``no_samples`` tasks that one of them has without a valid
    sample: none of these takes part. ``differences`` is by task."""

    a: float
    b: float
    difference: float
    interval: Interval
    tasks: int
    b_higher: int
    a_higher: int
    same: int
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    no_samples: tuple[str, ...] = ()
    differences: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        left_out = len(self.only_a) + len(self.only_b) + len(self.no_samples)
        return (
            f"a {self.a:.3f}, b {self.b:.3f}: b - a = {self.difference:+.3f} {self.interval} over "
            f"{self.tasks} tasks (b higher {self.b_higher}, a higher {self.a_higher}, same {self.same}"
            f"{f'; {left_out} could not be paired' if left_out else ''}). {self.interval.note}"
        )


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples passes, from n samples of which c did.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n-c, k) / C(n, k).

    Raises:
        InvalidRequestError: k is below 1 or above n, or c is not in 0..n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of k samples pass (pass^k), from n samples of which c did.

    The unbiased estimator of Yao et al. 2024 (arXiv:2406.12045): C(c, k) / C(n, k).

    Raises:
        InvalidRequestError: as :func:`pass_at_k`.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise InvalidRequestError(f"{c} of {n} samples passed", hint="c must be in 0..n")
    if not 1 <= k <= n:
        raise InvalidRequestError(
            f"k={k} with {n} valid samples", hint="k must be at least 1 and at most the valid samples"
        )


ESTIMATORS: Mapping[Literal["pass@k", "pass^k"], Callable[[int, int, int], float]] = {
    "pass@k": pass_at_k,
    "pass^k": pass_hat_k,
}


def cluster_interval(
    values: Sequence[float],
    clusters: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """The 95 % interval of the mean of ``values``, one a task, by resampling whole clusters.

    BCa (Efron 1987), accelerated by leaving out one cluster at a time. Where the means of all
    clusters agree, resampling would claim certainty: then the exact Clopper-Pearson limit bounds
    the share of clusters that would say otherwise, and ``bounds``, the least and the greatest
    possible value, how far they could move the mean.

    Args:
        values: One for each task.
        clusters: Each task's cluster, in the same order.
        seed: Of the draws; the same seed gives the same interval.
        draws: How many resamples.

    Raises:
        InvalidRequestError: the lengths differ, a value is not finite or out of bounds.
    """
    if len(values) != len(clusters):
        raise InvalidRequestError(f"{len(values)} values with {len(clusters)} clusters")
    outside = [value for value in values if not bounds[0] <= value <= bounds[1]]
    if outside:
        raise InvalidRequestError(
            f"the value {outside[0]} is not within {bounds[0]} and {bounds[1]}",
            hint="bounds= takes the least and the greatest value there can be",
        )
    if not values:
        return Interval(math.nan, math.nan, "none", "of nothing: no task has enough samples")
    numpy, special = _libraries()
    sums, sizes = _by_cluster(numpy, values, clusters)
    count = len(sums)
    means = sums / sizes
    estimate = float(sums.sum() / sizes.sum())
    if float(means.max() - means.min()) < 1e-12:
        low, high = _exact(special, estimate, count, bounds)
        return Interval(low, high, "clopper-pearson", _note(count, agree=True))
    resampled = _resample(numpy, sums, sizes, seed, draws)
    low, high = _bca(numpy, special, resampled, estimate, sums, sizes)
    return Interval(low, high, "bca", _note(count))


def need() -> None:
    """Find out now, and not after hours of episodes, whether intervals can be had.

    Raises:
        UnsupportedError: numpy or scipy is missing.
    """
    for name in ("numpy", "scipy"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedError(f"the report's intervals need {name}", hint=HOW)


def _libraries() -> tuple[ModuleType, ModuleType]:
    """numpy and scipy.special, loaded when first needed: tasks and policies do without."""
    try:
        import numpy
        from scipy import special
    except ImportError as error:
        raise UnsupportedError(f"intervals need numpy and scipy: {error}", hint=HOW) from error
    return numpy, special


def _by_cluster(numpy: ModuleType, values: Sequence[float], clusters: Sequence[str]) -> tuple[Floats, Floats]:
    """The sum and the number of values in each cluster, in the order of the clusters' names."""
    number = {cluster: i for i, cluster in enumerate(sorted(set(clusters)))}
    index = numpy.array([number[cluster] for cluster in clusters])
    sums = numpy.bincount(index, weights=numpy.asarray(values, dtype=float))
    return sums, numpy.bincount(index).astype(float)


def _resample(numpy: ModuleType, sums: Floats, sizes: Floats, seed: int, draws: int) -> Floats:
    """The mean of each of ``draws`` resamples of as many clusters as there are."""
    random = numpy.random.default_rng(seed)
    count = len(sums)
    even = numpy.full(count, 1 / count)
    blocks = []
    for start in range(0, draws, BLOCK):
        times = random.multinomial(count, even, size=min(BLOCK, draws - start))
        blocks.append(times @ sums / (times @ sizes))
    return numpy.concatenate(blocks)


def _bca(
    numpy: ModuleType, special: ModuleType, resampled: Floats, estimate: float, sums: Floats, sizes: Floats
) -> tuple[float, float]:
    draws = len(resampled)
    # Ties count half: means of few clusters take few values.
    tied = numpy.isclose(resampled, estimate, rtol=0, atol=1e-12)
    below = float(((resampled < estimate) & ~tied).sum() + tied.sum() / 2) / draws
    bias = float(special.ndtri(min(max(below, 0.5 / draws), 1 - 0.5 / draws)))
    without = (sums.sum() - sums) / (sizes.sum() - sizes)
    off = without.mean() - without
    spread = float((off**2).sum())
    acceleration = float((off**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    ends = []
    for z in special.ndtri([(1 - LEVEL) / 2, (1 + LEVEL) / 2]):
        shift = bias + float(z)
        stretch = 1 - acceleration * shift
        # Beyond this the correction has no meaning, and the outermost resample is the end.
        quantile = float(special.ndtr(bias + shift / stretch)) if stretch > 0 else float(shift > 0)
        ends.append(float(numpy.quantile(resampled, quantile)))
    return ends[0], ends[1]


def _exact(
    special: ModuleType, estimate: float, count: int, bounds: tuple[float, float]
) -> tuple[float, float]:
    # The upper Clopper-Pearson limit of 0 in count: what share of clusters could differ.
    share = float(special.betaincinv(1, count, (1 + LEVEL) / 2))
    return estimate - share * (estimate - bounds[0]), estimate + share * (bounds[1] - estimate)


def _note(count: int, agree: bool = False) -> str:
    words = [
        f"speaks of the population that the {count} cluster{'s stand' if count > 1 else ' stands'} for, "
        "not of this set of tasks alone"
    ]
    if agree:
        words.append("all clusters agree, so it is the exact limit and no resampling")
    if count < FEW_CLUSTERS:
        words.append(f"warning: fewer than {FEW_CLUSTERS} clusters, the true interval may be wider")
    return "; ".join(words)


@dataclass(frozen=True, slots=True)
class Tally(Record):
    """One task's samples: ``valid`` of them say something about the policy, ``passed`` passed;
    ``reward`` is the mean of the valid ones (NaN without)."""

    task: str
    cluster: str
    samples: int
    valid: int
    passed: int
    reward: float


def tally(samples: Iterable[Sample], *, invalid_fails: bool = False) -> list[Tally]:
    """Each task's samples counted, in the order in which tasks first appear.

    Args:
        invalid_fails: Count what was lost to the host or the grader as failed with reward 0,
            instead of leaving it out.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    found = []
    for task, all_of_it in by_task.items():
        counted = [s for s in all_of_it if s.valid or invalid_fails]
        rewards = [s.reward if s.valid else 0.0 for s in counted]
        found.append(
            Tally(
                task=task,
                cluster=all_of_it[0].cluster or task,
                samples=len(all_of_it),
                valid=len(counted),
                passed=sum(s.outcome == "passed" for s in counted),
                reward=math.fsum(rewards) / len(rewards) if rewards else math.nan,
            )
        )
    return found


def pass_rates(
    samples: Iterable[Sample],
    ks: Sequence[int] = (1,),
    *,
    kinds: Sequence[Literal["pass@k", "pass^k"]] = ("pass@k", "pass^k"),
    invalid_fails: bool = False,
    seed: int = 0,
    draws: int = DRAWS,
) -> list[Rate]:
    """pass@k and pass^k for each of ``ks``: the mean over the tasks that have k valid samples.

    Raises:
        InvalidRequestError: a k is below 1.
    """
    for k in ks:
        if k < 1:
            raise InvalidRequestError(f"k={k}", hint="k counts samples: 1 or more")
    tallies = tally(samples, invalid_fails=invalid_fails)
    rates = []
    for kind in kinds:
        estimate = ESTIMATORS[kind]
        for k in ks:
            enough = [t for t in tallies if t.valid >= k]
            values = [estimate(t.valid, t.passed, k) for t in enough]
            interval = cluster_interval(values, [t.cluster for t in enough], seed, draws)
            rates.append(
                Rate(
                    kind=kind,
                    k=k,
                    value=math.fsum(values) / len(values) if values else math.nan,
                    interval=interval,
                    tasks=len(values),
                    short=tuple(t.task for t in tallies if t.valid < k),
                )
            )
    return rates


def compare_runs(
    a: Iterable[Sample],
    b: Iterable[Sample],
    *,
    measure: Literal["passed", "reward"] = "passed",
    seed: int = 0,
    draws: int = DRAWS,
) -> Comparison:
    """``b`` less ``a``, paired by task: what is easy or hard for both cancels out.

    Args:
        measure: ``passed``, the share of a task's valid samples that passed, or ``reward``, their
            mean, which must then be within 0 and 1.
    """
    first, second = ({t.task: t for t in tally(run)} for run in (a, b))
    shared = [task for task in first if task in second]
    paired = [task for task in shared if first[task].valid and second[task].valid]

    def score(of: Tally) -> float:
        return of.passed / of.valid if measure == "passed" else of.reward

    left = [score(first[task]) for task in paired]
    right = [score(second[task]) for task in paired]
    differences = [after - before for before, after in zip(left, right, strict=True)]
    clusters = [first[task].cluster for task in paired]
    interval = cluster_interval(differences, clusters, seed, draws, bounds=(-1.0, 1.0))

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    return Comparison(
        a=mean(left),
        b=mean(right),
        difference=mean(differences),
        interval=interval,
        tasks=len(paired),
        b_higher=sum(value > 1e-12 for value in differences),
        a_higher=sum(value < -1e-12 for value in differences),
        same=sum(abs(value) <= 1e-12 for value in differences),
        only_a=tuple(task for task in first if task not in second),
        only_b=tuple(task for task in second if task not in first),
        no_samples=tuple(task for task in shared if task not in paired),
        differences=dict(zip(paired, differences, strict=True)),
    )
