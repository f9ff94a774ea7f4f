"""What is written into the audit about a sandbox's network: everything once, a flood as a number."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

AGAIN_S = 60.0
BURST = 300
RATE = 20.0
NAMES = 1024

Record = Callable[[str, dict[str, Any]], object]


class Account:
    """Hands records on to the audit, which a guest must not be able to fill.

    The same fact about the same name is told again after a minute at the earliest, with how often
    it was so meanwhile; beyond ``BURST`` records, and ``RATE`` a second from then on, only their
    number is told.
    """

    def __init__(self, record: Record, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._facts: dict[tuple[str, str, int | None, str], tuple[float, int]] = {}
        self._tokens = float(BURST)
        self._at = clock()
        self._dropped = 0

    def fact(self, kind: str, name: str, port: int | None, why: str) -> None:
        """Something that may repeat: a name that is allowed or is not."""
        now = self._clock()
        key = (kind, name, port, why)
        last, times = self._facts.get(key, (float("-inf"), 0))
        if now - last < AGAIN_S:
            self._facts[key] = (last, times + 1)
            return
        if len(self._facts) >= NAMES:
            self._facts.pop(next(iter(self._facts)))
        self._facts.pop(key, None)
        self._facts[key] = (now, 0)
        data: dict[str, Any] = {"name": name, "why": why}
        if port is not None:
            data["port"] = port
        if times:
            data["times_before"] = times
        self.event(kind, data)

    def event(self, kind: str, data: dict[str, Any]) -> None:
        """Something that happened once."""
        now = self._clock()
        self._tokens = min(float(BURST), self._tokens + (now - self._at) * RATE)
        self._at = now
        if self._tokens < 1:
            self._dropped += 1
            return
        self._tokens -= 1
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._record("egress.unrecorded", {"records": dropped})
        self._record(kind, data)

    def close(self) -> None:
        """Tell what is still untold."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._record("egress.unrecorded", {"records": dropped})
