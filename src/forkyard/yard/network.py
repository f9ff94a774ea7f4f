"""Each sandbox's network: its policy put into force, what its commands are told of it, and the
ports of it that the host can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.egress.account import Account
from forkyard.egress.broker import Gate, splice
from forkyard.egress.policy import DENY, Mode, Policy, Rule, canonical, parse_address, parse_rule
from forkyard.egress.presets import Presets
from forkyard.egress.reach import Reach
from forkyard.egress.sniff import Check
from forkyard.errors import CapacityError, ForkyardError, InvalidRequestError, UnsupportedError
from forkyard.guest import Guest
from forkyard.host.failpoint import failpoint
from forkyard.wire import NetFlag
from forkyard.yard.background import begin
from forkyard.yard.context import Context
from forkyard.yard.machines import Box
from forkyard.yard.model import Sandbox

log = logging.getLogger("forkyard.yard")

CA_FILE = "/run/forkyard/ca.crt"
APT_FILE = "/run/forkyard/apt.conf"
HTTP_PROXY = "http://127.0.0.1:3128"
APT_CONF = f'Acquire::https::CAInfo "{CA_FILE}";\n'
# How the host's own certificate authorities reach the programs inside, whose images know only theirs.
CA_ENV = {
    **dict.fromkeys(
        (
            *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"),
            "NODE_EXTRA_CA_CERTS",
        ),
        CA_FILE,
    ),
    "APT_CONFIG": APT_FILE,
}
_LOCAL = "localhost,127.0.0.1,::1"
PROXY_ENV = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), HTTP_PROXY),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _LOCAL),
}
BUNDLES = (
    *("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"),
    *("/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"),
)
INTO_S = 10.0
MAX_EXPOSED = 64
_RESET = struct.pack("ii", 1, 0)


def ca_bundle() -> bytes:
    """The host's certificate authorities, those of ``SSL_CERT_FILE`` first; empty if it has none."""
    for path in (os.environ.get("SSL_CERT_FILE", ""), *BUNDLES):
        with contextlib.suppress(OSError):
            if path and (found := Path(path).read_bytes()):
                return found
    return b""


@dataclass(slots=True)
class Exposed:
    """A port of a sandbox on the host's loopback."""

    sock: socket.socket
    task: asyncio.Task[Any]
    url: str


@dataclass(slots=True)
class Reached:
    """One sandbox's network. ``rules`` and ``env`` are those of its policy with presets read."""

    gate: Gate
    mode: Mode = "deny"
    rules: tuple[Rule, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    granted: list[Rule] = field(default_factory=list)
    exposed: dict[int, Exposed] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        return Policy(self.mode, self.rules, tuple(self.granted))


class Network:
    """The networks of all sandboxes. ``machine_of`` gives the machine that a connection goes to."""

    def __init__(self, context: Context, machine_of: Callable[[Sandbox], Awaitable[Box]]) -> None:
        self.context = context
        self._machine_of = machine_of
        self.presets = Presets()
        self.reach = Reach()
        self._known: dict[str, Reached] = {}

    def close(self) -> None:
        """Cut and close everything; exposed ports come back with the next daemon."""
        for sandbox_id in list(self._known):
            self.forget(sandbox_id)
        self.reach.close()

    def _of(self, sandbox: Sandbox) -> Reached:
        known = self._known.get(sandbox.id)
        if known is None:

            def record(kind: str, data: dict[str, Any]) -> None:
                self.context.audit.append(kind, sandbox.id, "guest", data)

            gate = Gate(self.reach, self.context.tg, Account(record), DENY)
            known = self._known[sandbox.id] = Reached(gate)
        return known

    # -- policy ------------------------------------------------------------------------

    async def read(self, mode: str, allow: list[str]) -> tuple[Mode, tuple[Rule, ...], dict[str, str]]:
        """A policy with its presets read, and the presets' variables.

        Raises:
            UnsupportedError: this machine has not what a preset names.
        """
        texts, env = await self.presets.expand(allow)
        kept: Mode = "any" if mode == "any" else "allow" if texts else "deny"
        return kept, tuple(parse_rule(text) for text in texts), env

    async def prepare(self, sandbox: Sandbox) -> NetFlag:
        """Before a start: put the sandbox's policy into force; how its machine's network is to be."""
        known = self._of(sandbox)
        read = await self.read(sandbox.doc.egress, sandbox.doc.egress_allow)
        known.mode, known.rules, known.env = read
        return self._enforce(sandbox, known)

    def _enforce(self, sandbox: Sandbox, known: Reached) -> NetFlag:
        policy = known.policy
        known.gate.set_policy(policy)
        sandbox.net_env = {}
        if policy.open:
            sandbox.net_env = {**CA_ENV, **known.env, **(PROXY_ENV if policy.needs_proxy else {})}
        return NetFlag.PROXY if policy.needs_proxy else NetFlag(0)

    def serve(self, sandbox: Sandbox, guest: Guest) -> None:
        """Answer a machine of the sandbox's, before it says anything."""
        guest.serve(self._of(sandbox).gate)

    async def equip(self, sandbox: Sandbox) -> None:
        """Give a started machine what its commands need of the host's, if its network is open.

        Raises:
            UnsupportedError: its agent is of an age without a network.
        """
        known = self._of(sandbox)
        if known.policy.open and sandbox.box is not None:
            await _equip(sandbox, sandbox.box.guest)

    async def change(self, sandbox: Sandbox, mode: str, allow: list[str]) -> None:
        """Another policy for a sandbox, which may be running: what it no longer allows is cut.

        Raises:
            UnsupportedError: see :meth:`read` and :meth:`equip`. Nothing has changed then.
        """
        read = await self.read(mode, allow)
        known = self._of(sandbox)
        if read[0] != "deny" and sandbox.box is not None:
            await _equip(sandbox, sandbox.box.guest)
        await failpoint("egress.read")
        known.mode, known.rules, known.env = read
        await self._apply(sandbox, known)

    async def _apply(self, sandbox: Sandbox, known: Reached) -> None:
        flags = self._enforce(sandbox, known)
        guest = sandbox.box.guest if sandbox.box is not None else None
        if guest is not None and guest.has_network:
            await guest.set_network(flags)

    @contextlib.asynccontextmanager
    async def grant_host(self, sandbox: Sandbox, host: str, port: int) -> AsyncIterator[None]:
        """Let the sandbox reach one host while the block runs, by its name on that port (an address:
        through the proxy).

        Raises:
            InvalidRequestError: this is no host. UnsupportedError: see :meth:`equip`.
        """
        bare = host.strip("[]")
        rule = parse_rule(f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}")
        known = self._of(sandbox)
        if self._already(known.policy, bare, port):
            yield
            return
        if sandbox.box is not None:
            await _equip(sandbox, sandbox.box.guest)
        known.granted.append(rule)
        try:
            await self._apply(sandbox, known)
            self.context.audit.append("egress.granted", sandbox.id, "yard", {"name": bare, "port": port})
            yield
        finally:
            known.granted.remove(rule)
            self._enforce(sandbox, known)
            with contextlib.suppress(ForkyardError):
                await self._apply(sandbox, known)
            self.context.audit.append("egress.revoked", sandbox.id, "yard", {"name": bare, "port": port})

    @staticmethod
    def _already(policy: Policy, host: str, port: int) -> bool:
        address = parse_address(host)
        if address is not None:
            return policy.allows_address(address, port)
        name = canonical(host)
        return name is not None and policy.allows_name(name, port)

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone, or the yard closes."""
        known = self._known.pop(sandbox_id, None)
        if known is not None:
            known.gate.close()
            for exposed in known.exposed.values():
                _close(exposed)

    # -- ports inside ------------------------------------------------------------------

    async def expose(self, sandbox: Sandbox, port: int) -> str:
        """A URL on the host's loopback that leads to a port of the sandbox's, whatever machine it has
        and for as long as it exists. The same port has the same URL.

        Raises:
            InvalidRequestError: no port. CapacityError: too many are exposed.
        """
        if not 0 < port < 65536:
            raise InvalidRequestError(f"port {port} is not from 1 to 65535")
        known = self._of(sandbox)
        exposed = known.exposed.get(port)
        if exposed is None:
            if len(known.exposed) >= MAX_EXPOSED:
                raise CapacityError(f"{MAX_EXPOSED} ports of {sandbox.doc.name!r} are exposed already")
            exposed = self._listen(sandbox, port, 0)
            known.exposed[port] = exposed
            sandbox.doc.exposed[str(port)] = exposed.sock.getsockname()[1]
        return exposed.url

    def conceal(self, sandbox: Sandbox, port: int) -> None:
        """Undo :meth:`expose`."""
        sandbox.doc.exposed.pop(str(port), None)
        exposed = self._of(sandbox).exposed.pop(port, None)
        if exposed is not None:
            _close(exposed)

    def restore(self, sandbox: Sandbox) -> None:
        """After a daemon's start: expose what was exposed, at the same addresses where they are free."""
        for inside, outside in list(sandbox.doc.exposed.items()):
            try:
                exposed = self._listen(sandbox, int(inside), outside)
            except OSError as error:
                log.warning(
                    "port %s of %s cannot be exposed at %d again: %s", inside, sandbox.id, outside, error
                )
                del sandbox.doc.exposed[inside]
            else:
                self._of(sandbox).exposed[int(inside)] = exposed

    def _listen(self, sandbox: Sandbox, inside: int, outside: int) -> Exposed:
        sock = socket.socket()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", outside))
            sock.listen(128)
            task, _ = begin(self.context.tg, self._accept(sandbox, inside, sock))
        except BaseException:
            sock.close()
            raise
        return Exposed(sock, task, f"http://127.0.0.1:{sock.getsockname()[1]}")

    async def _accept(self, sandbox: Sandbox, port: int, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    peer, _ = await loop.sock_accept(sock)
                except OSError as error:
                    log.warning("exposed port %d of %s: %s", port, sandbox.id, error)
                    await asyncio.sleep(0.1)
                    continue
                group.create_task(self._into(sandbox, port, peer))

    async def _into(self, sandbox: Sandbox, port: int, peer: socket.socket) -> None:
        """Carry one connection from the host to the port inside."""
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began, connection, done = time.monotonic(), None, False
        sandbox.active_calls += 1
        sandbox.touch()
        try:
            box = await self._machine_of(sandbox)
            connection = await box.guest.connect(port, timeout_s=INTO_S)
            await splice(connection, peer, Check())
            done = True
        except (OSError, ForkyardError) as error:
            log.debug("exposed port %d of %s: %s", port, sandbox.id, error)
        finally:
            sandbox.active_calls -= 1
            sandbox.touch()
            if not done:
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            peer.close()
            if connection is not None:
                connection.abort()
                self._of(sandbox).gate.account.event(
                    "expose.closed",
                    {
                        "port": port,
                        "sent": connection.sent,
                        "received": connection.received,
                        "duration_ms": round((time.monotonic() - began) * 1e3, 1),
                    },
                )


async def _equip(sandbox: Sandbox, guest: Guest) -> None:
    if not guest.has_network:
        raise UnsupportedError(
            f"the memory of {sandbox.doc.name!r} was saved by a forkyard without egress",
            hint="start it from the snapshot's disk with memory=False, or use egress='deny'",
            sandbox=sandbox.id,
        )
    bundle = await asyncio.to_thread(ca_bundle)
    for path, content in ((CA_FILE, bundle), (APT_FILE, APT_CONF.encode())):
        with contextlib.suppress(ForkyardError):
            if (await guest.stat(path, user="0")).size == len(content):
                continue
        await guest.write_file(path, content, mode=0o644, user="0")


def _close(exposed: Exposed) -> None:
    exposed.task.cancel()
    # The task may be waiting for it: it is closed when that has ended.
    exposed.task.add_done_callback(lambda _: exposed.sock.close())
