"""Where the toy machines run: a thread of their own, as real machines run beside the daemon.

A machine is known by its box's directory, like a real one by its processes, and runs on when
whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forkyard.engines.fake.agent import Agent

T = TypeVar("T")
READ_BYTES = 1 << 18


class World:
    """Every toy machine of this process, by pid."""

    def __init__(self) -> None:
        self.machines: dict[int, ToyMachine] = {}
        self._pids = itertools.count(1)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, directory: Path, agent: Agent) -> ToyMachine:
        """Switch a machine on; its FIFOs are in ``directory``."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="toy machines", daemon=True).start()
        machine = ToyMachine(self, next(self._pids), directory, agent, self._loop)
        self.machines[machine.pid] = machine
        self._loop.call_soon_threadsafe(machine.resume)
        return machine

    def find(self, pid: int, directory: Path) -> ToyMachine | None:
        """The machine with this pid, if it still runs."""
        machine = self.machines.get(pid)
        return machine if machine is not None and machine.directory == directory else None

    def forget(self, machine: ToyMachine) -> None:
        self.machines.pop(machine.pid, None)


class ToyMachine:
    """One machine. Only :meth:`ask` and :meth:`end` may be used from another thread.

    Attributes:
        on_death: Called once, in the machines' thread, when it has ended.
    """

    def __init__(
        self, world: World, pid: int, directory: Path, agent: Agent, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.world = world
        self.pid = pid
        self.directory = directory
        self.agent = agent
        self.paused = True
        self.dead = False
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._in = os.open(directory / "in", flags)
        self._out = os.open(directory / "out", flags)
        self._timer: asyncio.Handle | None = None
        self._reading = self._writing = False

    async def ask(self, function: Callable[[], T]) -> T:
        """Run ``function`` between two steps of the machine. It is run even if nobody waits."""

        async def run() -> T:
            return function()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return await asyncio.shield(asyncio.wrap_future(future))

    def end(self) -> None:
        """Kill it soon, without waiting for it."""
        self._loop.call_soon_threadsafe(self.kill)

    # -- in the machines' thread

    def resume(self) -> None:
        if self.paused and not self.dead:
            self.paused = False
            self.agent.kernel.thaw()
            self._go_on()

    def pause(self) -> None:
        """Stop its time, and write its disk out."""
        if self.dead or self.paused:
            return
        self.paused = True
        self.agent.kernel.freeze()
        self.agent.kernel.tree.flush()
        self._listen(read=False, write=False)
        self._forget_timer()

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self.dead:
            return
        self.paused = self.dead = True
        self._listen(read=False, write=False)
        self._forget_timer()
        os.close(self._in)
        os.close(self._out)
        for told in self.on_death:
            told()
        self.world.forget(self)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _listen(self, *, read: bool, write: bool) -> None:
        if read != self._reading:
            self._reading = read
            if read:
                self._loop.add_reader(self._in, self._go_on)
            else:
                self._loop.remove_reader(self._in)
        if write != self._writing:
            self._writing = write
            if write:
                self._loop.add_writer(self._out, self._go_on)
            else:
                self._loop.remove_writer(self._out)

    def _go_on(self) -> None:
        """One turn: take what came, let processes run, send what there is, set the clock."""
        self._forget_timer()
        if self.paused:
            return
        agent = self.agent
        if agent.wants_read:
            with contextlib.suppress(BlockingIOError):
                agent.feed(os.read(self._in, READ_BYTES))
        more = agent.turn()
        blocked = False
        while out := agent.outgoing():
            try:
                written = os.write(self._out, out)
            except BlockingIOError:
                blocked = True
                break
            del out[:written]
        self._listen(read=agent.wants_read, write=blocked)
        due = agent.next_timer()
        if more and not blocked:
            self._timer = self._loop.call_soon(self._go_on)
        elif due is not None:
            self._timer = self._loop.call_later(max(0.0, due - agent.kernel.now()), self._go_on)


WORLD = World()
