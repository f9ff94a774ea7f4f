"""A stream in which a program's output and frames of ours follow each other, taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable

HEAD = 38
FRAME = 4096
MAX_MESSAGE = 17 << 20
_LENGTH = re.compile(rb"[A-Za-z][0-9a-f]{4}")


class Splitter:
    """Takes one stream apart: the code's output, and the frames of the ids it listens for.

    While ``hunting`` what is not in a frame is dropped, up to the first frame.

    Args:
        output: Takes output as it comes.
        message: Takes a letter and a payload; what is longer than MAX_MESSAGE comes as None.
    """

    def __init__(
        self, output: Callable[[bytes], None], message: Callable[[bytes, str, bytes | None], None]
    ) -> None:
        self._output = output
        self._message = message
        self._ids: tuple[bytes, ...] = ()
        self._rest = b""
        self._parts: list[bytes] | None = []
        self._size = 0
        self.hunting = False
        # The end of what was dropped: an interpreter that does not start says why.
        self.dropped = b""

    def listen(self, *ids: str, hunting: bool) -> None:
        self._ids = tuple(b"\0" + one.encode() for one in ids)
        self.hunting = hunting
        self._parts, self._size = [], 0

    def feed(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        while (begin := self._find(data, at)) < len(data):
            head = data[begin : begin + HEAD]
            if len(head) < HEAD:
                break
            size = _size(head)
            if size is None:
                self._emit(data[at : begin + 1])
                at = begin + 1
                continue
            end = begin + HEAD + size
            if len(data) < end:
                break
            self._emit(data[at:begin])
            self._frame(head[1:33], head[33:34], data[begin + HEAD : end])
            at = end
        self._emit(data[at:begin])
        self._rest = data[begin:]

    def _find(self, data: bytes, at: int) -> int:
        """Where a frame begins, or may begin with what comes next; the length if nowhere."""
        whole = [found for mark in self._ids if (found := data.find(mark, at)) >= 0]
        if whole:
            return min(whole)
        for begin in range(max(at, len(data) - 32), len(data)):
            if data[begin] == 0 and any(mark.startswith(data[begin:]) for mark in self._ids):
                return begin
        return len(data)

    def end(self) -> None:
        """Nothing more comes: what was held back is output."""
        rest, self._rest = self._rest, b""
        self._emit(rest)

    def gap(self) -> None:
        self._rest = b""

    def _emit(self, data: bytes) -> None:
        if self.hunting:
            self.dropped = (self.dropped + data)[-2000:]
        elif data:
            self._output(data)

    def _frame(self, one: bytes, letter: bytes, payload: bytes) -> None:
        self.hunting = False
        self._size += len(payload)
        if self._size > MAX_MESSAGE:
            self._parts = None
        elif self._parts is not None:
            self._parts.append(payload)
        if letter.isupper():
            return
        whole = None if self._parts is None else b"".join(self._parts)
        self._parts, self._size = [], 0
        self._message(letter, one.decode(), whole)


def _size(head: bytes) -> int | None:
    if not _LENGTH.fullmatch(head[33:]):
        return None
    size = int(head[34:], 16)
    return size if size <= FRAME - HEAD else None
