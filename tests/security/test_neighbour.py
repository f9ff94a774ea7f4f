"""One sandbox does its worst; the one next door is answered all the while."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from bench.neighbour import ECHO, OPEN_STREAMS, PORT
from forkyard import Client

pytestmark = [pytest.mark.root, pytest.mark.slow]
GOES_OFF_S = 6
BOMBS = {
    "forks": "f() { f | f & }; f; sleep 60",
    "memory": "while :; do python3 -c 'x = bytearray(b\"y\" * (4 << 30))'; done",
    "tmpfs": "while :; do head -c 4G /dev/zero > /dev/shm/fill; rm -f /dev/shm/fill; done",
    "output": "yes",
    "disk": "while :; do head -c 4G /dev/zero > fill; rm -f fill; done",
    "inodes": "while :; do mkdir -p d; for i in $(seq 5000); do : > d/$i; done; rm -rf d; done",
    "processes": "for i in $(seq 10000); do sleep 60 & done; wait",
}


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Client]:  # noqa: F811
    with Client(home=own_yard.home) as client:
        yield client


@pytest.mark.parametrize("bombs", [*([name] for name in BOMBS), list(BOMBS)], ids="+".join)
def test_a_neighbour_is_answered_beside(client: Client, bombs: list[str]) -> None:
    client.create_sandbox("bad", mem_mb=512, disk_mb=1024)
    client.create_sandbox("neighbour")
    served = []
    with ThreadPoolExecutor(len(bombs)) as pool:
        going_off = [
            pool.submit(client.shell, "bad", BOMBS[name], timeout_s=GOES_OFF_S, max_output=1 << 16)
            for name in bombs
        ]
        while not all(bomb.done() for bomb in going_off):
            begun = time.monotonic()
            assert client.exec("neighbour", ["true"], timeout_s=60).exit_code == 0
            served.append(time.monotonic() - begun)
    for bomb in going_off:
        if (failure := bomb.exception()) is not None:  # its sandbox may have been lost by its own doing
            assert getattr(failure, "code", "") in ("sandbox_lost", "unavailable", "conflict"), failure
    assert len(served) >= 3 and max(served) < _limit_s(), sorted(served)[-5:]
    assert client.get_sandbox("neighbour").state == "running"
    if client.get_sandbox("bad").state == "failed":
        failure_of_bad = client.get_sandbox("bad").failure
        assert failure_of_bad is not None and failure_of_bad.cause != "host", failure_of_bad


def test_a_neighbour_is_answered_beside_a_thousand_open_streams(client: Client) -> None:
    client.create_sandbox("bad", mem_mb=512)
    client.create_sandbox("neighbour")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(client.spawn("bad", ["python3", "-u", "-c", ECHO]))
        assert b"ready" in next(server.stream()).data
        where = urlsplit(client.expose("bad", PORT))
        streams = _open(stack, str(where.hostname), int(where.port or 0))
        served = []
        for _ in range(5):
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.sendall(b"x" * 1000)
            begun = time.monotonic()
            assert client.exec("neighbour", ["true"], timeout_s=60).exit_code == 0
            served.append(time.monotonic() - begun)
        # Those that it let open were served all the while; the others were sent away.
        whole = sum(_takes(stream, 5000) for stream in streams)
        assert whole >= 200, whole
    assert max(served) < _limit_s(), served


def _open(stack: contextlib.ExitStack, host: str, port: int) -> list[socket.socket]:
    """As many of a thousand connections as there may be."""
    streams = []
    for _ in range(OPEN_STREAMS):
        with contextlib.suppress(ConnectionResetError):
            streams.append(stack.enter_context(socket.create_connection((host, port), timeout=60)))
    return streams


def _takes(stream: socket.socket, size: int) -> bool:
    """Whether so much comes out of it."""
    while size:
        try:
            data = stream.recv(size)
        except ConnectionResetError:
            return False
        if not data:
            return False
        size -= len(data)
    return True


def _limit_s() -> float:
    """What others run on this machine takes its share of the same time; the figures are the bench's."""
    return 3 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
