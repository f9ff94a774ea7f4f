"""``forkyard doctor``: prove each thing that sandboxes need by doing it, and name the remedy.

Nothing here touches a sandbox or the store in use: what is tried is tried in scratch
directories, which are gone afterwards. A running daemon is not disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.config import Settings, short
from forkyard.engines.gvisor import Runsc
from forkyard.engines.qemu import load_kit
from forkyard.errors import ConflictError, ForkyardError, UnavailableError, UnsupportedError
from forkyard.host import mounts, probe, process, userns
from forkyard.host.files import rmtree
from forkyard.setup import runsc
from forkyard.setup.microvms import boot_ms, kit_dir
from forkyard.setup.templates import layer_paths, read_template
from forkyard.setup.trial import agent_dir, open_trial
from forkyard.store.disks import DiskStore
from forkyard.yard.storecheck import Damage, StoreCheck

__all__ = ["Check", "check_store", "run"]

NEEDED_DISK_MB = 6 * 1024
NEEDED_MEM_MB = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. ``remedy`` is what to do about it, also where it works but could
    work better; empty if nothing is to be done."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    ms: float = 0.0


@dataclass(slots=True)
class _Finding:
    detail: str
    remedy: str = ""
    ok: bool = True


Probe = Callable[[Settings], Awaitable[_Finding]]


async def run(settings: Settings, *, on_check: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """Every check, in order; ``on_check`` is told of each as it ends. Takes about two seconds.

    A failure never raises: it is a check that is not ok.
    """
    checks = []
    for name, attempt in _CHECKS:
        started = time.perf_counter()
        try:
            found = await attempt(settings)
        except Exception as error:
            found = _failure(error)
        check = Check(name, found.ok, found.detail, found.remedy, (time.perf_counter() - started) * 1000)
        checks.append(check)
        on_check(check)
    return checks


def _failure(error: BaseException) -> _Finding:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ForkyardError):
        return _Finding(error.message, error.hint, ok=False)
    return _Finding(f"{type(error).__name__}: {error}", ok=False)


async def check_store(settings: Settings, *, repair: bool = False) -> list[Damage]:
    """Read all of the store in use, and say what is damaged and what depends on it.

    Args:
        repair: Take what cannot be used out of the records, so that the rest works.

    Raises:
        ConflictError: it cannot be repaired while a daemon has it.
        UnavailableError: a newer forkyard wrote it, so that this one does not touch it.
    """
    home = short(settings.home)
    if not (home / "store").exists():
        raise UnavailableError(f"there is no store in {settings.home}", hint="forkyard setup makes one")
    with _held(settings.home) as alone:
        if repair and not alone:
            raise ConflictError(
                "a daemon has this store", hint="forkyard daemon stop (sandboxes run on), then again"
            )
        disks = DiskStore(home, settings)
        there = mounts.is_mount(home / "store")
        await disks.open(clear=alone)
        try:
            check = StoreCheck(home, disks)
            damages = await check.run()
            if repair:
                await check.repair()
            return damages
        finally:
            await disks.close(unmount=alone and not there)


@contextlib.contextmanager
def _held(home: Path) -> Iterator[bool]:
    """Hold the home's lock, as a daemon does, unless one has it; whether it is held."""
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


# -- the machine -------------------------------------------------------------------------------


async def _host(settings: Settings) -> _Finding:
    kernel = ".".join(map(str, probe.kernel_release()))
    total, available = probe.memory_mb()
    detail = f"Linux {kernel}, {os.cpu_count()} CPUs, {available} of {total} MiB memory available"
    if available < NEEDED_MEM_MB:
        return _Finding(detail, f"sandboxes want {NEEDED_MEM_MB} MiB or more", ok=False)
    return _Finding(detail)


async def _agent(settings: Settings) -> _Finding:
    program = agent_dir() / "fy-agent"
    return _Finding(f"{program} ({program.stat().st_size // 1024} KiB)")


async def _cgroups(settings: Settings) -> _Finding:
    found = probe.cgroups()
    if not found.version:
        return _Finding(
            "no cgroup controllers: memory, CPU and process limits of sandboxes cannot be enforced",
            "mount cgroup2 on /sys/fs/cgroup, or give the container its own cgroups",
            ok=False,
        )
    root = Path("/sys/fs/cgroup") / ("memory" if found.version == 1 else "")
    trial = root / f"forkyard-doctor-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return _Finding(
            f"cgroup v{found.version}, but no group can be made: {error.strerror}: "
            "CPU and memory of sandboxes are not limited",
            "run as root, or have this user's cgroup delegated",
            ok=userns.inside(),  # an ordinary user's yard does without
        )
    detail = f"v{found.version}: {', '.join(found.controllers)}"
    if found.missing:
        return _Finding(
            f"{detail}; missing: {', '.join(found.missing)}", "enable them in the kernel", ok=False
        )
    return _Finding(detail)


async def _rcu(settings: Settings) -> _Finding:
    setting, wait = probe.rcu_expedited(), probe.grace_period_ms()
    if setting is None or wait is None:
        return _Finding("the kernel does not tell")
    detail = f"rcu_expedited = {int(setting)}, one wait takes {wait:.1f} ms"
    if not setting and wait > 4:
        return _Finding(
            f"{detail}; a start pays for several",
            "forkyard setup --tune sets it for the whole host until the next boot (--no-tune takes it back)",
        )
    return _Finding(detail)


async def _kvm(settings: Settings) -> _Finding:
    there = probe.kvm_device()
    return _Finding("/dev/kvm is there" if there else "no /dev/kvm; gVisor does not need it")


# -- the disk ------------------------------------------------------------------------------------


async def _space(settings: Settings) -> _Finding:
    home = settings.home
    while not home.exists():
        home = home.parent
    free = shutil.disk_usage(home).free >> 20
    ready = (settings.home / "store.img").exists() or (settings.home / "store").exists()
    if free < NEEDED_DISK_MB and not ready:
        return _Finding(f"{free} MiB free in {home}", f"set-up needs {NEEDED_DISK_MB} MiB", ok=False)
    return _Finding(
        f"{free} MiB free in {home}", "" if free > 2048 else "the store cannot grow: free some space"
    )


async def _loop(settings: Settings) -> _Finding:
    if probe.loop_devices():
        return _Finding("/dev/loop-control is there")
    return _Finding(
        "no loop devices: disks are copied instead of shared, unless the home is on btrfs",
        "modprobe loop, or put FORKYARD_HOME on btrfs",
    )


async def _overlay(settings: Settings) -> _Finding:
    with _Scratch(settings) as scratch:
        for name in ("lower", "up", "wk", "root"):
            (scratch / name).mkdir()
        (scratch / "lower" / "gone").write_text("x")
        mounts.mount_overlay([scratch / "lower"], scratch / "up", scratch / "wk", scratch / "root")
        try:
            (scratch / "root" / "new").write_text("y")
            (scratch / "root" / "gone").unlink()
            kept = (scratch / "lower" / "gone").exists() and (scratch / "up" / "new").exists()
        finally:
            mounts.unmount(scratch / "root")
    if not kept:
        return _Finding("an overlay does not keep its layers apart", ok=False)
    return _Finding("an overlay mounts, takes writes and deletions, and leaves its layer alone")


@dataclass(frozen=True, slots=True)
class _SmallStore:
    store_gb: int = 1


async def _store(settings: Settings) -> _Finding:
    """A store of its own: a layer, a box on it, a full disk, a seal, and a second box on the seal."""
    with _Scratch(settings) as scratch:
        disks = DiskStore(scratch, _SmallStore())
        await disks.open()
        try:
            (scratch / "content").mkdir()
            (scratch / "content" / "file").write_text("shared")
            await disks.import_layer("base", scratch / "content")
            first = await disks.create_box("first", ["base"], 64)
            stopped = await asyncio.to_thread(_fill, first.rootfs / "big", 80)
            (first.rootfs / "file").write_text("changed")
            await disks.seal("first", "seal")
            second = await disks.create_box("second", ["seal", "base"], 64)
            text = (second.rootfs / "file").read_text()
            quota, kind, why = disks.quota, disks.kind, disks.plain_because
        finally:
            for box in ("second", "first"):
                await disks.remove_box(box)
            await disks.close(unmount=True)
    if text != "changed":
        return _Finding("a sealed disk does not show what was written before", ok=False)
    if kind == "plain":
        return _Finding(f"plain directories, copied at every snapshot ({why})", "put FORKYARD_HOME on btrfs")
    limit = (
        f"quota ({quota}) stops a full disk at {stopped} MiB"
        if stopped
        else "disk_mb is watched, not enforced"
    )
    return _Finding(f"btrfs: layer, seal and fork work; {limit}")


def _fill(path: Path, most_mb: int) -> int:
    """MiB after which writing stopped; 0 if it did not."""
    block = os.urandom(1 << 20)
    with path.open("wb", buffering=0) as file:
        for written in range(most_mb):
            try:
                file.write(block)
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    path.unlink()
                    return written
                raise
    path.unlink()
    return 0


# -- the engine ----------------------------------------------------------------------------------


async def _chosen(settings: Settings) -> tuple[Runsc, str]:
    record = runsc.read_engine(settings.home)
    path = settings.runsc or (record or {}).get("runsc")
    if not path:
        _, why = await runsc.find(settings)
        raise UnsupportedError(f"no engine chosen yet ({why})", hint="forkyard setup")
    platform = settings.platform
    if platform == "auto":
        platform = (record or {}).get("platform") or "systrap"
    return await Runsc.probe(Path(path)), platform


async def _engine(settings: Settings) -> _Finding:
    chosen, platform = await _chosen(settings)
    costs = []
    for candidate in runsc.candidates(settings):
        started = time.perf_counter()
        await process.run([str(candidate.path), "--version"], timeout_s=10)
        took = (time.perf_counter() - started) * 1000
        mark = "*" if candidate.path == chosen.path else ""
        costs.append(f"{mark}{candidate.origin} {took:.0f} ms")
    record = runsc.read_engine(settings.home) or {}
    for row in record.get("measured", []):
        costs.append(f"{row['platform']}: boot {row['boot_ms']} ms, command {row['command_ms']} ms")
    remedy = ""
    if not chosen.validates_specs and probe.has_go():
        remedy = "forkyard setup --newest builds a quicker one with this machine's Go"
    return _Finding(f"{chosen.path} {chosen.version} on {platform} ({'; '.join(costs)})", remedy)


async def _machine(settings: Settings) -> _Finding:
    """Boot, checkpoint and restore on a root that has nothing but the agent."""
    chosen, platform = await _chosen(settings)
    took: dict[str, float] = {}
    async with open_trial(chosen, platform, settings.home) as trial:
        for verb in ("boot", "checkpoint", "restore"):
            started = time.perf_counter()
            if verb == "boot":
                machine, guest = await trial.boot()
            elif verb == "checkpoint":
                image = await trial.save(machine)
                await trial.end(machine, guest)
            else:
                await trial.restore(image)
            took[verb] = (time.perf_counter() - started) * 1000
    return _Finding(", ".join(f"{verb} {ms:.0f} ms" for verb, ms in took.items()))


async def _microvms(settings: Settings) -> _Finding:
    """Boot one, if this home has what it takes."""
    try:
        kit = load_kit(kit_dir(settings.home))
    except UnavailableError as error:
        asked = settings.engine == "qemu"
        return _Finding(error.message, error.hint if asked else "", ok=not asked)
    took = await boot_ms(kit, settings.home)
    how = "on KVM" if kit.accel == "kvm" else "translated: a program takes 12 to 25 times its time"
    return _Finding(f"QEMU {kit.version}, Linux {kit.kernel}, {how}; boot {took / 1000:.1f} s")


async def _template(settings: Settings) -> _Finding:
    record: dict[str, Any] | None = read_template(settings.home, "base")
    if record is None:
        return _Finding("there is no base template", "forkyard setup", ok=False)
    places = layer_paths(settings.home, record["layers"])
    if not all(path.is_dir() for path in places) and _daemon_pid(settings.home):
        return _Finding(f"its layer is gone: {places[0]}", "forkyard setup builds it anew", ok=False)
    warm = (settings.home / "engine" / "warm.json").exists()
    return _Finding(
        f"{record['size_bytes'] >> 20} MiB, {'warm' if warm else 'its first start is a cold boot'}"
    )


async def _daemon(settings: Settings) -> _Finding:
    pid = _daemon_pid(settings.home)
    return _Finding(f"running, pid {pid}" if pid else "not running; the first client starts it")


def _daemon_pid(home: Path) -> int:
    try:
        pid = int(json.loads((home / "daemon.json").read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if process.start_time(pid) is not None else 0


class _Scratch:
    """A directory below the home (so that what is tried there holds there), gone at the end."""

    def __init__(self, settings: Settings) -> None:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = Path(tempfile.mkdtemp(prefix="doctor-", dir=short(settings.home)))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        for target in mounts.mounts_below(self.path):
            mounts.unmount(target)
        rmtree(self.path)


_CHECKS: list[tuple[str, Probe]] = [
    ("host", _host),
    ("agent", _agent),
    ("space", _space),
    ("cgroups", _cgroups),
    ("overlay", _overlay),
    ("loop devices", _loop),
    ("store", _store),
    ("engine", _engine),
    ("machine", _machine),
    ("microVMs", _microvms),
    ("base", _template),
    ("rcu", _rcu),
    ("kvm", _kvm),
    ("daemon", _daemon),
]
