"""Sockets with data on its way. See ``state.py``."""

from __future__ import annotations

import array
import os
import socket
import tempfile
from collections.abc import Iterator

from state import LIVE, kind, read_exactly


@kind
def unix_sockets() -> Iterator[None]:
    """Bytes, datagrams and descriptors on their way; a connection nobody has accepted yet."""
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile(dir=LIVE) as scratch:
        scratch.write(b"inside")
        scratch.flush()
        rights = array.array("i", [reading, scratch.fileno()]).tobytes()
        left.sendmsg([b"fds"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    os.close(reading)
    os.write(writing, b"through the passed pipe")
    right.sendall(b"x" * 10_000)
    packets = socket.socketpair(type=socket.SOCK_DGRAM)
    sequence = socket.socketpair(type=socket.SOCK_SEQPACKET)
    for pair in (packets, sequence):
        pair[0].send(b"one")
        pair[0].send(b"three")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{LIVE}/listener")
    listener.listen(5)
    early = socket.socket(socket.AF_UNIX)
    early.connect(f"{LIVE}/listener")
    early.sendall(b"early")
    yield
    data, fds, _, _ = socket.recv_fds(right, 100, 2)
    assert data == b"fds" and os.read(fds[0], 100) == b"through the passed pipe"
    assert os.pread(fds[1], 100, 0) == b"inside"
    assert read_exactly(left.recv, 10_000) == b"x" * 10_000
    for pair in (packets, sequence):
        assert [pair[1].recv(100), pair[1].recv(100)] == [b"one", b"three"]
    late = socket.socket(socket.AF_UNIX)
    late.connect(f"{LIVE}/listener")
    late.sendall(b"late")
    assert sorted(listener.accept()[0].recv(100) for _ in range(2)) == [b"early", b"late"]
    left.close()
    assert right.recv(1) == b""


def tcp_over(family: int, bind_to: str, connect_to: str) -> Iterator[None]:
    """A connection with data on its way in both directions, one not yet accepted, and a new one."""
    both = family == socket.AF_INET6 and "." in connect_to
    listener = socket.create_server((bind_to, 0), family=family, backlog=8, dualstack_ipv6=both)
    port = listener.getsockname()[1]
    ours = socket.create_connection((connect_to, port), timeout=15)
    theirs, _ = listener.accept()
    theirs.settimeout(15)
    ours.sendall(b"a" * 30_000)
    theirs.sendall(b"b" * 30_000)
    read_exactly(theirs.recv, 10_000)
    waiting = socket.create_connection((connect_to, port), timeout=15)
    waiting.sendall(b"waiting")
    yield
    assert read_exactly(theirs.recv, 20_000) == b"a" * 20_000
    assert read_exactly(ours.recv, 30_000) == b"b" * 30_000
    pending, _ = listener.accept()
    pending.settimeout(15)
    assert pending.recv(100) == b"waiting"
    fresh = socket.create_connection((connect_to, port), timeout=15)
    accepted, _ = listener.accept()
    accepted.sendall(b"new")
    assert read_exactly(fresh.recv, 3) == b"new"
    for big in (ours, theirs):
        big.sendall(b"again")
    assert read_exactly(ours.recv, 5) == read_exactly(theirs.recv, 5) == b"again"
    ours.close()
    assert theirs.recv(1) == b""


@kind
def tcp() -> Iterator[None]:
    yield from tcp_over(socket.AF_INET, "127.0.0.1", "127.0.0.1")


@kind
def tcp_other_loopback() -> Iterator[None]:
    yield from tcp_over(socket.AF_INET, "127.64.3.9", "127.64.3.9")


@kind
def tcp_wildcard() -> Iterator[None]:
    yield from tcp_over(socket.AF_INET, "0.0.0.0", "127.0.0.1")


@kind
def tcp_ipv6() -> Iterator[None]:
    yield from tcp_over(socket.AF_INET6, "::1", "::1")


@kind
def tcp_both() -> Iterator[None]:
    """IPv4 over an IPv6 wildcard, as most servers listen."""
    yield from tcp_over(socket.AF_INET6, "::", "127.0.0.1")


@kind
def udp() -> Iterator[None]:
    """Datagrams that wait in a socket, connected and not, IPv4 and IPv6."""
    pairs = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        server = socket.socket(family, socket.SOCK_DGRAM)
        server.bind((address, 0))
        server.settimeout(10)
        peer = socket.socket(family, socket.SOCK_DGRAM)
        peer.connect(server.getsockname()[:2])
        peer.settimeout(10)
        peer.send(b"queued 1")
        peer.send(b"queued 2")
        pairs.append((server, peer))
    yield
    for server, peer in pairs:
        assert [server.recv(100), server.recv(100)] == [b"queued 1", b"queued 2"]
        peer.send(b"new")
        data, sender = server.recvfrom(100)
        assert data == b"new"
        server.sendto(b"answer", sender)
        assert peer.recv(100) == b"answer"
