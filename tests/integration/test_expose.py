"""Ports of a sandbox, reached from the host."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from own_yard import OwnYard, own_yard, programs  # noqa: F401
from test_egress import audited, fetched
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client
from forkyard.errors import InvalidRequestError

pytestmark = pytest.mark.root


def test_exposed_ports(client: Client, own_yard: OwnYard) -> None:  # noqa: F811
    client.create_sandbox("web")
    client.spawn("web", "cd /etc && exec python3 -m http.server 8000 --bind 127.0.0.1", detach=True)
    url = client.expose("web", 8000)
    assert url.startswith("http://127.0.0.1:")
    assert own_yard.out("expose", "web", "8000") == url
    until(lambda: fetched(f"{url}/hostname") == b"web\n", 30)
    client.checkpoint("web")
    client.rewind("web")
    assert fetched(f"{url}/hostname") == b"web\n"
    assert fetched(client.expose("web", 8001)) is None
    with pytest.raises(InvalidRequestError):
        client.expose("web", 70000)
    assert [data["port"] for data in audited(client, "web", "sandbox.exposed")][:1] == [8000]
    assert audited(client, "web", "expose.closed")
    client.delete_sandbox("web")
    assert fetched(url) is None


def test_raw_bytes_through_an_exposed_port(client: Client) -> None:  # noqa: F811
    client.create_sandbox("raw")
    echo = 'import socket\\ns=socket.create_server(("127.0.0.1",7))\\nwhile 1:\\n c=s.accept()[0]\\n'
    echo += " while d:=c.recv(65536): c.sendall(d)\\n c.close()"
    client.spawn("raw", f"exec python3 -c \"$(printf '{echo}')\"", user="root", detach=True)
    port = int(client.expose("raw", 7).rpartition(":")[2])
    data = os.urandom(3 << 20)

    def through() -> bytes:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as sock:
            sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
            sender.start()
            got = bytearray()
            while piece := sock.recv(1 << 20):
                got += piece
            sender.join()
            return bytes(got)
        return b""

    until(lambda: through() == data, 60)


# Speaks enough of RFC 6455 to greet one client and say what it says, in capitals.
WEBSOCKET = r"""
import base64, hashlib, socket
s = socket.create_server(("127.0.0.1", 8765))
while True:
    c = s.accept()[0]
    f = c.makefile("rb")
    key = b""
    while (line := f.readline().strip()):
        if line.lower().startswith(b"sec-websocket-key:"):
            key = line.split(b":", 1)[1].strip()
    if not key:
        c.close()
        continue
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    c.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
              b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while (head := f.read(2)) and head[0] == 0x81:
        mask = f.read(4)
        text = bytes(b ^ mask[i % 4] for i, b in enumerate(f.read(head[1] & 127)))
        c.sendall(bytes([0x81, len(text)]) + text.upper())
    c.close()
"""


def test_a_websocket_through_an_exposed_port(client: Client) -> None:  # noqa: F811
    client.create_sandbox("ws")
    client.write_file("ws", "ws.py", WEBSOCKET)
    client.spawn("ws", "exec python3 ws.py", detach=True)
    url = client.expose("ws", 8765)
    until(lambda: client.shell("ws", "grep -q :223D /proc/net/tcp").ok, 30)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 30) as sock:
        sock.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        file = sock.makefile("rb")
        answer = []
        while line := file.readline().strip():
            answer.append(line)
        assert answer[0].split()[1] == b"101"
        # The example of RFC 6455, section 1.3.
        assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer
        for text in (b"one", b"two"):
            mask = os.urandom(4)
            masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(text))
            sock.sendall(bytes([0x81, 0x80 | len(text)]) + mask + masked)
            assert file.read(2 + len(text)) == bytes([0x81, len(text)]) + text.upper()
