"""What the figures depend on: the machine's facts, and what processes use on it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, Any]:
    """CPU, memory, kernel, settings that matter to start times, and how busy the machine is."""
    cpu = _field("/proc/cpuinfo", "model name")
    total_kb = int((_field("/proc/meminfo", "MemTotal") or "0").split()[0])
    release = platform.freedesktop_os_release()
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "mem_gb": round(total_kb / (1 << 20), 1),
        "kernel": platform.release(),
        "os": release.get("PRETTY_NAME", ""),
        "python": platform.python_version(),
        "rcu_expedited": _read("/sys/kernel/rcu_expedited"),
        "cgroup": "v1" if Path("/sys/fs/cgroup/memory").is_dir() else "v2",
        "commit": _commit(),
        "load_before": round(os.getloadavg()[0], 2),
        "busy_percent_before": busy_percent(),
    }


def _field(path: str, name: str) -> str | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).parent
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip()
    return ""


def busy_percent(over_s: float = 1.0) -> float:
    """How much of all CPUs somebody uses now."""

    def sample() -> tuple[int, int]:
        words = [int(word) for word in _read("/proc/stat").splitlines()[0].split()[1:9]]
        return sum(words), words[3] + words[4]

    all_before, idle_before = sample()
    time.sleep(over_s)
    all_after, idle_after = sample()
    return round(100 * (1 - (idle_after - idle_before) / max(1, all_after - all_before)), 1)


def pids_of(mark: str, parents: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    """Processes with ``mark`` in their command line, ``parents``, and all that descend from either."""
    children: dict[int, list[int]] = {}
    roots: set[int] = set(parents)
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            stat = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] in (b"Z", b"X"):
                continue
            children.setdefault(int(stat[1]), []).append(pid)
            if mark and mark.encode() in Path(entry.path, "cmdline").read_bytes() and pid != os.getpid():
                roots.add(pid)
    found: set[int] = set()
    left = list(roots)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found


def pss_mb(pids: set[int]) -> float:
    """Memory of these processes, what they share with others counted by their share."""
    total = 0
    for pid in pids:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def cpu_s(pids: set[int]) -> float:
    """CPU seconds that these processes, and children that they have reaped, used so far."""
    total = 0
    for pid in pids:
        stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(stat) > 15:
            total += sum(map(int, stat[11:15]))
    return total / TICKS


def reap() -> None:
    """Collect orphans that became this process's children (see ``BareRunsc.open``); call it when no
    child that somebody waits for can have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
