"""Rates, intervals and comparisons against closed forms, enumeration, scipy and simulation."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from forkyard.errors import InvalidRequestError, UnsupportedError
from forkyard.rollouts import Task, evaluate
from forkyard.rollouts.numbers import (
    cluster_interval,
    compare_runs,
    pass_at_k,
    pass_hat_k,
    pass_rates,
    tally,
)
from forkyard.rollouts.types import Outcome, Phases, Sample


def made(task: str, outcomes: Sequence[Outcome], cluster: str | None = None) -> list[Sample]:
    return [
        Sample(
            task=task, sample=i, key="k", seed=i, outcome=outcome, reward=float(outcome == "passed"),
            verdict=None, message="", phases=Phases(), retries=0, started_at=0, ended_at=1, sandbox=None,
            transcript=None, diff=None, audit=None, cluster=cluster or task,
        )
        for i, outcome in enumerate(outcomes)
    ]  # fmt: skip


@pytest.mark.parametrize("n", range(1, 8))
def test_estimators_are_the_mean_over_every_choice_of_k(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))


def test_estimators_are_unbiased() -> None:
    """Over every outcome of n tries of a policy that passes with p: 1 - (1-p)^k and p^k."""
    n, p = 6, 0.3
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        any_of = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
        all_of = sum(w * pass_hat_k(n, c, k) for c, w in enumerate(weights))
        assert any_of == pytest.approx(1 - (1 - p) ** k)
        assert all_of == pytest.approx(p**k)


def test_estimators_hold_for_large_numbers() -> None:
    assert pass_at_k(200, 100, 5) == pytest.approx(1 - math.prod((100 - i) / (200 - i) for i in range(5)))
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_estimators_are_the_hypergeometric_distributions() -> None:
    """k samples drawn from n, without putting back: none that passed, or all."""
    random = np.random.default_rng(5)
    for _ in range(200):
        n = int(random.integers(1, 300))
        c, k = int(random.integers(0, n + 1)), int(random.integers(1, n + 1))
        drawn = stats.hypergeom(n, c, k)
        assert pass_at_k(n, c, k) == pytest.approx(1 - drawn.pmf(0), abs=1e-9)
        assert pass_hat_k(n, c, k) == pytest.approx(drawn.pmf(k), abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (0, 0, 1), (4, -1, 1)])
def test_k_is_never_above_the_valid_samples(n: int, c: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(InvalidRequestError):
            estimate(n, c, k)


def test_agreeing_clusters_get_the_exact_limit() -> None:
    for count in (1, 3, 40):
        names = [str(i) for i in range(count)]
        for value in (0.0, 1.0):
            known = stats.binomtest(int(value) * count, count).proportion_ci(method="exact")
            got = cluster_interval([value] * count, names)
            assert got.method == "clopper-pearson"
            assert (got.low, got.high) == pytest.approx((known.low, known.high), abs=1e-9)
    # Three mutants of each of five packages are five witnesses, not fifteen.
    fifteen = cluster_interval([1.0] * 15, [str(i // 3) for i in range(15)])
    assert fifteen.low == pytest.approx(0.025 ** (1 / 5))


def test_agreeing_differences_are_not_certain() -> None:
    got = cluster_interval([0.0] * 10, [str(i) for i in range(10)], bounds=(-1, 1))
    share = 1 - 0.025 ** (1 / 10)
    assert (got.low, got.high) == pytest.approx((-share, share))


def test_single_task_clusters_agree_with_scipy() -> None:
    values = np.random.default_rng(3).beta(0.6, 1.4, size=60)
    known = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    got = cluster_interval(list(values), [str(i) for i in range(60)], draws=20_000)
    assert got.method == "bca"
    assert (got.low, got.high) == pytest.approx((known.low, known.high), abs=0.004)


def test_clusters_of_many_sizes_agree_with_scipy() -> None:
    """The mean over tasks is a ratio, of the clusters' sums and sizes: scipy resamples them in pairs."""
    random = np.random.default_rng(11)
    sizes = random.integers(1, 8, size=50)
    values = [
        list(random.binomial(4, p, size=n) / 4) for n, p in zip(sizes, random.beta(0.7, 1.5, 50), strict=True)
    ]
    sums = np.array([sum(one) for one in values])
    known = stats.bootstrap(
        (sums, sizes), lambda s, n, axis=-1: s.sum(axis=axis) / n.sum(axis=axis), paired=True,
        n_resamples=20_000, method="BCa", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    clusters = [str(number) for number, one in enumerate(values) for _ in one]
    got = cluster_interval([value for one in values for value in one], clusters, draws=20_000)
    assert (got.low, got.high) == pytest.approx((known.low, known.high), abs=0.004)
    # And the correction is seen: the plain percentiles lie elsewhere.
    plain = stats.bootstrap(
        (sums, sizes), lambda s, n, axis=-1: s.sum(axis=axis) / n.sum(axis=axis), paired=True,
        n_resamples=20_000, method="percentile", rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert abs(got.low - plain.low) + abs(got.high - plain.high) > 0.005


def test_every_resample_of_few_clusters() -> None:
    """Without bias and skew BCa is the percentile interval: here against all 6^6 resamples."""
    values = [0.1, 0.3, 0.5, 0.5, 0.7, 0.9]
    every = np.array(list(itertools.product(values, repeat=6))).mean(axis=1)
    got = cluster_interval(values, list("abcdef"), draws=40_000)
    assert got.low == pytest.approx(np.quantile(every, 0.025), abs=0.012)
    assert got.high == pytest.approx(np.quantile(every, 0.975), abs=0.012)


def test_clusters_widen_and_the_order_does_not_matter() -> None:
    random = np.random.default_rng(0)
    values = list(np.repeat(random.random(40), 5))
    alone = cluster_interval(values, [str(i) for i in range(200)])
    whole = cluster_interval(values, [str(i // 5) for i in range(200)])
    assert (whole.high - whole.low) > 1.8 * (alone.high - alone.low)
    shuffled = list(random.permutation(200))
    again = cluster_interval([values[i] for i in shuffled], [str(i // 5) for i in shuffled])
    assert (again.low, again.high) == pytest.approx((whole.low, whole.high))
    assert cluster_interval(values, [str(i) for i in range(200)], seed=1) != alone


def test_notes_say_what_it_speaks_of_and_warn() -> None:
    few = cluster_interval([0.0, 1.0, 1.0], list("abc"))
    many = cluster_interval([0.0, 1.0] * 15, [str(i) for i in range(30)])
    assert "population that the 3 clusters stand for" in few.note and "warning" in few.note
    assert "population" in many.note and "warning" not in many.note
    nothing = cluster_interval([], [])
    assert nothing.method == "none" and math.isnan(nothing.low)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="2 values with 1 clusters"):
        cluster_interval([0, 1], ["a"])
    for value in (1.5, math.nan):
        with pytest.raises(InvalidRequestError, match="is not within"):
            cluster_interval([value], ["a"])


@pytest.mark.slow
def test_intervals_cover_what_they_should() -> None:
    """40 clusters of 1 to 6 tasks of like difficulty: 95 % intervals hold the truth in 91 to 98
    of a hundred runs; ones that take tasks for independent do not."""
    random = np.random.default_rng(7)
    runs, held, naive = 300, 0, 0
    for _ in range(runs):
        values: list[float] = []
        clusters: list[str] = []
        for cluster in range(40):
            p = random.beta(0.8, 0.8)
            for _ in range(random.integers(1, 7)):
                values.append(random.binomial(4, p) / 4)
                clusters.append(str(cluster))
        got = cluster_interval(values, clusters, draws=1000)
        wrong = cluster_interval(values, [str(i) for i in range(len(values))], draws=1000)
        held += got.low <= 0.5 <= got.high
        naive += wrong.low <= 0.5 <= wrong.high
    assert 0.91 <= held / runs <= 0.98
    assert naive / runs < 0.85


def test_rates_leave_no_task_out_unsaid() -> None:
    samples = [
        *made("a", ["passed", "failed", "passed", "failed"]),
        *made("b", ["passed", "infra", "grader_error", "timeout_contended"]),
        *made("c", ["sandbox_broken", "oom"]),
    ]
    rates = {rate.name: rate for rate in pass_rates(samples, ks=(1, 2, 5))}
    assert rates["pass@1"].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert rates["pass@1"].short == () and rates["pass@1"].tasks == 3
    # b has one valid sample: nothing can be said of its pass@2.
    assert rates["pass@2"].value == pytest.approx((5 / 6 + 0) / 2)
    assert rates["pass@2"].short == ("b",)
    assert rates["pass^2"].value == pytest.approx((1 / 6 + 0) / 2)
    assert math.isnan(rates["pass@5"].value) and rates["pass@5"].short == ("a", "b", "c")
    strict = pass_rates(samples, invalid_fails=True)[0]
    assert strict.value == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert [t.valid for t in tally(samples)] == [4, 1, 2]


def test_comparison_is_paired_by_task() -> None:
    hard = [f"t{i}" for i in range(40)]
    a = [s for i, t in enumerate(hard) for s in made(t, ["passed" if i % 2 else "failed"] * 2)]
    b = [
        s
        for i, t in enumerate(hard)
        for s in made(t, ["passed" if i % 2 or i < 8 else "failed", "passed" if i % 2 else "failed"])
    ]
    got = compare_runs(a, b)
    assert got.difference == pytest.approx(0.05) and got.tasks == 40
    assert (got.b_higher, got.a_higher, got.same) == (4, 0, 36)
    # Unpaired, the tasks' own spread would hide it.
    assert 0 < got.interval.low < 0.05 < got.interval.high < 0.12
    back = compare_runs(b, a)
    assert back.difference == pytest.approx(-0.05)
    assert "b - a = +0.050" in str(got)


def test_comparison_names_what_it_cannot_pair() -> None:
    a = [*made("x", ["passed"]), *made("y", ["infra"]), *made("z", ["failed"])]
    b = [*made("x", ["failed"]), *made("y", ["passed"]), *made("w", ["failed"])]
    got = compare_runs(a, b)
    assert (got.only_a, got.only_b, got.no_samples) == (("z",), ("w",), ("y",))
    assert got.tasks == 1 and got.difference == -1 and got.differences == {"x": -1.0}
    assert "3 could not be paired" in str(got)


def test_what_intervals_need_is_looked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the last episode, when the report is printed."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UnsupportedError, match=r"scipy .*rollouts"):
        evaluate([Task("one")], lambda episode: None)
