"""Steps that take back what was done, each with a deadline, none skipped."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from forkyard.errors import ForkyardError
from forkyard.yard.background import Services, insist

__all__ = ["UNDO_DEADLINE_S", "Undo", "within"]

log = logging.getLogger("forkyard.yard")

UNDO_DEADLINE_S = 60


class Undo:
    """Undo steps in reverse order unless :meth:`keep` is called; each with a deadline, none skipped."""

    def __init__(self, tg: Services) -> None:
        self._tg = tg
        self._steps: list[tuple[Any, tuple[Any, ...]]] = []

    def push(self, step: Any, *args: Any) -> None:
        self._steps.append((step, args))

    def keep(self) -> None:
        self._steps.clear()

    async def __aenter__(self) -> Undo:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._steps:
            await insist(self._tg, self._undo())

    async def _undo(self) -> None:
        while self._steps:
            step, args = self._steps.pop()
            await within(step(*args))


async def within(step: Any) -> None:
    """Finish ``step`` (a coroutine) within the undo deadline; its failure is logged, since the
    next steps matter more."""
    try:
        async with asyncio.timeout(UNDO_DEADLINE_S):
            await step
    except (ForkyardError, OSError, TimeoutError) as error:
        log.error("undo step failed: %r", error)
