"""Fork bombs: seen from the host, ended by the guest's agent.

A guest's processes are threads of the host, several each under ptrace. Where the host has no more for a
box, its kernel ends and with it the sandbox; long before that, hundreds of busy processes leave the
agent no time to answer. So the threads of every box are counted, which costs one read for all of them
while there are few, and a box that has many is asked for a sign of life. One that gives none loses
the command with the most processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from forkyard.errors import DeadlineError, ForkyardError
from forkyard.host.cgroup import thread_limit
from forkyard.yard.background import begin
from forkyard.yard.context import Context
from forkyard.yard.machines import Box
from forkyard.yard.model import Sandbox
from forkyard.yard.overuse import CROWD, CROWD_S

log = logging.getLogger("forkyard.yard")

TICK_S = 0.25
# An agent that has the CPU answers within milliseconds.
ANSWER_S = 0.5
# The part of the guest's limit on processes that one command must have to be ended for it.
SHARE = 4


class Crowds:
    """Watches every running box's threads."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.context.machines.cgroups.threads() < CROWD:
                continue
            for sandbox in self.context.sandboxes:
                box = sandbox.box
                if box is None or box.cgroup is None or box.id in self._busy or sandbox.lock.locked():
                    continue
                threads = box.cgroup.threads()
                if threads >= CROWD and box.guest.has_crowds:
                    self._busy.add(box.id)
                    begin(self.context.tg, self._attend(sandbox, box, threads))

    async def _attend(self, sandbox: Sandbox, box: Box, threads: int) -> None:
        begun = time.monotonic()
        try:
            near = threads > thread_limit(sandbox.doc.processes) // 2
            if not near and await _answers(box):
                # It is well; asking on would cost it more than it gives.
                await asyncio.sleep(ANSWER_S)
                return
            killed = await box.guest.kill_crowd(max(32, sandbox.doc.processes // SHARE), timeout_s=CROWD_S)
            if killed is None:
                return
            log.warning("%s had %d processes of one command and did not answer", sandbox.id, killed.processes)
            data = {
                "pid": killed.pid,
                "processes": killed.processes,
                "threads": threads,
                "command": killed.command,
                "took_ms": round((time.monotonic() - begun) * 1e3),
            }
            self.context.audit.append("process.crowd", sandbox.id, "yard", data)
        except ForkyardError as error:
            if sandbox.box is box:
                log.warning("%s is crowded, and its agent did not answer: %s", sandbox.id, error)
                self.context.audit.append("process.crowd", sandbox.id, "yard", {"error": error.message})
        finally:
            self._busy.discard(box.id)


async def _answers(box: Box) -> bool:
    with contextlib.suppress(DeadlineError):
        await box.guest.ping(ANSWER_S)
        return True
    return False
