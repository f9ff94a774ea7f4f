"""Advantages of a group of rollouts: what each reward is worth beside the others'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forkyard.errors import InvalidRequestError
from forkyard.types import Record

Normalize = Literal["std", "mean", "rloo"]
SAME = 1e-12


@dataclass(frozen=True, slots=True)
class Advantages(Record):
    """``values`` has 0.0 where a rollout is masked, and everywhere where all rewards are the same or
    fewer than two count (``no_variance``). ``mean`` and ``std`` are those of the rewards that
    count; ``std`` divides by their number less ``ddof``, and is NaN where there are too few."""

    values: list[float]
    mean: float
    std: float
    ddof: int
    no_variance: bool


def advantages(
    rewards: Sequence[float], valid: Sequence[bool], normalize: Normalize = "std", ddof: int = 1
) -> Advantages:
    """Each reward against its group's.

    ``std``: less the mean, by the standard deviation (GRPO, Shao et al. 2024, arXiv:2402.03300).
    ``mean``: less the mean (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). ``rloo``: less the mean of the
    *others* (Ahmadian et al. 2024, arXiv:2402.14740), which is ``mean`` times n / (n - 1).

    Args:
        valid: Which of them count; the others are masked.
        ddof: Degrees of freedom that the standard deviation takes off: 1 is the sample's, 0 the
            population's.

    Raises:
        InvalidRequestError: the lengths differ, a reward that counts is not finite, or an argument
            is unknown.
    """
    if len(rewards) != len(valid):
        raise InvalidRequestError(f"{len(rewards)} rewards with {len(valid)} marks of which are valid")
    if normalize not in ("std", "mean", "rloo"):
        raise InvalidRequestError(f"normalize={normalize!r} is not known", hint="use std, mean or rloo")
    if ddof not in (0, 1):
        raise InvalidRequestError(f"ddof={ddof!r}", hint="0 or 1")
    counted = [reward for reward, counts in zip(rewards, valid, strict=True) if counts]
    if not all(math.isfinite(reward) for reward in counted):
        raise InvalidRequestError(f"a reward is not finite: {counted}")
    n = len(counted)
    mean = math.fsum(counted) / n if n else math.nan
    squares = math.fsum((reward - mean) ** 2 for reward in counted)
    std = math.sqrt(squares / (n - ddof)) if n > ddof else math.nan
    if n < 2 or max(counted) - min(counted) <= SAME:
        return Advantages([0.0] * len(rewards), mean, std, ddof, no_variance=True)
    scale = {"std": 1 / std, "mean": 1.0, "rloo": n / (n - 1)}[normalize]
    values = [
        (reward - mean) * scale if counts else 0.0 for reward, counts in zip(rewards, valid, strict=True)
    ]
    return Advantages(values, mean, std, ddof, no_variance=False)
