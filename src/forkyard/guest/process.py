"""One command in a guest: its output by offset, its stdin by credit, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forkyard import wire
from forkyard.errors import (
    ConflictError,
    DeadlineError,
    ForkyardError,
    InvalidRequestError,
    UnavailableError,
)
from forkyard.guest.channel import Channel
from forkyard.guest.request import error_of
from forkyard.wire import Frame, Packer, Scope, SpawnFlag, Type, Unpacker, WireError

OUTPUT_WINDOW = 1 << 20
STALL_S = 30.0
ACK_EVERY = 128 << 10
# What came in several frames is given on in pieces of at most this.
JOINED = 256 << 10
# Of what a reader passed on, the last may lie in this process: a piece, and what a connection writes behind.
ON_THE_WAY = JOINED + (128 << 10)
KINDS: dict[int, Literal["stdout", "stderr"]] = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """One command.

    Attributes:
        argv: Program and arguments; a program without a slash is looked up in ``env``'s PATH.
        env: The environment. PATH, HOME, USER, LOGNAME, SHELL and (PTY) TERM are added where absent.
        cwd: Working directory; None is the user's home.
        user: A name, ``uid`` or ``uid:gid``.
        stdin: ``"none"`` is /dev/null. ``pty`` implies a stdin.
        merge: stderr goes where stdout goes.
        nofile: Limit of open files, hard and soft.
        tag: Up to 64 bytes of the daemon's own, given back when it attaches again.
        detached: Never wait for a reader: the oldest output is dropped instead.
    """

    argv: list[str] | list[bytes]
    env: dict[str, str]
    cwd: str | None = None
    user: str = "root"
    pty: bool = False
    rows: int = 24
    cols: int = 80
    stdin: Literal["none", "pipe"] = "none"
    merge: bool = False
    nofile: int | None = None
    tag: bytes = b""
    detached: bool = False

    def encode(self) -> bytes:
        flags = (
            (SpawnFlag.PTY if self.pty else 0)
            | (SpawnFlag.MERGE if self.merge else 0)
            | (SpawnFlag.STDIN if self.stdin == "pipe" and not self.pty else 0)
            | (SpawnFlag.DETACHED if self.detached else 0)
        )
        p = Packer().u32(flags).u16(_size(self.rows)).u16(_size(self.cols)).u32(self.nofile or 0)
        p.str(_bytes(self.user)).str(_bytes(self.cwd or "")).str(self.tag[:64])
        p.u32(len(self.argv))
        for arg in self.argv:
            p.str(_bytes(arg))
        p.u32(len(self.env))
        for key, value in self.env.items():
            if not key or "=" in key:
                raise InvalidRequestError(f"{key!r} is no name for an environment variable")
            p.str(_bytes(f"{key}={value}"))
        payload = p.done()
        if len(payload) > wire.MAX_REQUEST:
            raise InvalidRequestError(
                f"arguments and environment have {len(payload)} bytes, {wire.MAX_REQUEST} are possible",
                hint="pass long data through stdin or a file",
            )
        return payload


def _bytes(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise InvalidRequestError("a NUL byte in an argument, a path or the environment")
    return data


def _size(n: int) -> int:
    return min(max(n, 1), 65535)


class Output(NamedTuple):
    """A piece of output that begins ``offset`` bytes after the stream's start. ``gap`` stands for
    ``missing`` bytes of ``stream`` that were no longer kept; output goes on at ``offset``."""

    kind: Literal["stdout", "stderr", "gap"]
    offset: int
    data: bytes
    stream: Literal["stdout", "stderr"]
    missing: int = 0


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """``code`` is 128 + ``signal`` for a command that a signal ended. ``max_rss_mb`` is 0 where unknown.
    ``crowded``: it was ended because it had too many processes."""

    code: int
    signal: int | None
    cpu_ms: float
    max_rss_mb: float
    oom: bool
    crowded: bool = False


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """One line of the agent's table: a command that it still keeps, running or not."""

    pid: int
    id: int
    pty: bool
    detached: bool
    exited: bool
    code: int
    signal: int
    stdout_start: int
    stdout_end: int
    stderr_start: int
    stderr_end: int
    stdin_received: int
    tag: bytes

    @classmethod
    def read(cls, u: Unpacker) -> KnownProcess:
        pid, number, flags = u.u32(), u.u32(), u.u32()
        out_start, out_end, err_start, err_end, stdin = (u.u64() for _ in range(5))
        code, sig, tag = u.u32(), u.u32(), u.str(64)
        return cls(
            pid=pid,
            id=number,
            pty=bool(flags & SpawnFlag.PTY),
            detached=bool(flags & SpawnFlag.DETACHED),
            exited=bool(flags & SpawnFlag.EXITED),
            code=code & 0xFF,
            signal=sig & 0x7F,
            stdout_start=out_start,
            stdout_end=out_end,
            stderr_start=err_start,
            stderr_end=err_end,
            stdin_received=stdin,
            tag=tag,
        )


class GuestProcess:
    """A command that this daemon is attached to. Made by ``Guest.spawn`` and ``Guest.process``.

    Output is acknowledged as it is taken from :meth:`output`, so a reader that stops holds the
    command up and nothing else. Every method raises SandboxLostError once the machine is gone.
    """

    def __init__(self, channel: Channel, *, stdin: bool) -> None:
        self._channel = channel
        self.stream = channel.open(self)
        self.pid = 0
        self.id = 0
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: deque[Output] = deque()
        self._wake = asyncio.Event()
        self._seen = [0, 0, 0]
        self._taken = [0, 0, 0]
        self._acked = [0, 0, 0]
        self._limit = [0, wire.WINDOW, wire.WINDOW]
        self._final = [0, 0, 0]
        self._status: ExitStatus | None = None
        self._error: ForkyardError | None = None
        self._released = False
        self._holding = False
        self._has_stdin = stdin
        self._stdin_open = stdin
        self._sent = 0
        self._unheard = bytearray()  # input sent that the agent has not yet said it took
        self._eof_sent = False
        self._suspended = False  # between two epochs: what is asked of it meanwhile waits
        self._waiting: list[tuple[Type, bytes, int]] = []
        self._stdin_limit = wire.WINDOW if stdin else 0
        self._credit = asyncio.Event()

    # ---- what the agent says

    def on_frame(self, frame: Frame) -> None:
        u = Unpacker(frame.payload)
        if frame.type == Type.DATA:
            self._on_data(frame)
        elif frame.type == Type.ACK:
            if frame.chan != wire.STDIN:
                raise WireError("credit for a stream that the guest writes")
            taken, limit = u.u64(), u.u64()
            first = self._sent - len(self._unheard)
            del self._unheard[: max(0, min(taken, self._sent) - first)]
            if limit > self._stdin_limit:
                self._stdin_limit = min(limit, self._sent + (64 << 20))
                self._credit.set()
        elif frame.type == Type.EXIT:
            if self._status is not None:
                return  # said again after a new epoch; the first one counts
            code, sig, flags, cpu_us, rss_kb = u.u32(), u.u32(), u.u32(), u.u64(), u.u64()
            self._final = [0, u.u64(), u.u64()]
            sig &= 0x7F
            self._status = ExitStatus(
                code=128 + sig if sig else code & 0xFF,
                signal=sig or None,
                cpu_ms=cpu_us / 1000,
                max_rss_mb=rss_kb / 1024,
                oom=bool(flags & 1),
                crowded=bool(flags & 2),
            )
            self._end_stdin()
            self._wake.set()
            self._channel.go_on()
        elif frame.type == Type.OPENED:
            self._on_opened(frame, u)
        elif frame.type == Type.EOF:
            self._end_stdin()
        elif frame.type == Type.END:
            self.fail(error_of(u) or UnavailableError("the agent ended the stream"))
            self._channel.forget(self.stream)
        elif frame.type == Type.RESET:
            self.fail(ConflictError("another reader attached to this process"))
            self._channel.forget(self.stream)
        elif frame.type != Type.ERROR:
            raise WireError(f"a frame of type {frame.type} for a process")

    def _on_opened(self, frame: Frame, u: Unpacker) -> None:
        self.pid, self.id = u.u32(), u.u32()
        if frame.chan == wire.Op.ADOPT:
            u.u32()
            for chan in (wire.STDOUT, wire.STDERR):
                start = u.u64()
                if start > 1 << 62:
                    raise WireError("an impossible offset")
                if start > self._seen[chan]:
                    self._gap(chan, start)
                self._acked[chan] = start
                self._limit[chan] = start + wire.WINDOW
            received = u.u64()
            self._suspended = False
            if not self._released:
                self._resume_input(received)
                for chan in (wire.STDOUT, wire.STDERR):
                    self._grant(chan, self._acked[chan] if self._holding else self._taken[chan])
            waiting, self._waiting = self._waiting, []
            for type_, payload, chan in waiting:
                self._channel.send(wire.encode(type_, self.stream, frame.epoch, payload, chan=chan))
            if self._released:
                # Let go of while the epoch began: only what was still to be said brought it here.
                self._channel.forget(self.stream)
        if not self._opened.done():
            self._opened.set_result(None)

    def _on_data(self, frame: Frame) -> None:
        kind = KINDS.get(frame.chan)
        if kind is None or len(frame.payload) < 8:
            raise WireError("data of no stream")
        offset = int.from_bytes(frame.payload[:8], "little")
        data = frame.payload[8:]
        chan, end = frame.chan, offset + len(data)
        if end > self._limit[chan]:
            if offset - self._seen[chan] < len(data) or offset > 1 << 62:
                raise WireError("more data than was asked for")
            self._limit[chan] = end  # a gap: what was dropped counts as sent
        seen = self._seen[chan]
        if end <= seen:
            return
        if offset < seen:
            data, offset = data[seen - offset :], seen
        if offset > seen:
            self._gap(chan, offset)
        self._seen[chan] = end
        self._queue.append(Output(kind, offset, data, kind))
        self._wake.set()

    def _resume_input(self, received: int) -> None:
        """After a new epoch: say again what was on the way when the old one ended."""
        rest = bytes(self._unheard[max(0, received - self._sent + len(self._unheard)) :])
        self._stdin_limit, self._sent, self._unheard = 0, received, bytearray()
        for i in range(0, len(rest), wire.MAX_DATA):
            self._send_input(rest[i : i + wire.MAX_DATA])
        if self._eof_sent and self._has_stdin:
            self._send(Type.EOF, chan=wire.STDIN)

    def _send_input(self, data: bytes) -> None:
        epoch = self._channel.epoch
        self._channel.send(wire.encode_data(self.stream, epoch, wire.STDIN, self._sent, data))
        self._sent += len(data)
        self._unheard += data

    def _gap(self, chan: int, until: int) -> None:
        self._queue.append(Output("gap", until, b"", KINDS[chan], until - self._seen[chan]))
        self._seen[chan] = until
        self._wake.set()

    def fail(self, error: ForkyardError) -> None:
        if self._error is None and not (self._released and self._status):
            self._error = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        self._end_stdin()
        self._wake.set()

    def _end_stdin(self) -> None:
        self._stdin_open = False
        self._credit.set()

    def _send(self, type_: Type, payload: bytes = b"", *, chan: int = 0) -> None:
        if self._error is not None:
            raise self._error
        if self._suspended:
            self._waiting.append((type_, payload, chan))
            return
        self._channel.send(wire.encode(type_, self.stream, self._channel.epoch, payload, chan=chan))

    # ---- for Guest

    def suspend(self) -> None:
        """A new epoch begins, and :meth:`rebind` will follow: readers and writers wait."""
        self._channel.forget(self.stream)
        self._suspended = True
        self._stdin_limit = 0  # nothing leaves before the agent has said what it has

    def rebind(self) -> tuple[int, bytes]:
        """A new stream in a new epoch, and the ADOPT request that goes on where this reader is."""
        self.stream = self._channel.open(self)
        self._opened = asyncio.get_running_loop().create_future()
        self._stdin_open = self._has_stdin and self._status is None and not self._eof_sent
        return self.stream, self.adopt_request()

    def start_at(self, stdout: int, stderr: int) -> None:
        self._seen = [0, stdout, stderr]
        self._taken = [0, stdout, stderr]
        self._acked = [0, stdout, stderr]

    def adopt_request(self) -> bytes:
        """What was not acknowledged is kept on, and comes once more."""
        return Packer().u32(self.pid).u64(self._acked[1]).u64(self._acked[2]).done()

    async def opened(self) -> None:
        await self._opened

    @property
    def finished(self) -> bool:
        return self._released or self._complete()

    # ---- reading

    def _grant(self, chan: int, delivered: int) -> None:
        if self._suspended:
            return  # granted anew by the next OPENED
        self._acked[chan] = delivered
        self._limit[chan] = max(self._limit[chan], self._taken[chan] + OUTPUT_WINDOW)
        self._credit_for(chan, delivered)

    def _credit_for(self, chan: int, delivered: int) -> None:
        if self._suspended:
            return
        payload = delivered.to_bytes(8, "little") + self._limit[chan].to_bytes(8, "little")
        self._channel.send(wire.encode(Type.ACK, self.stream, self._channel.epoch, payload, chan=chan))

    def _took(self, item: Output) -> None:
        chan = wire.STDOUT if item.stream == "stdout" else wire.STDERR
        self._taken[chan] = item.offset + len(item.data)
        due = self._taken[chan] - self._acked[chan] >= ACK_EVERY
        if self._complete() or self._released or self._error is not None:
            return
        if not self._holding:
            if due:
                self._grant(chan, self._taken[chan])
        elif self._taken[chan] * 2 > self._limit[chan] < self._acked[chan] + OUTPUT_WINDOW:
            self._limit[chan] = self._acked[chan] + OUTPUT_WINDOW
            self._credit_for(chan, self._acked[chan])

    def _complete(self) -> bool:
        """Whether the command has ended and all of its output has arrived."""
        return self._status is not None and all(a >= b for a, b in zip(self._seen, self._final, strict=True))

    async def output(self) -> AsyncIterator[Output]:
        """The output until the command has ended. One reader at a time. After it the agent may forget
        the command, unless :meth:`hold` was called: then :meth:`release` says when.

        Raises:
            SandboxLostError: the machine died. DeadlineError: the agent owes output and sends none.
            ConflictError: another reader took over, or :meth:`detach` was called.
            UnavailableError: the agent ended the stream.
        """
        while True:
            while self._queue:
                item = self._next()
                yield item
                self._took(item)
            if self._complete():
                if not self._holding:
                    self._release()
                return
            if self._error is not None:
                raise self._error
            self._wake.clear()
            try:
                async with asyncio.timeout(STALL_S if self._status is not None else None):
                    await self._wake.wait()
            except TimeoutError:
                raise DeadlineError("the agent owes output of a command that ended") from None

    def _next(self) -> Output:
        """The first of the queue, with what follows it in the same stream."""
        first = self._queue.popleft()
        parts, size = [first.data], len(first.data)
        while first.kind != "gap" and self._queue and self._queue[0].kind == first.kind:
            size += len(self._queue[0].data)
            if size > JOINED:
                break
            parts.append(self._queue.popleft().data)
        return first if len(parts) == 1 else first._replace(data=b"".join(parts))

    async def wait(self) -> ExitStatus:
        """The exit status, as soon as there is one. Output may be read before, meanwhile or after it;
        a reader that wants no more of it calls :meth:`detach`."""
        while self._status is None:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        if self._complete() and not self._holding:
            self._release()
        return self._status

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        if self._error is None and self._channel.error is None:
            self._send(Type.RELEASE)
        self._channel.forget(self.stream)

    @property
    def status(self) -> ExitStatus | None:
        """The exit status, or None while it runs (or its end has not come here yet)."""
        return self._status

    def hold(self) -> None:
        """From now on output is acknowledged by :meth:`acknowledge` alone, so that the agent keeps
        what was taken from :meth:`output` until it is safe somewhere."""
        self._holding = True

    @property
    def unacknowledged(self) -> int:
        """Bytes of output taken and not acknowledged; at 1 MiB of a stream the command waits."""
        return self._taken[1] - self._acked[1] + self._taken[2] - self._acked[2]

    def acknowledge(self) -> None:
        """Let the agent forget the output that was taken so far."""
        self._acknowledge(0, 1)

    def acknowledge_older(self) -> None:
        """The same, from time to time, but for what may still be on its way: see :data:`ON_THE_WAY`."""
        self._acknowledge(ON_THE_WAY, ACK_EVERY)

    def _acknowledge(self, but: int, least: int) -> None:
        if not self._complete() and not self._released and self._error is None:
            for chan in (wire.STDOUT, wire.STDERR):
                if self._taken[chan] - but - self._acked[chan] >= least:
                    self._grant(chan, self._taken[chan] - but)

    def release(self) -> None:
        """Let the agent forget an ended command, its output and status."""
        if self._status is not None:
            with contextlib.suppress(ForkyardError):
                self._release()

    def leave(self) -> None:
        """Stop reading and let the agent keep everything: what was not acknowledged, and the end."""
        self._channel.forget(self.stream, reset=True)

    def abandon(self) -> None:
        """End it with all its descendants and hear no more of it."""
        with contextlib.suppress(ForkyardError):
            self.kill_tree()
        self.detach()

    def detach(self) -> None:
        """Let go of it. One that runs does so still, its recent output is kept for whoever attaches
        next; of one that has ended the agent forgets the rest."""
        if not self._released:
            self._release()
            self._error = self._error or ConflictError("this reader let go of the process")
            self._end_stdin()
            self._wake.set()

    # ---- writing

    async def write(self, data: bytes) -> None:
        """Send to its stdin, as fast as it reads. Ends silently where nobody reads it any more."""
        view = memoryview(data)
        while view:
            await self._channel.room()
            if self._error is not None:
                raise self._error
            if not self._stdin_open:
                return
            credit = self._stdin_limit - self._sent
            if credit <= 0:
                self._credit.clear()
                await self._credit.wait()
                continue
            n = min(len(view), credit, wire.MAX_DATA)
            self._send_input(bytes(view[:n]))
            view = view[n:]

    def close_stdin(self) -> None:
        """End of file for its stdin (Ctrl-D for a PTY). Idempotent."""
        if self._stdin_open and self._error is None:
            self._stdin_open = False
            self._eof_sent = True
            self._send(Type.EOF, chan=wire.STDIN)

    def resize(self, rows: int, cols: int) -> None:
        self._send(Type.RESIZE, Packer().u16(_size(rows)).u16(_size(cols)).done())

    def signal(self, number: int, *, scope: Scope = Scope.GROUP) -> None:
        """Send a signal to its process group, or to the process alone.

        Raises:
            InvalidRequestError: no such signal.
        """
        if number < 0 or number >= signals.NSIG:
            raise InvalidRequestError(f"there is no signal {number}")
        if self._status is None:
            self._send(Type.SIGNAL, Packer().u32(number).u8(scope).done())

    def kill_tree(self) -> None:
        """SIGKILL for it and all that descends from it, other sessions included. Its exit follows."""
        self._send(Type.SIGNAL, Packer().u32(9).u8(Scope.TREE).done())
