"""A command while the sandbox next door does its worst: what one tenant costs another."""

from __future__ import annotations

import contextlib
import threading
import time

from bench.cases import TRUE, Bench
from bench.ours import Forkyard
from forkyard.errors import ForkyardError

COMMANDS = 100
# Each goes on until it is ended.
BOMBS = {
    "forks": "f() { f | f & }; f; sleep 60",
    "memory": "python3 -c 'x = bytearray(b\"y\" * (4 << 30))'",
    "tmpfs": "head -c 4G /dev/zero > /dev/shm/fill; rm -f /dev/shm/fill",
    "output": "yes",
    "disk": "head -c 4G /dev/zero > fill; rm -f fill",
    "inodes": "mkdir -p d; for i in $(seq 5000); do : > d/$i; done; rm -rf d",
}


def neighbour(bench: Bench) -> None:
    """``true`` in one sandbox: alone, beside each bomb in another, and beside all of them in one."""
    for ours in [contender for contender in bench.contenders if isinstance(contender, Forkyard)]:
        bench.note(f"{ours.name}: a command beside bombs")
        box = ours.start()
        try:
            _measure(bench, ours, box, "no bomb", [])
            for name, bomb in BOMBS.items():
                _measure(bench, ours, box, name, [bomb])
            _measure(bench, ours, box, "all of these", list(BOMBS.values()))
        finally:
            ours.end(box)


def _measure(bench: Bench, ours: Forkyard, box: str, name: str, bombs: list[str]) -> None:
    bad = ours.client.create_sandbox(mem_mb=512, disk_mb=1024).id
    over = threading.Event()
    threads = [threading.Thread(target=_go_off, args=(ours, bad, bomb, over)) for bomb in bombs]
    try:
        for thread in threads:
            thread.start()
        if bombs:
            time.sleep(2)
        for index in range(-1, COMMANDS):
            with bench.timed(f"exec `true`, next door: {name}", ours.name, index):
                ours.run(box, TRUE)
    finally:
        over.set()
        ours.end(bad)
        for thread in threads:
            thread.join()


def _go_off(ours: Forkyard, bad: str, bomb: str, over: threading.Event) -> None:
    """Again and again: a bomb that is ended for what it did is thrown anew."""
    while not over.is_set():
        # Its sandbox is deleted under it at the end, or did not survive it.
        with contextlib.suppress(ForkyardError):
            ours.client.shell(bad, bomb, timeout_s=30, max_output=1 << 16)
        over.wait(0.05)
