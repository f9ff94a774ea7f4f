"""The toy kernel: processes, pipes and time, all of it data that can be written to a file.

A process is a record and the name of a program; the program is a function that does a little
and says what it waits for. So a machine can be stopped between any two steps, saved, and
gone on with elsewhere, with every process where it was.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from forkyard.engines.fake.tree import ROOT, Tree, Who, fault

PIPE_BYTES = 65536
SLICE_S = 0.005
BIN = ("/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin", "/usr/local/sbin")
HARMLESS = {signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG, 0}
IDLE_RSS_KB = 1024

Program = Callable[["Kernel", "Proc"], None]
PROGRAMS: dict[str, Program] = {}


def program(name: str) -> Callable[[Program], Program]:
    """Give the toy machine a program."""

    def register(function: Program) -> Program:
        PROGRAMS[name] = function
        return function

    return register


class Fd(msgspec.Struct):
    """``kind`` is null, zero, urandom, pipe, tty or file; ``ident`` is the number of which one."""

    kind: str
    ident: int = 0
    writes: bool = False


class File(msgspec.Struct):
    """An open file, which descriptors share; an ``offset`` of None is its end."""

    path: str
    offset: int | None = 0
    holders: int = 0


class Pipe(msgspec.Struct):
    data: bytearray = msgspec.field(default_factory=bytearray)
    readers: int = 0
    writers: int = 0


class Tty(msgspec.Struct):
    """``into`` and ``out`` are the pipes between it and its master."""

    into: int
    out: int
    rows: int
    cols: int
    session: int = 0


class Proc(msgspec.Struct):
    """``command`` is the agent's number for the command that it descends from."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    user: str
    uid: int
    gid: int
    argv: list[str]
    env: dict[str, str]
    cwd: str
    fds: dict[int, Fd]
    program: str
    command: int = 0
    mem: dict[str, Any] = {}
    out: list[tuple[int, bytes]] = []
    wait: tuple[str, float] | None = None
    ending: int | None = None
    stopped: bool = False
    dead: bool = False
    code: int = 0
    signal: int = 0
    ignored: list[int] = []
    cpu_us: int = 0
    rss_kb: int = IDLE_RSS_KB

    @property
    def who(self) -> Who:
        return Who(self.uid, self.gid)


class State(msgspec.Struct):
    """All of a kernel that is in its memory image."""

    procs: dict[int, Proc] = {}
    pipes: dict[int, Pipe] = {}
    ttys: dict[int, Tty] = {}
    files: dict[int, File] = {}
    next_pid: int = 2
    next_pipe: int = 1
    hostname: str = "sandbox"
    seed: bytes = b""
    random_taken: int = 0
    now_s: float = 0.0
    ended_cpu_us: int = 0


class Kernel:
    """See the module.

    Attributes:
        on_exit: Called with a process that ended and whose parent is the agent.
    """

    def __init__(self, root: Path, state: State) -> None:
        self.state = state
        self.procs = state.procs
        self.tree = Tree(
            root,
            {
                "/proc/sys/kernel/hostname": lambda: f"{state.hostname}\n".encode(),
                "/proc/uptime": lambda: f"{self.now():.2f} 0\n".encode(),
                **dict.fromkeys(("/dev/null", "/dev/zero", "/dev/urandom"), bytes),
            },
        )
        self.on_exit: Callable[[Proc], None] = lambda proc: None
        self._running_since: float | None = None

    # -- time

    def now(self) -> float:
        """Seconds that this machine has run."""
        since = self._running_since
        return self.state.now_s + (time.monotonic() - since if since is not None else 0.0)

    def freeze(self) -> None:
        """Stop time."""
        self.state.now_s = self.now()
        self._running_since = None

    def thaw(self) -> None:
        """Let time go on."""
        if self._running_since is None:
            self._running_since = time.monotonic()

    def random(self, size: int) -> bytes:
        """Bytes that follow from the seed and from how many were taken."""
        self.state.random_taken += 1
        taken = self.state.random_taken.to_bytes(8, "little")
        return hashlib.shake_128(self.state.seed + taken).digest(size)

    # -- running

    def run(self) -> bool:
        """Let processes run for a slice of time; whether some still could."""
        until = time.monotonic() + SLICE_S
        while ready := [proc for proc in self.procs.values() if self._ready(proc)]:
            for proc in ready:
                if self._ready(proc):
                    self._turn(proc)
            if time.monotonic() > until:
                return self.runnable()
        return False

    def runnable(self) -> bool:
        """Whether some process could go on."""
        return any(self._ready(proc) for proc in self.procs.values())

    def next_timer(self) -> float | None:
        """When the first sleeper wakes, in this machine's time."""
        times = [
            proc.wait[1]
            for proc in self.procs.values()
            if proc.wait and proc.wait[0] == "until" and not proc.stopped and not proc.dead
        ]
        return min(times, default=None)

    def _ready(self, proc: Proc) -> bool:
        if proc.dead or proc.stopped:
            return False
        if proc.wait is None:
            return True
        what, arg = proc.wait
        if what == "until":
            return self.now() >= arg
        if what == "child":
            return any(self._zombies(proc, int(arg))) or not self._children(proc, int(arg))
        fd = proc.fds.get(int(arg))
        if fd is None or fd.kind not in ("pipe", "tty"):
            return True
        pipe = self.pipe_of(fd, reading=what == "read")
        if what == "read":
            return bool(pipe.data) or not pipe.writers
        return len(pipe.data) < PIPE_BYTES or not pipe.readers

    def _turn(self, proc: Proc) -> None:
        proc.wait = None
        begun = time.perf_counter()
        try:
            if proc.out:
                self._flush(proc)
            elif proc.ending is not None:
                self.die(proc, proc.ending & 0xFF, 0)
            else:
                PROGRAMS[proc.program](self, proc)
        except OSError as error:
            name = proc.argv[0].rpartition("/")[2]
            self.say(proc, f"{name}: {error.strerror}\n", fd=2)
            proc.ending = 1
        proc.cpu_us += int((time.perf_counter() - begun) * 1e6)

    def _flush(self, proc: Proc) -> None:
        number, data = proc.out[0]
        fd = proc.fds.get(number)
        written = len(data)
        if fd is not None and fd.kind == "file":
            file = self.state.files[fd.ident]
            end = self.tree.write(file.path, file.offset, data)
            file.offset = None if file.offset is None else end
        elif fd is not None and fd.kind in ("pipe", "tty"):
            pipe = self.pipe_of(fd, reading=False)
            if not pipe.readers:
                self.deliver(proc, signal.SIGPIPE)
                proc.out, proc.ending = [], 1
                return
            written = min(len(data), PIPE_BYTES - len(pipe.data))
            piece = data[:written]
            pipe.data += piece.replace(b"\n", b"\r\n") if fd.kind == "tty" else piece
        if written < len(data):
            proc.out[0] = (number, data[written:])
            proc.wait = ("write", number)
        else:
            proc.out.pop(0)

    # -- what programs do

    def say(self, proc: Proc, text: str | bytes, *, fd: int = 1) -> None:
        """Queue output; the program runs again when it is written."""
        data = text.encode("latin-1") if isinstance(text, str) else text
        if data:
            proc.out = [*proc.out, (fd, data)]

    def read(self, proc: Proc, number: int, size: int = PIPE_BYTES) -> bytes | None:
        """Bytes from a descriptor, ``b""`` at its end; None: wait, and call again."""
        fd = proc.fds.get(number)
        if fd is None or fd.kind == "null":
            return b""
        if fd.kind in ("zero", "urandom"):
            return bytes(size) if fd.kind == "zero" else self.random(size)
        if fd.kind == "file":
            file = self.state.files[fd.ident]
            data = self.tree.read(file.path, file.offset or 0, size)
            file.offset = (file.offset or 0) + len(data)
            return data
        pipe = self.pipe_of(fd, reading=True)
        if pipe.data:
            data = bytes(pipe.data[:size])
            del pipe.data[:size]
            return data
        if pipe.writers:
            proc.wait = ("read", number)
            return None
        return b""

    def open(self, proc: Proc, path: str, *, write: bool = False, append: bool = False) -> Fd:
        """Open a file by any path."""
        full = self.tree.resolve(path, proc.cwd, proc.who)
        if full == "/dev/null":
            return Fd("null")
        if full in ("/dev/zero", "/dev/urandom"):
            return Fd(full.removeprefix("/dev/"))
        self.tree.open(full, proc.who, write=write, create=write, truncate=write and not append)
        number = self._number()
        self.state.files[number] = File(full, None if append else 0)
        return Fd("file", number, writes=write)

    def fork(self, parent: Proc, fds: dict[int, Fd], **changes: Any) -> Proc:
        """A child with copies of the descriptors ``fds``."""
        child = msgspec.structs.replace(
            parent,
            pid=self.claim_pid(),
            ppid=parent.pid,
            fds={},
            mem={},
            out=[],
            wait=None,
            ending=None,
            cpu_us=0,
            rss_kb=IDLE_RSS_KB,
            env=dict(parent.env),
            ignored=list(parent.ignored),
            **changes,
        )
        for number, fd in fds.items():
            child.fds[number] = self.share(fd)
        self.procs[child.pid] = child
        return child

    def start(self, argv: list[str], env: dict[str, str], cwd: str, user: str, who: Who,
              fds: dict[int, Fd], command: int) -> Proc:  # fmt: skip
        """A process of the agent's, the leader of a session of its own.

        Raises:
            OSError: there is no such program, or it may not be run.
        """
        found, words = self.find(argv, env, cwd, who)
        pid = self.claim_pid()
        proc = Proc(pid, 1, pid, pid, user, who.uid, who.gid, words, dict(env), cwd, {}, found, command)
        for number, fd in fds.items():
            proc.fds[number] = self.share(fd)
        self.procs[pid] = proc
        return proc

    def find(self, argv: list[str], env: dict[str, str], cwd: str, who: Who) -> tuple[str, list[str]]:
        """Which program an argv runs, and with which words (a script's are its shell's)."""
        name = argv[0]
        if "/" not in name:
            if name in PROGRAMS:
                return name, argv
            places = [f"{place}/{name}" for place in env.get("PATH", "").split(":") if place]
        else:
            base = name.rpartition("/")[2]
            if base in PROGRAMS and name.rpartition("/")[0] in BIN:
                return base, argv
            places = [name]
        worst = errno.ENOENT
        for place in places:
            with contextlib.suppress(OSError):
                path = self.tree.resolve(place, cwd, who)
                if self.tree.exists(path):
                    if self.tree.is_file(path) and self.tree.may(path, who, 1):
                        return "sh", ["sh", path, *argv[1:]]
                    worst = errno.EACCES
        raise fault(worst)

    def claim_pid(self) -> int:
        """A process number that was never used."""
        self.state.next_pid += 1
        return self.state.next_pid - 1

    # -- descriptors

    def _number(self) -> int:
        self.state.next_pipe += 1
        return self.state.next_pipe - 1

    def new_pipe(self) -> int:
        number = self._number()
        self.state.pipes[number] = Pipe()
        return number

    def pipe(self, number: int) -> Pipe:
        return self.state.pipes[number]

    def pipe_of(self, fd: Fd, *, reading: bool) -> Pipe:
        if fd.kind == "tty":
            tty = self.state.ttys[fd.ident]
            return self.pipe(tty.into if reading else tty.out)
        return self.pipe(fd.ident)

    def share(self, fd: Fd) -> Fd:
        """Another descriptor of the same thing."""
        if fd.kind == "pipe":
            pipe = self.pipe(fd.ident)
            pipe.writers += fd.writes
            pipe.readers += not fd.writes
        elif fd.kind == "tty":
            tty = self.state.ttys[fd.ident]
            self.pipe(tty.into).readers += 1
            self.pipe(tty.out).writers += 1
        elif fd.kind == "file":
            self.state.files[fd.ident].holders += 1
        return msgspec.structs.replace(fd)

    def close(self, fd: Fd) -> None:
        if fd.kind == "pipe":
            pipe = self.pipe(fd.ident)
            pipe.writers -= fd.writes
            pipe.readers -= not fd.writes
            self._drop_pipe(fd.ident)
        elif fd.kind == "tty":
            tty = self.state.ttys[fd.ident]
            self.pipe(tty.into).readers -= 1
            self.pipe(tty.out).writers -= 1
        elif fd.kind == "file":
            file = self.state.files[fd.ident]
            file.holders -= 1
            if file.holders <= 0:
                del self.state.files[fd.ident]

    def _drop_pipe(self, number: int) -> None:
        pipe = self.state.pipes.get(number)
        if pipe is not None and not pipe.readers and not pipe.writers:
            del self.state.pipes[number]

    def new_tty(self, rows: int, cols: int) -> int:
        """A terminal whose master's ends the caller holds."""
        into, out = self.new_pipe(), self.new_pipe()
        self.pipe(into).writers = 1
        self.pipe(out).readers = 1
        self.state.ttys[into] = Tty(into, out, rows, cols)
        return into

    def type_in(self, number: int, data: bytes) -> None:
        """What its user types: echoed, with Ctrl-C and Ctrl-D as they are."""
        tty = self.state.ttys[number]
        out = self.pipe(tty.out)
        for byte in data:
            char = bytes([byte])
            if char == b"\x03":
                out.data += b"^C\r\n"
                for proc in list(self.procs.values()):
                    if proc.session == tty.session and not self._is_waiting_shell(proc):
                        self.deliver(proc, signal.SIGINT)
            elif char == b"\x04":
                self.pipe(tty.into).writers = 0
            else:
                char = char.replace(b"\r", b"\n")
                out.data += char.replace(b"\n", b"\r\n")
                self.pipe(tty.into).data += char

    def _is_waiting_shell(self, proc: Proc) -> bool:
        return proc.program == "sh" and bool(self._children(proc, 0))

    # -- ends

    def _children(self, proc: Proc, pid: int) -> list[Proc]:
        return [child for child in self.procs.values() if child.ppid == proc.pid and pid in (0, child.pid)]

    def _zombies(self, proc: Proc, pid: int) -> list[Proc]:
        return [child for child in self._children(proc, pid) if child.dead]

    def reap(self, proc: Proc, pid: int) -> int | None:
        """The status of an ended child as a shell counts it (128 + signal); None: none ended."""
        for child in self._zombies(proc, pid):
            del self.procs[child.pid]
            self.state.ended_cpu_us += child.cpu_us
            return 128 + child.signal if child.signal else child.code
        return None if self._children(proc, pid) else 127

    def deliver(self, proc: Proc, number: int) -> None:
        """Send a signal."""
        if proc.dead or number in HARMLESS:
            return
        if number == signal.SIGKILL:
            self.die(proc, 0, number)
        elif number == signal.SIGSTOP or (number == signal.SIGTSTP and number not in proc.ignored):
            proc.stopped = True
        elif number == signal.SIGCONT:
            proc.stopped = False
        elif str(number) in proc.mem.get("traps", {}):
            proc.mem["pending"] = [*proc.mem.get("pending", []), number]
            proc.wait = None
        elif number not in proc.ignored:
            self.die(proc, 0, number)

    def die(self, proc: Proc, code: int, number: int) -> None:
        proc.dead, proc.code, proc.signal = True, code, number
        proc.mem, proc.out, proc.wait, proc.stopped = {}, [], None, False
        fds, proc.fds = proc.fds, {}
        for fd in fds.values():
            self.close(fd)
        for child in self._children(proc, 0):
            child.ppid = 1
            if child.dead:
                self._bury(child)
        if proc.ppid == 1 or proc.ppid not in self.procs:
            self._bury(proc)

    def _bury(self, proc: Proc) -> None:
        self.procs.pop(proc.pid, None)
        self.state.ended_cpu_us += proc.cpu_us
        self.on_exit(proc)

    def descendants(self, roots: Callable[[Proc], bool]) -> list[Proc]:
        """Living processes that are roots, or came from one."""
        chosen = {proc.pid for proc in self.procs.values() if roots(proc)}
        todo = collections.deque(chosen)
        while todo:
            pid = todo.popleft()
            for proc in self.procs.values():
                if proc.ppid == pid and proc.pid not in chosen:
                    chosen.add(proc.pid)
                    todo.append(proc.pid)
        return [proc for proc in self.procs.values() if proc.pid in chosen and not proc.dead]

    def cpu_ms(self) -> int:
        """CPU time of all processes, ended ones included."""
        return (self.state.ended_cpu_us + sum(proc.cpu_us for proc in self.procs.values())) // 1000


__all__ = ["PROGRAMS", "ROOT", "Fd", "Kernel", "Pipe", "Proc", "State", "Tty", "program"]
