"""Requests and replies over the daemon's unix socket, or over TLS: reaching it, and reaching it again.

Everything that is sent through :meth:`AsyncTransport.call` carries a request id or changes
nothing, so it may be sent again: when an idle connection turns out to be closed, when the
daemon restarts under a running command (which it joins again by its request id), and when no
daemon runs and one is started (on this machine).
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from socket import SHUT_RDWR
from socket import socket as Socket
from typing import Any

import httpx

from forkyard import errors, verbs
from forkyard.client import _protocol as protocol
from forkyard.client import launch
from forkyard.client._protocol import BusyError, RestartingError, aslices, loop_key, to_thread
from forkyard.client.remote import CONNECT_S, SOCKET_OPTIONS, Remote

TRIES = 3
REMOTE_TRIES = 12
"""Of connections that were not taken: the daemon has only so many at a time that have shown no token yet."""
PATIENCE_S = 30.0
READ_BYTES = 256 << 10
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)
LOST = (*_UNREACHED, httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=600)


def _urls(base: str) -> dict[str, httpx.URL]:
    return {name: httpx.URL(f"{base}/v1/{name}") for name in (*verbs.VERBS, *verbs.STREAMS, *verbs.FILES)}


_LOCAL = _urls("http://forkyard")


class AsyncTransport:
    """One daemon, as one process (and event loop) reaches it.

    Args:
        home: The daemon's home, for starting it there.
        socket: Where it listens.
        start: Start it when it does not answer.
        remote: It is another machine's instead: home, socket and start mean nothing.
    """

    def __init__(
        self, home: Path, socket: Path, *, start: bool = True, remote: Remote | None = None
    ) -> None:
        self.home = home
        self.socket = socket
        self.start = start
        self.remote = remote
        self._urls = _LOCAL if remote is None else _urls(remote.url)
        self._pool: tuple[tuple[int, int], httpx.AsyncHTTPTransport] | None = None

    def _new(self) -> httpx.AsyncHTTPTransport:
        if self.remote is not None:
            return httpx.AsyncHTTPTransport(
                verify=self.remote.context(),
                limits=_LIMITS,
                trust_env=False,
                socket_options=SOCKET_OPTIONS,
            )
        # verify=False: there is no TLS on this socket, and reading the certificates takes 20 ms.
        return httpx.AsyncHTTPTransport(uds=str(self.socket), limits=_LIMITS, verify=False, trust_env=False)

    def _connections(self) -> httpx.AsyncHTTPTransport:
        """This process's and loop's connections; those of a parent process are left to it."""
        owner = (os.getpid(), loop_key())
        pool = self._pool
        if pool is None or pool[0] != owner:
            # No lock, which a fork could copy while it is held: two threads at once make two
            # pools, and the one that is forgotten closes after its request.
            pool = self._pool = (owner, self._new())
        return pool[1]

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and pool[0] == (os.getpid(), loop_key()):
            await pool[1].aclose()

    async def reach(self, wait_s: float = 0) -> None:
        """Return when a daemon listens; see :func:`forkyard.client.launch.ensure`."""
        if self.remote is not None:
            await to_thread(self.remote.reach, wait_s)
            return
        await to_thread(lambda: launch.ensure(self.home, self.socket, start=self.start, wait_s=wait_s))

    async def call(self, verb: str, request: Any) -> Any:
        """The result of ``verb``. Raises what went wrong."""
        body = protocol.encode(request)
        head = protocol.headers(verb, body=body)
        return await self._again(lambda: self._exchange(verb, head, httpx.ByteStream(body)), repeatable=True)

    async def send(
        self, verb: str, request: Any, chunks: Callable[[], Iterable[bytes]], *, repeatable: bool
    ) -> Any:
        """The result of a verb whose body is streamed; ``chunks`` gives it, again and again if
        ``repeatable``."""
        head = protocol.headers(verb, body=None)

        async def once() -> Any:
            body = aslices(protocol.with_head(request, chunks()))
            return await self._exchange(verb, head, AsyncBody(body))

        return await self._again(once, repeatable=repeatable)

    async def _exchange(self, verb: str, head: list[tuple[bytes, bytes]], body: Any) -> Any:
        await self._prepare()
        response = await self._connections().handle_async_request(self._request(verb, head, body))
        try:
            data = await response.aread()
        finally:
            await response.aclose()
        _remember(response)
        protocol.check(verb, response.status_code, response.headers, data)
        return protocol.result(verb, response.status_code, data)

    async def _prepare(self) -> None:
        """What the connections are made with, off the loop: it may have to be fetched."""
        if self.remote is not None and not self.remote.ready:
            await to_thread(self.remote.context)

    def _request(self, verb: str, head: list[tuple[bytes, bytes]], body: Any) -> httpx.Request:
        if self.remote is None:
            return httpx.Request("POST", self._urls[verb], headers=head, stream=body)
        head = [*self.remote.headers(), *(item for item in head if item[0] != b"host")]
        timeout = {"timeout": {"connect": CONNECT_S}}
        return httpx.Request("POST", self._urls[verb], headers=head, stream=body, extensions=timeout)

    async def _again(self, once: Callable[[], Any], *, repeatable: bool) -> Any:
        deadline = 0.0
        tries = 0
        while True:
            try:
                return await once()
            except BusyError as error:
                deadline = deadline or time.monotonic() + PATIENCE_S
                if not repeatable or time.monotonic() + error.after_s > deadline:
                    raise error.failure from None
                await to_thread(time.sleep, error.after_s)
                continue
            except RestartingError:
                cause: Exception = errors.UnavailableError("the daemon is stopping", retryable=True)
                tries = 0
            except LOST as error:
                if self.remote is not None and isinstance(error, _UNREACHED):
                    failure = self.remote.failure(error)
                    if not failure.retryable:
                        raise failure from None
                cause = error
                tries += 1
            now = time.monotonic()
            deadline = deadline or now + PATIENCE_S
            sent = not isinstance(cause, _UNREACHED)
            most = TRIES if sent or self.remote is None else REMOTE_TRIES
            if tries >= most or now >= deadline or (sent and not repeatable):
                where = self.socket if self.remote is None else self.remote.url
                raise errors.UnavailableError(
                    f"the daemon at {where} broke off: {cause or type(cause).__name__}",
                    hint=protocol.CONNECT_HINT,
                    retryable=True,
                )
            if tries == 0 or (self.remote is not None and not sent):
                await to_thread(time.sleep, 0.05 * max(1, tries))
            # Lost in the middle: somebody restarts it, so there will be another.
            await self.reach(PATIENCE_S if sent else 0)

    async def open(self, verb: str, request: Any, *, partial: bool = False) -> AsyncStream:
        """Begin a stream. It has a connection of its own, which ends with it."""
        return await self._again(lambda: self.open_once(verb, request, partial=partial), repeatable=True)

    async def open_once(self, verb: str, request: Any, *, partial: bool = False) -> AsyncStream:
        """As :meth:`open`, without trying again: what is wrong with the connection is raised as it is."""
        body = protocol.encode(request)
        await self._prepare()
        http = self._new()
        try:
            asked = self._request(verb, protocol.headers(verb, body=body), httpx.ByteStream(body))
            response = await http.handle_async_request(asked)
            if response.status_code != 200:
                data = await response.aread()
                protocol.check(verb, response.status_code, response.headers, data)
                raise protocol.failure(data)
            protocol.check(verb, response.status_code, response.headers)
        except BaseException:
            await http.aclose()
            raise
        _widen(response)
        return AsyncStream(http, response, partial=partial)


class AsyncBody(httpx.AsyncByteStream):
    """A request body that is made while it is sent."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk


class AsyncStream:
    """A reply that goes on: frames, or with ``partial`` pieces of them.

    A stream that is dropped without :meth:`close` closes its connection all the same, so that
    the daemon hears of it.
    """

    def __init__(self, http: httpx.AsyncHTTPTransport, response: httpx.Response, *, partial: bool) -> None:
        self._http = http
        self._response = response
        self._pieces = response.aiter_raw()
        self._reader = verbs.FrameReader(partial=partial)
        self._dropped = weakref.finalize(self, _hang_up, *_remember(response))
        self._dropped.atexit = False

    async def read(self) -> list[bytes | memoryview]:
        """What came next, at least one; nothing at the end.

        Raises:
            ForkyardError: what the daemon broke the stream off with; a retryable
                UnavailableError if the connection is lost.
        """
        while not self._reader.ended:
            try:
                data = await anext(self._pieces)
            except (StopAsyncIteration, httpx.HTTPError, httpx.StreamError):
                raise protocol.stream_failure(self._reader) from None
            if found := self._reader.feed(data):
                return found
        if self._reader.error is not None:
            raise protocol.stream_failure(self._reader)
        return []

    async def close(self) -> None:
        """Close the connection. The daemon ends what depended on it."""
        # Hang up first: that also wakes a reader in another thread.
        self._dropped()
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            await self._response.aclose()
        await self._http.aclose()


def _widen(response: httpx.Response) -> None:
    """Read as much at a time as a unix socket holds: a third less CPU for a long reply than by 64 KiB."""
    stream = response.extensions["network_stream"]
    read = stream.read
    stream.read = lambda max_bytes, timeout=None: read(max(max_bytes, READ_BYTES), timeout)


_INHERITABLE: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def _remember(response: httpx.Response) -> tuple[int, int]:
    """The connection's descriptor and inode, by which both are known again: the number alone may
    meanwhile be another file's."""
    stream = response.extensions["network_stream"]
    fd = stream.get_extra_info("socket").fileno()
    # Once closed it has no number; who asks then finds nothing to do.
    mark = _INHERITABLE[stream] = (fd, os.fstat(fd).st_ino) if fd >= 0 else (fd, 0)
    return mark


def _still(fd: int, inode: int) -> bool:
    try:
        return fd >= 0 and os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _hang_up(fd: int, inode: int) -> None:
    """End a connection under whoever reads from it; what TLS or a loop knows of it they find out."""
    with contextlib.suppress(OSError):
        if _still(fd, inode):
            with Socket(fileno=os.dup(fd)) as same:
                same.shutdown(SHUT_RDWR)


def _let_go() -> None:
    """In a forked child: let go of the parent's connections, or the daemon would not hear of
    the parent's death for as long as the child lives."""
    for fd, inode in list(_INHERITABLE.values()):
        with contextlib.suppress(OSError):
            if _still(fd, inode):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, fd)
                os.close(null)
    _INHERITABLE.clear()


os.register_at_fork(after_in_child=_let_go)
