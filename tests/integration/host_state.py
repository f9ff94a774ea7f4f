"""What the tests look for on the host when everything should be gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def loops_below(path: Path) -> list[str]:
    """Loop devices on files below ``path``, but for those that another program's copy of the
    mount table keeps: a container engine that starts meanwhile takes all mounts along. (So does a sandbox
    of another suite: the files that it has open on the old root keep every mount below that.)"""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name, file = backing.parent.parent.name, backing.read_text().strip()
            if file.startswith(str(path)) and not _mounted_elsewhere(name):
                found.append(f"{name}: {file}")
        except OSError:
            continue
    return found


def _mounted_elsewhere(loop: str) -> bool:
    ours = os.readlink("/proc/self/ns/mnt")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            elsewhere = os.readlink(process / "ns/mnt") != ours
            if elsewhere and f"/dev/{loop} " in (process / "mountinfo").read_text():
                return True
            if elsewhere and (process / "cmdline").read_bytes().startswith(b"runsc-sandbox"):
                return True
        except OSError:
            continue
    return False


def cgroups_like(tag: str) -> list[str]:
    """Control groups, of either version, whose name starts with ``tag``."""
    return [str(path) for pattern in (f"{tag}*", f"*/{tag}*") for path in CGROUPS.glob(pattern)]


def processes_below(path: Path) -> list[int]:
    """Processes with a working directory, root or open file below ``path``, ourselves included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        links = [process / "cwd", process / "root"]
        try:
            links += list((process / "fd").iterdir())
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith(f"{path}/"):
                found.append(int(process.name))
                break
    return found


def processes_of(path: Path) -> list[str]:
    """Command lines of the processes, other than this one, that name ``path``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{path}/" in line and int(process.name) != os.getpid():
            found.append(f"{process.name}: {line}")
    return found


def eventually(look: Callable[[], object], timeout_s: float = 5) -> None:
    """Wait until ``look`` finds nothing; fails with what it still finds."""
    deadline = time.monotonic() + timeout_s
    while found := look():
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
