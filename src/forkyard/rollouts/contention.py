"""Whether a time limit that ran out says something about the policy, or about a starved host.

All of this must hold over the episode's own time:

- the host had no CPU to give: another tenant took 10 % of it (steal), or at most 10 % was idle
  while, where the kernel tells (``/proc/pressure/cpu``), something waited for a CPU for at least a
  quarter of the time;
- the sandbox got less than 90 % of the CPU it may use, so that it did not run into its own limit.

A guest cannot claim this of itself: by spinning it uses up its own share, and is then not starved.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STOLEN = 0.10
IDLE = 0.10
WAITED = 0.25
SERVED = 0.90
# Shorter times say little about a load.
SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The host's clocks at one moment: CPU time in ticks, ``waited_us`` None where it is not known."""

    at: float
    total: int
    idle: int
    steal: int
    waited_us: int | None


def load_now() -> Load:
    """Reads ``/proc``."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = (int(word) for word in words)
    waited = None
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        waited = int(some.rpartition("total=")[2])
    except (OSError, ValueError, IndexError):
        waited = None
    total = user + nice + system + idle + iowait + irq + softirq + steal
    return Load(time.monotonic(), total, idle + iowait, steal, waited)


def starved(before: Load, after: Load) -> bool:
    """Whether the host had no CPU to give between two moments."""
    ticks, seconds = after.total - before.total, after.at - before.at
    if ticks <= 0 or seconds < SHORTEST_S:
        return False
    if (after.steal - before.steal) / ticks >= STOLEN:
        return True
    if (after.idle - before.idle) / ticks > IDLE:
        return False
    if before.waited_us is None or after.waited_us is None:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    return (after.waited_us - before.waited_us) / (seconds * 1e6) >= WAITED


def contended(before: Load, after: Load, used_cpu_s: float, cpus: float) -> bool:
    """Whether a time limit that ran out between two moments is the host's doing.

    Args:
        used_cpu_s: What the sandbox used meanwhile.
        cpus: What it may use at a time.
    """
    share = used_cpu_s / (cpus * max(after.at - before.at, 1e-9))
    return starved(before, after) and share < SERVED
