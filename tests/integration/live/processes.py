"""Threads, processes, pipes and a terminal. See ``state.py``."""

from __future__ import annotations

import fcntl
import functools
import multiprocessing
import os
import pty
import queue
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from state import LIVE, kind, read_exactly, wait


@kind
def threads() -> Iterator[None]:
    """Threads in a condition variable, a held lock, thread-local data, a queue."""
    condition, held, local = threading.Condition(), threading.Lock(), threading.local()
    turn, out = [-1], queue.Queue()

    def worker(number: int) -> None:
        local.number = number * 11
        with condition:
            out.put(("waits", number))
            condition.wait_for(lambda: turn[0] == number)
            turn[0] += 1
            condition.notify_all()
        out.put((local.number, number))

    held.acquire()
    stuck = threading.Thread(target=lambda: (held.acquire(), out.put("lock")), daemon=True)
    workers = [threading.Thread(target=worker, args=(n,)) for n in range(8)]
    for thread in (stuck, *workers):
        thread.start()
    for _ in workers:
        out.get(timeout=10)
    yield
    assert not held.acquire(blocking=False)
    with condition:
        turn[0] = 0
        condition.notify_all()
    assert sorted(out.get(timeout=10) for _ in workers) == [(n * 11, n) for n in range(8)]
    held.release()
    assert out.get(timeout=10) == "lock"
    for thread in workers:
        thread.join(10)


@kind
def tree() -> Iterator[None]:
    """Three levels of processes, exit statuses not yet waited for, a stopped process."""
    def fork(body: Callable[[], int | None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                os._exit(body() or 0)
            finally:
                os._exit(99)
        return pid

    told, tell = os.pipe()

    def middle() -> int:
        leaf = fork(lambda: time.sleep(1000))
        os.write(tell, struct.pack("ii", os.getpid(), leaf))
        _, status = os.waitpid(leaf, 0)
        return 40 + os.WTERMSIG(status)

    parent = fork(middle)
    zombie = fork(lambda: 7)
    killed = fork(lambda: time.sleep(1000))
    # In a group of its own: gVisor hangs up on an orphaned group with a stopped member.
    stopped = fork(lambda: (os.setpgid(0, 0), time.sleep(1000))[1])
    wait(lambda: os.getpgid(stopped) == stopped)
    os.kill(killed, signal.SIGTERM)
    os.kill(stopped, signal.SIGSTOP)
    pid, leaf = struct.unpack("ii", os.read(told, 8))
    assert pid == parent
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    yield
    assert Path(f"/proc/{leaf}/stat").read_text().split()[3] == str(parent)
    assert os.waitstatus_to_exitcode(os.waitpid(zombie, 0)[1]) == 7
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGTERM
    assert os.waitpid(stopped, os.WUNTRACED | os.WNOHANG)[0] == stopped
    os.kill(stopped, signal.SIGCONT)
    os.kill(stopped, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(stopped, 0)[1]) == -signal.SIGKILL
    os.kill(leaf, signal.SIGUSR2)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 40 + signal.SIGUSR2


@kind
def pipes() -> Iterator[None]:
    """A pipe whose writer never stops: what comes out has no gap; a FIFO with data in it."""
    reading, writing = os.pipe()
    fifo = f"{LIVE}/fifo"
    os.mkfifo(fifo)
    both = os.open(fifo, os.O_RDWR)
    os.write(both, b"waiting in the fifo")
    writer = os.fork()
    if writer == 0:
        number = 0
        while True:
            os.write(writing, struct.pack("512Q", *range(number, number + 512)))
            number += 512
    seen = struct.unpack("1000Q", read_exactly(lambda n: os.read(reading, n), 8000))
    yield
    more = struct.unpack("100000Q", read_exactly(lambda n: os.read(reading, n), 800_000))
    assert [*seen, *more] == list(range(101_000))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert os.read(both, 100) == b"waiting in the fifo"


@kind
def workers() -> Iterator[None]:
    """A pool of processes in the middle of its work, with its queues and semaphores."""
    context = multiprocessing.get_context("fork")
    gate = context.Semaphore(0)
    jobs, done = context.Queue(), context.Queue()

    def work() -> None:
        while (number := jobs.get()) is not None:
            gate.acquire()
            done.put((number, number * number))

    pool = [context.Process(target=work) for _ in range(3)]
    for process in pool:
        process.start()
    for number in range(30):
        jobs.put(number)
    for _ in range(5):
        gate.release()
    early = [done.get(timeout=10) for _ in range(5)]
    yield
    for _ in range(25):
        gate.release()
    assert sorted(early + [done.get(timeout=10) for _ in range(25)]) == [(n, n * n) for n in range(30)]
    for _ in pool:
        jobs.put(None)
    for process in pool:
        process.join(10)
        assert process.exitcode == 0


@kind
def terminal() -> Iterator[None]:
    """bash on a terminal: its variables, the window's size, Ctrl-C, jobs."""
    pid, fd = pty.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp("bash", ["bash", "--norc", "-i"])
    seen = b""

    def resize(rows: int, columns: int) -> None:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(word: bytes, again: Callable[[], object] = lambda: None) -> None:
        nonlocal seen
        deadline = time.monotonic() + 15
        while word not in seen:
            if select.select([fd], [], [], 3)[0]:
                seen += os.read(fd, 4096)
            else:
                assert time.monotonic() < deadline, seen
                again()
        seen = seen.partition(word)[2]

    resize(33, 99)
    # The first job reads the terminal once it is told to, which it is in the foreground.
    go = f"{LIVE}/terminal.go"
    first = f"(until test -e {go}; do sleep 0.02; done; read line; echo got-$line)"
    os.write(fd, f"X=kept; f() {{ echo func-$1; }}; cd /usr; {first} & sleep 1000 &\n".encode())
    os.write(fd, b"sh -c 'echo be''gun; exec sleep 999'\n")
    until(b"begun")
    yield
    os.write(fd, b"\x03")
    os.write(fd, b"echo rc-$?-$X-$PWD-$(stty size | tr ' ' x); f y\n")
    until(b"rc-130-kept-/usr-33x99")
    until(b"func-y")
    os.write(fd, b"jobs\n")
    until(b"[2]")
    until(b"sleep 1000")
    os.write(fd, b"fg %1\n")
    until(b"read line")
    Path(go).touch()
    os.write(fd, b"typed\n")
    until(b"got-typed")
    # A stop that comes while the shell waits in vfork, or executes, reaches nobody on the runsc of 2024.
    os.write(fd, b"sh -c 'echo fo''re; exec sleep 1000'\n")
    until(b"fore")
    stop = functools.partial(os.write, fd, b"\x1a")
    stop()
    until(b"Stopped", again=stop)
    os.write(fd, b"kill -9 %2 %3; wait; trap 'echo re''sized' WINCH; echo trap''ped\n")
    until(b"trapped")

    def ask() -> None:
        # A bash that shows its prompt reads the size and writes it back: it may undo a change.
        resize(40, 120)
        os.write(fd, b"stty size\n")

    ask()
    until(b"40 120", again=ask)
    os.write(fd, b"exit 5\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
