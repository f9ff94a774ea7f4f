"""Who a sandbox lives for, and until when.

An ephemeral sandbox lives while the process that holds its lease does. The daemon watches
that process itself, by a pidfd, so that a client need do nothing and may be killed in any
way. One on another machine it cannot watch: that one holds a stream open, and has a while to
open it again. Expiry and idleness are checked once a second: both are in minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator

from forkyard.errors import ForkyardError
from forkyard.host import process
from forkyard.requests import Lease
from forkyard.yard.background import begin
from forkyard.yard.context import Context
from forkyard.yard.model import Sandbox, boot_clock

log = logging.getLogger("forkyard.yard")

TICK_S = 1.0
MEASURE_S = 5.0
# A yard in which nothing runs keeps nothing made ahead for longer than this.
UNUSED_S = 60.0
# A sandbox is idle while its own processes use less than this share of one CPU.
IDLE_CPU = 0.01
# Nobody holds a lease's stream: its client may be opening it again, or be on the way to this daemon.
GRACE_S = 60.0

Holder = tuple[int, int] | str
"""A process (pid, start time), or the name of a stream."""


class Leases:
    """Deletes what outlived its lease, stops what is idle.

    ``delete`` and ``nap`` are given by the yard: what to do with a sandbox whose lease
    ended, and with one that is idle.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.delete: Callable[[Sandbox], Awaitable[None]]
        self.nap: Callable[[Sandbox], Awaitable[None]]
        self._holders: dict[Holder, set[str]] = {}
        self._pidfds: dict[Holder, int] = {}
        self._streams: dict[str, int] = {}
        self._unheld: dict[str, float] = {}  # until when (monotonic) their clients may come back
        self._leaving = False
        self._busy: set[str] = set()

    def watch(self, sandbox: Sandbox) -> None:
        """Watch who holds the sandbox's lease. A process that is gone already ends it now."""
        self.unwatch(sandbox)
        holder = _holder(sandbox.doc.lease)
        if holder is None or not sandbox.doc.ephemeral:
            return
        self._holders.setdefault(holder, set()).add(sandbox.id)
        if isinstance(holder, str):
            if holder not in self._streams:
                self._unheld.setdefault(holder, time.monotonic() + GRACE_S)
            return
        if holder in self._pidfds:
            return
        pid, start = holder
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self._holder_gone(holder)
            return
        if process.start_time(pid) != start:
            os.close(fd)
            self._holder_gone(holder)
            return
        self._pidfds[holder] = fd
        asyncio.get_running_loop().add_reader(fd, self._holder_gone, holder)

    def unwatch(self, sandbox: Sandbox) -> None:
        """Forget the lease of a sandbox."""
        for holder, ids in list(self._holders.items()):
            ids.discard(sandbox.id)
            if not ids:
                del self._holders[holder]
                self._close(holder)

    @contextlib.contextmanager
    def held(self, stream: str, grace_s: float) -> Iterator[None]:
        """The lease of that name lives inside the block, and for ``grace_s`` after the last such block."""
        self._streams[stream] = self._streams.get(stream, 0) + 1
        self._unheld.pop(stream, None)
        try:
            yield
        finally:
            self._streams[stream] -= 1
            if not self._streams[stream]:
                del self._streams[stream]
                if stream in self._holders and not self._leaving:
                    self._unheld[stream] = time.monotonic() + grace_s

    def leave_to_next(self) -> None:
        """Streams end from now on because this daemon does: their clients come back to the next one."""
        self._leaving = True
        self._unheld.clear()

    def _close(self, holder: Holder) -> None:
        if isinstance(holder, str):
            self._unheld.pop(holder, None)
        fd = self._pidfds.pop(holder, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _holder_gone(self, holder: Holder) -> None:
        self._close(holder)
        for sandbox_id in self._holders.pop(holder, set()):
            sandbox = self.context.sandboxes.find(sandbox_id)
            if sandbox is not None:
                log.info("who held %s is gone: %s", sandbox_id, holder)
                self._do(sandbox, self.delete)

    async def run(self) -> None:
        """Check expiry and idleness until cancelled."""
        unused_s = 0.0
        while True:
            now = boot_clock()
            used = any(sandbox.box or sandbox.doc.state == "creating" for sandbox in self.context.sandboxes)
            unused_s = 0.0 if used else unused_s + TICK_S
            if unused_s >= UNUSED_S:
                await self.context.machines.drop_ahead()
            for stream, until in list(self._unheld.items()):
                if time.monotonic() >= until:
                    self._holder_gone(stream)
            for sandbox in self.context.sandboxes:
                doc = sandbox.doc
                if doc.deadline is not None and now >= doc.deadline:
                    self._do(sandbox, self.delete)
                elif doc.auto_stop_min is not None and doc.state == "running":
                    self._do(sandbox, self._check_idle)
            await asyncio.sleep(TICK_S)

    async def _check_idle(self, sandbox: Sandbox) -> None:
        period_s = (sandbox.doc.auto_stop_min or 0) * 60
        box, now = sandbox.box, time.monotonic()
        if sandbox.active_calls:
            sandbox.touch()
            return
        if box is None or now - sandbox.measured_at < min(MEASURE_S, period_s / 4):
            return
        cpu_ms = (await box.guest.activity()).cpu_ms
        spent, since = cpu_ms - sandbox.guest_cpu_ms, now - sandbox.measured_at
        first = not sandbox.measured_at
        sandbox.guest_cpu_ms, sandbox.measured_at = cpu_ms, now
        if first or spent > IDLE_CPU * since * 1e3:
            sandbox.idle_since = now
        elif now - sandbox.idle_since >= period_s:
            await self.nap(sandbox)

    def _do(self, sandbox: Sandbox, what: Callable[[Sandbox], Awaitable[None]]) -> None:
        """Do something with a sandbox, once at a time, without waiting for it."""
        if sandbox.id in self._busy:
            return
        self._busy.add(sandbox.id)

        async def work() -> None:
            try:
                await what(sandbox)
            except (ForkyardError, OSError) as error:
                log.warning("%s: %s", sandbox.id, error)
            finally:
                self._busy.discard(sandbox.id)

        begin(self.context.tg, work())

    def rebase_deadline(self, sandbox: Sandbox) -> None:
        """After a reboot the boot clock began anew: count the deadline from the wall clock."""
        doc = sandbox.doc
        if doc.expires_at is not None and doc.boot_id != process.boot_id():
            doc.deadline = boot_clock() + (doc.expires_at - time.time())
            doc.boot_id = process.boot_id()

    def close(self) -> None:
        """Stop watching; the sandboxes stay."""
        for holder in list(self._pidfds):
            self._close(holder)


def _holder(lease: Lease | None) -> Holder | None:
    if lease is None:
        return None
    if lease.stream is not None:
        return lease.stream
    return None if lease.pid is None or lease.start_time is None else (lease.pid, lease.start_time)
