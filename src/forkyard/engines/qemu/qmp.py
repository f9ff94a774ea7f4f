"""QMP, as much as it takes to stop, save, load and continue a machine.

Descriptors are passed to QEMU with their command, since a QEMU that has given up its rights opens
no file by itself any more; that, and the size of what is needed, is why this is not a library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from forkyard.errors import InternalError

__all__ = ["Qmp", "QmpError", "connected"]

_MAX_LINE = 1 << 20


class QmpError(Exception):
    """QEMU's own words for why it refused a command."""


class Qmp:
    """A connection to one QEMU, for one command at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = b""
        self._events: list[str] = []

    async def call(self, command: str, *, fd: int | None = None, **arguments: Any) -> Any:
        """Run a command, with a descriptor passed along if it takes one; what it returns.

        Raises:
            QmpError: QEMU refuses it. ConnectionError: QEMU is gone.
        """
        line = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        if fd is None:
            await asyncio.get_running_loop().sock_sendall(self._sock, line)
        else:
            # Far less than a socket's buffer, so that it is sent whole.
            socket.send_fds(self._sock, [line], [fd])
        while True:
            reply = await self._reply()
            if "return" in reply:
                return reply["return"]
            if "error" in reply:
                raise QmpError(str(reply["error"].get("desc", reply["error"])))
            self._events.append(str(reply.get("event")))

    async def wait_event(self, name: str) -> None:
        """Wait until QEMU has told of that event, on this connection and since it was last waited for."""
        while name not in self._events:
            self._events.append(str((await self._reply()).get("event")))
        self._events.clear()

    async def _reply(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            if not data:
                raise ConnectionResetError("QEMU closed its control socket")
            self._received += data
            if len(self._received) > _MAX_LINE:
                raise InternalError("QEMU's reply does not end")
        line, _, self._received = self._received.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise InternalError(f"QEMU's reply is no object: {line[:100]!r}")
        return reply

    async def file(self, fd: int) -> str:
        """Give QEMU a file; the path by which its commands know it, until :meth:`drop`."""
        added = await self.call("add-fd", fd=fd)
        return f"/dev/fdset/{added['fdset-id']}"

    async def drop(self, path: str) -> None:
        """Take back what :meth:`file` gave."""
        await self.call("remove-fd", **{"fdset-id": int(path.rpartition("/")[2])})


@contextlib.asynccontextmanager
async def connected(path: Path, timeout_s: float) -> AsyncIterator[Qmp]:
    """A connection to the QEMU whose control socket is ``path``, for the body's time: QEMU listens to
    one at a time, and the next daemon must find it free.

    Raises:
        InternalError: it does not answer within ``timeout_s``, the body's commands included.
        QmpError, OSError: see :meth:`Qmp.call`; it does not run any more.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        async with asyncio.timeout(timeout_s):
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            qmp = Qmp(sock)
            await qmp._reply()  # its greeting
            await qmp.call("qmp_capabilities")
            yield qmp
    except TimeoutError:
        raise InternalError(f"QEMU did not answer within {timeout_s:g} s") from None
    finally:
        sock.close()
