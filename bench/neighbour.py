"""A command while the sandbox next door does its worst: what one tenant costs another.

What else the machine does changes within seconds, so that every bomb takes turns with no bomb: a few
commands without, a few beside it, and again.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench.cases import TRUE, Bench
from bench.ours import Forkyard
from forkyard import Client
from forkyard.errors import ForkyardError

TURNS = 10
COMMANDS = 20
OPEN_STREAMS = 1000
PORT = 7000
# Each goes on until it is ended.
BOMBS = {
    "forks": "f() { f | f & }; f; sleep 60",
    "memory": "python3 -c 'x = bytearray(b\"y\" * (4 << 30))'",
    "tmpfs": "head -c 4G /dev/zero > /dev/shm/fill; rm -f /dev/shm/fill",
    "output": "yes",
    "disk": "head -c 4G /dev/zero > fill; rm -f fill",
    "inodes": "mkdir -p d; for i in $(seq 5000); do : > d/$i; done; rm -rf d",
    "10000 processes": "for i in $(seq 10000); do sleep 60 & done; wait",
}
# What comes in goes back, as fast as it is taken.
ECHO = f"""
import asyncio
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", {PORT}, backlog={OPEN_STREAMS})
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
STREAMS = f"{OPEN_STREAMS} open streams"
NONE = "no bomb"


def neighbour(bench: Bench) -> None:
    """``true`` in one sandbox: alone, beside each bomb in another, and beside all of them in one."""
    for ours in [contender for contender in bench.contenders if isinstance(contender, Forkyard)]:
        bench.note(f"{ours.name}: a command beside bombs")
        box = ours.start()
        try:
            for turn in range(TURNS):
                bench.note(f"  turn {turn + 1} of {TURNS}")
                for name in [*BOMBS, STREAMS, "all of these"]:
                    _measure(bench, ours, box, turn, f"{NONE}, in turns with: {name}", [])
                    together = [*BOMBS, STREAMS] if name == "all of these" else [name]
                    _measure(bench, ours, box, turn, name, together)
        finally:
            ours.end(box)


def _measure(bench: Bench, ours: Forkyard, box: str, turn: int, name: str, bombs: list[str]) -> None:
    with _going_off(ours, bombs) if bombs else contextlib.nullcontext():
        for index in range(-1, COMMANDS):
            number = turn * COMMANDS + index if index >= 0 else -1
            with bench.timed(f"exec `true`, next door: {name}", ours.name, number):
                ours.run(box, TRUE)


@contextlib.contextmanager
def _going_off(ours: Forkyard, bombs: list[str]) -> Iterator[None]:
    """In a process of their own, so that it is not this one's interpreter that is kept busy."""
    bad = ours.client.create_sandbox(mem_mb=512, disk_mb=1024).id
    command = [sys.executable, "-m", "bench.neighbour", str(ours.home), bad, *bombs]
    thrower = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        time.sleep(3)
        if thrower.poll() is not None:
            raise RuntimeError(f"the bombs were not thrown: exit {thrower.returncode}")
        yield
    finally:
        thrower.terminate()
        thrower.wait()
        ours.end(bad)


def _throw(client: Client, bad: str, bomb: str) -> None:
    """Again and again: a bomb that is ended for what it did is thrown anew."""
    while True:
        with contextlib.suppress(ForkyardError, OSError):
            if bomb == STREAMS:
                _streams(client, bad)
            else:
                client.shell(bad, BOMBS[bomb], timeout_s=30, max_output=1 << 16)
        time.sleep(0.05)


def _streams(client: Client, bad: str) -> None:
    """Many connections to a port inside, each of which sends and is sent something all the time."""
    with contextlib.ExitStack() as stack:
        server = client.spawn(bad, ["python3", "-c", ECHO])
        stack.callback(server.close)
        where = urlsplit(client.expose(bad, PORT))
        connections: list[socket.socket] = []
        while True:
            if len(connections) < OPEN_STREAMS:
                # Beyond what a sandbox may have they are reset, and asked for again.
                with contextlib.suppress(ConnectionResetError):
                    one = stack.enter_context(
                        socket.create_connection((where.hostname, where.port), timeout=10)
                    )
                    one.setblocking(False)
                    connections.append(one)
            for one in list(connections):
                try:
                    one.send(b"x" * 1000)
                    if not one.recv(65536):
                        connections.remove(one)
                except BlockingIOError:
                    pass
                except OSError:
                    connections.remove(one)


if __name__ == "__main__":
    _, _home, _bad, *_bombs = sys.argv
    with Client(home=Path(_home), start=False) as _client:
        for _bomb in _bombs:
            threading.Thread(target=_throw, args=(_client, _bad, _bomb), daemon=True).start()
        threading.Event().wait()
