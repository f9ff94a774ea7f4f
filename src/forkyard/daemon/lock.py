"""The right to be a home's daemon: a lock held for life."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class TakenError(Exception):
    """Another daemon holds the home; ``pid`` is its process, 0 if it has not said."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


def take(path: Path) -> int:
    """The descriptor that holds the lock; the kernel lets go when the process ends.

    Raises:
        TakenError: another process has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = 0
        with contextlib.suppress(ValueError):
            pid = int(os.pread(fd, 32, 0) or b"0")
        os.close(fd)
        raise TakenError(pid) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd
