"""The guest's network on the wire: names that it asks for, connections out of it and into it.

What the guest says is a claim: every connection's target is checked again by whoever serves it.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Protocol

from forkyard import wire
from forkyard.errors import ForkyardError
from forkyard.guest.channel import Channel, Stream
from forkyard.guest.request import error_of
from forkyard.wire import Frame, Op, Packer, Type, Unpacker, Via, WireError

MAX_HOST = 255
MAX_PORTS = 16
ACK_EVERY = 64 << 10
# From here on a connection carries much, and lets commands go first: short answers never wait.
MUCH = 1 << 20
TO_GUEST, FROM_GUEST = 0, 1


class Server(Protocol):
    """What answers a guest's questions and carries its connections. Neither may block."""

    def resolve(self, name: str) -> list[int] | None:
        """The ports of an allowed name (16 at most), or None."""
        ...

    def connect(self, connection: Connection) -> None:
        """Serve ``connection``: accept or refuse it, some time."""
        ...


class Connection:
    """One TCP connection of the guest's: bytes both ways, each with its own end and credit.

    After a reset, a new epoch or the sandbox's death its methods raise ConnectionError; those that
    end it never do.
    """

    def __init__(self, channel: Channel, host: str, port: int, via: Via) -> None:
        self.host = host
        self.port = port
        self.via = via
        self.received = self.sent = 0
        self._channel = channel
        self._number = 0
        self._error: ConnectionError | None = None
        self._parts: deque[bytes] = deque()
        self._granted = wire.WINDOW  # how far the guest may send
        self._consumed = self._acked = 0
        self._limit = wire.WINDOW  # how far we may send
        self._peer_eof = self._over = False
        self._changed = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None

    # -- out of the wire

    def on_frame(self, frame: Frame) -> None:
        if frame.type == Type.DATA:
            self._on_data(frame)
        elif frame.type == Type.EOF:
            if frame.chan != FROM_GUEST or self._peer_eof:
                raise WireError("an unexpected end of a connection")
            self._peer_eof = True
        elif frame.type == Type.ACK:
            u = Unpacker(frame.payload)
            delivered, limit = u.u64(), u.u64()
            if frame.chan != TO_GUEST or delivered > self.sent or limit > delivered + (16 << 20):
                raise WireError("an acknowledgement of what was never sent")
            self._limit = max(self._limit, limit)
        elif frame.type == Type.OPENED and self._opened is not None:
            if not self._opened.done():
                self._opened.set_result(None)
        elif frame.type == Type.RESET or (frame.type == Type.ERROR and self._number):
            self._ended(ConnectionResetError("the guest reset the connection"))
        elif frame.type == Type.END and self._opened is not None:
            error = error_of(Unpacker(frame.payload))
            if error is None:
                self._over = True
                self._ended(ConnectionAbortedError("the connection is over"))
            else:
                self._ended(ConnectionRefusedError(str(error)))
        else:
            raise WireError(f"a frame of type {frame.type} for a connection")
        self._changed.set()

    def _on_data(self, frame: Frame) -> None:
        u = Unpacker(frame.payload)
        offset, data = u.u64(), frame.payload[8:]
        if frame.chan != FROM_GUEST or offset != self.received or self._peer_eof:
            raise WireError("data at the wrong place of a connection")
        self.received += len(data)
        if self.received > self._granted:
            raise WireError("more data than a connection's credit")
        if data:
            self._parts.append(data)

    def fail(self, error: ForkyardError) -> None:
        self._ended(ConnectionResetError(error.message), known=False)
        self._changed.set()

    def _ended(self, error: ConnectionError, *, known: bool = True) -> None:
        """Nothing more may be sent: by the time of the next epoch the number is another's."""
        if self._error is None:
            self._error = error
            if known:
                self._channel.forget(self._number)
            if self._opened is not None and not self._opened.done():
                self._opened.set_exception(error)
                self._opened.exception()

    # -- for whoever serves it

    async def read(self) -> bytes:
        """The next bytes; b"" at their end."""
        while not self._parts:
            if self._peer_eof:
                return b""
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        data = self._parts.popleft()
        self._consumed += len(data)
        if self._error is None and self._consumed - self._acked >= ACK_EVERY:
            self._acked = self._consumed
            self._granted = self._consumed + wire.WINDOW
            payload = Packer().u64(self._consumed).u64(self._granted).done()
            self._send(Type.ACK, payload, FROM_GUEST)
        return data

    async def write(self, data: bytes) -> None:
        """Send all of it, at the pace of the guest and in turn with others."""
        at = 0
        while at < len(data):
            if self._error is not None:
                raise self._error
            room = min(self._limit - self.sent, wire.MAX_DATA, len(data) - at)
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            if self.sent >= MUCH:
                await self._channel.calm()
            try:
                await self._channel.turn()
            except ForkyardError as error:
                raise ConnectionResetError(error.message) from None
            if self._error is None:
                piece = data if room == len(data) else data[at : at + room]
                frame = wire.encode_data(self._number, self._channel.epoch, TO_GUEST, self.sent, piece)
                self.sent += room
                at += room
                self._channel.send(frame)

    def write_eof(self) -> None:
        self._send(Type.EOF, b"", TO_GUEST)

    def accept(self) -> None:
        """Tell the guest that the other side is connected."""
        self._send(Type.OPENED, b"", Op.CONNECT)

    def finish(self, code: int = 0, text: str = "") -> None:
        """The connection is over, or (with an errno) never came to be."""
        if self._error is None:
            self._ended(ConnectionAbortedError("the connection is over"))
            self._channel.end(self._number, code, text)
            self._changed.set()

    def abort(self) -> None:
        """Reset it."""
        if self._error is None:
            self._send(Type.RESET, b"", 0)
            self._ended(ConnectionAbortedError("the connection was cut"))
            self._changed.set()

    def _send(self, type_: int, payload: bytes, chan: int) -> None:
        if self._error is None and self._channel.error is None:
            self._channel.send(wire.encode(type_, self._number, self._channel.epoch, payload, chan=chan))

    @classmethod
    async def into(cls, channel: Channel, port: int, timeout_s: float) -> Connection:
        """A connection to a port inside.

        Raises:
            ConnectionError: nothing listens there, or the sandbox is gone.
        """
        made = cls(channel, "127.0.0.1", port, Via.NAME)
        made._opened = asyncio.get_running_loop().create_future()
        try:
            made._number = channel.open(made)
            request = Packer().u16(port).done()
            channel.send(*wire.encode_request(Op.CONNECT, made._number, channel.epoch, request))
            async with asyncio.timeout(timeout_s):
                await made._opened
        except TimeoutError:
            made.abort()
            raise ConnectionRefusedError(f"port {port} does not answer") from None
        except ForkyardError as error:
            raise ConnectionRefusedError(error.message) from None
        except BaseException:
            made.abort()
            raise
        return made


def opener(channel: Channel, server: Server) -> Callable[[Frame], Stream | None]:
    """What a channel's ``opener`` has to be for ``server`` to serve the guest."""

    def opened(frame: Frame) -> Stream | None:
        u = Unpacker(frame.payload)
        host = u.str(MAX_HOST).decode("ascii", "replace")
        if frame.chan == Op.RESOLVE:
            u.u16()  # the type asked for: addresses are the agent's to make
            ports = server.resolve(host)
            if ports is None:
                channel.end(frame.stream, errno.ENOENT)
            else:
                p = Packer().u32(min(len(ports), MAX_PORTS))
                for port in ports[:MAX_PORTS]:
                    p.u16(port)
                channel.end(frame.stream, result=p.done())
            return None
        if frame.chan != Op.CONNECT:
            raise WireError(f"a request {frame.chan} of the guest's")
        port, via = u.u16(), u.u8()
        if not port or via not in Via._value2member_map_:
            raise WireError("a malformed request for a connection")
        connection = Connection(channel, host, port, Via(via))
        connection._number = frame.stream
        server.connect(connection)
        return connection

    return opened


__all__ = ["Connection", "Server", "opener"]
