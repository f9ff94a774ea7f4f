"""A sandbox that takes more memory or disk than it may: its largest process is ended, before the
kernel ends the sandbox."""

from __future__ import annotations

import logging
import time

from forkyard.errors import ForkyardError
from forkyard.yard.background import begin
from forkyard.yard.context import Context
from forkyard.yard.machines import Box
from forkyard.yard.model import Sandbox

__all__ = ["CROWD", "CROWD_S", "of_disk", "of_memory"]

# So many threads of a box on the host are a crowd, whose members keep the agent from the CPU.
CROWD = 150
# How long the agent may take in one: each of its calls waits for its turn.
CROWD_S = 30.0
ANSWER_S = 5.0
# Within this the memory of a killed process is free.
GONE_S = 0.5

log = logging.getLogger("forkyard.yard")


def of_memory(context: Context, sandbox: Sandbox, box: Box, used_mb: float) -> None:
    """More memory is used than allowed. What was killed takes a moment to be gone from the
    figures: while they do not grow, its neighbour is not killed for it too."""
    now = time.monotonic()
    if now - sandbox.killed_at > GONE_S or used_mb > sandbox.killed_mb:
        sandbox.killed_at, sandbox.killed_mb = now, used_mb
        _kill_largest(context, sandbox, box, "process.oom")


def of_disk(context: Context, sandbox: Sandbox, used_mb: float) -> None:
    """More is on its disk than allowed, where no quota stops it: what writes is likely what is largest."""
    if sandbox.box is not None:
        log.warning("%s has %.0f MiB on its disk of %d", sandbox.id, used_mb, sandbox.doc.disk_mb)
        _kill_largest(context, sandbox, sandbox.box, "process.disk_full")


def _kill_largest(context: Context, sandbox: Sandbox, box: Box, why: str) -> None:
    """``why`` is the kind of the audit's record."""
    if sandbox.box is not box or sandbox.killing:
        return
    sandbox.killing = True

    async def kill() -> None:
        try:
            crowded = box.cgroup is not None and box.cgroup.threads() >= CROWD
            timeout_s = CROWD_S if crowded else ANSWER_S
            killed = await box.guest.kill_largest(crowded=crowded, timeout_s=timeout_s)
            if killed is not None:
                if why == "process.oom":
                    sandbox.ooms[killed.command] = sandbox.ooms.get(killed.command, 0) + 1
                data = {"pid": killed.pid, "rss_mb": round(killed.rss_mb), "command": killed.command}
                context.audit.append(why, sandbox.id, "yard", data)
        except ForkyardError as error:
            # It may have acted and been too busy to say so.
            log.warning("%s in %s, and its agent did not answer: %s", why, sandbox.id, error)
            context.audit.append(why, sandbox.id, "yard", {"error": error.message})
        finally:
            sandbox.killing = False

    begin(context.tg, kill())
