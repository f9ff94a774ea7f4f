"""btrfs by its ioctls: subvolumes, snapshots, quotas, size. No program is run.

Calls block for as long as the kernel takes: making a subvolume is under a millisecond, a
snapshot is one transaction commit (milliseconds, more if much is dirty), so snapshots and
syncs belong in a thread.

Quotas: *simple quotas* (Linux 6.7 and later) charge an extent to the subvolume that wrote it
for as long as anything refers to it, at no cost for snapshots. Older kernels have quota groups
only, which count what a subvolume refers to, and make commits slower with every snapshot.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Literal

__all__ = ["QuotaKind", "Volume", "is_btrfs", "is_subvolume", "subvolume_id"]

QuotaKind = Literal["simple", "groups", "none"]

_MAGIC = 0x94
_SUPER_MAGIC = 0x9123683E
_SUBVOL_ROOT_INODE = 256
_RDONLY, _BY_ID = 1 << 1, 1 << 4
_QUOTA_ENABLE, _QUOTA_ENABLE_SIMPLE = 1, 4
_LIMIT_MAX_REFERENCED, _NO_LIMIT = 1, (1 << 64) - 1
_NAME_MAX = 255


def _code(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_W, _R = 1, 2
_SYNC = _code(0, 8, 0)
_RESIZE = _code(_W, 3, 4096)
_INO_LOOKUP = _code(_W | _R, 18, 4096)
_SNAP_CREATE_V2 = _code(_W, 23, 4096)
_SUBVOL_CREATE_V2 = _code(_W, 24, 4096)
_START_SYNC = _code(_R, 24, 8)
_WAIT_SYNC = _code(_W, 22, 8)
_SNAP_DESTROY_V2 = _code(_W, 63, 4096)
_SNAP_DESTROY = _code(_W, 15, 4096)
_DEV_INFO = _code(_W | _R, 30, 4096)
_FS_INFO = _code(_R, 31, 1024)
_QUOTA_CTL = _code(_W | _R, 40, 16)
_QGROUP_CREATE = _code(_W, 42, 16)
_QGROUP_LIMIT = _code(_R, 43, 48)

_libc = ctypes.CDLL(None, use_errno=True)


def is_btrfs(path: Path) -> bool:
    """Whether ``path`` lies on a btrfs filesystem."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return bool(struct.unpack_from("l", buffer)[0] & 0xFFFFFFFF == _SUPER_MAGIC)


def is_subvolume(path: Path) -> bool:
    """Whether ``path`` is the root of a subvolume (of a filesystem known to be btrfs)."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return info.st_ino == _SUBVOL_ROOT_INODE and info.st_dev != os.lstat(path.parent).st_dev


def subvolume_id(path: Path) -> int:
    """The id of the subvolume that ``path`` lies in."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        buffer = bytearray(4096)
        struct.pack_into("QQ", buffer, 0, 0, _SUBVOL_ROOT_INODE)
        fcntl.ioctl(fd, _INO_LOOKUP, buffer)
        return int(struct.unpack_from("Q", buffer)[0])
    finally:
        os.close(fd)


def _args_v2(name: str, fd: int = 0, flags: int = 0, subvolid: int | None = None) -> bytearray:
    raw = os.fsencode(name)
    if not 0 <= len(raw) <= _NAME_MAX or b"/" in raw:
        raise ValueError(f"not a name for a subvolume: {name!r}")
    buffer = bytearray(4096)
    struct.pack_into("qQQ", buffer, 0, fd, 0, flags)
    if subvolid is not None:
        struct.pack_into("Q", buffer, 56, subvolid)
    else:
        buffer[56 : 56 + len(raw)] = raw
    return buffer


class Volume:
    """One mounted btrfs filesystem, through a directory on it that stays open.

    Paths are absolute and lie on the filesystem. Errors are ``OSError`` as the kernel gives them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        buffer = bytearray(1024)
        try:
            fcntl.ioctl(self._fd, _FS_INFO, buffer)
        except OSError:
            os.close(self._fd)
            raise
        raw = bytes(buffer[16:32]).hex()
        self.uuid = "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
        self.max_devid = struct.unpack_from("Q", buffer)[0]
        self._sysfs = f"/sys/fs/btrfs/{self.uuid}"
        self.quota: QuotaKind = self._quota_kind()

    def close(self) -> None:
        """Let go of the filesystem, so that it can be unmounted. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- subvolumes

    def _in_parent(self, path: Path, request: int, args: bytearray) -> None:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, request, args)
        finally:
            os.close(fd)

    def create(self, path: Path) -> None:
        """Make an empty subvolume."""
        self._in_parent(path, _SUBVOL_CREATE_V2, _args_v2(path.name))

    def snapshot(self, source: Path, path: Path, *, read_only: bool) -> None:
        """Make ``path`` a snapshot of the subvolume ``source``: what is dirty in it is written first."""
        fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._in_parent(path, _SNAP_CREATE_V2, _args_v2(path.name, fd, _RDONLY if read_only else 0))
        finally:
            os.close(fd)

    def delete(self, path: Path) -> None:
        """Delete a subvolume: its name goes now, its space later (the kernel's cleaner)."""
        try:
            self._in_parent(path, _SNAP_DESTROY_V2, _args_v2(path.name))
        except OSError as error:
            if error.errno != errno.ENOTTY:
                raise
            self._in_parent(path, _SNAP_DESTROY, _args_v2("")[:8] + _args_v2(path.name)[56:] + bytes(48))

    # -- writing out

    def sync(self) -> None:
        """Commit the whole filesystem and wait for it."""
        fcntl.ioctl(self._fd, _SYNC)

    def commit(self) -> None:
        """Commit the running transaction (metadata and what it depends on), not data that is merely dirty."""
        buffer = bytearray(8)
        fcntl.ioctl(self._fd, _START_SYNC, buffer)
        fcntl.ioctl(self._fd, _WAIT_SYNC, bytes(buffer))

    # -- quotas

    def _read(self, *parts: str) -> str:
        with open("/".join((self._sysfs, *parts)), "rb", buffering=0) as file:
            return file.read(64).decode().strip()

    def _quota_kind(self) -> QuotaKind:
        try:
            mode = self._read("qgroups", "mode")
        except OSError:
            return "none"
        return "simple" if mode == "squota" else "groups"

    def enable_quota(self, *, groups: bool = False) -> QuotaKind:
        """Turn quotas on: simple ones, or else (if ``groups`` allows it) quota groups. Idempotent."""
        for command in (_QUOTA_ENABLE_SIMPLE, _QUOTA_ENABLE) if groups else (_QUOTA_ENABLE_SIMPLE,):
            if self.quota != "none":
                break
            try:
                fcntl.ioctl(self._fd, _QUOTA_CTL, bytearray(struct.pack("QQ", command, 0)))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM):
                    raise
            self.quota = self._quota_kind()
        return self.quota

    def set_limit(self, subvolume: int, limit_bytes: int | None) -> None:
        """Limit what a subvolume may hold (None lifts it). Nothing happens without quotas."""
        if self.quota == "none":
            return
        value = _NO_LIMIT if limit_bytes is None else limit_bytes
        args = struct.pack("QQQQQQ", subvolume, _LIMIT_MAX_REFERENCED, value, 0, 0, 0)
        fcntl.ioctl(self._fd, _QGROUP_LIMIT, bytearray(args))

    def usage(self, subvolume: int) -> int | None:
        """Bytes charged to a subvolume now, reservations for dirty pages included; None if not known."""
        group = f"0_{subvolume}"
        try:
            return int(self._read("qgroups", group, "referenced")) + int(
                self._read("qgroups", group, "rsv_data")
            )
        except (OSError, ValueError):
            return None

    def dirty(self, subvolume: int) -> int | None:
        """Bytes of a subvolume that have a reservation but no place yet, so still have to be written."""
        try:
            return int(self._read("qgroups", f"0_{subvolume}", "rsv_data"))
        except (OSError, ValueError):
            return None

    def limit(self, subvolume: int) -> int | None:
        """The limit of a subvolume in bytes, or None."""
        try:
            value = int(self._read("qgroups", f"0_{subvolume}", "max_referenced"))
            flags = int(self._read("qgroups", f"0_{subvolume}", "limit_flags"), 0)
        except (OSError, ValueError):
            return None
        return value if flags & _LIMIT_MAX_REFERENCED else None

    def drop_quota_group(self, subvolume: int) -> None:
        """Forget the quota group of a deleted subvolume, if the kernel has not yet and nothing is charged."""
        try:
            fcntl.ioctl(self._fd, _QGROUP_CREATE, struct.pack("QQ", 0, subvolume))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTCONN, errno.EINVAL):
                raise

    # -- size

    def device_bytes(self) -> tuple[int, int]:
        """(size, allocated to chunks) of the filesystem's devices together."""
        size = used = 0
        for devid in range(1, self.max_devid + 1):
            buffer = bytearray(4096)
            struct.pack_into("Q", buffer, 0, devid)
            try:
                fcntl.ioctl(self._fd, _DEV_INFO, buffer)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    continue
                raise
            device_used, device_size = struct.unpack_from("QQ", buffer, 24)
            size, used = size + device_size, used + device_used
        return size, used

    def resize(self, new_bytes: int) -> None:
        """Set the size of the filesystem's first device."""
        text = f"1:{new_bytes}".encode()
        fcntl.ioctl(self._fd, _RESIZE, bytearray(struct.pack("q4088s", 0, text)))

    def free_bytes(self) -> int:
        """Bytes that can still be written: as the filesystem estimates it, less what writers were
        promised and what is not laid out yet, which that leaves out (gigabytes within a second)."""
        info = os.fstatvfs(self._fd)
        try:
            with open(f"{self._sysfs}/allocation/data/bytes_may_use", "rb", buffering=0) as file:
                promised = int(file.read(32))
        except (OSError, ValueError):
            promised = 0  # no sysfs here
        return max(0, info.f_bavail * info.f_frsize - promised)
