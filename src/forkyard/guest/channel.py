"""The daemon's end of one guest's wire: two FIFOs, epochs, and frames to and from streams.

A FIFO that the daemon holds open for reading and writing never reports that the other end
died, so the owner of the machine says so (:meth:`Channel.lost`). Whatever a guest sends is
checked: frames for streams that were never opened, of unknown types or over a limit are
violations. The first violation opens a new epoch, the next one loses the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from forkyard.errors import DeadlineError, ForkyardError, SandboxLostError, UnavailableError
from forkyard.wire import (
    MORE,
    NONCE_BYTES,
    Decoder,
    Frame,
    Packer,
    Type,
    WireError,
    encode,
    encode_attach,
)

# A turn's worth of one guest's output: whoever floods the daemon keeps others waiting for no more.
READ_BYTES = 128 << 10
TURN_S = 0.002
BACKLOG_BYTES = 1 << 20
# Several frames: fewer turns between the two sides for the same bytes. While a file moves, more.
PIPE_BYTES = 256 << 10
WIDE_BYTES = 1 << 20
PARTS = 16
MAX_MESSAGE = 8 << 20
FORGIVEN_S = 60.0
# Bulk data waits for its turn while more than this is queued, so that a command never waits long.
BULK_BYTES = 64 << 10
# A command that begins goes first: connections that carry much stand still until it ends, or this
# long, and then stand no more for a while. Not the wire is short then, but the guest's CPU.
HOLD_S, REST_S = 0.1, 0.05
# What a guest may have open at a time. An agent keeps to less.
MAX_OPENED = 512
_STRAY = frozenset({Type.OPENED, Type.END, Type.RESET, Type.DATA, Type.EOF, Type.ACK, Type.EXIT, Type.ERROR})


class Stream(Protocol):
    """What receives a stream's frames. ``on_frame`` raises WireError for what it refuses."""

    def on_frame(self, frame: Frame) -> None: ...

    def fail(self, error: ForkyardError) -> None: ...


Opener = Callable[[Frame], "Stream | None"]


class Channel:
    """See the module. ``on_violation`` is called once per forgiven violation, with its reason,
    ``on_lost`` once at the end, whoever brought it about."""

    def __init__(
        self,
        to_guest: int,
        from_guest: int,
        *,
        box: str,
        on_violation: Callable[[str], None],
        on_lost: Callable[[ForkyardError], None],
    ) -> None:
        self._to = to_guest
        self._from = from_guest
        self.box = box
        self._on_violation = on_violation
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder = Decoder()
        self._frames: Iterator[Frame] = iter(())
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._later: list[bytes] | None = None  # frames held back while the wire is quiet
        self._writing = False
        self._wide = 0
        self._room = asyncio.Event()
        self._room.set()
        self._streams: dict[int, Stream] = {}
        # Answers streams that the guest opens; None for one that ended with the answer.
        self.opener: Opener | None = None
        self._guests = 0
        self._guest_last = 0
        self._turns: deque[asyncio.Future[None]] = deque()
        self._calm = asyncio.Event()
        self._calm.set()
        self._hold: asyncio.TimerHandle | None = None
        self._hold_again = 0.0
        self._partial: dict[tuple[int, int], list[bytes]] = {}
        self._partial_bytes = 0
        self._next = 1
        self._hello: asyncio.Future[bytes] | None = None
        self._pings: dict[int, asyncio.Future[bytes]] = {}
        self._quiesced: asyncio.Future[None] | None = None
        self._violated_at: float | None = None
        self.epoch = 0
        self.error: ForkyardError | None = None

    # ---- life

    def start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for fd in (self._to, self._from):
                os.set_blocking(fd, False)
            self._pipes(PIPE_BYTES)
            self._loop.add_reader(self._from, self._readable)

    def widen(self) -> None:
        """A file moves: the pipes hold more until :meth:`narrow`, which is called once for each call."""
        self._wide += 1
        if self._wide == 1:
            self._pipes(WIDE_BYTES)

    def narrow(self) -> None:
        self._wide -= 1
        if self._wide == 0 and self.error is None:
            self._pipes(PIPE_BYTES)

    def _pipes(self, size: int) -> None:
        for fd in (self._to, self._from):
            # Beyond what an ordinary user may have, or still full: it works as it is.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)

    def close(self) -> None:
        """Stop listening and fail what waits. The descriptors are the owner's."""
        self.lost(SandboxLostError("the channel to the sandbox was closed", cause="host"))

    def lost(self, error: ForkyardError) -> None:
        """The machine is gone: everything that waits, and every later call, gets ``error``."""
        if self.error is not None:
            return
        self.error = error
        if self._loop is not None:
            self._loop.remove_reader(self._from)
            if self._writing:
                self._loop.remove_writer(self._to)
        self._writing = False
        self._out.clear()
        self._out_bytes = 0
        self._room.set()
        self.go_on()
        self._fail_all(error, streams=True)
        self._on_lost(error)

    def _fail_all(self, error: ForkyardError, *, streams: bool) -> None:
        waiting: list[asyncio.Future] = [*self._pings.values()]
        if self._hello is not None:
            waiting.append(self._hello)
        if self._quiesced is not None:
            waiting.append(self._quiesced)
        self._pings.clear()
        self._hello = self._quiesced = None
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waited may have gone: no warning for that
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)
        self._turns.clear()
        if streams:
            held = list(self._streams.values())
            self._streams.clear()
            self._guests = self._guest_last = 0
            for stream in held:
                stream.fail(error)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self._loop is None:
            raise UnavailableError(f"nobody is attached to sandbox {self.box}")

    # ---- epochs

    async def attach(self, timeout_s: float) -> bytes:
        """Open a new epoch; the payload of the agent's HELLO.

        Every stream of the former epoch ends with UnavailableError.

        Raises:
            DeadlineError: no answer in time. SandboxLostError: the machine is gone.
        """
        self.start()
        self._check()
        assert self._loop is not None
        self._fail_all(
            UnavailableError("the channel to the sandbox was opened anew", retryable=True), streams=True
        )
        self._partial.clear()
        self._partial_bytes = 0
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.epoch = secrets.randbits(32) or 1
        self._decoder.hunt(nonce)
        # A frame that is half written has to be left half written: the zeros end it.
        self._out.clear()
        self._out_bytes = 0
        self._later = None
        self._room.set()
        hello = self._hello = self._loop.create_future()
        self.send(encode_attach(self.epoch, nonce))
        try:
            async with asyncio.timeout(timeout_s):
                return await hello
        except TimeoutError:
            raise DeadlineError(
                f"the agent of {self.box} did not answer within {timeout_s:g} s", retryable=True
            ) from None
        finally:
            if self._hello is hello:
                self._hello = None
            if hello.cancelled():
                # The answer may come yet (a guest that stood still goes on): nobody waits for it.
                self._decoder.hunt(secrets.token_bytes(NONCE_BYTES))

    def violation(self, why: str) -> None:
        """The guest broke the protocol: forgive it once (a new epoch), else it is lost."""
        now = time.monotonic()
        if self._violated_at is not None and now - self._violated_at < FORGIVEN_S:
            self.lost(SandboxLostError(f"the guest broke the wire protocol: {why}", cause="guest"))
            return
        self._violated_at = now
        self._decoder.hunt(secrets.token_bytes(NONCE_BYTES))  # deaf until the next attach
        self._on_violation(why)

    # ---- out

    def send(self, *frames: bytes) -> None:
        """Queue frames; they leave in this order, at once where the pipe has room."""
        self._check()
        if self._later is not None:
            self._later.extend(frames)
            self._room.clear()
            return
        for frame in frames:
            self._out.append(memoryview(frame))
            self._out_bytes += len(frame)
        if not self._writing:
            self._writable()
        if self._out_bytes > BACKLOG_BYTES:
            self._room.clear()

    async def room(self) -> None:
        """Wait until the queue is short enough for more bulk data."""
        self._check()
        await self._room.wait()
        self._check()

    async def turn(self) -> None:
        """Wait until it is this sender's turn to send one frame of bulk data."""
        self._check()
        if self._turns or self._out_bytes > BULK_BYTES or self._later is not None:
            assert self._loop is not None
            turn: asyncio.Future[None] = self._loop.create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done():
                    self._next_turn()
                raise
            self._check()

    def hold(self) -> None:
        """A command begins: see :data:`HOLD_S`."""
        self._check()
        assert self._loop is not None
        now = self._loop.time()
        if now >= self._hold_again:
            self._hold_again = now + HOLD_S + REST_S
            self._calm.clear()
            self._hold = self._loop.call_later(HOLD_S, self.go_on)

    def go_on(self) -> None:
        """The command has ended."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
            self._calm.set()

    async def calm(self) -> None:
        """Wait while a command goes first."""
        await self._calm.wait()

    def _next_turn(self) -> None:
        """One at a time: whoever is woken has sent its frame when this looks again."""
        while self._turns and self._out_bytes <= BULK_BYTES and self._later is None:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                assert self._loop is not None
                self._loop.call_soon(self._next_turn)
                return

    def _writable(self) -> None:
        assert self._loop is not None
        try:
            while self._out:
                n = os.writev(self._to, list(itertools.islice(self._out, PARTS)))
                self._out_bytes -= n
                while n and n >= len(self._out[0]):
                    n -= len(self._out.popleft())
                if n:
                    self._out[0] = self._out[0][n:]
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._loop.add_writer(self._to, self._writable)
                self._writing = True
        except OSError as e:
            self.lost(SandboxLostError(f"cannot write to the sandbox: {e.strerror}", cause="unknown"))
            return
        else:
            if self._writing:
                self._loop.remove_writer(self._to)
                self._writing = False
        if self._out_bytes <= BACKLOG_BYTES // 2 and self._later is None:
            self._room.set()
        if self._turns:
            self._next_turn()

    # ---- in

    def _readable(self) -> None:
        try:
            data = os.read(self._from, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self.lost(SandboxLostError(f"cannot read from the sandbox: {e.strerror}", cause="unknown"))
            return
        if not data:
            self.lost(SandboxLostError("the sandbox closed its channel", cause="unknown"))
            return
        self._frames = self._decoder.feed(data)
        self._go_through()

    def _go_through(self) -> None:
        """The frames that were read; those that one turn has no time for, when others had theirs."""
        assert self._loop is not None
        end = time.perf_counter() + TURN_S
        try:
            for frame in self._frames:
                self._dispatch(frame)
                if self.error is not None:
                    return
                if time.perf_counter() > end:
                    self._loop.remove_reader(self._from)
                    self._loop.call_soon(self._next_go)
                    return
        except WireError as e:
            self.violation(str(e))

    def _next_go(self) -> None:
        if self.error is None:
            assert self._loop is not None
            # First, since it may be taken away again.
            self._loop.add_reader(self._from, self._readable)
            self._go_through()

    def _whole(self, frame: Frame) -> Frame | None:
        """Put a message of several frames together."""
        key = (frame.stream, frame.type)
        if not frame.flags & MORE and key not in self._partial:
            return frame
        if frame.type not in (Type.HELLO, Type.END, Type.OPENED):
            raise WireError("a frame in parts where none may be")
        self._partial_bytes += len(frame.payload)
        if self._partial_bytes > MAX_MESSAGE:
            raise WireError("a message is too long")
        parts = self._partial.setdefault(key, [])
        parts.append(frame.payload)
        if frame.flags & MORE:
            return None
        del self._partial[key]
        payload = b"".join(parts)
        self._partial_bytes -= len(payload)
        return frame._replace(payload=payload, flags=0)

    def _dispatch(self, frame: Frame) -> None:
        if frame.epoch != self.epoch or self._decoder.hunting:
            return
        if not frame.intact:
            raise WireError("a frame's checksum is wrong")
        whole = self._whole(frame)
        if whole is None:
            return
        stream = self._streams.get(whole.stream)
        if stream is not None and whole.type in _STRAY:
            stream.on_frame(whole)
        elif whole.type in _STRAY:
            if whole.stream >= self._next if whole.stream & 1 else whole.stream > self._guest_last:
                raise WireError(f"a frame for stream {whole.stream}, which was never opened")
        elif whole.type == Type.OPEN:
            self._opened(whole)
        elif whole.type == Type.HELLO and self._hello is not None:
            if not self._hello.done():
                self._hello.set_result(whole.payload[NONCE_BYTES:])
        elif whole.type == Type.PONG:
            future = self._pings.pop(whole.stream, None)
            if future is not None and not future.done():
                future.set_result(whole.payload)
        elif whole.type == Type.QUIESCED:
            if self._quiesced is not None and not self._quiesced.done():
                self._quiesced.set_result(None)
        else:
            raise WireError(f"a frame of type {whole.type}")

    def _opened(self, frame: Frame) -> None:
        """A stream that the guest opened."""
        if frame.stream & 1 or frame.stream <= self._guest_last:
            raise WireError(f"stream {frame.stream} is not the guest's to open")
        if self._guests >= MAX_OPENED:
            raise WireError(f"more than {MAX_OPENED} streams at a time")
        if self._out_bytes > 4 * BACKLOG_BYTES:
            raise WireError("it asks and does not listen to the answers")
        self._guest_last = frame.stream
        stream = self.opener(frame) if self.opener is not None else None
        if stream is not None:
            self._streams[frame.stream] = stream
            self._guests += 1
        elif self.opener is None:
            self.end(frame.stream, errno.EAGAIN)

    # ---- streams and control

    def end(self, number: int, code: int = 0, text: str = "", result: bytes = b"") -> None:
        """Answer a stream that the guest opened, for good: an errno (0: success) and a result."""
        if self.error is None:
            payload = Packer().u32(code).str(text.encode()[:512]).raw(result).done()
            self.send(encode(Type.END, number, self.epoch, payload))

    def open(self, stream: Stream) -> int:
        """A number for a new stream of ours; its frames go to ``stream`` until :meth:`forget`."""
        self._check()
        number, self._next = self._next, self._next + 2
        self._streams[number] = stream
        return number

    def forget(self, number: int, *, reset: bool = False) -> None:
        """Drop a stream; with ``reset`` the agent is told to do so too."""
        known = self._streams.pop(number, None) is not None
        if known and not number & 1:
            self._guests -= 1
        for key in [k for k in self._partial if k[0] == number]:
            self._partial_bytes -= sum(map(len, self._partial.pop(key)))
        if known and reset and self.error is None:
            self.send(encode(Type.RESET, number, self.epoch))

    async def ping(self, timeout_s: float) -> float:
        """Seconds until the agent's answer.

        Raises:
            DeadlineError: none came in time.
        """
        self._check()
        assert self._loop is not None
        number, self._next = self._next, self._next + 2
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._pings[number] = future
        started = time.perf_counter()
        self.send(encode(Type.PING, number, self.epoch))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            raise DeadlineError(f"the agent did not answer within {timeout_s:g} s", retryable=True) from None
        finally:
            self._pings.pop(number, None)
        return time.perf_counter() - started

    async def quiesce(self, timeout_s: float, *, sync: bool) -> bool:
        """Ask the agent to fall silent, and fall silent too; whether it said so in time."""
        self._check()
        assert self._loop is not None
        future = self._quiesced = self._loop.create_future()
        self.send(encode(Type.QUIESCE, 0, self.epoch, b"\1" if sync else b"\0"))
        if self._later is None:
            self._later = []
        try:
            async with asyncio.timeout(timeout_s):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._quiesced = None

    def unquiesce(self) -> None:
        """Also the frame that makes gVisor look at input which a save found in the pipe."""
        later, self._later = self._later or [], None
        with contextlib.suppress(ForkyardError):
            self.send(encode(Type.UNQUIESCE, 0, self.epoch), *later)
            if self._out_bytes <= BACKLOG_BYTES // 2:
                self._room.set()
            self._next_turn()
