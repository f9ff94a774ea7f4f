"""What is kept of a command's output: all of it, or its ends, and a digest of the whole."""

from __future__ import annotations

import collections
import hashlib
from typing import Literal


class Tally:
    """Length and digest of a stream of which nothing is kept."""

    def __init__(self) -> None:
        self.total = 0
        self._digest = hashlib.sha256()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        self._digest.update(data)

    def skip(self, size: int) -> None:
        """Note ``size`` bytes that were lost before they could be kept."""
        self.total += size

    @property
    def digest(self) -> str:
        """SHA-256 of all that was fed, in hexadecimal."""
        return self._digest.hexdigest()


class Capture(Tally):
    """Keeps at most ``limit`` bytes of a stream: its head, its tail, or half of each."""

    def __init__(self, limit: int, keep: Literal["head", "tail", "both"]) -> None:
        super().__init__()
        self._head_room = {"head": limit, "tail": 0, "both": limit - limit // 2}[keep]
        self._tail_room = limit - self._head_room
        self._head = bytearray()
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_size = 0
        self._fresh: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        super().feed(data)
        self._fresh.append(data)
        if self._head_room:
            taken = data[: self._head_room]
            self._head += taken
            self._head_room -= len(taken)
            data = data[len(taken) :]
        if data and self._tail_room:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._tail_room:
                self._tail_size -= len(self._tail.popleft())

    def unspooled(self, limit: int) -> list[bytes]:
        """What was fed since the last call, at most ``limit`` bytes of it."""
        fresh, self._fresh = self._fresh, []
        pieces = []
        for piece in fresh:
            if limit <= 0:
                break
            pieces.append(piece[:limit])
            limit -= len(piece)
        return pieces

    @property
    def omitted(self) -> int:
        """How many bytes were not kept."""
        return self.total - len(self._head) - min(self._tail_size, self._tail_room)

    def data(self) -> bytes:
        """What was kept, in order."""
        tail = b"".join(self._tail)
        if self._tail_room and len(tail) > self._tail_room:
            tail = tail[-self._tail_room :]
        return bytes(self._head) + tail
