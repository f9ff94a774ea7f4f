"""One command over the daemon's unix socket, without the client's imports.

``forkyard exec`` is run by loops and scripts, where 100 ms of imports are most of the time;
this speaks the same requests (see ``forkyard.verbs``) with a socket and msgspec alone. The
process it gives has the interface of the client's ``Process``. Where it cannot serve
(another machine's daemon, no daemon yet), ``spawn`` gives None and the caller uses the client.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from forkyard import config, errors

# As in forkyard.verbs, whose import costs more than all of this; a test holds them together.
API_VERSION = "1"
VERSION_HEADER = "forkyard-wire"
ERROR_BIT = 0x8000_0000

CUT_OFF = "the daemon's connection ended in the middle of a reply"

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.decode


class Chunk(NamedTuple):
    kind: str
    data: bytes


def spawn(sandbox: str, command: str | list[str], *, request_id: str, **options: Any) -> Process | None:
    """Start ``command``, or None if no daemon of this version listens here.

    Raises:
        ForkyardError: what the daemon said.
    """
    settings = config.load()
    if settings.url:
        return None
    what = {"command": command} if isinstance(command, str) else {"argv": command}
    request = {"sandbox": sandbox, "request_id": request_id, **what, **options}
    try:
        connection = Connection(str(settings.socket))
    except OSError:
        return None
    try:
        headers = connection.start("spawn", request)
        if headers.get(VERSION_HEADER) == API_VERSION:
            return Process(settings, sandbox, connection)
    except OSError:
        # The client asks again; by the request id, the command is started once.
        pass
    except errors.UnavailableError as error:
        if not error.retryable:
            raise
    connection.close()
    return None


class Connection:
    """One HTTP/1.1 connection over a unix socket, one exchange at a time."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._spare = b""
        self._headers: dict[str, str] = {}

    def close(self) -> None:
        self._socket.close()

    def post(self, verb: str, request: dict[str, Any]) -> tuple[int, dict[str, str]]:
        """Send a request; its reply's status and headers. The body is left for :meth:`body`."""
        data = encode(request)
        head = (f"POST /v1/{verb} HTTP/1.1\r\nhost: forkyard\r\naccept: application/msgpack\r\n"
                f"content-type: application/msgpack\r\ncontent-length: {len(data)}\r\n\r\n")
        self._socket.sendall(head.encode() + data)
        while b"\r\n\r\n" not in self._spare:
            self._more()
        text, _, self._spare = self._spare.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return int(first.split()[1]), self._headers

    def start(self, verb: str, request: dict[str, Any]) -> dict[str, str]:
        """Send a request and read its reply's head. Raises what the daemon said went wrong."""
        status, headers = self.post(verb, request)
        if status != 200:
            raise errors.from_wire(decode(b"".join(self.body())))
        return headers

    def body(self) -> Iterator[bytes]:
        """The reply's body as it comes."""
        if self._headers.get("transfer-encoding") != "chunked":
            yield self._take(int(self._headers.get("content-length", "0")))
            return
        while True:
            while b"\r\n" not in self._spare:
                self._more()
            length, _, self._spare = self._spare.partition(b"\r\n")
            left = int(length, 16)
            if left == 0:
                self._take(2)
                return
            while left:
                if not self._spare:
                    self._more()
                piece, self._spare = self._spare[:left], self._spare[left:]
                left -= len(piece)
                yield piece
            self._take(2)

    def call(self, verb: str, request: dict[str, Any]) -> Any:
        """One whole exchange. Raises what the daemon said."""
        self.start(verb, request)
        return decode(b"".join(self.body()))

    def _take(self, count: int) -> bytes:
        while len(self._spare) < count:
            self._more()
        data, self._spare = self._spare[:count], self._spare[count:]
        return data

    def _more(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise errors.UnavailableError(CUT_OFF, retryable=True)
        self._spare += data


class Process:
    """A command in a sandbox: its output, and what may be sent to it from other threads."""

    def __init__(self, settings: config.Settings, sandbox: str, connection: Connection) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._connection = connection
        self._events = events(connection)
        self._offsets = {"stdout": 0, "stderr": 0}
        self._result: SimpleNamespace | None = None
        self._input: Connection | None = None
        self._writing = threading.Lock()
        self.pid: int = next(self._events)["pid"]

    def stream(self) -> Iterator[Chunk]:
        """Output as it comes, until the command's end; over a restart of the daemon, too."""
        while self._result is None:
            try:
                yield from self._read()
            except (errors.UnavailableError, OSError) as error:
                self._connection.close()
                if isinstance(error, errors.ForkyardError) and not error.retryable:
                    raise
                self._resume()
        self._connection.close()

    def _read(self) -> Iterator[Chunk]:
        for event in self._events:
            kind, data = event["kind"], event.get("data", b"")
            if kind == "exit":
                self._result = SimpleNamespace(**{**RESULT, **event["result"]})
                return
            if kind in self._offsets:
                self._offsets[kind] = event.get("offset", 0) + len(data)
            yield Chunk(kind, data)
        raise errors.UnavailableError("the daemon ended the stream without a result")

    def _resume(self) -> None:
        """The daemon went: the next one has the command, and its output from here on."""
        from forkyard.client import launch

        launch.ensure(self._settings.home, self._settings.socket)
        self._connection = Connection(str(self._settings.socket))
        self._connection.start("attach", {
            "sandbox": self._sandbox, "pid": self.pid,
            **{f"{kind}_offset": offset for kind, offset in self._offsets.items()}})
        self._events = events(self._connection)
        next(self._events)

    def wait(self) -> SimpleNamespace:
        """How it ended; :meth:`stream` must be through."""
        if self._result is None:
            raise errors.UnavailableError("the daemon did not say how the command ended")
        return self._result

    def write(self, data: bytes) -> None:
        self._send_input({"data": data})

    def close_stdin(self) -> None:
        self._send_input({"eof": True})

    def signal(self, number: int) -> None:
        # On a connection of its own: a command that reads no input holds back the other one.
        connection = Connection(str(self._settings.socket))
        try:
            connection.call("signal", self._request({"signal": int(number)}))
        finally:
            connection.close()

    def _send_input(self, fields: dict[str, Any]) -> None:
        with self._writing:
            if self._input is None:
                self._input = Connection(str(self._settings.socket))
            self._input.call("write", self._request(fields))

    def _request(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"sandbox": self._sandbox, "pid": self.pid, "request_id": os.urandom(16).hex(), **fields}


# What a result's fields are where the daemon leaves them out.
RESULT = {"timed_out": False, "oom": False, "disk_full": False, "process_limit": False, "duration_ms": 0.0}


def events(connection: Connection) -> Iterator[dict[str, Any]]:
    """The events of a stream's body, each a frame. Raises the error that it ends with."""
    pieces = connection.body()
    have = b""

    def take(count: int) -> bytes:
        nonlocal have
        if len(have) < count:
            parts, size = [have], len(have)
            while size < count:
                try:
                    piece = next(pieces)
                except StopIteration:
                    raise errors.UnavailableError(CUT_OFF, retryable=True) from None
                parts.append(piece)
                size += len(piece)
            have = b"".join(parts)
        data, have = have[:count], have[count:]
        return data

    while length := int.from_bytes(take(4), "big"):
        event = decode(take(length & ~ERROR_BIT))
        if length & ERROR_BIT:
            raise errors.from_wire(event)
        if event["kind"] == "error":
            raise errors.from_wire(event["error"])
        yield event
