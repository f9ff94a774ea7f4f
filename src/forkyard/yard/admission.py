"""Whether one more sandbox fits, by what is used and not by the sum of limits.

Most forks use a fraction of their limit, so limits may exceed the machine. What is counted
is the memory that the kernel says is available, less what has been promised to starts under
way: a start from an image needs the image's pages (gVisor restores into private memory) and
the engine's own, a cold one what a boot needs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable

from forkyard.errors import CapacityError
from forkyard.host.memory import memory_mb

ENGINE_MB = 15
COLD_BOOT_MB = 40
# Left to the host whatever is asked: the smaller of a twentieth and this.
FLOOR_MB = 512
DISK_FLOOR_MB = 512
RETRY_S = 0.2


class Admission:
    """Promises memory to starts, first come first served.

    Args:
        space_mb: How much room for disks there is, in MiB.
        limit_mb: At most this much memory for all sandboxes, or None for the machine's.
        max_sandboxes: At most this many.
    """

    def __init__(self, space_mb: Callable[[], int], limit_mb: int | None, max_sandboxes: int) -> None:
        self.space_mb = space_mb
        self.limit_mb = limit_mb
        self.max_sandboxes = max_sandboxes
        self.running = 0
        self.promised_mb = 0.0
        self.promised = 0
        self.used_mb = 0.0
        self._queue: collections.deque[object] = collections.deque()

    @staticmethod
    def need_mb(image_bytes: int | None) -> float:
        """Memory that a start needs: from an image of that many bytes, or (None) cold."""
        return COLD_BOOT_MB if image_bytes is None else ENGINE_MB + image_bytes / (1 << 20)

    def free_mb(self) -> float:
        """Memory for new sandboxes, in MiB."""
        total, available = memory_mb()
        free = available - min(FLOOR_MB, total / 20)
        if self.limit_mb is not None:
            free = min(free, self.limit_mb - self.used_mb)
        return max(0.0, free - self.promised_mb)

    def fits(self, need_mb: float) -> int:
        """How many starts that need this much memory each would be let in now."""
        slots = self.max_sandboxes - self.running - self.promised
        return max(0, min(slots, int(self.free_mb() // need_mb)))

    @contextlib.asynccontextmanager
    async def reserve(self, n: int, need_mb: float, wait_s: float, what: str) -> AsyncIterator[None]:
        """Promise memory and places for ``n`` starts while the body runs.

        Raises:
            CapacityError: they do not fit within ``wait_s`` seconds; with the figures.
        """
        ticket = object()
        self._queue.append(ticket)
        try:
            async with asyncio.timeout(wait_s) as limit:
                while not (self._queue[0] is ticket and self._may(n, need_mb)):
                    if wait_s <= 0:
                        break
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._queue.remove(ticket)
        if not self._may(n, need_mb):
            raise self._refusal(n, need_mb, what)
        self.promised_mb += n * need_mb
        self.promised += n
        try:
            yield
        finally:
            self.promised_mb -= n * need_mb
            self.promised -= n

    def _may(self, n: int, need_mb: float) -> bool:
        return self.fits(need_mb) >= n and self.space_mb() >= DISK_FLOOR_MB

    def _refusal(self, n: int, need_mb: float, what: str) -> CapacityError:
        fits = self.fits(need_mb)
        slots = self.max_sandboxes - self.running - self.promised
        if slots < n:
            return CapacityError(
                f"{what} needs {n} sandboxes more, {max(0, slots)} of {self.max_sandboxes} are left",
                hint="delete or stop some, or raise the setting max_sandboxes",
                retryable=True,
            )
        disk = self.space_mb()
        if disk < DISK_FLOOR_MB:
            return CapacityError(
                f"{what} needs disk: {disk} MiB are free, {DISK_FLOOR_MB} MiB are kept",
                hint="delete snapshots or sandboxes, or raise the setting store_gb",
                retryable=True,
            )
        return CapacityError(
            f"{what} needs {n * need_mb:.0f} MiB of memory ({need_mb:.0f} MiB each), "
            f"{self.free_mb():.0f} MiB are free",
            hint=f"stop sandboxes, pass wait_s=, or ask for {fits}"
            if fits
            else "stop sandboxes or pass wait_s=",
            retryable=True,
        )
