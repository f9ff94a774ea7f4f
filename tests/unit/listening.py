"""Bare connections to a daemon that listens, as anybody may make them."""

from __future__ import annotations

import socket
import ssl

import httpx

DEADLINE_S = 10


def place(url: str) -> tuple[str, int]:
    found = httpx.URL(url)
    return found.host, found.port or 0


def plain(url: str, token: str | None = None) -> httpx.Client:
    """What anybody may use."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=url.partition("#")[0], verify=False, headers=headers, timeout=DEADLINE_S)


def connect(url: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(place(url), timeout=DEADLINE_S))


def is_closed(sock: socket.socket) -> bool:
    """Waits for the other side to close it, or to answer."""
    sock.settimeout(DEADLINE_S)
    try:
        return sock.recv(1000) == b""
    except (ConnectionError, ssl.SSLError):
        return True
