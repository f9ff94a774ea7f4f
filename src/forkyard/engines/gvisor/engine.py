"""Boot, restore, pause, save, resume and kill gVisor sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkyard.engines.base import Frozen, Machine, MachineSpec
from forkyard.engines.gvisor import control
from forkyard.engines.gvisor.runsc import PANIC, Runsc
from forkyard.engines.gvisor.spec import DISK_BACKED, oci_spec
from forkyard.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    UnsupportedError,
)
from forkyard.host import process
from forkyard.host.files import rmtree
from forkyard.host.roots import PLACE, replace_root
from forkyard.host.trace import span

log = logging.getLogger("forkyard.engines")

# Order matters: it is the order in which the sentry takes them.
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
CONTAINER = "b"
START_TIMEOUT_S = 60
# What any user may have by default (pipe-max-size).
PIPE_BYTES = 1 << 20


class GVisor:
    """See :class:`forkyard.engines.base.Engine`.

    Args:
        runsc: The probed binary.
        platform: ``systrap`` or ``ptrace``.
        shared: Directory for what all boxes share (an empty network namespace).
    """

    name = "gvisor"
    shares_files = True
    own_kernel = False
    boot_timeout_s = 20.0

    def __init__(self, runsc: Runsc, platform: str, shared: Path) -> None:
        self.runsc = runsc
        self.platform = platform
        self.shared = shared
        shared.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fingerprint(self) -> str:
        return f"gvisor/{self.runsc.version}/{self.runsc.digest}/{self.platform}/{_cpu_flags()}"

    async def boot(self, spec: MachineSpec) -> Machine:
        bundle = await _Bundle(self, spec).open()
        try:
            await bundle.runsc("run", "-detach")
            return bundle.machine()
        except BaseException:
            await bundle.abandon()
            raise

    async def prepare(self, spec: MachineSpec) -> _Bundle:
        # The gofer, which opens the guest's files, stands in an empty directory meanwhile.
        seat = spec.dir / "seat"
        (seat / PLACE).mkdir(mode=0o700, parents=True, exist_ok=True)
        return await self._create(replace(spec, rootfs=seat))

    async def _create(self, spec: MachineSpec) -> _Bundle:
        bundle = await _Bundle(self, spec).open()
        try:
            await bundle.runsc("create")
        except BaseException:
            await bundle.abandon()
            raise
        return bundle

    async def _seated(self, spec: MachineSpec, prepared: _Bundle) -> _Bundle:
        """``prepared`` on the root of ``spec``, or else one made anew."""
        try:
            with span("seat"):
                await asyncio.to_thread(_seat, prepared.gofer(), spec.rootfs)
        except OSError as error:
            log.warning("the box %s that was made ahead is of no use: %s", spec.box, error)
            await prepared.abandon()
            return await self._create(spec)
        except BaseException:
            await prepared.abandon()
            raise
        prepared.spec = spec
        return prepared

    async def discard(self, prepared: _Bundle) -> None:
        await prepared.abandon()

    async def restore(self, spec: MachineSpec, image: Path, prepared: _Bundle | None = None) -> Machine:
        with contextlib.ExitStack() as files:
            try:
                fds = [_open(files, image / name, os.O_RDONLY) for name in IMAGE_FILES]
            except BaseException:
                if prepared is not None:
                    await prepared.abandon()
                raise
            bundle = await (self._create(spec) if prepared is None else self._seated(spec, prepared))
            try:
                with span("restore"):
                    await control.restore(
                        _socket(spec), fds, describes_network=self.runsc.validates_specs
                    )
                return bundle.machine()
            except (control.ControlError, OSError) as error:
                said = bundle.stderr()
                await bundle.abandon()
                raise _restore_error(error, image, said) from error
            except BaseException:
                await bundle.abandon()
                raise

    def guest_root(self, machine: Machine, pids: list[int]) -> int | None:
        # The sentry's first child: both platforms clone the process of each new guest process from it.
        children = [(process.start_time(pid) or 0, pid) for pid in pids if process.parent(pid) == machine.pid]
        return min(children)[1] if children else None

    async def pause(self, machine: Machine) -> None:
        await control.pause(_socket(machine.spec))

    async def resume(self, machine: Machine) -> None:
        await control.resume(_socket(machine.spec))

    async def save(self, machine: Machine, image: Path) -> Frozen:
        image.mkdir(mode=0o700)
        with contextlib.ExitStack() as files:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
            fds = [_open(files, image / name, flags) for name in IMAGE_FILES]
            try:
                await control.checkpoint(_socket(machine.spec), fds)
            except control.ControlError as error:
                raise _save_error(error, machine.spec.box) from error
            size = sum(os.fstat(fd).st_blocks * 512 for fd in fds)
        return Frozen(image, self.fingerprint(), size)

    async def kill(self, machine: Machine) -> None:
        loop = asyncio.get_running_loop()
        private: _Watch = machine.private
        await process.kill_pid(machine.pid, machine.start_time, timeout_s=30)
        if private.gofer:
            # It leaves when the sentry's socket closes; killing it spares the wait.
            await process.kill_pid(private.gofer, private.gofer_start, timeout_s=10)
        machine.died.set()
        private.close(loop)
        for fd in (machine.to_guest, machine.from_guest):
            with contextlib.suppress(OSError):
                os.close(fd)
        machine.to_guest = machine.from_guest = -1

    async def reattach(self, spec: MachineSpec, record: dict[str, Any]) -> Machine | None:
        pid, start = int(record["pid"]), int(record["start_time"])
        if process.start_time(pid) != start:
            return None
        try:
            return _machine(spec, pid, start)
        except OSError:
            return None

    async def sweep(self, directory: Path) -> None:
        # By either name: it may have been started through the home's short alias.
        for path in {directory, directory.parent.resolve() / directory.name}:
            await _end_all(path)

    async def close(self) -> None:
        """Remove what the boxes shared; call it when none is left."""
        await asyncio.to_thread(_drop_shared, self.shared)


class _Watch:
    """The death watch of one machine: a pidfd in the event loop."""

    def __init__(self, pidfd: int, gofer: int, gofer_start: int) -> None:
        self.pidfd = pidfd
        self.gofer = gofer
        self.gofer_start = gofer_start

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1


class _Bundle:
    """The files and descriptors of a machine that is being started; gone again if that fails."""

    def __init__(self, engine: GVisor, spec: MachineSpec) -> None:
        self.engine = engine
        self.spec = spec
        self._stdio = [-1, -1]

    async def open(self) -> _Bundle:
        """Make the files."""
        try:
            self._make()
        except BaseException:
            await self.abandon()
            raise
        return self

    def _make(self) -> None:
        directory = self.spec.dir
        for name in ("st", "fs", *(f"fs/{name}" for name in DISK_BACKED)):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(oci_spec(self.spec)))
        for index, name in enumerate(("in", "out")):
            # 0600: a plain user in the guest could otherwise read its host's commands
            # through /proc/1/fd/0, which shows the FIFO with its mode.
            os.mkfifo(directory / name, 0o600)
            self._stdio[index] = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)

    def _close_stdio(self) -> None:
        for index, fd in enumerate(self._stdio):
            if fd >= 0:
                os.close(fd)
            self._stdio[index] = -1

    async def abandon(self) -> None:
        """End whatever was started, and remove the files."""
        self._close_stdio()
        await _end_all(self.spec.dir)
        for name in ("in", "out", "pid", "config.json", "stderr", PANIC):
            (self.spec.dir / name).unlink(missing_ok=True)
        for name in ("st", "fs", "seat"):
            await asyncio.to_thread(rmtree, self.spec.dir / name)

    async def runsc(self, *verb: str) -> None:
        """Run one runsc verb for this bundle.

        Raises:
            InternalError: it failed; with the end of what it said.
        """
        directory = self.spec.dir
        argv = self.engine.runsc.command(self.engine.platform, directory / "st", self.engine.shared)
        argv += [*verb, f"-bundle={directory}", f"-pid-file={directory / 'pid'}", CONTAINER]
        # 0600 whatever the umask: a plain user in the guest sees it as /proc/1/fd/2.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        (directory / PANIC).touch(mode=0o600)
        stderr = os.open(directory / "stderr", flags, 0o600)
        try:
            done = await process.run(
                self.spec.wrap(argv),
                timeout_s=START_TIMEOUT_S,
                stdin=self._stdio[0],
                stdout=self._stdio[1],
                stderr=stderr,
                cwd="/",
            )
        finally:
            os.close(stderr)
        if done.rc:
            raise InternalError(
                f"runsc {verb[0]} failed: {self.stderr() or f'exit code {done.rc}'}",
                hint="forkyard doctor finds out why",
            )

    def stderr(self) -> str:
        """The last line that runsc or the sentry wrote."""
        return _said(self.spec.dir, "stderr").rsplit("\n", 1)[-1][-500:]

    def gofer(self) -> int:
        """The process that opens files for the box."""
        pid = _state(self.spec.dir).get("goferPid")
        if not isinstance(pid, int):
            raise OSError("it has no gofer")
        return pid

    def machine(self) -> Machine:
        """The machine that runs now."""
        self._close_stdio()
        pid = int((self.spec.dir / "pid").read_text())
        start = process.start_time(pid)
        if start is None:
            raise InternalError(f"the sandbox process ended at once: {self.stderr()}")
        return _machine(self.spec, pid, start)


def _machine(spec: MachineSpec, pid: int, start: int) -> Machine:
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)
    fds: list[int] = []
    try:
        # Own descriptions: the sentry sets O_NONBLOCK on those it was given. Read and
        # write, so that a FIFO without the other end neither blocks nor ends.
        for name in ("in", "out"):
            fds.append(os.open(spec.dir / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            # The default 64 KiB hold less than one bulk frame; refused to users with many pipes.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fds[-1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        gofer = _state(spec.dir).get("goferPid") or 0
        watch = _Watch(pidfd, gofer, (process.start_time(gofer) or 0) if gofer else 0)
        machine = Machine(spec, pid, start, to_guest=fds[0], from_guest=fds[1], private=watch)
    except BaseException:
        for fd in (*fds, pidfd):
            os.close(fd)
        raise

    def ended() -> None:
        loop.remove_reader(pidfd)
        machine.exit_status = process.reap(pidfd)
        if said := _last_words(spec.dir):
            log.warning("the kernel of %s ended: %s", spec.box, said)
        machine.died.set()

    if process.is_readable(pidfd):
        machine.died.set()
    else:
        loop.add_reader(pidfd, ended)
    return machine


def _said(directory: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        return (directory / name).read_text(errors="replace").strip()
    return ""


def _last_words(directory: Path) -> str:
    """Why a sentry says that it ended: the first line of a panic, before the stacks of its goroutines."""
    lines = _said(directory, PANIC).splitlines()
    why = next((line for line in lines if line.startswith(("panic:", "fatal error:", "runtime:"))), "")
    return (why or (lines[-1] if lines else ""))[:500]


def _seat(gofer: int, rootfs: Path) -> None:
    """Give the gofer of a box made ahead its root. One in which a directory that the box mounts on is
    a link cannot be: runsc resolves those as it makes the box."""
    for name in ("dev", "proc", "sys", "tmp", "var", "var/tmp"):
        if (rootfs / name).is_symlink():
            raise OSError(f"/{name} is a link in this root")
    replace_root(gofer, rootfs)


def _socket(spec: MachineSpec) -> Path:
    return spec.dir / "st" / f"runsc-{CONTAINER}.sock"


def _state(directory: Path) -> dict[str, Any]:
    for path in (directory / "st").glob(f"{CONTAINER}_*.state"):
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(path.read_text())
            if isinstance(state, dict):
                return state
    return {}


async def _end_all(directory: Path) -> None:
    """End every process of a box, also of a half-made one."""
    for pid in await asyncio.to_thread(_pids, directory):
        start = process.start_time(pid)
        if start is not None and _is_ours(pid, directory):
            await process.kill_pid(pid, start, timeout_s=10)


def _pids(directory: Path) -> list[int]:
    """Every process that a half-made bundle may have left."""
    state = _state(directory)
    sandbox = state.get("sandbox")
    found = {state.get("goferPid"), sandbox.get("pid") if isinstance(sandbox, dict) else None}
    with contextlib.suppress(OSError, ValueError):
        found.add(int((directory / "pid").read_text()))
    # Neither file may exist yet when runsc itself was killed, so ask the processes too.
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and _is_ours(int(entry.name), directory):
            found.add(int(entry.name))
    return [pid for pid in found if isinstance(pid, int) and pid > 1]


def _is_ours(pid: int, directory: Path) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return f"--root={directory / 'st'}".encode() in words


def _open(stack: contextlib.ExitStack, path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise CorruptSnapshotError(f"the memory image lacks {path.name}") from None
    stack.callback(os.close, fd)
    return fd


def _save_error(error: control.ControlError, box: str) -> Exception:
    text = error.message
    if "no space left" in text or "disk quota" in text:
        return CapacityError("the disk is full: the memory image could not be written", retryable=True)
    if "deleted and invalidated" in text or "deleted" in text:
        return ConflictError(f"an open file that was deleted cannot be saved: {text}")
    return InternalError(f"saving the memory of {box} failed: {text}")


def _restore_error(error: Exception, image: Path, stderr: str) -> Exception:
    text = f"{error} {stderr}".strip()
    # The last one: its decoder panicked over what it read.
    damaged = (
        "hash mismatch",
        "unreachable",
        "EOF",
        "header",
        "statefile cannot be empty",
        "decoding",
        "goroutine",
    )
    if any(word in text for word in damaged):
        return CorruptSnapshotError(f"the memory image {image.name} is damaged: {text[:300]}")
    if isinstance(error, ConnectionResetError):
        return CorruptSnapshotError(
            f"the memory image {image.name} cannot be read back: the sandbox's kernel ended over it {stderr}"
        )
    if "version does not match" in text:
        return UnsupportedError(f"the memory image {image.name} was made by another runsc: {text}")
    return InternalError(f"restoring {image.name} failed: {text}")


def _cpu_flags() -> str:
    """Digest of the CPU's features: an image made with more of them cannot be restored with fewer."""
    import hashlib

    with open("/proc/cpuinfo") as file:
        line = next((line for line in file if line.startswith("flags")), "")
    return hashlib.sha256(" ".join(sorted(line.split())).encode()).hexdigest()[:12]


def _drop_shared(shared: Path) -> None:
    from forkyard.host.mounts import mounts_below, unmount

    for target in mounts_below(shared):
        unmount(target)
    rmtree(shared)
