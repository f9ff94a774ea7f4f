"""One HTTP exchange: reading a body, and writing replies, errors and streams of frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from forkyard import errors, verbs
from forkyard.types import Record

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

log = logging.getLogger("forkyard.daemon")

_encode = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    """``value`` in msgpack. A guest's file name that is no UTF-8 is shown with escapes."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_escaped(msgspec.to_builtins(value, builtin_types=(bytes,))))


def encode_json(value: Any) -> bytes:
    try:
        return _encode_json(value)
    except UnicodeEncodeError:
        return _encode_json(_escaped(msgspec.to_builtins(value)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return value


_VERSION = (verbs.VERSION_HEADER.encode(), str(verbs.API_VERSION).encode())
_MSGPACK = (b"content-type", verbs.MSGPACK.encode())
_JSON = (b"content-type", verbs.JSON.encode())
_RESTARTING = (verbs.RESTARTING_HEADER.encode(), b"1")
_CLOSE = (b"connection", b"close")


class ClientGoneError(errors.UnavailableError):
    """The client closed its connection before it had its answer, or before it had sent all."""

    def __init__(self) -> None:
        super().__init__("the client has gone")


@dataclass(frozen=True, slots=True)
class Done:
    """A finished reply: the msgpack of the result, or of an error's wire data. ``retryable``: it
    is no answer for good, so it is not kept for who asks again."""

    status: int
    body: bytes
    retryable: bool = False


RESTARTING = Done(
    503,
    encode(
        errors.to_wire(
            errors.UnavailableError("the daemon is stopping", hint="ask its successor again", retryable=True)
        )
    ),
    retryable=True,
)


def done_with(error: BaseException) -> Done:
    """What to reply for ``error``; one that is not forkyard's own is logged, not told."""
    if not isinstance(error, errors.ForkyardError):
        log.error("a verb failed unexpectedly", exc_info=error)
        error = errors.InternalError(
            f"the daemon failed ({type(error).__name__})", hint="see daemon.log for the details"
        )
    again = error.retryable or isinstance(error, errors.InternalError)
    return Done(verbs.STATUS.get(error.code, 500), encode(errors.to_wire(error)), again)


class Body:
    """The request's body, and after its end the client's presence.

    Attributes:
        complete: All of it has come in.
        headed: It began with a head, so what follows is a stream.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._spare = b""
        self.complete = False
        self.headed = False

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.complete = not message.get("more_body", False)
        return message.get("body", b"")

    async def whole(self, limit: int = verbs.MAX_BODY) -> bytes:
        """All of it. Raises InvalidRequestError beyond ``limit`` bytes."""
        data = await self._next()
        if self.complete:
            return data
        parts, size = [data], len(data)
        while not self.complete:
            data = await self._next()
            parts.append(data)
            size += len(data)
            if size > limit:
                raise errors.InvalidRequestError(
                    f"the request is longer than {limit} bytes", hint="use the streaming calls for large data"
                )
        return b"".join(parts)

    async def head(self, limit: int = 1 << 20) -> bytes:
        """The payload of the frame that it begins with."""
        self.headed = True
        data = b""
        need = 4
        while len(data) < need:
            if self.complete:
                raise errors.InvalidRequestError("the request ends before its head")
            data += await self._next()
            if len(data) >= 4:
                need = 4 + int.from_bytes(data[:4], "big")
                if need > limit:
                    raise errors.InvalidRequestError(f"the request's head is longer than {limit} bytes")
        self._spare = data[need:]
        return data[4:need]

    async def chunks(self) -> AsyncIterator[bytes]:
        """What follows the head, as it comes. Raises ClientGoneError if the client goes."""
        if self._spare:
            data, self._spare = self._spare, b""
            yield data
        while not self.complete:
            if data := await self._next():
                yield data

    async def gone(self) -> None:
        """Returns when the client has gone; what it still sends is dropped."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return
        finally:
            self.complete = True


class Pump:
    """Reads a body on behalf of a command's stdin, so that the client's going is noticed
    whether or not the command reads."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(4)
        self._gone = False

    async def run(self) -> None:
        """Returns when the client has gone."""
        try:
            async for data in self._body.chunks():
                await self._queue.put(data)
            await self._queue.put(None)
            await self._body.gone()
        except ClientGoneError:
            pass
        finally:
            # Also when the command has ended: whoever still reads must not wait for ever.
            self._gone = True
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait(None)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises ClientGoneError where the client went before the end."""
        while (data := await self._queue.get()) is not None:
            yield data
        if self._gone:
            raise ClientGoneError


def _plain(value: Any) -> Any:
    """For JSON, records show their computed fields too."""
    return value.to_dict() if isinstance(value, Record) else value


class Reply:
    """The way back to one client, in the encoding that it wants."""

    def __init__(self, send: Send, *, json: bool = False) -> None:
        self._send = send
        self.json = json
        self.started = False

    async def done(
        self, done: Done, kind: Any = Any, *, close: bool = False, headers: Iterable[Header] = ()
    ) -> None:
        """``kind`` is the type of a result."""
        body = done.body
        if self.json:
            body = encode_json(_plain(msgspec.msgpack.decode(body, type=kind if done.status == 200 else Any)))
        more = [*headers, _RESTARTING] if done is RESTARTING else headers
        await self.bytes(body, done.status, close=close, headers=more)

    async def bytes(
        self, body: bytes, status: int = 200, *, close: bool = False, headers: Iterable[Header] = ()
    ) -> None:
        head = [
            _JSON if self.json else _MSGPACK,
            (b"content-length", b"%d" % len(body)),
            _VERSION,
            *headers,
        ]
        if close:
            head.append(_CLOSE)
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def value(self, value: Any) -> None:
        """A result."""
        await self.bytes(encode_json(_plain(value)) if self.json else encode(value))

    async def begin(self) -> None:
        """Begin a stream of frames (or, in JSON, of lines)."""
        self.started = True
        headers = [_JSON if self.json else _MSGPACK, _VERSION]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def item(self, item: Any) -> None:
        """One item of a stream: bytes as they are, anything else encoded."""
        if self.json:
            data = encode_json(item) + b"\n"
        else:
            data = verbs.frame(item if isinstance(item, bytes | bytearray | memoryview) else encode(item))
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, failed: Done | None = None) -> None:
        """End the stream, or break it off with an error."""
        if failed is None:
            data = b"" if self.json else verbs.END_FRAME
        elif self.json:
            data = encode_json({"error": msgspec.msgpack.decode(failed.body)}) + b"\n"
        else:
            data = verbs.error_frame(failed.body)
        await self._send({"type": "http.response.body", "body": data})
