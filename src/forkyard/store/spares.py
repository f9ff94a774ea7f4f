"""Volumes made ahead for the layers that boxes are made on most.

A box's volume is a snapshot (it counts inodes on from the layer below), and a snapshot waits for
a commit of the whole filesystem: a few milliseconds, more beside a neighbour that writes. A spare
is there already, and taking it is a rename.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from forkyard.store.backend import Backend

__all__ = ["Spares"]

_LAYERS, _EACH = 4, 4
# a burst of creations is left alone: its machines need the disk more
_CALM_S = 0.1


class Spares:
    """Spares lie in ``tmp``: what a crash leaves is cleared there."""

    def __init__(self, backend: Backend, tmp: Path) -> None:
        self.backend = backend
        self.tmp = tmp
        self._lock = threading.Lock()
        self._ready: dict[str, list[Path]] = {}  # the layer that was asked for last is last
        self._parents: dict[str, Path] = {}
        self._wake = asyncio.Event()

    def take(self, layer: str) -> Path | None:
        """A spare on ``layer``, now the caller's to rename; None if there is none. From any thread."""
        with self._lock:
            ready = self._ready.get(layer)
            return ready.pop() if ready else None

    def ask(self, layer: str, parent: Path) -> None:
        """Note that a box is made on ``layer``, whose sealed volume is ``parent``."""
        with self._lock:
            self._ready[layer] = self._ready.pop(layer, [])
            self._parents[layer] = parent
        self._wake.set()

    def drop(self, layer: str) -> None:
        """Delete the spares of a layer. Blocks."""
        with self._lock:
            gone = self._ready.pop(layer, [])
            self._parents.pop(layer, None)
        for path in gone:
            self.backend.delete(path)

    def drop_all(self) -> None:
        """Delete all spares. Blocks."""
        for layer in list(self._ready):
            self.drop(layer)

    async def run(self, thread: Callable[..., Awaitable[None]]) -> None:
        """Keep some spares of the layers last asked for, until cancelled."""
        while True:
            await self._wake.wait()
            while self._wake.is_set():
                self._wake.clear()
                await asyncio.sleep(_CALM_S)
            with self._lock:
                old = list(self._ready)[:-_LAYERS]
            for layer in old:
                await thread(self.drop, layer)
            while (layer_now := self._lacking()) is not None and not self._wake.is_set():
                await thread(self._add, layer_now)

    def _lacking(self) -> str | None:
        with self._lock:
            short = [layer for layer, ready in self._ready.items() if len(ready) < _EACH]
        return short[-1] if short else None

    def _add(self, layer: str) -> None:
        with self._lock:
            parent = self._parents.get(layer)
        if parent is None:
            return
        path = self.tmp / f"spare-{secrets.token_hex(8)}"
        try:
            self.backend.create(path, parent)
        except OSError:  # the layer went, or the disk is full: whoever needs one will be told
            with contextlib.suppress(OSError):
                self.backend.delete(path)
            self.drop(layer)
            return
        with self._lock:
            ready = self._ready.get(layer)
            if ready is not None:
                ready.append(path)
                return
        self.backend.delete(path)
