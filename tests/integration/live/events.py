"""What waits for something to happen. See ``state.py``."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator

from state import HOME, LIBC, kind, wait


@kind
def inotify() -> Iterator[None]:
    """An event that waits, and those that come after."""
    place = tempfile.mkdtemp(dir=HOME)
    fd = LIBC.inotify_init1(os.O_NONBLOCK)
    assert LIBC.inotify_add_watch(fd, place.encode(), 0x100 | 0x200) > 0
    open(f"{place}/queued", "w").close()

    def names() -> list[str]:
        assert select.select([fd], [], [], 10)[0]
        data, found = os.read(fd, 65536), []
        while data:
            size = struct.unpack_from("iIII", data)[3]
            found.append(data[16 : 16 + size].rstrip(b"\0").decode())
            data = data[16 + size :]
        return found

    yield
    assert names() == ["queued"]
    open(f"{place}/new", "w").close()
    os.unlink(f"{place}/queued")
    seen = names()
    while len(seen) < 2:
        seen += names()
    assert seen == ["new", "queued"]


@kind
def epoll() -> Iterator[None]:
    """An epoll set of an eventfd, a timerfd that is yet to fire, a pipe and a signalfd."""
    LIBC.timerfd_create.restype = ctypes.c_int
    timer = LIBC.timerfd_create(time.CLOCK_MONOTONIC, 0)
    spec = struct.pack("qqqq", 0, 50_000_000, 0, 300_000_000)
    assert LIBC.timerfd_settime(timer, 0, spec, None) == 0
    counter = os.eventfd(5)
    reading, writing = os.pipe()
    poll = select.epoll()
    for fd in (timer, counter, reading):
        poll.register(fd, select.EPOLLIN)
    once = os.eventfd(1)
    poll.register(once, select.EPOLLIN | select.EPOLLONESHOT)
    assert once in dict(poll.poll(10))
    yield
    os.write(writing, b"x")
    seen: set[int] = set()
    wait(lambda: seen.update(fd for fd, _ in poll.poll(1)) or {timer, counter, reading} <= seen)
    assert once not in seen
    assert os.eventfd_read(counter) == 5
    assert struct.unpack("Q", os.read(timer, 8))[0] >= 1
    assert struct.unpack("Q", os.read(timer, 8))[0] >= 1


@kind
def timers() -> Iterator[None]:
    """An interval timer, a sleep that goes on to its end, a blocked signal that waits."""
    # (A handler may interrupt itself: it counts, and reads no clock.)
    ticks: list[None] = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(None))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    caught: list[int] = []
    signal.signal(signal.SIGUSR2, lambda *_: caught.append(1))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    begun, slept = time.monotonic(), []
    sleeper = threading.Thread(target=lambda: (time.sleep(2), slept.append(time.monotonic() - begun)))
    sleeper.start()
    wait(lambda: len(ticks) > 2)
    clock = time.monotonic()
    yield
    assert time.monotonic() >= clock
    before = len(ticks)
    wait(lambda: len(ticks) > before + 3)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sleeper.join(10)
    assert slept and slept[0] >= 2
    assert not caught
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert caught == [1]
