"""The store's filesystem in a file: made once, attached to a loop device that frees itself, mounted.

The filesystem is never larger than what has been reserved for it in the file below
(:meth:`LoopFile.grow` reserves first and resizes then). So when the disk of the host is full,
a sandbox sees "no space left", and the store never meets a failed write, which would turn it
read-only for everyone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import time
from pathlib import Path

from forkyard.errors import CapacityError, UnsupportedError
from forkyard.host import files, mounts, process, userns
from forkyard.store.btrfs import Volume

__all__ = ["GIB", "LoopFile"]

GIB = 1 << 30
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_SET_FD = 0x4C82, 0x4C0A, 0x4C00
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64, _LOOP_CLR_FD = 0x4C04, 0x4C05, 0x4C01
_AUTOCLEAR, _DIRECT_IO = 4, 16
_MS_NOATIME = 1024
_STEP = 2 * GIB
_FIRST = 2 * GIB
_LEAVE = 1 * GIB  # never taken from the host's disk by growing

_libc = ctypes.CDLL(None, use_errno=True)


class LoopFile:
    """``path``, mounted on ``target``, growing up to ``max_bytes``. Methods block: call them in a thread."""

    def __init__(self, path: Path, target: Path, max_bytes: int) -> None:
        self.path = path
        self.target = target
        self.max_bytes = max(max_bytes, 512 << 20)

    async def ensure(self) -> None:
        """Make the file if it is not there, mount it if it is not.

        Raises:
            CapacityError: the host's disk has no room for the first step.
            UnsupportedError: no mkfs.btrfs, no loop devices, no btrfs in the kernel.
        """
        if mounts.is_mount(self.target):
            return
        if userns.inside():
            raise UnsupportedError("a user namespace has no loop devices: disks are copied instead of shared")
        fresh = not self.path.exists()
        if fresh:
            await self._make()
        try:
            self._attach_and_mount()
        except BaseException:
            if fresh:
                self.path.unlink(missing_ok=True)
            raise

    def _attach_and_mount(self) -> None:
        self.target.mkdir(mode=0o700, exist_ok=True)
        device = _attach(self.path)
        try:
            _mount(device[1], self.target)
        finally:
            os.close(device[0])  # from here on the mount keeps it; without one the device goes

    async def _make(self) -> None:
        first = min(_FIRST, self.max_bytes)
        free = shutil.disk_usage(self.path.parent).free
        if free < first + _LEAVE // 2:
            first = (free - _LEAVE) // GIB * GIB
            if first < 1 * GIB:
                raise CapacityError(
                    f"the store needs 2 GiB to begin with, {self.path.parent} has {free / GIB:.1f} GiB free",
                    hint="free some space or set another home",
                )
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, max(self.max_bytes, first))
            _reserve(fd, 0, first)
        finally:
            os.close(fd)
        try:
            options = ["-q", "-K", "-L", "forkyard", "-m", "single", "-b", str(first)]
            await process.run(["mkfs.btrfs", *options, str(temporary)], check=True)
            _fsync(temporary)
            os.rename(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        files.fsync_dir(self.path.parent)

    def grow(self, volume: Volume, wanted: int = GIB) -> bool:
        """See that ``wanted`` bytes can be written, by reserving another step if need be.

        Returns:
            Whether they can now; False if the limit or the host's disk is reached.
        """
        while volume.free_bytes() < wanted:
            size = volume.device_bytes()[0]
            free = shutil.disk_usage(self.path).free - _LEAVE
            step = min(_STEP, self.max_bytes - size, free) // (64 << 20) * (64 << 20)
            if step < 64 << 20:
                return False
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size < size + step:
                    return False  # the limit was raised while mounted: it counts from the next mount on
                try:
                    _reserve(fd, size, step)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        return False
                    raise
            finally:
                os.close(fd)
            try:
                volume.resize(size + step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # Full to the last block, what says so included: deleted space may be on its way.
                volume.sync()
                volume.resize(size + step)
        return True

    def growth_bytes(self, volume: Volume) -> int:
        """Bytes by which it may still grow, by its limit and by the host's disk."""
        limit = self.max_bytes - volume.device_bytes()[0]
        return max(0, min(limit, shutil.disk_usage(self.path).free - _LEAVE))

    def close(self) -> None:
        """Unmount it, at once if nothing uses it. What a process of another home pins stays mounted: that
        home has layers in it. Otherwise it goes lazily."""
        for _ in range(20):  # an overlay that was just detached is still let go of
            try:
                mounts.unmount(self.target, lazy=False)
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            time.sleep(0.02)
        if not _is_pinned(self.target):
            mounts.unmount(self.target)


def _is_pinned(target: Path) -> bool:
    """Whether another process has ``target`` itself open."""
    for process_dir in Path("/proc").iterdir():
        if not process_dir.name.isdigit() or int(process_dir.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile
            if any(os.readlink(fd) == str(target) for fd in (process_dir / "fd").iterdir()):
                return True
    return False


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reserve(fd: int, offset: int, length: int) -> None:
    """Take the blocks now. A filesystem that cannot (ZFS, some network ones) is used without."""
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise


def _attach(path: Path) -> tuple[int, str]:
    """A loop device for ``path`` that frees itself after its last user: (descriptor, device)."""
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(backing).st_size % 4096:
        os.ftruncate(backing, os.fstat(backing).st_size // 4096 * 4096)
    try:
        # One that was unmounted while in use lives on with its filesystem: a second device
        # for the same file would have two filesystems write over each other.
        if (held := _device_of(backing, path.name)) is not None:
            return held
        for _ in range(64):
            try:
                control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise UnsupportedError(
                    f"no loop devices here: {error.strerror}",
                    hint="put the home on a btrfs filesystem, or allow the container loop devices",
                ) from error
            try:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            finally:
                os.close(control)
            device = f"/dev/loop{number}"
            try:
                fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise UnsupportedError(
                    f"{device} cannot be opened: {error.strerror}",
                    hint="put the home on a btrfs filesystem, or allow the container loop devices",
                ) from error
            try:
                _configure(fd, backing, path)
                return fd, device
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # somebody else took it in between
                    raise
        raise CapacityError("no free loop device after 64 tries", retryable=True)
    finally:
        os.close(backing)


def _device_of(backing: int, name: str) -> tuple[int, str] | None:
    """The loop device that has the file behind the descriptor ``backing``, opened, if there is one."""
    file = os.fstat(backing)
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if Path(entry.read_text().strip().removesuffix(" (deleted)")).name != name:
                continue
            device = f"/dev/{entry.parent.parent.name}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                status = fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(232))
            except OSError:  # it went meanwhile
                os.close(fd)
                continue
            if struct.unpack_from("2Q", status) == (file.st_dev, file.st_ino):
                return fd, device
            os.close(fd)
    return None


def _configure(fd: int, backing: int, path: Path) -> None:
    name = os.fsencode(path)[-63:]
    flags = _AUTOCLEAR | _DIRECT_IO  # direct where the host's filesystem can: nothing is cached twice
    info = struct.pack("5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
    try:
        fcntl.ioctl(fd, _LOOP_CONFIGURE, struct.pack("II", backing, 4096) + info + bytes(64))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
        fcntl.ioctl(fd, _LOOP_SET_FD, backing)  # before Linux 5.8
        try:
            fcntl.ioctl(fd, _LOOP_SET_STATUS64, info)
        except OSError:
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, _LOOP_CLR_FD)
            raise


def _mount(device: str, target: Path) -> None:
    # without discard: what is reserved stays reserved; commit: the cleaner frees deleted space that often
    if _libc.mount(device.encode(), os.fsencode(target), b"btrfs", _MS_NOATIME, b"nodiscard,commit=5") != 0:
        code = ctypes.get_errno()
        if code == errno.ENODEV:
            raise UnsupportedError("the kernel has no btrfs", hint="modprobe btrfs")
        raise OSError(code, f"mount {device} (the store) on {target}: {os.strerror(code)}")
