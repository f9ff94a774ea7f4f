"""Which of the host's threads goes first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# Nine times the weight of others, and the next turn is its own. It works for milliseconds at a time.
NICE = -10


def go_first() -> None:
    """Let the calling thread go before all others; threads and processes that it starts do not. Without
    effect where the user may not."""
    if not hasattr(os, "SCHED_RESET_ON_FORK"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if os.getsid(0) == os.getpid():
        # Where the kernel groups by session, a thread's own weight counts within its session alone.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE))
