"""The HTTPS listener: connections from other machines, counted before they cost anything.

A connection is a stranger's until it has shown a token. Strangers are few, have ten seconds for the
handshake and ten for the head of their request, and are sent away after one refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forkyard.daemon.auth import NOBODY
from forkyard.daemon.exchange import log
from forkyard.daemon.gate import App, Gate
from forkyard.daemon.limits import Door, place_of
from forkyard.daemon.server import Server
from forkyard.daemon.tokens import Tokens
from forkyard.errors import InvalidRequestError, UnavailableError

HEAD_S = 10.0
HANDSHAKE_S = 10.0
MAX_HEAD = 64 << 10
SWEEP_S = 1.0
BACKLOG = 1024
FULL_S = 0.5
# A peer that vanished without a word is noticed after about half a minute.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
UNHEARD_MS = 30_000
# What strangers send is no warning: anybody could fill the log with it.
_strangers = logging.getLogger("forkyard.daemon.strangers")
_strangers.setLevel(logging.ERROR)


class RemoteProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol for a peer that nothing is known of yet."""

    def __init__(self, listener: Listener, place: str, **given: Any) -> None:
        super().__init__(**given)
        self.logger = _strangers
        self.place = place
        self.tokens: set[str] = set()
        self._listener = listener
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # As without TLS, where a stream's output is acknowledged by what may be written behind.
        transport.set_write_buffer_limits(high=64 << 10)
        self.app_state = {"caller": NOBODY, "connection": self}
        self._listener.connections.add(self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        self._listener.left(self)
        super().connection_lost(exc)

    def admitted(self, token: str) -> None:
        if not self.tokens:
            self._listener.door.known(self.place)
        self.tokens.add(token)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._wait_for_head()
        super().data_received(data)
        # Looked at afterwards: with the head's end, a piece of the body may have come too.
        if self._in_head and self._head_bytes > MAX_HEAD:
            self.hang_up()

    def on_headers_complete(self) -> None:
        self._heard()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def hang_up(self) -> None:
        self.transport.abort()

    def _wait_for_head(self) -> None:
        self._heard()
        self._timer = self.loop.call_later(HEAD_S, self.hang_up)

    def _heard(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Listener(Server):
    """Serves ``app`` behind a :class:`Gate` over TLS.

    Args:
        tasks: Owns the connections that are being made.
    """

    def __init__(self, app: App, tokens: Tokens, tasks: asyncio.TaskGroup) -> None:
        self.gate = Gate(app, tokens)
        super().__init__(self.gate)
        # Descriptors are left for sandboxes and for the machine's own clients.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.door = Door(connections=min(8192, files // 2))
        self.connections: set[RemoteProtocol] = set()
        self._tokens = tokens
        self._tasks = tasks
        self._sweeping: asyncio.Task[None] | None = None
        self._sockets: list[socket.socket] = []

    def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext) -> None:
        self._sockets = sockets
        self._sweeping = self._tasks.create_task(self._sweep())
        for sock in sockets:
            self._watch(sock, tls)

    def refuse(self) -> None:
        """No new connections."""
        while self._sockets:
            sock = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()

    async def close(self, grace_s: float = 10) -> None:
        self.refuse()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await super().close(grace_s)

    def hang_up(self, token: str) -> None:
        """End every connection on which the token was shown, whatever runs on it."""
        for connection in list(self.connections):
            if token in connection.tokens:
                connection.hang_up()

    def left(self, connection: RemoteProtocol) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.door.leave(connection.place, known=bool(connection.tokens))

    async def _sweep(self) -> None:
        """What runs on under a token that has expired ends."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for token in self._tokens.drop_expired():
                self.hang_up(token)

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        for _ in range(BACKLOG):
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A peer that had gone before it was taken, or no descriptors left: not at once again.
                log.warning("a connection could not be taken: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(FULL_S, self._watch, listening, tls)
                return
            place = place_of(address[0])
            if self.door.enter(place):
                self._tasks.create_task(self._shake_hands(sock, place, tls))
            else:
                sock.close()

    def _watch(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, tls)

    async def _shake_hands(self, sock: socket.socket, place: str, tls: ssl.SSLContext) -> None:
        protocol = RemoteProtocol(self, place, config=self._config, server_state=self._state, app_state={})
        try:
            sock.setblocking(False)
            _watch_over(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, sock, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except Exception as error:
            # Of whatever kind: what a stranger sends ends no task group.
            log.debug("no TLS with %s: %r", place, error)
        finally:
            if protocol.transport is None:  # no connection came of it
                sock.close()
                self.door.leave(place, known=False)


def _watch_over(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)


def split(address: str, port: int) -> tuple[str, int]:
    """``(host, port)`` of ``HOST``, ``HOST:PORT``, ``[V6]:PORT``; ``port`` where none is said."""
    host, colon, number = address.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")) or address.endswith("]"):
        host, number = address, str(port)
    host = host.strip("[]")
    if not host or not number.isdecimal() or int(number) > 65535:
        raise InvalidRequestError(
            f"{address!r} is no address to listen at", hint="say ADDR:PORT, as in 127.0.0.1:8470 or [::]:8470"
        )
    return host, int(number)


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address that ``host`` is. Raises UnavailableError."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, proto, _, where in dict.fromkeys(found):
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            made.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if len(found) > 1 else 0)
            # The second of a name's addresses is at the port that the first was given.
            sock.bind((where[0], port or made[0].getsockname()[1], *where[2:]))
            sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter for a name that can be none
        for sock in made:
            with contextlib.suppress(OSError):
                sock.close()
        raise UnavailableError(
            f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}",
            hint="choose another address or port",
        ) from None
    return made
