"""The real agent as an ordinary process with a network behind a gate, on ports of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.egress.account import Account
from forkyard.egress.broker import Gate
from forkyard.egress.policy import Policy
from forkyard.egress.reach import Reach
from forkyard.guest import Guest, Identity


def free_ports(n: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


@dataclass
class Net:
    """``dns``, ``http`` and ``socks`` are the agent's ports, ``records`` what went into the audit."""

    guest: Guest
    gate: Gate
    dns: int
    http: int
    socks: int
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, kind: str, data: dict[str, Any]) -> None:
        self.records.append((kind, data))
        self.changed.set()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data in self.records if name == kind]

    async def until_told(self, kind: str, n: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(20):
            while len(self.told(kind)) < n:
                self.changed.clear()
                await self.changed.wait()
        return self.told(kind)


@contextlib.asynccontextmanager
async def networked(
    agent: Path, dir: Path, policy: Policy, environ: dict[str, str] | None = None
) -> AsyncIterator[Net]:
    for name in ("in", "out"):
        os.mkfifo(dir / name, 0o600)
    ends = [os.open(dir / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for name in ("in", "out")]
    theirs = [os.open(dir / name, os.O_RDWR) for name in ("in", "out")]
    dns, http, socks = free_ports(3)
    child = subprocess.Popen(  # noqa: ASYNC220 (it only forks)
        [agent, "--plain", f"--net={dns},{http},{socks}"], stdin=theirs[0], stdout=theirs[1]
    )
    for fd in theirs:
        os.close(fd)
    reach = Reach(environ or {})
    try:
        async with asyncio.TaskGroup() as tg:
            guest = Guest(*ends, box="test")
            net: Net
            gate = Gate(reach, tg, Account(lambda kind, data: net.record(kind, data)), policy)
            net = Net(guest, gate, dns, http, socks)
            guest.serve(gate)
            await guest.attach(tg)
            await guest.identify(Identity("box", "0" * 32, "sb_test", network=1))
            try:
                yield net
            finally:
                gate.close()
                await guest.close()
    finally:
        child.kill()
        child.wait(10)
        reach.close()
        for fd in ends:
            os.close(fd)


def question(name: str, kind: int = 1, *, edns: bool = False, id_: int = 7) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    head = struct.pack(">HHHHHH", id_, 0x0100, 1, 0, 0, int(edns))
    opt = b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0) if edns else b""
    return head + labels + b"\0" + struct.pack(">HH", kind, 1) + opt


@dataclass
class Answer:
    rcode: int
    address: str | None
    raw: bytes


def parse(data: bytes, asked: bytes) -> Answer:
    assert data[:2] == asked[:2] and data[2] & 0x80
    rcode, count = data[3] & 15, int.from_bytes(data[6:8], "big")
    end = 12
    while data[end]:
        end += data[end] + 1
    assert data[12 : end + 5] == asked[12 : end + 5], "the question comes back as it was asked"
    record = data[end + 5 :]
    if not count:
        return Answer(rcode, None, data)
    assert int.from_bytes(record[6:10], "big") == 1, "TTL"
    size = int.from_bytes(record[10:12], "big")
    family = socket.AF_INET if size == 4 else socket.AF_INET6
    return Answer(rcode, socket.inet_ntop(family, record[12 : 12 + size]), data)


async def ask(net: Net, name: str, kind: int = 1, **options: Any) -> Answer:
    """One question over UDP."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect(("127.0.0.1", net.dns))
        sent = question(name, kind, **options)
        await loop.sock_sendall(sock, sent)
        async with asyncio.timeout(20):
            return parse(await loop.sock_recv(sock, 4096), sent)


Handler = Any


@contextlib.asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """A TCP server on the host's loopback; its port."""
    made = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield made.sockets[0].getsockname()[1]
    finally:
        made.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    writer.close()
