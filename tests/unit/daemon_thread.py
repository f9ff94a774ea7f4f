"""The daemon's surface over a yard in memory, in a thread with a loop of its own, for tests of
the blocking client; it can go down and come up again like a real one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from memory_yard import MemoryDaemon, MemoryYard

DEADLINE_S = 10


class ThreadedDaemon:
    def __init__(self) -> None:
        self.daemon = MemoryDaemon()
        self.socket = self.daemon.socket
        self.yard: MemoryYard
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._restart = False
        self.times_up = 0
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._up.wait(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as outer:
            self.yard = MemoryYard(self.daemon.boxes, outer)
            while True:
                self._stop = asyncio.Event()
                async with self.daemon.up(before=self.yard):
                    self.times_up += 1
                    self._up.set()
                    await self._stop.wait()
                    await self.yard.prepare_shutdown("keep")
                self._up.clear()
                if not self._restart:
                    break
            self.yard.kill()

    def restart(self) -> None:
        """The daemon goes (its sandboxes stay) and another one comes."""
        self._restart = True
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        self._restart = False
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.daemon.clean()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will make true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
