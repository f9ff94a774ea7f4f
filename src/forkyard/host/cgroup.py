"""Control groups, both versions: one group per box below ``forkyard-<hash of the home>``.

``mem_mb`` is what a sandbox may use of memory that cannot be reclaimed (anonymous and shared).
The kernel's own limit lies a reserve above it and is the last resort: at ``mem_mb`` the watch
(:meth:`CgroupBox.watch_memory`) tells the daemon, which ends something inside the sandbox. Page
cache counts for the kernel's limit only, where it is dropped first.

Boxes are siblings, so that the weight of one counts against the other boxes of its home, and only
while they want the same CPU. Inside a box, what runs the guest's programs can be set apart
(:meth:`CgroupBox.set_apart`): together those processes then weigh as much as one thread of the guest's
kernel, however many they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forkyard.errors import CapacityError, DeadlineError, InternalError, UnsupportedError
from forkyard.host.memwatch import MemoryWatch, V1Watch, V2Watch

__all__ = ["CgroupBox", "Cgroups", "GroupUsage", "thread_limit"]

_V1_CONTROLLERS = ("memory", "cpu", "cpuacct", "pids", "freezer")
_V2_CONTROLLERS = ("memory", "cpu", "pids")
_MIB = 1 << 20
_PERIOD_US = 100_000
_WEIGHT = 100
# What version 1 calls a weight of 100.
_SHARES = 1024
_NOTE = "trusted.forkyard"
# Parts of a box: the guest's programs and, in version 2, where only leaves have processes, the rest.
_GUEST, _KERNEL = "guest", "kernel"


class GroupUsage(NamedTuple):
    """``cpu_ms`` since the group was made; ``mem_mb`` that cannot be reclaimed, and processes, now."""

    cpu_ms: float
    mem_mb: float
    processes: int


def _read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.read(1 << 16).decode()


def _write(path: str, text: str | int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(text).encode())
    finally:
        os.close(fd)


def _fields(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def thread_limit(processes: int) -> int:
    """Threads that a box with so many guest processes may have on the host. A sentry that gets none
    ends; ptrace takes one for each pair of a guest process and a thread of the sentry that has run it. No
    box may have more than a quarter of the host's."""
    host = min(int(_read(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max"))
    return min(20 * processes + 400, max(host // 4, 2 * processes + 400))


class Cgroups:
    """The groups of one home. Every method but :meth:`CgroupBox.delete` blocks for microseconds.

    Attributes:
        version: 1, 2, or 0 where there is nothing usable.
        reason: Why there is not, for the doctor.
    """

    def __init__(self, root_name: str) -> None:
        self.root_name = root_name
        self.version = 0
        self.reason = ""
        self._dirs: dict[str, str] = {}  # controller -> our root directory in its hierarchy
        self._probe()

    @classmethod
    def for_home(cls, home: Path) -> Cgroups:
        """The groups of ``home``, by whatever name it is reached."""
        return cls(f"forkyard-{hashlib.sha256(os.path.realpath(home).encode()).hexdigest()[:8]}")

    @property
    def available(self) -> bool:
        """Whether limits can be set here."""
        return self.version > 0

    def controllers(self) -> list[str]:
        """The controllers in use."""
        return sorted(self._dirs)

    def _probe(self) -> None:
        v1: dict[str, str] = {}
        v2 = ""
        for line in _read("/proc/self/mounts").splitlines():
            _, where, kind, options = line.split(" ")[:4]
            if kind == "cgroup":
                for controller in set(options.split(",")) & set(_V1_CONTROLLERS):
                    v1.setdefault(controller, where)
            elif kind == "cgroup2":
                v2 = v2 or where
        try:
            if v2 and "memory" in _read(f"{v2}/cgroup.controllers").split():
                self._open_v2(v2)
            elif "memory" in v1:
                self._dirs = {name: f"{where}/{self.root_name}" for name, where in v1.items()}
                self.version = 1
                self._make_roots()
            else:
                self.reason = "no memory controller is mounted"
        except OSError as error:
            self.version, self._dirs = 0, {}
            self.reason = f"cannot make groups: {error}"

    def _open_v2(self, root: str) -> None:
        present = set(_read(f"{root}/cgroup.controllers").split()) & set(_V2_CONTROLLERS)
        self._dirs = dict.fromkeys(present, f"{root}/{self.root_name}")
        self.version = 2
        enabled = set(_read(f"{root}/cgroup.subtree_control").split())
        if present - enabled:
            _write(f"{root}/cgroup.subtree_control", " ".join(f"+{name}" for name in present - enabled))
        self._make_roots()

    def _make_roots(self) -> None:
        for path in set(self._dirs.values()):
            os.makedirs(path, mode=0o755, exist_ok=True)
        if self.version == 1 and "cpu" in self._dirs:
            # Processes beside this group count one by one: it is to weigh as much as one on each CPU.
            with contextlib.suppress(OSError):
                _write(f"{self._dirs['cpu']}/cpu.shares", (os.cpu_count() or 1) * _SHARES)
        if self.version == 2:
            path = next(iter(self._dirs.values()))
            _write(f"{path}/cgroup.subtree_control", " ".join(f"+{name}" for name in self._dirs))

    def _box(self, name: str) -> CgroupBox:
        if not name or "/" in name or name.startswith("."):
            raise InternalError(f"not a name for a group: {name!r}")
        dirs = {controller: f"{path}/{name}" for controller, path in self._dirs.items()}
        return _V1Box(name, dirs) if self.version == 1 else _V2Box(name, dirs)

    def create(
        self,
        name: str,
        *,
        mem_mb: int | None = None,
        mem_reserve_mb: int | None = None,
        cpus: float | None = None,
        cpu_weight: int | None = None,
        pids: int | None = None,
    ) -> CgroupBox:
        """Make a group with the limits that are given; if that fails, nothing is left.

        Raises:
            UnsupportedError: no control groups here (see ``reason``).
            CapacityError: the kernel takes no more groups.
        """
        if not self.available:
            raise UnsupportedError(f"no control groups: {self.reason}")
        box = self._box(name)
        made: list[str] = []
        try:
            for path in box.paths:
                try:
                    os.mkdir(path)
                except FileNotFoundError:  # somebody removed our root
                    self._make_roots()
                    os.mkdir(path)
                made.append(path)
            made += box.divide()
            box.update(
                mem_mb=mem_mb, mem_reserve_mb=mem_reserve_mb, cpus=cpus, cpu_weight=cpu_weight, pids=pids
            )
        except BaseException as error:
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM):
                raise CapacityError(f"the kernel takes no more control groups: {error}") from error
            raise
        return box

    def find(self, name: str) -> CgroupBox | None:
        """An existing group, also one that an earlier daemon made; None if there is none."""
        if not self.available:
            return None
        box = self._box(name)
        if not any(os.path.isdir(path) for path in box.paths):
            return None
        with contextlib.suppress(OSError, ValueError):
            box.recall()
        return box

    def names(self) -> list[str]:
        """Names of all groups of this home."""
        found: set[str] = set()
        for path in set(self._dirs.values()):
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                found.update(entry.name for entry in entries if entry.is_dir())
        return sorted(found)

    def threads(self) -> int:
        """Threads in all boxes together; 0 where nobody counts them."""
        with contextlib.suppress(KeyError, OSError):
            return int(_read(f"{self._dirs['pids']}/pids.current"))
        return 0

    def close(self) -> None:
        """Remove the home's own group if no box is left in it. Idempotent."""
        for path in set(self._dirs.values()):
            with contextlib.suppress(OSError):
                os.rmdir(path)


class CgroupBox:
    """The group of one box. ``dirs`` maps a controller to the group's directory there."""

    def __init__(self, name: str, dirs: dict[str, str]) -> None:
        self.name = name
        self.dirs = dirs
        self.paths = sorted(set(dirs.values()))
        self.mem_mb = 0
        self.mem_reserve_mb = 0

    def _file(self, controller: str, name: str) -> str:
        return f"{self.dirs[controller]}/{name}"

    def update(
        self,
        *,
        mem_mb: int | None = None,
        mem_reserve_mb: int | None = None,
        cpus: float | None = None,
        cpu_weight: int | None = None,
        pids: int | None = None,
    ) -> None:
        """Set the limits that are given; ``cpu_weight`` is version 2's, 1 to 10000, in both."""
        if mem_mb is not None:
            self.mem_mb = mem_mb
            self.mem_reserve_mb = self.mem_reserve_mb if mem_reserve_mb is None else mem_reserve_mb
            self._limit_memory()
        if cpus and "cpu" in self.dirs:
            self._limit_cpu(max(int(cpus * _PERIOD_US), 1000))
        if cpu_weight is not None and "cpu" in self.dirs:
            self._weigh(cpu_weight)
        if pids is not None and "pids" in self.dirs:
            _write(self._file("pids", "pids.max"), pids)

    def _limit_memory(self) -> None:
        raise NotImplementedError

    def _limit_cpu(self, quota_us: int) -> None:
        raise NotImplementedError

    def _weigh(self, weight: int) -> None:
        raise NotImplementedError

    def recall(self) -> None:
        """Learn the memory limits from the group itself."""
        raise NotImplementedError

    def join_argv(self, argv: list[str]) -> list[str]:
        """An argv that enters the group and then becomes ``argv``."""
        raise NotImplementedError

    def _join(self, argv: list[str], files: list[str]) -> list[str]:
        script = "; ".join(f"echo 0 > {path} || exit 126" for path in files)
        return ["/bin/sh", "-c", f'{script}; exec "$@"', "sh", *argv]

    def divide(self) -> list[str]:
        """Make the parts that a new group must have before anything is in it; their directories."""
        return []

    def set_apart(self, pid: int) -> None:
        """Move a process, and with it all that it starts from now on, to the part of the group that
        gets no more of the CPU than one thread outside it while both want it. Waits for the kernel, which
        takes 10 ms and more; without effect where the CPU is not controlled."""
        raise NotImplementedError

    def usage(self) -> GroupUsage:
        """What the group uses."""
        raise NotImplementedError

    def mem_bytes(self) -> int:
        """Anonymous and shared memory, which cannot be reclaimed."""
        raise NotImplementedError

    def threads(self) -> int:
        """Its threads; 0 where nobody counts them."""
        with contextlib.suppress(KeyError, OSError):
            return int(_read(self._file("pids", "pids.current")))
        return 0

    def dirty_mb(self) -> float:
        """MiB of the group's page cache that still have to be written."""
        raise NotImplementedError

    def oom_kills(self) -> int:
        """How many of its processes the kernel has ended for want of memory."""
        raise NotImplementedError

    def freeze(self, frozen: bool) -> None:
        """Ask the kernel to stop all of its processes, or to let them go on."""
        raise NotImplementedError

    def watch_memory(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[float, float], None]
    ) -> MemoryWatch:
        """Call ``callback(usage_mb, limit_mb)`` on the loop, at most every 20 ms, as long as more than
        ``mem_mb`` is used. Close what is returned before the group is deleted."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Its processes."""
        found: list[int] = []
        for path in (f"{self.paths[0]}/{part}" for part in (".", _GUEST, _KERNEL)):
            with contextlib.suppress(FileNotFoundError):
                found += [int(pid) for pid in _read(f"{path}/cgroup.procs").split()]
        return found

    async def delete(self, deadline_s: float = 5.0) -> None:
        """Remove the group. Its processes must be gone, or on their way. Idempotent.

        Raises:
            DeadlineError: there still are some; the message has their pids.
        """
        end = time.monotonic() + deadline_s
        pause = 0.001
        parts = [f"{path}/{part}" for path in self.paths for part in (_GUEST, _KERNEL)]
        for path in [*parts, *self.paths]:
            while True:
                try:
                    os.rmdir(path)
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                if time.monotonic() > end:
                    pids = self.pids()[:8]
                    raise DeadlineError(
                        f"control group {self.name} still has processes: {pids}", retryable=True
                    )
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)


class _V1Box(CgroupBox):
    def _limit_memory(self) -> None:
        memory = self.dirs["memory"]
        with contextlib.suppress(OSError):
            _write(f"{memory}/memory.swappiness", 0)
        _write(f"{memory}/memory.limit_in_bytes", (self.mem_mb + self.mem_reserve_mb) * _MIB)
        # what the kernel squeezes this group to when the host is short, and our note of mem_mb
        _write(f"{memory}/memory.soft_limit_in_bytes", self.mem_mb * _MIB)

    def recall(self) -> None:
        memory = self.dirs["memory"]
        self.mem_mb = int(_read(f"{memory}/memory.soft_limit_in_bytes")) // _MIB
        self.mem_reserve_mb = int(_read(f"{memory}/memory.limit_in_bytes")) // _MIB - self.mem_mb

    def _limit_cpu(self, quota_us: int) -> None:
        _write(self._file("cpu", "cpu.cfs_period_us"), _PERIOD_US)
        _write(self._file("cpu", "cpu.cfs_quota_us"), quota_us)

    def _weigh(self, weight: int) -> None:
        _write(self._file("cpu", "cpu.shares"), weight * _SHARES // _WEIGHT)

    def join_argv(self, argv: list[str]) -> list[str]:
        # "tasks" moves the writing thread alone, and that needs no wait for an RCU grace period
        return self._join(argv, [f"{path}/tasks" for path in self.paths])

    def set_apart(self, pid: int) -> None:
        if "cpu" not in self.dirs:
            return
        part = self._file("cpu", _GUEST)
        with contextlib.suppress(FileExistsError):
            os.mkdir(part)
        # A new group's cpu.shares are those of one thread, and threads beside it count one by one.
        _write(f"{part}/cgroup.procs", pid)

    def _stat(self) -> dict[str, int]:
        return _fields(self._file("memory", "memory.stat"))

    def mem_bytes(self) -> int:
        stat = self._stat()
        return stat["rss"] + stat.get("shmem", 0)

    def dirty_mb(self) -> float:
        with contextlib.suppress(OSError):
            stat = self._stat()
            return (stat.get("dirty", 0) + stat.get("writeback", 0)) / _MIB
        return 0.0

    def usage(self) -> GroupUsage:
        cpu = 0.0
        if "cpuacct" in self.dirs:
            cpu = int(_read(self._file("cpuacct", "cpuacct.usage"))) / 1e6
        count = int(_read(self._file("pids", "pids.current"))) if "pids" in self.dirs else len(self.pids())
        return GroupUsage(cpu, self.mem_bytes() / _MIB, count)

    def oom_kills(self) -> int:
        with contextlib.suppress(OSError):
            return _fields(self._file("memory", "memory.oom_control")).get("oom_kill", 0)
        return 0

    def freeze(self, frozen: bool) -> None:
        _write(self._file("freezer", "freezer.state"), "FROZEN" if frozen else "THAWED")

    def watch_memory(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[float, float], None]
    ) -> MemoryWatch:
        return V1Watch(
            loop,
            callback,
            self.mem_bytes,
            self.dirs["memory"],
            self.mem_mb * _MIB,
            self.mem_reserve_mb * _MIB,
        )


class _V2Box(CgroupBox):
    @property
    def _dir(self) -> str:
        return self.paths[0]

    def _limit_memory(self) -> None:
        _write(f"{self._dir}/memory.max", (self.mem_mb + self.mem_reserve_mb) * _MIB)
        with contextlib.suppress(OSError):  # no swap in this kernel
            _write(f"{self._dir}/memory.swap.max", 0)
        with contextlib.suppress(OSError):
            os.setxattr(self._dir, _NOTE, f"{self.mem_mb} {self.mem_reserve_mb}".encode())

    def recall(self) -> None:
        try:
            note = os.getxattr(self._dir, _NOTE).split()
            self.mem_mb, self.mem_reserve_mb = int(note[0]), int(note[1])
        except OSError:
            total = int(_read(f"{self._dir}/memory.max")) // _MIB
            self.mem_reserve_mb = total // 8
            self.mem_mb = total - self.mem_reserve_mb

    def _limit_cpu(self, quota_us: int) -> None:
        _write(f"{self._dir}/cpu.max", f"{quota_us} {_PERIOD_US}")

    def _weigh(self, weight: int) -> None:
        _write(f"{self._dir}/cpu.weight", weight)

    def divide(self) -> list[str]:
        part = f"{self._dir}/{_KERNEL}"
        os.mkdir(part)
        if "cpu" in self.dirs:
            _write(f"{self._dir}/cgroup.subtree_control", "+cpu")
        return [part]

    def join_argv(self, argv: list[str]) -> list[str]:
        return self._join(argv, [f"{self._dir}/{_KERNEL}/cgroup.procs"])

    def set_apart(self, pid: int) -> None:
        part = f"{self._dir}/{_GUEST}"
        if not os.path.isdir(f"{self._dir}/{_KERNEL}"):  # made by an earlier release
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(part)
        if "cpu" in self.dirs:
            # Here it is group against group: a kernel of several threads against one.
            _write(f"{self._dir}/{_KERNEL}/cpu.weight", 10 * _WEIGHT)
            _write(f"{part}/cpu.weight", _WEIGHT)
        _write(f"{part}/cgroup.procs", pid)

    def mem_bytes(self) -> int:
        stat = _fields(f"{self._dir}/memory.stat")
        return stat["anon"] + stat.get("shmem", 0)

    def dirty_mb(self) -> float:
        with contextlib.suppress(OSError):
            stat = _fields(f"{self._dir}/memory.stat")
            return (stat.get("file_dirty", 0) + stat.get("file_writeback", 0)) / _MIB
        return 0.0

    def usage(self) -> GroupUsage:
        cpu = _fields(f"{self._dir}/cpu.stat").get("usage_usec", 0) / 1e3
        count = int(_read(f"{self._dir}/pids.current")) if "pids" in self.dirs else len(self.pids())
        return GroupUsage(cpu, self.mem_bytes() / _MIB, count)

    def oom_kills(self) -> int:
        with contextlib.suppress(OSError):
            return _fields(f"{self._dir}/memory.events").get("oom_kill", 0)
        return 0

    def freeze(self, frozen: bool) -> None:
        _write(f"{self._dir}/cgroup.freeze", int(frozen))

    def watch_memory(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[float, float], None]
    ) -> MemoryWatch:
        return V2Watch(
            loop, callback, self.mem_bytes, self._dir, self.mem_mb * _MIB, self.mem_reserve_mb * _MIB
        )
