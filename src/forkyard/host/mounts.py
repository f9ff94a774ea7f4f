"""Mounts, through the kernel's new mount interface: no process, no limit on the length of options.

All calls block for well under a millisecond and may be made on the event loop.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from forkyard.host import userns

__all__ = [
    "bind_read_only",
    "clone_tree",
    "is_mount",
    "mount_overlay",
    "mount_points",
    "mounts_below",
    "move_tree",
    "unmount",
]

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 429, 430, 431, 432
_SYS_MOUNT_SETATTR = 442
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOUNT_ATTR_RDONLY = 1
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(what: str, number: int, *args: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _messages(fs: int) -> str:
    """What the kernel wrote on a filesystem context, one message per read."""
    lines: list[str] = []
    while len(lines) < 10:
        try:
            lines.append(os.read(fs, 4096).decode("utf-8", "replace").strip())
        except OSError:
            break
    return "; ".join(lines)


def _set(fs: int, key: str, value: str) -> None:
    _call(f"overlay {key}={value}", _SYS_FSCONFIG, fs, _SET_STRING, key.encode(), os.fsencode(value), 0)


def mount_overlay(
    lowers: Sequence[Path],
    upper: Path | None,
    work: Path | None,
    target: Path,
    *,
    volatile: bool = False,
) -> None:
    """Mount an overlay of ``lowers`` (top first, at most 500) under ``upper`` on ``target``.

    Without ``upper`` the mount is read-only. ``index``, ``metacopy``, ``redirect_dir`` and ``xino``
    are off whatever the kernel's defaults are, so that an upper can become a lower anywhere.
    ``volatile`` makes the guest's fsync free: for an upper that means nothing after a reboot.

    Raises:
        OSError: with the kernel's own explanation.
    """
    if upper is None and len(lowers) == 1:
        bind_read_only(lowers[0], target)
        return
    fs = _call("fsopen overlay", _SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC)
    mount = -1
    try:
        _set(fs, "source", "forkyard")
        for lower in lowers:
            _set(fs, "lowerdir+", str(lower))
        if upper is not None:
            _set(fs, "upperdir", str(upper))
            _set(fs, "workdir", str(work))
        if userns.inside():
            # "trusted." attributes are the host's root's alone. With those of users the kernel
            # follows no redirection, and takes "off" for a contradiction.
            _call("overlay userxattr", _SYS_FSCONFIG, fs, _SET_FLAG, b"userxattr", None, 0)
        else:
            _set(fs, "redirect_dir", "off")
        for key in ("index", "metacopy", "xino"):
            _set(fs, key, "off")
        if volatile and upper is not None:
            _call("overlay volatile", _SYS_FSCONFIG, fs, _SET_FLAG, b"volatile", None, 0)
        _call("overlay", _SYS_FSCONFIG, fs, _CMD_CREATE, None, None, 0)
        mount = _call("fsmount", _SYS_FSMOUNT, fs, _FSMOUNT_CLOEXEC, 0)
        move_tree(mount, target)
    except OSError as error:
        detail = _messages(fs)
        raise OSError(error.errno, f"{error.strerror}: {detail}" if detail else error.strerror) from None
    finally:
        if mount >= 0:
            os.close(mount)
        os.close(fs)


def clone_tree(source: Path) -> int:
    """A copy of what is mounted on ``source`` (without what is mounted below it), attached nowhere
    yet: a descriptor, the caller's to close. It may be attached in another mount namespace."""
    return _call(
        f"open_tree {source}", _SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source),
        _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC,
    )  # fmt: skip


def move_tree(mount: int, target: Path | int) -> None:
    """Attach a mount that is attached nowhere to ``target``, a path or an open directory."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    if isinstance(target, int):
        where, path = target, b""
        flags |= _MOVE_MOUNT_T_EMPTY_PATH
    else:
        where, path = _AT_FDCWD, os.fsencode(target)
    _call(f"move_mount to {target}", _SYS_MOVE_MOUNT, mount, b"", where, path, flags)


def bind_read_only(source: Path, target: Path) -> None:
    """Bind ``source`` (without what is mounted below it) on ``target``, read-only from its first moment."""
    tree = clone_tree(source)
    try:
        attr = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
        _call("mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attr), 32)
        move_tree(tree, target)
    finally:
        os.close(tree)


def unmount(target: Path, lazy: bool = True) -> bool:
    """Unmount everything that is stacked on ``target``; True if something was.

    ``lazy`` detaches at once, also while it is in use. Idempotent: no mount and no directory are fine.

    Raises:
        OSError: EBUSY without ``lazy``; EPERM.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    done = False
    while _libc.umount2(os.fsencode(target), flags) == 0:
        done = True
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
        raise OSError(code, f"unmount {target}: {os.strerror(code)}")
    return done


def is_mount(path: Path) -> bool:
    """Whether a filesystem is mounted on ``path`` (False for a bind of the same filesystem)."""
    return os.path.ismount(path)


def _unescape(word: str) -> str:
    if "\\" not in word:
        return word
    raw = os.fsencode(word)
    for octal, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        raw = raw.replace(octal, char)
    return os.fsdecode(raw)


def mount_points() -> list[tuple[Path, str, str]]:
    """All mounts of this namespace in order of mounting: (target, filesystem type, source)."""
    found = []
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, source = right.split(" ", 2)[:2]
            found.append((Path(_unescape(left.split(" ", 5)[4])), kind, _unescape(source)))
    return found


def mounts_below(path: Path) -> list[Path]:
    """Targets of the mounts on or below ``path``, innermost first: the order to unmount them in."""
    top = Path(os.path.realpath(path))
    inside = [target for target, _, _ in mount_points() if target == top or top in target.parents]
    return inside[::-1]
