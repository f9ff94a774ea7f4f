"""Who is at the other end of a connection, as the kernel says, and whether they may speak.

The socket belongs to root (or the daemon's own user) with mode 0600; the peer's credentials
are checked again here, since a descriptor can be handed on.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import struct
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forkyard.host.process import start_time
from forkyard.requests import Caller

_UCRED = struct.Struct("3i")
NOBODY = Caller(uid=-1, name="nobody")


def peer(sock: Any) -> Caller:
    """The process that connected (``SO_PEERCRED``): it is what it was at ``connect``."""
    if sock is None or sock.family != socket.AF_UNIX:
        return NOBODY
    # uvloop's stand-in for a socket has no getsockopt.
    with socket.socket(fileno=os.dup(sock.fileno())) as real:
        pid, uid, _gid = _UCRED.unpack(real.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    known = pid if pid > 0 else None
    return Caller(uid=uid, pid=known, start_time=start_time(pid) if known else None, name=_name(uid))


def may_speak(caller: Caller) -> bool:
    """Root, the daemon's own user, and who came through the gate with a token."""
    return caller.token is not None or caller.uid in (0, os.geteuid())


_names: dict[int, str] = {}


def _name(uid: int) -> str:
    if uid not in _names:
        try:
            _names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            _names[uid] = str(uid)
    return _names[uid]


class PeerProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol that puts ``caller`` into each request's ``scope["state"]``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {"caller": peer(transport.get_extra_info("socket"))}
