"""Where the time goes: spans of the daemon's work, as a file that trace viewers read.

The file is in the Trace Event Format (a JSON array; Perfetto and chrome://tracing open it): one
row for each task of the event loop, one bar for each step. Off, a span costs the look at one global.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

__all__ = ["span", "tracing"]

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_sink: _Sink | None = None


class _Sink:
    """The open file. Rows are numbered as tasks come, so that what overlaps lies side by side."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._comma = ""
        self._numbers = itertools.count(1)
        self._rows: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        file.write("[")

    def row(self) -> int:
        with contextlib.suppress(RuntimeError):
            task = asyncio.current_task()
            if task is not None:
                number = self._rows.get(task)
                if number is None:
                    number = self._rows[task] = next(self._numbers)
                return number
        return threading.get_native_id()

    def write(self, name: str, row: int, begun_ns: int, fields: dict[str, Any]) -> None:
        event = {
            "ph": "X",
            "name": name,
            "pid": self._pid,
            "tid": row,
            "ts": begun_ns / 1e3,
            "dur": (time.perf_counter_ns() - begun_ns) / 1e3,
            "args": fields,
        }
        with self._lock:
            self._file.write(f"{self._comma}\n{json.dumps(event)}")
            self._comma = ","


@contextmanager
def tracing(path: Path | None) -> Iterator[None]:
    """Write what happens inside to ``path``, or nothing if that is None."""
    global _sink
    if path is None:
        yield
        return
    with path.open("w", buffering=1 << 16) as file:
        _sink = _Sink(file)
        try:
            yield
        finally:
            _sink = None
            file.write("\n]\n")


def span(name: str, **fields: Any) -> AbstractContextManager[None]:
    """A step, from entering to leaving it; ``fields`` are shown with it."""
    return _NOTHING if _sink is None else _span(_sink, name, fields)


@contextmanager
def _span(sink: _Sink, name: str, fields: dict[str, Any]) -> Iterator[None]:
    row, begun = sink.row(), time.perf_counter_ns()
    try:
        yield
    finally:
        sink.write(name, row, begun, fields)
