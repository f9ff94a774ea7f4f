"""Forkyard as a contender: a home of its own, and the synchronous client that users have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.contender import HEAP, Forked, argv_of_heap
from forkyard import Client, config
from forkyard.client.launch import _environment
from forkyard.errors import UnavailableError
from forkyard.host import mounts
from forkyard.setup.borrow import SYSTEM_HOME, quick_setup
from forkyard.setup.runsc import read_engine
from forkyard.setup.templates import layer_paths, read_template

WARM_S = 60
# More than half of what a sandbox has unless it is told.
LARGE_MB = 250


@dataclass(frozen=True)
class Build:
    """A runsc on this machine; ``label`` is its date, or ``newest`` for one that has none."""

    label: str
    path: Path


def lender() -> Path:
    """The ready home whose engine and base template are measured."""
    home = Path(os.environ.get("FORKYARD_BASE_FROM") or os.environ.get("FORKYARD_HOME") or SYSTEM_HOME)
    if read_engine(home) is None or read_template(home, "base") is None:
        raise SystemExit(f"{home} is not set up: run forkyard setup (or make setup) first")
    return home


def base_layers(home: Path) -> list[Path]:
    """The directories of the base template, top first."""
    template = read_template(home, "base")
    assert template is not None
    return layer_paths(home, template["layers"])


def builds(home: Path) -> list[Build]:
    """The engine that set-up chose, the others that it knows of, and ``FORKYARD_BENCH_NEWEST``."""
    engine = read_engine(home)
    assert engine is not None
    paths = [engine["runsc"], *(candidate["runsc"] for candidate in engine["candidates"])]
    if newest := os.environ.get("FORKYARD_BENCH_NEWEST"):
        paths.append(newest)
    found: dict[str, Build] = {}
    for path in dict.fromkeys(paths):
        if os.access(path, os.X_OK):
            label = _label(path)
            found.setdefault(label, Build(label, Path(path)))
    return list(found.values())


def _label(path: str) -> str:
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    version = re.search(r"runsc version (\S+)", shown)
    date = re.search(r"20\d{6}", version[1] if version else "")
    return date[0] if date else "newest"


class Forkyard:
    """A daemon with a home of its own in /tmp, on one build and platform.

    Args:
        trace: Where its trace goes, if anywhere: a directory.
    """

    forks_memory = True

    def __init__(self, build: Build, platform: str, base_from: Path, trace: Path | None = None) -> None:
        self.name = f"forkyard {build.label} {platform}"
        self.build = build
        self.platform = platform
        self.base_from = base_from
        self.trace = trace
        self.home = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/tmp"))
        self._heaps: list[Any] = []

    def open(self) -> None:
        """Borrow the base, start the daemon, and wait for the template's warm image."""
        where = {"home": self.home, "base_from": self.base_from}
        asyncio.run(quick_setup(config.load(where, env={})))
        env = {key: value for key, value in _environment().items() if not key.startswith("FORKYARD_")}
        env |= {
            "FORKYARD_HOME": str(self.home),
            "FORKYARD_BASE_FROM": str(self.base_from),
            "FORKYARD_PLATFORM": self.platform,
            "FORKYARD_RUNSC": str(self.build.path),
        }
        if self.trace is not None:
            env["FORKYARD_TRACE"] = str(self.trace.absolute() / f"{self.name.replace(' ', '-')}.json")
        command = [sys.executable, "-m", "forkyard.cli", "daemon", "start"]
        subprocess.run(command, env=env, check=True, timeout=60, stdout=subprocess.DEVNULL)
        self.client = Client(home=self.home, start=False)
        self.end(self.start())
        deadline = time.monotonic() + WARM_S
        while not self.client.list_templates()[0].warm:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: the base template did not become warm")
            time.sleep(0.1)

    def close(self) -> None:
        try:
            self._stop()
        finally:
            for target in mounts.mounts_below(self.home):
                mounts.unmount(target)
            shutil.rmtree(self.home, ignore_errors=True)

    def _stop(self) -> None:
        """End the daemon and all of its sandboxes, if it got as far as that."""
        if not (self.home / "daemon.json").exists():
            return
        client = Client(home=self.home, start=False)
        pid = client.health().pid
        # Its reply may be lost with it; that it is gone is what counts.
        with contextlib.suppress(UnavailableError):
            client.shutdown("delete")
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: the daemon {pid} does not end")
            time.sleep(0.02)

    def start(self) -> str:
        return self.client.create_sandbox().id

    def run(self, box: str, argv: list[str]) -> None:
        self.client.exec(box, argv, check=True)

    def read_out(self, box: str, argv: list[str]) -> int:
        return sum(len(chunk.data) for chunk in self.client.spawn(box, argv).stream())

    def end(self, box: str) -> None:
        self.client.delete_sandbox(box)

    def source(self, heap_mb: int) -> str:
        box = self.client.create_sandbox(mem_mb=2 * heap_mb).id if heap_mb > LARGE_MB else self.start()
        if heap_mb:
            process = self.client.spawn(box, argv_of_heap(heap_mb), detach=True)
            self._heaps.append(process)
            for chunk in process.stream():
                if b"ready" in chunk.data:
                    break
        return box

    def fork(self, box: str, n: int, heap_mb: int) -> Forked:
        result = self.client.fork(box, n)
        return Forked(
            [fork.id for fork in result.forks],
            {"paused_ms": result.paused_ms, "dirty_mb": result.dirty_mb},
        )

    def check_heap(self, box: str) -> None:
        """Raises unless the process with the heap lives in this fork."""
        if not any(HEAP[:20] in process.command for process in self.client.processes(box)):
            raise AssertionError(f"{self.name}: the fork lacks the source's process")

    def checkpoint(self, box: str) -> dict[str, float]:
        info = self.client.checkpoint(box, keep_last=1)
        return {"paused_ms": info.paused_ms, "dirty_mb": info.dirty_mb}

    def rewind(self, box: str) -> str:
        self.client.rewind(box)
        return box

    def put(self, box: str, data: bytes) -> None:
        self.client.write_file(box, "big", data)

    def get(self, box: str) -> int:
        return len(self.client.read_file(box, "big"))

    def pids(self, box: str) -> set[int]:
        with contextlib.closing(sqlite3.connect(f"file:{self.home}/catalog.db?mode=ro", uri=True)) as catalog:
            (inner,) = catalog.execute("SELECT box FROM sandboxes WHERE id = ?", (box,)).fetchone()
        return machine.pids_of(f"/boxes/{inner}/")

    def shared_pids(self) -> set[int]:
        """The daemon alone."""
        return {self.client.health().pid}
