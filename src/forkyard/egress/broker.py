"""Carries a sandbox's connections: decides, connects, splices, keeps the account.

One :class:`Gate` stands before each sandbox, whatever machine it has at the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from forkyard.egress.account import Account
from forkyard.egress.policy import DENY, Policy, canonical, closed, parse_address
from forkyard.egress.reach import Reach, UnreachableError
from forkyard.egress.sniff import Check, RefusedError, check_for
from forkyard.host.failpoint import failpoint

CHUNK = 64 << 10
# How long a program may take to say what its connection is for.
GREETING_S = 30.0
_RESET = struct.pack("ii", 1, 0)


class Wire(Protocol):
    """A connection of the guest's. Reading and writing raise ConnectionError once it is cut."""

    host: str
    port: int
    received: int
    sent: int

    @property
    def via(self) -> int:
        """0 by the address of a name, else through a proxy inside."""
        ...

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def accept(self) -> None: ...
    def finish(self, code: int = 0, text: str = "") -> None: ...
    def abort(self) -> None: ...


class Starter(Protocol):
    def create_task(self, work: Coroutine[Any, Any, Any], /) -> asyncio.Task[Any]: ...


class Gate:
    """What one sandbox may reach, and what it has open. ``connections`` are carried by tasks of ``tg``."""

    def __init__(self, reach: Reach, tg: Starter, account: Account, policy: Policy = DENY) -> None:
        self.policy = policy
        self.account = account
        self._reach = reach
        self._tg = tg
        self._carried: dict[Wire, asyncio.Task[Any]] = {}

    @property
    def connections(self) -> int:
        return len(self._carried)

    # -- what the guest asks

    def resolve(self, name: str) -> list[int] | None:
        """The ports of an allowed name, or None. Nothing is asked of anybody."""
        found = canonical(name)
        ports = self.policy.ports(found) if found is not None else frozenset()
        if found is None or not ports:
            self.account.fact("egress.denied", name[:255], None, "no rule allows this name")
            return None
        self.account.fact("egress.resolved", found, None, "a rule allows this name")
        return sorted(ports)

    def refusal(self, host: str, port: int, via: int) -> str | None:
        """Why the policy forbids a connection, or None."""
        address = parse_address(host)
        if address is not None:
            if via and self.policy.allows_address(address, port):
                return None
            kind = closed(address)
            return f"a {kind} address, and no rule names it" if kind else "no rule names this address"
        name = canonical(host)
        if name is None:
            return "this is no host name"
        if not self.policy.allows_name(name, port, by_proxy=bool(via)):
            return "no rule allows this name and port"
        return None

    def connect(self, connection: Wire) -> None:
        """Serve a connection that the guest asks for."""
        why = self.refusal(connection.host, connection.port, connection.via)
        if why is not None:
            self.account.fact("egress.denied", connection.host, connection.port, why)
            # The stream gets its number first, and its answer right after.
            asyncio.get_running_loop().call_soon(connection.finish, errno.EACCES, why)
            return
        task = self._tg.create_task(self._carry(connection))
        self._carried[connection] = task
        task.add_done_callback(lambda _: self._carried.pop(connection, None))

    # -- changes

    def set_policy(self, policy: Policy) -> None:
        """From now on; connections that it does not allow are cut."""
        self.policy = policy
        for connection, task in list(self._carried.items()):
            if self.refusal(connection.host, connection.port, connection.via) is not None:
                connection.abort()
                task.cancel()

    def close(self) -> None:
        """Cut everything."""
        for connection, task in list(self._carried.items()):
            connection.abort()
            task.cancel()
        self.account.close()

    # -- one connection

    async def _carry(self, connection: Wire) -> None:
        host, port, began = connection.host, connection.port, time.monotonic()
        sock: socket.socket | None = None
        told, ended = False, "cut"
        try:
            name = canonical(host)
            if name is not None and parse_address(host) is None:
                host = name
            sock, address = await self._reach.connect(self.policy, host, port)
            await failpoint("egress.connected")
            again = self.refusal(host, port, connection.via)
            if again is not None:  # the policy changed while the connection was made
                raise UnreachableError(again, errno.EACCES, denied=True)
            said = {"name": host, "port": port, "address": address, "via": _VIA[connection.via]}
            self.account.event("egress.allowed", said)
            told = True
            connection.accept()
            check = check_for(host, port) if self.policy.checks_content(host, port) else Check()
            await splice(connection, sock, check)
            ended = "done"
        except UnreachableError as error:
            kind = "egress.denied" if error.denied else "egress.failed"
            self.account.fact(kind, host, port, str(error))
            connection.finish(error.code, str(error)[:200])
        except RefusedError as error:
            ended = "refused"
            self.account.fact("egress.denied", host, port, str(error))
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1):
                    await connection.write(error.answer)
            connection.write_eof()
        except OSError:
            ended = "reset"
        finally:
            if sock is not None:
                if ended != "done":
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()
            if ended in ("done", "refused"):
                connection.finish()
            else:
                connection.abort()
            if told:
                self.account.event(
                    "egress.closed",
                    {
                        "name": host,
                        "port": port,
                        "sent": connection.received,
                        "received": connection.sent,
                        "duration_ms": round((time.monotonic() - began) * 1e3, 1),
                        "end": ended,
                    },
                )


_VIA = {0: "name", 1: "http proxy", 2: "socks proxy"}


async def splice(connection: Wire, sock: socket.socket, check: Check) -> None:
    """Carry bytes both ways until both sides have ended; either may end first.

    Raises:
        RefusedError: the guest's side says what it must not; nothing of that went on.
        OSError: one side was reset.
    """
    loop = asyncio.get_running_loop()
    turn = asyncio.Lock()  # what a check held back must not be overtaken

    async def out() -> None:
        first = type(check) is not Check
        while True:
            if first:
                async with asyncio.timeout(GREETING_S):
                    data = await connection.read()
            else:
                data = await connection.read()
            if not data:
                break
            async with turn:
                data = check.feed(data)
                if data:
                    first = False
                    await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)

    async def back() -> None:
        while data := await loop.sock_recv(sock, CHUNK):
            if check.waits:
                async with turn:
                    held = check.answered(data)
                    if held:
                        await loop.sock_sendall(sock, held)
            await connection.write(data)
        connection.write_eof()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(out())
            group.create_task(back())
    except BaseExceptionGroup as failed:
        raise _first(failed) from None


def _first(group: BaseExceptionGroup) -> BaseException:
    """What a check refused counts before the resets that it led to."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, RefusedError)), leaves[0])
