"""Which way back to a state is cheaper, from what each took so far."""

from __future__ import annotations

import statistics
from typing import Literal

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.tree import Way

Choice = Literal["auto", "fork", "rewind"]

# The median of so many newest decides; the loser is tried again after so many returns.
NEWEST = 9
TRY_AGAIN = 24


class Costs:
    """Timings of returns, and the choice they lead to.

    Args:
        choice: ``fork`` or ``rewind`` decides beforehand.
    """

    def __init__(self, choice: Choice = "auto") -> None:
        if choice not in ("auto", "fork", "rewind"):
            raise InvalidRequestError(f"way={choice!r} is not known", hint="use auto, fork or rewind")
        self.choice = choice
        self.took: dict[Way, list[float]] = {"fork": [], "rewind": [], "stay": []}
        self._since_loser = 0

    def record(self, way: Way, seconds: float) -> None:
        self.took[way].append(seconds)

    def median(self, way: Way) -> float | None:
        """Of the newest; None if there is none."""
        newest = self.took[way][-NEWEST:]
        return statistics.median(newest) if newest else None

    def cheaper(self) -> Literal["fork", "rewind"]:
        """The way to prefer now; what was never tried comes first."""
        if self.choice != "auto":
            return self.choice
        rewind, fork = self.median("rewind"), self.median("fork")
        if rewind is None:
            return "rewind"
        return "fork" if fork is not None and fork < rewind else "rewind"

    def next(self) -> Literal["fork", "rewind"]:
        """As :meth:`cheaper`, but now and then the other one, since a machine's load changes."""
        better = self.cheaper()
        if self.choice != "auto" or self.median("rewind") is None:
            return better
        self._since_loser += 1
        if self._since_loser < TRY_AGAIN:
            return better
        self._since_loser = 0
        return "fork" if better == "rewind" else "rewind"
