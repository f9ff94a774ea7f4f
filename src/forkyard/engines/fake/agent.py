"""The toy machine's agent: the guest's end of the wire, written anew from its specification.

Everything it has is in :class:`AgentState` and so in a memory image, the unwritten half of a
frame and the epoch of its reader included: a restored agent goes on as if nothing had
happened, and the new reader has to cope.
"""

from __future__ import annotations

import errno
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from forkyard import wire
from forkyard.engines.fake import programs, shell  # noqa: F401 (they register the programs)
from forkyard.engines.fake.commands import Command
from forkyard.engines.fake.kernel import Fd, Kernel, Proc, State
from forkyard.engines.fake.streams import CommandStream
from forkyard.engines.fake.tree import Who, fault
from forkyard.wire import (
    HEADER,
    MAGIC,
    MAX_DATA,
    MAX_PAYLOAD,
    MORE,
    Op,
    Packer,
    Scope,
    SpawnFlag,
    Type,
    Unpacker,
)

BUILD = "fake"
MAX_COMMANDS = 256
BACKLOG = 1 << 20
BULK_ROOM = 8192


class User(msgspec.Struct):
    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def who(self) -> Who:
        return Who(self.uid, self.gid)


# Asked for; the acknowledgement is on its way; nothing more may leave.
Quiesce = Literal["no", "asked", "acking", "held"]


class AgentState(msgspec.Struct):
    """All of an agent that is in its machine's memory image."""

    commands: list[Command] = []
    serial: int = 0
    fork_id: str = ""
    epoch: int = 0
    out: bytearray = msgspec.field(default_factory=bytearray)
    quiesce: Quiesce = "no"
    discards: list[int] = []


class Stream(Protocol):
    """A request under way. Offsets in ``limits`` are what the daemon lets it send, by channel."""

    limits: list[int]

    def pump(self) -> bool:
        """Send at most one piece; whether there may be more."""
        ...

    def frame(self, type_: int, chan: int, u: Unpacker) -> None: ...

    def close(self) -> None: ...


Handler = Callable[["Agent", int, Unpacker], "bytes | None"]


class Agent:
    """See the module. ``handlers`` are the functions that answer requests, by their number."""

    def __init__(self, root: Path, kernel: State, state: AgentState, handlers: dict[int, Handler]) -> None:
        self.kernel = Kernel(root, kernel)
        self.kernel.on_exit = self._exited
        self.state = state
        self.streams: dict[int, Stream] = {}
        self._input = bytearray()
        self._parts: dict[int, bytearray] = {}
        self._handlers = handlers

    # -- frames in

    def feed(self, data: bytes) -> None:
        """Take bytes from the daemon, in whatever pieces and after whatever noise."""
        self._input += data
        at, size = 0, HEADER.size
        buffer = self._input
        while len(buffer) - at >= size:
            magic, type_, flags, chan, stream, length, epoch, crc = HEADER.unpack_from(buffer, at)
            if magic != MAGIC or length > MAX_PAYLOAD:
                # Zeros, mostly: the start of an epoch. Look for where a frame may begin.
                found = buffer.find(MAGIC.to_bytes(4, "little"), at + 1)
                at = found if found >= 0 else max(at, len(buffer) - 3)
                continue
            end = at + size + length
            if end > len(buffer):
                break
            payload = bytes(buffer[at + size : end])
            intact = zlib.crc32(payload, zlib.crc32(buffer[at : at + 20])) == crc
            at = end
            if not intact:
                self._damaged(stream, epoch)
            elif type_ == Type.ATTACH:
                self._attach(epoch, Unpacker(payload))
            elif epoch == self.state.epoch and epoch:
                self._frame(type_, flags, chan, stream, payload)
        del buffer[:at]

    def _damaged(self, stream: int, epoch: int) -> None:
        if epoch != self.state.epoch or not epoch:
            return
        if stream in self.streams:
            self.drop(stream)
            self.emit(Type.RESET, stream)
        self._error(stream, errno.EBADMSG, "checksum mismatch")

    def _attach(self, epoch: int, u: Unpacker) -> None:
        low, high, nonce = u.u16(), u.u16(), u.raw(wire.NONCE_BYTES)
        state = self.state
        state.out.clear()
        self._parts.clear()
        state.quiesce = "no"
        state.epoch = epoch
        for stream in list(self.streams):
            self.drop(stream)
        for command in state.commands:
            command.stream = 0
            for ring in command.rings:
                ring.sent = ring.start
        spoken = wire.VERSION if low <= wire.VERSION and high >= wire.VERSION_MIN else 0
        p = Packer().raw(nonce).u16(spoken).u64(0).str(BUILD.encode()).u32(1)
        p.u64(int(self.kernel.now() * 1000)).str(state.fork_id.encode()).u32(len(state.commands))
        for command in reversed(state.commands):
            command.row(p)
        self.emit(Type.HELLO, 0, p.done())

    def _frame(self, type_: int, flags: int, chan: int, number: int, payload: bytes) -> None:
        u = Unpacker(payload)
        stream = self.streams.get(number)
        if type_ == Type.PING:
            self.emit(Type.PONG, number, payload)
        elif type_ == Type.QUIESCE:
            if self.state.quiesce == "no":
                self.state.quiesce = "asked"
        elif type_ == Type.UNQUIESCE:
            self.state.quiesce = "no"
        elif type_ == Type.OPEN:
            if stream is not None or not number & 1:
                self._error(number, errno.EINVAL, "the stream is in use or not yours to open")
            else:
                self._open(chan, flags, number, payload)
        elif type_ == Type.ACK:
            u.u64()
            limit = u.u64()
            if stream is not None and chan <= 2:
                stream.limits[chan] = max(stream.limits[chan], limit)
                stream.frame(type_, chan, Unpacker(payload))
        elif type_ == Type.RESET:
            self.drop(number)
        elif type_ in (Type.DATA, Type.EOF, Type.RELEASE, Type.SIGNAL, Type.RESIZE):
            if stream is not None:
                stream.frame(type_, chan, u)
        else:
            self._error(number, errno.ENOSYS, "unknown frame type")

    def _open(self, op: int, flags: int, number: int, payload: bytes) -> None:
        parts = self._parts.setdefault(number, bytearray())
        parts += payload
        if flags & MORE:
            return
        del self._parts[number]
        handler = self._handlers.get(op)
        if handler is None:
            self.end(number, errno.ENOSYS, "unknown request")
            return
        try:
            answer = handler(self, number, Unpacker(bytes(parts)))
        except OSError as error:
            self.end(number, error.errno or errno.EIO, error.strerror or "")
        except wire.WireError:
            self.end(number, errno.EINVAL, "malformed request")
        else:
            if answer is not None:
                self.end(number, 0, "", answer)

    # -- frames out

    def emit(self, type_: int, stream: int, payload: bytes = b"", *, chan: int = 0) -> None:
        state = self.state
        if not state.epoch:
            return
        pieces = [payload[i : i + MAX_DATA] for i in range(0, len(payload), MAX_DATA)] or [b""]
        for index, piece in enumerate(pieces):
            flags = MORE if index < len(pieces) - 1 else 0
            state.out += wire.encode(type_, stream, state.epoch, piece, chan=chan, flags=flags)

    def emit_data(self, stream: int, chan: int, offset: int, data: bytes) -> None:
        self.state.out += wire.encode_data(stream, self.state.epoch, chan, offset, data)

    def acknowledge(self, stream: int, delivered: int, limit: int) -> None:
        self.emit(Type.ACK, stream, Packer().u64(delivered).u64(limit).done())

    def end(self, stream: int, code: int, what: str, payload: bytes = b"") -> None:
        self.emit(Type.END, stream, Packer().u32(code).str(what.encode()[:512]).raw(payload).done())
        self.drop(stream)

    def _error(self, stream: int, code: int, what: str) -> None:
        self.emit(Type.ERROR, stream, Packer().u32(code).str(what.encode()).done())

    def drop(self, number: int) -> None:
        """Forget a stream without a word."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.close()

    def outgoing(self) -> bytearray:
        """What may be written now; what was written is deleted from it."""
        state = self.state
        if state.quiesce == "held":
            return bytearray()
        if not state.out and state.quiesce == "acking":
            state.quiesce = "held"
        elif not state.out and state.quiesce == "asked":
            self.emit(Type.QUIESCED, 0)
            state.quiesce = "acking"
        return state.out

    # -- turns

    def turn(self) -> bool:
        """Let processes run and streams send; whether there is more to do at once."""
        state, k = self.state, self.kernel
        busy = k.run()
        for command in list(state.commands):
            command.read(k)
            moved, closed = command.feed(k)
            if command.stream and moved:
                self.acknowledge(
                    command.stream,
                    command.stdin_seen - len(command.stdin),
                    command.stdin_seen - len(command.stdin) + wire.WINDOW,
                )
            if command.stream and closed:
                self.emit(Type.EOF, command.stream)
            command.settle(k)
            if command.drained:
                state.discards += [number for number in command.outs if number]
                command.outs = [0, 0]
        self._discard()
        more = False
        if state.quiesce == "no":
            for stream in list(self.streams.values()):
                # Without room it goes on when what is there has left.
                more = len(state.out) >= BULK_ROOM or stream.pump() or more
        return busy or more or k.runnable()

    def _discard(self) -> None:
        """Empty the pipes that only detached children still write to."""
        for number in list(self.state.discards):
            pipe = self.kernel.pipe(number)
            pipe.data.clear()
            if not pipe.writers:
                self.state.discards.remove(number)
                self.kernel.close(Fd("pipe", number))

    @property
    def wants_read(self) -> bool:
        return len(self.state.out) < BACKLOG

    def next_timer(self) -> float | None:
        """When something is due, in the machine's time."""
        times = [self.kernel.next_timer(), *(command.next_timer for command in self.state.commands)]
        return min((at for at in times if at is not None), default=None)

    # -- commands

    def user(self, spec: str) -> User:
        """By name, uid or uid:gid, as /etc/passwd says."""
        name, _, group = (spec or "root").partition(":")
        found = None
        rows = [line.split(":") for line in self._text("/etc/passwd").splitlines()]
        for row in rows:
            if len(row) >= 7 and name in (row[0], row[2]):
                found = User(row[0], int(row[2]), int(row[3]), row[5] or "/", row[6] or "/bin/sh")
                break
        if found is None and name == "root":
            found = User("root", 0, 0, "/root", "/bin/sh")
        if found is None and name.isdigit():
            found = User(name, int(name), 0 if group else int(name), "/", "/bin/sh")
        if found is None:
            raise OSError(errno.ENOENT, "no such user")
        if group:
            if not group.isdigit():
                raise OSError(errno.ENOENT, "no such user")
            found.gid = int(group)
        return found

    def _text(self, path: str) -> str:
        try:
            return self.kernel.tree.read(path, 0, 1 << 20).decode("latin-1")
        except OSError:
            return ""

    def spawn(self, number: int, u: Unpacker) -> None:
        """Start a command and open its stream."""
        k, state = self.kernel, self.state
        flags, rows, cols, _ = u.u32(), u.u16(), u.u16(), u.u32()
        user, cwd, tag = self.user(_text(u, 128)), _text(u), u.str(64)
        argv = [_text(u, wire.MAX_REQUEST) for _ in range(u.u32())]
        pairs = [_text(u, wire.MAX_REQUEST).partition("=") for _ in range(u.u32())]
        env = {name: value for name, _, value in pairs}
        env = self._login(user, bool(flags & SpawnFlag.PTY)) | env
        where = self._directory(cwd, user)
        if len(state.commands) >= MAX_COMMANDS:
            raise OSError(errno.EAGAIN, "too many commands")
        state.serial += 1
        command = Command(state.serial, 0, flags & 15, tag)
        fds = self._pipes(command, rows, cols)
        try:
            proc = k.start(argv, env, where, user.name, user.who, fds, command.id)
        except OSError as error:
            missing = error.errno == errno.ENOENT
            text = f"{argv[0]}: {'not found' if missing else error.strerror}\n".encode("latin-1")
            merged = flags & (SpawnFlag.MERGE | SpawnFlag.PTY)
            command.rings[0 if merged else 1].add(text, drop=False)
            command.code, command.exited, command.pid = 127 if missing else 126, True, k.claim_pid()
        else:
            command.pid = proc.pid
            if command.tty:
                k.state.ttys[command.tty].session = proc.pid
        state.commands.append(command)
        self.bind(command, number)
        opened = Packer().u32(command.pid).u32(command.id).done()
        self.emit(Type.OPENED, number, opened, chan=Op.SPAWN)

    def _login(self, user: User, pty: bool) -> dict[str, str]:
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": user.home,
            "USER": user.name,
            "LOGNAME": user.name,
            "SHELL": user.shell,
        }
        if self.state.fork_id:
            env["FORKYARD_FORK_ID"] = self.state.fork_id
        return env | ({"TERM": "xterm-256color"} if pty else {})

    def _directory(self, cwd: str, user: User) -> str:
        tree = self.kernel.tree
        try:
            path = tree.resolve(cwd or user.home, "/", user.who)
            if not tree.is_dir(path):
                raise fault(errno.ENOTDIR if tree.exists(path) else errno.ENOENT)
            tree.check(path, user.who, 1)
            return path
        except OSError as error:
            if not cwd and error.errno == errno.ENOENT:
                return "/"
            raise OSError(error.errno, "cannot change to the working directory") from None

    def _pipes(self, command: Command, rows: int, cols: int) -> dict[int, Fd]:
        """The command's descriptors; the agent's own ends are counted already."""
        k = self.kernel
        if command.flags & SpawnFlag.PTY:
            command.tty = command.into = k.new_tty(rows, cols)
            command.outs = [k.state.ttys[command.tty].out, 0]
            return dict.fromkeys((0, 1, 2), Fd("tty", command.tty))
        fds = {0: Fd("null")}
        if command.flags & SpawnFlag.STDIN:
            command.into = k.new_pipe()
            k.pipe(command.into).writers = 1
            fds[0] = Fd("pipe", command.into)
        count = 1 if command.flags & SpawnFlag.MERGE else 2
        command.outs = [k.new_pipe() for _ in range(count)]
        for number in command.outs:
            k.pipe(number).readers = 1
        fds[1] = Fd("pipe", command.outs[0], writes=True)
        fds[2] = Fd("pipe", command.outs[-1], writes=True)
        return fds

    def bind(self, command: Command, number: int) -> None:
        """Make a stream the command's reader."""
        command.stream = number
        self.streams[number] = CommandStream(self, command, number)

    def adopt(self, number: int, u: Unpacker) -> None:
        """A new reader for a command: output goes on where it says."""
        pid, offsets = u.u32(), (u.u64(), u.u64())
        command = next((c for c in reversed(self.state.commands) if c.pid == pid), None)
        if command is None:
            raise OSError(errno.ESRCH, "no such command")
        if command.stream in self.streams:
            old, command.stream = command.stream, 0
            self.emit(Type.RESET, old)
            self.drop(old)
        command.drop = command.exit_sent = False
        for ring, offset in zip(command.rings, offsets, strict=True):
            ring.acknowledge(offset)
            ring.sent = ring.start
        self.bind(command, number)
        self.streams[number].limits[:] = [0, *(ring.start + wire.WINDOW for ring in command.rings)]
        self.emit(Type.OPENED, number, command.opened(), chan=Op.ADOPT)
        at = command.stdin_seen - len(command.stdin)
        self.acknowledge(number, at, at + wire.WINDOW)

    def free(self, command: Command) -> None:
        """Forget a command."""
        self.state.commands.remove(command)
        command.close_stdin(self.kernel)
        self.state.discards += [number for number in command.outs if number]

    def _exited(self, proc: Proc) -> None:
        for command in self.state.commands:
            if command.pid == proc.pid and not command.exited:
                command.ended(self.kernel, proc)

    def signal_command(self, command: Command, number: int, scope: int) -> None:
        k = self.kernel
        if scope == Scope.TREE:
            command.kill_tree(k)
        elif not command.exited:
            for proc in list(k.procs.values()):
                if proc.pid == command.pid or (scope == Scope.GROUP and proc.pgrp == command.pid):
                    k.deliver(proc, number)

    def kill_largest(self) -> bytes:
        k = self.kernel
        living = [proc for proc in k.procs.values() if not proc.dead]
        worst = max(living, key=lambda proc: proc.rss_kb, default=None)
        if worst is None:
            return Packer().u32(0).u64(0).u32(0).done()
        pid, rss_kb = worst.pid, worst.rss_kb
        command = next((c for c in self.state.commands if c.id == worst.command and not c.exited), None)
        if command is not None:
            command.oom = True
        k.deliver(worst, signal.SIGKILL)
        if command is not None and not command.flags & (SpawnFlag.PTY | SpawnFlag.STDIN):
            command.kill_tree(k)
        return Packer().u32(pid).u64(rss_kb).u32(command.pid if command else 0).done()


def _text(u: Unpacker, limit: int = 4096) -> str:
    return u.str(limit).decode("latin-1")
