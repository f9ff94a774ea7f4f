"""Through the wall: what a sandbox fetches from a server on this host, and a command beside it.

The floor is the same curl on the host itself, with nothing between.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from bench.cases import FILE_MB, TRUE, Bench
from bench.ours import Forkyard

AT_ONCE = 16
COMMANDS = 30
FLOOR = "floor"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (FILE_MB << 20)


def downloads(bench: Bench) -> None:
    """100 MB by one curl; then ``true`` while sixteen of them run without end."""
    with _server() as port:
        url = f"http://127.0.0.1:{port}/"
        bench.note("100 MB downloaded")
        for index in range(-1, min(bench.n, 10)):
            _rate(bench, FLOOR, index, lambda: subprocess.run(_curl(url), check=True))
            for ours in _ours(bench):
                box = ours.client.create_sandbox(egress_allow=[f"127.0.0.1:{port}"]).id
                try:
                    _rate(bench, ours.name, index, functools.partial(ours.run, box, _curl(url, inside=True)))
                finally:
                    ours.end(box)
        bench.note(f"a command beside {AT_ONCE} downloads")
        for ours in _ours(bench):
            _beside(bench, ours, url, port)


def _ours(bench: Bench) -> list[Forkyard]:
    return [contender for contender in bench.contenders if isinstance(contender, Forkyard)]


def _curl(url: str, *, inside: bool = False) -> list[str]:
    through = ["-p", "-x", "http://127.0.0.1:3128", "--noproxy", ""] if inside else ["--noproxy", "*"]
    return ["curl", "-sS", "-f", *through, "-o", "/dev/null", url]


def _rate(bench: Bench, name: str, index: int, fetch: Callable[[], object]) -> None:
    begun = time.perf_counter()
    fetch()
    if index >= 0:
        bench.add("100 MB downloaded", name, index, FILE_MB / (time.perf_counter() - begun), "MB/s")


def _beside(bench: Bench, ours: Forkyard, url: str, port: int) -> None:
    box = ours.client.create_sandbox(egress_allow=[f"127.0.0.1:{port}"]).id
    try:
        for loaded in (False, True):
            if loaded:
                script = f"while :; do {shlex.join(_curl(url, inside=True))}; done"
                for _ in range(AT_ONCE):
                    ours.client.spawn(box, ["sh", "-c", script], detach=True)
                time.sleep(1)
            metric = f"exec `true`, {f'beside {AT_ONCE} downloads' if loaded else 'alone in its sandbox'}"
            for index in range(-1, COMMANDS):
                with bench.timed(metric, ours.name, index):
                    ours.run(box, TRUE)
    finally:
        ours.end(box)


@contextlib.contextmanager
def _server() -> Iterator[int]:
    """Its port; in a process of its own, so that it is not this one's interpreter that is measured."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.downloads"], stdin=listener.fileno(), stderr=subprocess.DEVNULL
        )
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()


def _serve(listener: socket.socket) -> None:
    """A process for each request."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(os.urandom(1 << 20) * FILE_MB)
        file.flush()
        while True:
            peer, _ = listener.accept()
            if os.fork() == 0:
                with peer, contextlib.suppress(OSError):
                    peer.recv(65536)
                    peer.sendall(HEAD)
                    at = 0
                    while at < FILE_MB << 20:
                        at += os.sendfile(peer.fileno(), file.fileno(), at, (FILE_MB << 20) - at)
                os._exit(0)
            peer.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
