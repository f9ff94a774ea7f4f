"""One kind of live state each: programs that run inside a sandbox, over a freeze.

``python3 run.py KIND`` sets the state up, says so in ``/tmp/live/KIND.ready``, waits for SIGUSR1
(the freeze happens meanwhile), checks, and writes ``ok`` or a traceback to
``/tmp/live/KIND.result``. Each kind is a generator that yields once, where it is frozen.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator

LIVE = "/tmp/live"
LIBC = ctypes.CDLL(None, use_errno=True)
HOME = os.path.expanduser("~")
KINDS: dict[str, Callable[[], Iterator[None]]] = {}


def kind(make: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    KINDS[make.__name__] = make
    return make


def wait(condition: Callable[[], object], timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.005)


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = read(size - len(data))
        assert piece, f"it ended after {len(data)} bytes of {size}"
        data += piece
    return data
