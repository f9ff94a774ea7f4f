"""Advantages against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.advantages import advantages

REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5]


@pytest.mark.parametrize("ddof", [0, 1])
def test_std(ddof: int) -> None:
    got = advantages(REWARDS, [True] * 5, "std", ddof)
    expected = (np.array(REWARDS) - np.mean(REWARDS)) / np.std(REWARDS, ddof=ddof)
    assert got.values == pytest.approx(list(expected))
    assert got.std == pytest.approx(np.std(REWARDS, ddof=ddof)) and got.ddof == ddof
    assert not got.no_variance


def test_mean_and_leave_one_out() -> None:
    assert advantages(REWARDS, [True] * 5, "mean").values == pytest.approx(
        [reward - 0.55 for reward in REWARDS]
    )
    others = [
        reward - np.mean([other for j, other in enumerate(REWARDS) if j != i])
        for i, reward in enumerate(REWARDS)
    ]
    assert advantages(REWARDS, [True] * 5, "rloo").values == pytest.approx(others)


@pytest.mark.parametrize("normalize", ["std", "mean", "rloo"])
def test_masked_ones_neither_count_nor_learn(normalize: str) -> None:
    mask = [True, True, False, True, False]
    got = advantages(REWARDS, mask, normalize)  # type: ignore[arg-type]
    alone = advantages([1.0, 0.0, 1.0], [True] * 3, normalize)  # type: ignore[arg-type]
    assert [v for v, counts in zip(got.values, mask, strict=True) if counts] == alone.values
    assert got.values[2] == got.values[4] == 0.0
    assert got.mean == pytest.approx(2 / 3)
    # Whatever a masked one holds.
    assert advantages([1.0, math.nan, 0.0], [True, False, True]).values[1] == 0.0


@pytest.mark.parametrize(
    ("rewards", "mask"),
    [([0.3] * 4, [True] * 4), ([1.0, 0.0], [True, False]), ([1.0], [True]), ([], []), ([1.0], [False])],
)
def test_groups_without_variance_are_flagged(rewards: list[float], mask: list[bool]) -> None:
    for normalize in ("std", "mean", "rloo"):
        got = advantages(rewards, mask, normalize)  # type: ignore[arg-type]
        assert got.no_variance and got.values == [0.0] * len(rewards)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="2 rewards with 1 marks"):
        advantages([0, 1], [True])
    with pytest.raises(InvalidRequestError, match="not finite"):
        advantages([0, math.inf], [True, True])
    with pytest.raises(InvalidRequestError, match="normalize='max'"):
        advantages([0, 1], [True, True], "max")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="ddof=2"):
        advantages([0, 1], [True, True], ddof=2)
