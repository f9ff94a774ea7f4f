"""A daemon's life and death in one process.

A :class:`Life` is a yard in an event loop of its own. :meth:`Life.die` never runs that loop again:
no task is cancelled, no ``finally`` runs, no descriptor is closed, and whatever the yard had
started on the host goes on, as after a SIGKILL. (What dies with a process and does not here are
threads; they are waited for.) The next life is another loop over the same home.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from yards import DEADLINE_S, Home, TestYard, opened, until

from forkyard.host.failpoint import Armed, armed

T = TypeVar("T")


class Life:
    """One daemon's time with a home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.loop = asyncio.new_event_loop()
        self._open = opened(home)
        self.yard: TestYard = self.run(self._open.__aenter__())
        self._tasks: list[asyncio.Task[Any]] = []
        self._armed: Armed | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end."""
        return self.loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin ``work``, that will not be finished in this life."""
        self._tasks.append(self.loop.create_task(work))

    def go_on_until(self, condition: Callable[[], Any], what: str) -> None:
        """Let the loop run until ``condition()`` is true, and not a turn longer."""
        self.run(until(condition, what, DEADLINE_S))

    def go_on(self, turns: int) -> None:
        """Let the loop run for some turns."""

        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(wait())

    def die_of(self, spec: str, work: Coroutine[Any, Any, Any]) -> bool:
        """Run ``work`` with failpoints armed, one of which ends this life; whether it did."""
        with armed(spec, die=self.stop) as self._armed:
            try:
                self.run(work)
            except RuntimeError as error:
                if "stopped before" not in str(error):
                    raise
                self.die()
                return True
            # In the background, behind the work.
            self.go_on(50)
        return False

    @property
    def reached(self) -> list[str]:
        """The failpoints that this life's :meth:`die_of` has reached."""
        return self._armed.reached if self._armed is not None else []

    def stop(self) -> None:
        """Stop the loop where it is; from any thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def die(self) -> None:
        """End it like a SIGKILL."""
        for pool in (getattr(self.loop, "_default_executor", None), getattr(self._disks, "_pool", None)):
            if pool is not None:
                pool.shutdown(wait=True)
        DEAD.append(self)

    @property
    def _disks(self) -> Any:
        return self.yard.context.disks

    def close(self) -> None:
        """End it in an orderly way; what is there must be gone without a trace."""
        try:
            self.run(self.yard.empty())
            self.run(self.yard.assert_clean())
        finally:
            self.run(self._open.__aexit__(None, None, None))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


DEAD: list[Life] = []


def bury() -> None:
    """Let go of what dead lives hold in this process: threads that wait for work, and descriptors."""
    while DEAD:
        life = DEAD.pop()
        context = life.yard.context

        async def close(context: Any = context) -> None:
            await context.catalog.close()
            await context.audit.close()

        asyncio.run(close())
        # With its descriptor the file system would stay mounted after the home has gone.
        if (backend := getattr(life._disks, "_backend", None)) is not None:
            backend.close()
        for sandbox in context.sandboxes:
            box = sandbox.box
            if box is not None:
                for end in ("to_guest", "from_guest"):
                    with contextlib.suppress(OSError):
                        os.close(getattr(box.machine, end))
        # None of its tasks may be collected, which would run what a killed process does not.
        for task in asyncio.all_tasks(life.loop):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
