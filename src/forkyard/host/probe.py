"""What this host offers: cgroups, loop devices, filesystems, KVM, RCU. Reading only, a millisecond each.

Whether the things that matter really work is for ``forkyard doctor``, which tries them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CgroupSupport",
    "cgroups",
    "cpu_flags",
    "filesystems",
    "grace_period_ms",
    "has_go",
    "kernel_release",
    "kvm_device",
    "loop_devices",
    "memory_mb",
    "rcu_expedited",
    "set_rcu_expedited",
]

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_CMD_GLOBAL = 1
_WANTED = ("cpu", "memory", "pids", "freezer")
_RCU_EXPEDITED = Path("/sys/kernel/rcu_expedited")


@dataclass(frozen=True, slots=True)
class CgroupSupport:
    """``version`` is 2, 1 or 0 (none); ``controllers`` the usable ones of cpu, memory, pids, freezer."""

    version: int
    controllers: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in _WANTED if name not in self.controllers)


def cgroups(root: Path = Path("/sys/fs/cgroup")) -> CgroupSupport:
    """Which cgroup version has the controllers here. An empty v2 mount beside v1 ones counts as v1."""
    unified = _read(root / "cgroup.controllers").split()
    if "memory" in unified:
        # v2 has no freezer controller: every group can be frozen.
        return CgroupSupport(2, tuple(name for name in _WANTED if name in unified or name == "freezer"))
    first = tuple(name for name in _WANTED if (root / name / "cgroup.procs").exists())
    return CgroupSupport(1, first) if first else CgroupSupport(0, ())


def filesystems(file: Path = Path("/proc/filesystems")) -> set[str]:
    """Filesystem types that the kernel has loaded; others may still come as modules."""
    return {line.split()[-1] for line in _read(file).splitlines() if line.strip()}


def loop_devices() -> bool:
    """Whether loop devices can be asked for."""
    return os.access("/dev/loop-control", os.R_OK | os.W_OK)


def kvm_device(path: Path = Path("/dev/kvm")) -> bool:
    """Whether there is a /dev/kvm that we may open; not whether it runs guests."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def rcu_expedited(file: Path = _RCU_EXPEDITED) -> bool | None:
    """The kernel's ``rcu_expedited`` setting, None where there is none."""
    text = _read(file).strip()
    return text != "0" if text else None


def set_rcu_expedited(on: bool, file: Path = _RCU_EXPEDITED) -> None:
    """Set it until the next boot. It holds for the whole host: waits for RCU get short, at the
    price of interrupts to every CPU.

    Raises:
        OSError: not allowed, or the kernel has no such setting.
    """
    file.write_text("1" if on else "0")


def grace_period_ms() -> float | None:
    """How long one wait for RCU takes now, the best of three; None if the kernel does not tell."""
    number = _SYS_MEMBARRIER.get(platform.machine())
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        if libc.syscall(number, _MEMBARRIER_CMD_GLOBAL, 0, 0) != 0:
            return None
        best = min(best, (time.perf_counter() - started) * 1000)
    return best


def kernel_release() -> tuple[int, int]:
    """The kernel's version, such as ``(6, 18)``."""
    numbers = platform.release().split(".")
    try:
        return int(numbers[0]), int(numbers[1].split("-")[0])
    except (ValueError, IndexError):
        return 0, 0


def memory_mb(file: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """``(total, available)`` memory of the host, MiB."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    for line in _read(file).splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) // 1024
    return found["MemTotal"], found["MemAvailable"]


def cpu_flags(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Feature flags of the first CPU."""
    for line in _read(file).splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(rest.split())
    return set()


def has_go() -> bool:
    """Whether a Go tool chain is on PATH."""
    return shutil.which("go") is not None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
