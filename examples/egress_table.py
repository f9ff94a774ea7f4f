"""The wall of a sandbox, tried from inside: what is attempted, what becomes of it, what the audit says.

    python examples/egress_table.py [--name NAME]

One sandbox may reach NAME (default: where this machine's pip takes packages from), one address that
nobody has (so that its proxies run), and nothing else.
Each attempt is made by root inside; its time is what the program inside had to wait.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

from forkyard import Client
from forkyard.config import load

WAIT_S = 5
NOBODY = "192.0.2.7"
INDEX = """
import os, urllib.parse
from pip._internal.models.index import PyPI
print(urllib.parse.urlsplit(os.environ.get("PIP_INDEX_URL") or PyPI.simple_url).hostname)
"""
INSIDE = r"""
import json, socket, ssl, struct, sys, time

def question(name, kind):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)

def status(stream, host):
    stream.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    said = stream.recv(200)
    if not said:
        raise OSError("closed before it answered")
    line = said.split(b"\r\n")[0].decode("latin-1")
    if " 403 " in line:
        raise OSError(line)
    return line

def name(host):
    return socket.getaddrinfo(host, 443)[0][4][0]

def tls(host, sni, said):
    context = ssl.create_default_context()
    context.check_hostname = sni == host
    with context.wrap_socket(socket.create_connection((host, 443)), server_hostname=sni) as stream:
        return status(stream, said)

def plain(host, said):
    with socket.create_connection((host, 80)) as stream:
        return status(stream, said)

def connect(host, port):
    socket.create_connection((host, port)).close()
    return "connected"

def proxy(host, port):
    with socket.create_connection(("127.0.0.1", 3128)) as stream:
        stream.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
        said = stream.recv(200).split(b"\r\n")[0].decode()
    if " 200 " not in said + " ":
        raise OSError(said)
    return said

def dns(server, host, kind):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(question(host, kind), (server, 53))
        answer = sock.recv(512)
    code, found = answer[3] & 15, struct.unpack(">H", answer[6:8])[0]
    if code or not found:
        raise OSError({0: "no answer in it", 3: "NXDOMAIN", 5: "REFUSED"}.get(code, f"code {code}"))
    return f"{found} answers"

def ping(host):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        sock.sendto(b"\x08\0\xf7\xff\0\0\0\0", (host, 0))
        return f"{len(sock.recv(512))} bytes"

def unix(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
    return "connected"

what, how, wait = json.loads(sys.argv[1])
socket.setdefaulttimeout(wait)
begun = time.perf_counter()
try:
    ok, said = True, globals()[what](*how)
except Exception as error:
    ok, said = False, getattr(error, "strerror", None) or str(error)
print(json.dumps([ok, said, (time.perf_counter() - begun) * 1e3]))
"""


def attempts(name: str, port: int, daemon: str) -> list[tuple[str, bool, str, list[Any]]]:
    """(what is attempted, whether it is to succeed, the function inside, its arguments)."""
    return [
        ("the allowed name: resolve it", True, "name", [name]),
        ("the allowed name: HTTPS", True, "tls", [name, name, name]),
        ("its connection, another name in the TLS greeting", False, "tls", [name, "denied.example", name]),
        ("its connection, another name as HTTP's Host", False, "plain", [name, "denied.example"]),
        ("the allowed name: a port without a rule", False, "connect", [name, 22]),
        ("a name without a rule: resolve it", False, "name", ["denied.example"]),
        ("the same through the proxy", False, "proxy", ["denied.example", 443]),
        ("data in a query (TXT)", False, "dns", ["127.0.0.1", "c2VjcmV0.denied.example", 16]),
        ("a name server of the guest's choice", False, "dns", ["9.9.9.9", name, 1]),
        ("a public address", False, "connect", ["1.1.1.1", 443]),
        ("a public address, IPv6", False, "connect", ["2606:4700:4700::1111", 443]),
        ("a public address through the proxy", False, "proxy", ["1.1.1.1", 443]),
        ("a private address through the proxy", False, "proxy", ["10.0.0.1", 80]),
        ("the metadata service", False, "connect", ["169.254.169.254", 80]),
        ("the metadata service through the proxy", False, "proxy", ["169.254.169.254", 80]),
        ("a server on the host's loopback", False, "connect", ["127.0.0.1", port]),
        ("the same through the proxy", False, "proxy", ["127.0.0.1", port]),
        ("the daemon's socket", False, "unix", [daemon]),
        ("a ping, as root", False, "ping", ["1.1.1.1"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", help="the name that is allowed (default: @pip, and its index)")
    name = parser.parse_args().name
    rows, wrong = [], 0
    with Client() as client, socket.create_server(("127.0.0.1", 0)) as server:
        box = client.sandbox(client.create_sandbox(ephemeral=True, egress_allow=[name or "@pip", NOBODY]).id)
        if name is None:
            name = box.exec(["python3", "-c", INDEX], check=True).stdout.strip()
        daemon = str(Path(load().socket))
        box.write_file("/tmp/attempt.py", INSIDE)
        seen = max(record.seq for record in box.audit())
        for label, open_, what, how in attempts(name, server.getsockname()[1], daemon):
            argv = ["python3", "/tmp/attempt.py", json.dumps([what, how, WAIT_S])]
            ok, said, took = json.loads(box.exec(argv, user="root", check=True).stdout)
            # The end of a connection is written a moment after the program's.
            records = [record for record in box.audit() if record.seq > seen]
            seen = max(record.seq for record in records)
            kinds = dict.fromkeys(record.kind for record in records if record.kind.startswith("egress."))
            wrong += ok != open_
            rows.append((label, f"{said}{'' if ok == open_ else '  WRONG'}", f"{took:.1f}", " ".join(kinds)))
        box.delete_sandbox()
    heads = ("attempt", "what happened", "ms", "in the audit")
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(4)]
    for row in [heads, tuple("-" * width for width in widths), *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(f"{len(rows)} attempts, {wrong} of them not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
