"""Boot, restore, pause, save, resume and kill microVMs of QEMU."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.engines.base import Frozen, Machine, MachineSpec
from forkyard.engines.qemu import memory
from forkyard.engines.qemu.command import REVISION, command
from forkyard.engines.qemu.kit import Kit
from forkyard.engines.qemu.qmp import QmpError, connected
from forkyard.errors import CapacityError, CorruptSnapshotError, InternalError, UnsupportedError
from forkyard.host import process
from forkyard.host.files import rmtree
from forkyard.host.threads import in_thread
from forkyard.host.trace import span
from forkyard.host.tsc import tsc_khz

log = logging.getLogger("forkyard.engines")

RAM, STATE = "ram", "state"
START_TIMEOUT_S = 60
POLL_S = 0.002
# Of one that lives; it answers in a millisecond, or in a few hundred where everybody is busy.
ANSWER_S = 15.0
# What any user may have by default (pipe-max-size).
PIPE_BYTES = 1 << 20
# Several times what the devices' state takes.
STATE_ROOM = 1 << 20


class Qemu:
    """See :class:`forkyard.engines.base.Engine`."""

    name = "qemu"
    shares_files = False
    own_kernel = True
    # Four seconds where the translator has a CPU, and minutes where thirty share it.
    boot_timeout_s = 300.0

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    def fingerprint(self) -> str:
        # A translated guest goes by the speed of the host's counter, to a hundredth.
        cpu = _cpu_flags() if self.kit.accel == "kvm" else f"{math.log(max(1, tsc_khz())):.2f}"
        return f"qemu/{self.kit.version}/{self.kit.digest}/{self.kit.accel}/{cpu}/{REVISION}"

    async def boot(self, spec: MachineSpec) -> Machine:
        start = _Start(self.kit, spec)
        try:
            start.lay_out(None)
            machine = await start.run(boots=True)
            await _go(machine)
            return machine
        except BaseException:
            await start.abandon()
            raise

    async def prepare(self, spec: MachineSpec) -> None:
        # QEMU maps the memory and opens the disk as it starts: nothing can be done ahead of them.
        return None

    async def discard(self, prepared: Any) -> None:
        """Nothing is ever prepared."""

    async def restore(self, spec: MachineSpec, image: Path, prepared: Any | None = None) -> Machine:
        start = _Start(self.kit, spec)
        try:
            start.lay_out(image)
            with span("qemu"):
                machine = await start.run(boots=False)
            with span("load"):
                await _load(machine, image)
            return machine
        except BaseException:
            await start.abandon()
            raise

    def guest_root(self, machine: Machine, pids: list[int]) -> int | None:
        return None  # its processes are its own kernel's

    async def pause(self, machine: Machine) -> None:
        await _control(machine, "stop")

    async def resume(self, machine: Machine) -> None:
        await _control(machine, "cont")

    async def save(self, machine: Machine, image: Path) -> Frozen:
        image.mkdir(mode=0o700)
        private: _Watch = machine.private
        try:
            await _save_state(machine, image / STATE)
            with span("memory"):
                await in_thread(
                    memory.save_ram, machine.pid, private.address, machine.spec.dir / RAM, image / RAM
                )
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full() from error
            raise
        except QmpError as error:
            # It does not say why it could not write.
            if _free_bytes(image) < STATE_ROOM:
                raise _full() from error
            raise InternalError(f"saving the state of {machine.spec.box} failed: {error}") from error
        size = sum((image / name).stat().st_blocks * 512 for name in (RAM, STATE))
        return Frozen(image, self.fingerprint(), size)

    async def kill(self, machine: Machine) -> None:
        private: _Watch = machine.private
        await process.kill_pid(machine.pid, machine.start_time, timeout_s=30)
        machine.died.set()
        private.close(asyncio.get_running_loop())
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
        for path in {directory, directory.parent.resolve() / directory.name}:
            await _end_all(path)

    async def close(self) -> None:
        """Machines share nothing on the host."""


@dataclass(slots=True)
class _Watch:
    """The death watch of one machine, a pidfd in the event loop; and where its memory lies in it."""

    pidfd: int
    address: int

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1


class _Start:
    """The files of a machine that is being started; gone again if that fails."""

    def __init__(self, kit: Kit, spec: MachineSpec) -> None:
        self.kit = kit
        self.spec = spec

    def lay_out(self, image: Path | None) -> None:
        """Make the files: its streams, and the memory that it begins with."""
        directory = self.spec.dir
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "empty").mkdir(mode=0o755, exist_ok=True)
        for name in ("agent.in", "agent.out"):
            os.mkfifo(directory / name, 0o600)
        size = self.spec.mem_mb << 20
        if image is None:
            fd = os.open(directory / RAM, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, size)
            os.close(fd)
            return
        try:
            saved = os.stat(image / RAM).st_size
            # Under the machine's own roof: the image may be deleted while the machine lives.
            os.link(image / RAM, directory / RAM)
        except FileNotFoundError:
            raise CorruptSnapshotError(f"the memory image lacks {RAM}") from None
        if saved != size:
            raise UnsupportedError(
                f"the memory image {image.name} is of {saved >> 20} MiB, the machine of {self.spec.mem_mb}"
            )

    async def run(self, *, boots: bool) -> Machine:
        """Start QEMU, its guest paused."""
        directory = self.spec.dir
        # QEMU outlives this daemon, and its own way to the background needs a right that it is denied.
        shell = 'setsid "$@" </dev/null >/dev/null 2>"$0/stderr" & echo $! >"$0/pid"'
        with contextlib.ExitStack() as stack:
            disk = tuple(os.open(self.spec.rootfs, mode | os.O_CLOEXEC) for mode in (os.O_RDONLY, os.O_RDWR))
            for fd in disk:
                stack.callback(os.close, fd)
            argv = self.spec.wrap(command(self.kit, self.spec, disk, boots=boots))
            await process.run(
                ["/bin/sh", "-c", shell, str(directory), *argv],
                timeout_s=START_TIMEOUT_S,
                pass_fds=disk,
                cwd="/",
                check=True,
            )
        pid = int((directory / "pid").read_text())
        start = process.start_time(pid)
        if start is None:
            raise self._did_not_start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._listening(pid, start)
        except TimeoutError:
            raise InternalError(f"QEMU does not listen after {START_TIMEOUT_S} s") from None
        address = memory.mapping_of(pid, directory / RAM, self.spec.mem_mb << 20)
        (directory / "address").write_text(f"{address}\n")
        return _machine(self.spec, pid, start)

    async def _listening(self, pid: int, start: int) -> None:
        """Wait until QEMU answers on its control socket: all that it needs is open then."""
        while True:
            try:
                async with connected(self.spec.dir / "qmp", START_TIMEOUT_S):
                    return
            except (FileNotFoundError, ConnectionError):
                if process.start_time(pid) != start or _is_zombie(pid):
                    raise self._did_not_start() from None
            await asyncio.sleep(POLL_S)

    def _did_not_start(self) -> Exception:
        words = _said(self.spec.dir)
        if any(why in words for why in ("No space left", "annot allocate memory", "set up guest memory")):
            return CapacityError(f"no room for a microVM: {words}", retryable=True)
        return InternalError(
            f"QEMU did not start: {words or 'it ended at once'}", hint="forkyard doctor finds out why"
        )

    async def abandon(self) -> None:
        """End whatever was started, and remove the files."""
        directory = self.spec.dir
        await _end_all(directory)
        for name in ("agent.in", "agent.out", "pid", "qmp", "address", "stderr", RAM):
            (directory / name).unlink(missing_ok=True)
        await asyncio.to_thread(rmtree, directory / "empty")


def _machine(spec: MachineSpec, pid: int, start: int) -> Machine:
    loop = asyncio.get_running_loop()
    address = int((spec.dir / "address").read_text())
    pidfd = os.pidfd_open(pid)
    fds: list[int] = []
    try:
        # Read and write, so that a FIFO without the other end neither blocks nor ends.
        for name in ("agent.in", "agent.out"):
            fds.append(os.open(spec.dir / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            # The default 64 KiB hold less than one bulk frame; refused to users with many pipes.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fds[-1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        watch = _Watch(pidfd, address)
        machine = Machine(spec, pid, start, to_guest=fds[0], from_guest=fds[1], private=watch)
    except BaseException:
        for fd in (*fds, pidfd):
            os.close(fd)
        raise

    def ended() -> None:
        loop.remove_reader(pidfd)
        machine.exit_status = process.reap(pidfd)
        machine.died.set()

    if process.is_readable(pidfd):
        machine.died.set()
    else:
        loop.add_reader(pidfd, ended)
    return machine


def _full() -> CapacityError:
    return CapacityError("the disk is full: the memory image could not be written", retryable=True)


def _free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def _said(directory: Path) -> str:
    """The last that QEMU wrote."""
    with contextlib.suppress(OSError):
        return (directory / "stderr").read_text(errors="replace").strip()[-500:]
    return ""


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"Z"
    except OSError:
        return True


def _socket(machine: Machine) -> Path:
    return machine.spec.dir / "qmp"


async def _control(machine: Machine, verb: str) -> None:
    try:
        async with connected(_socket(machine), ANSWER_S) as qmp:
            await qmp.call(verb)
    except QmpError as error:
        raise InternalError(f"QEMU refused to {verb} {machine.spec.box}: {error}") from error


async def _go(machine: Machine) -> None:
    await _control(machine, "cont")


async def _save_state(machine: Machine, path: Path) -> None:
    """Write all that is not memory. By a command made for hypervisors that keep the memory
    themselves, as is done here."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        async with connected(_socket(machine), ANSWER_S) as qmp:
            name = await qmp.file(fd)
            # live: nobody else takes the disk over.
            await qmp.call("xen-save-devices-state", filename=name, live=False)
            await qmp.drop(name)
    finally:
        os.close(fd)


async def _load(machine: Machine, image: Path) -> None:
    """Give a machine that has its memory the state of ``image``, and let it go on."""
    try:
        fd = os.open(image / STATE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptSnapshotError(f"the memory image lacks {STATE}") from None
    try:
        async with connected(_socket(machine), ANSWER_S) as qmp:
            await qmp.call("getfd", fd=fd, fdname=STATE)
            try:
                await qmp.call("migrate-incoming", uri=f"fd:{STATE}")
                await qmp.wait_event("RESUME")
            except (QmpError, ConnectionError) as error:
                words = str(error) if isinstance(error, QmpError) else _said(machine.spec.dir)
                raise CorruptSnapshotError(
                    f"the memory image {image.name} cannot be read back: {words}"
                ) from error
    finally:
        os.close(fd)


async def _end_all(directory: Path) -> None:
    """End every process of a box, also of a half-made one."""
    for pid in await asyncio.to_thread(_pids, directory):
        start = process.start_time(pid)
        if start is not None and _is_ours(pid, directory):
            await process.kill_pid(pid, start, timeout_s=10)


def _pids(directory: Path) -> list[int]:
    return [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and _is_ours(int(entry.name), directory)
    ]


def _is_ours(pid: int, directory: Path) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return f"socket,id=qmp,path={directory}/qmp,server=on,wait=off".encode() in words


def _cpu_flags() -> str:
    """Digest of the CPU's features: state saved with more of them cannot be loaded with fewer."""
    with open("/proc/cpuinfo") as file:
        line = next((line for line in file if line.startswith("flags")), "")
    return hashlib.sha256(" ".join(sorted(line.split())).encode()).hexdigest()[:12]
