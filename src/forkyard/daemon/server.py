"""The unix socket: bound whole, served by uvicorn's protocol, closed in order. (The other way in is
:mod:`forkyard.daemon.listener`.)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from forkyard.daemon.auth import PeerProtocol
from forkyard.errors import InvalidRequestError

KEEP_ALIVE_S = 3600
_LONGEST = 107


def bind(path: Path, *, mode: int = 0o600) -> socket.socket:
    """A listening socket that appears at ``path`` only when it listens, in place of whatever
    a dead daemon left there. The caller holds the home's lock."""
    fresh = path.with_name(f".{os.getpid()}")
    if len(os.fsencode(path)) > _LONGEST or len(os.fsencode(fresh)) > _LONGEST:
        raise InvalidRequestError(
            f"the socket's path is longer than {_LONGEST} bytes: {path}",
            hint="set FORKYARD_SOCKET to a short one",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(fresh))
        finally:
            os.umask(before)
        sock.listen(4096)
        fresh.rename(path)
    except BaseException:
        sock.close()
        raise
    return sock


class Server:
    """Serves ``app`` on a bound socket until :meth:`close`."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            # Clients keep idle connections; closing one under a request costs it a retry.
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.AbstractServer | None = None

    async def open(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: PeerProtocol(config=self._config, server_state=self._state, app_state={}), sock=sock
        )

    async def close(self, grace_s: float = 10) -> None:
        """No new connections; running requests have ``grace_s`` to end."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = set(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1)
        for connection in list(self._state.connections):
            connection.transport.close()


@contextlib.asynccontextmanager
async def serving(
    app: Callable[..., Any], sock: socket.socket, drain: Callable[[], None]
) -> AsyncIterator[None]:
    """``app`` answers on ``sock`` inside the block; on the way out ``drain`` is called first."""
    server = Server(app)
    await server.open(sock)
    try:
        yield
    finally:
        drain()
        await server.close()
