"""Files that matter are written whole; trees are removed for good."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = ["free_mb", "fsync_dir", "rmtree", "sha256_file", "syncfs", "tree_bytes", "write_atomic"]

_libc = ctypes.CDLL(None, use_errno=True)


def fsync_dir(path: Path) -> None:
    """Make the names in the directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o600, *, durable: bool = True) -> None:
    """Write ``data`` to ``path`` whole or not at all: after a crash it has its old or its new content.

    Args:
        durable: Return only when it will also survive a power cut. False keeps the order (content
            before name) but not the moment.
    """
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(raw)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        fsync_dir(path.parent)


def syncfs(fd: int) -> None:
    """Write out everything dirty of the filesystem that ``fd`` is on."""
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")


def free_mb(path: Path) -> int:
    """MiB that a plain user may still write on the filesystem of ``path``."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize >> 20


def tree_bytes(path: Path) -> int:
    """Bytes that the files below ``path`` occupy, each inode once, other filesystems left out."""
    seen: set[int] = set()
    total = 0
    stack = [path]
    try:
        device = os.lstat(path).st_dev
    except OSError:
        return 0
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                if info.st_dev == device:
                    stack.append(Path(entry.path))
            elif info.st_nlink > 1:
                if info.st_ino in seen:
                    continue
                seen.add(info.st_ino)
            total += info.st_blocks * 512
    return total


def sha256_file(path: Path, *, cancelled: Callable[[], bool] = lambda: False) -> str:
    """Hex SHA-256 of a file; call it in a thread. ``cancelled`` is asked every 8 MiB.

    Raises:
        InterruptedError: ``cancelled()`` was true.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            if cancelled():
                raise InterruptedError(f"checksum of {path} was cancelled")
            digest.update(view[:count])
    return digest.hexdigest()


def rmtree(path: Path) -> None:
    """Remove ``path`` whatever it is. Nothing there is fine; symbolic links are not followed.

    Directories without write permission are made writable first (a guest's, if we are not root).
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(path)
        return

    def retry(function: Callable[..., object], name: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            return
        if not isinstance(error, PermissionError):
            raise error
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
        with contextlib.suppress(OSError):
            if not os.path.islink(name):
                os.chmod(name, 0o700)
        if function in (os.unlink, os.rmdir):
            function(name)
        elif os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)

    def remove() -> None:
        shutil.rmtree(path, onerror=lambda function, name, info: retry(function, name, info[1]))

    try:
        remove()
    except (RecursionError, OSError) as error:
        # A guest's tree may be deeper than the stack, the descriptors or a path's length allow.
        if isinstance(error, OSError) and error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG):
            raise
        _flatten(path)
        remove()


def _flatten(path: Path) -> None:
    """Move every directory below ``path`` right into it."""
    fresh = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    top = os.open(path, flags)
    try:
        with os.scandir(top) as entries:
            todo = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        while todo:
            name = todo.pop()
            with contextlib.suppress(PermissionError):
                os.chmod(name, 0o700, dir_fd=top)
            fd = os.open(name, flags, dir_fd=top)
            try:
                with os.scandir(fd) as entries:
                    below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
                for inner in below:
                    todo.append(next(fresh))
                    os.rename(inner, todo[-1], src_dir_fd=fd, dst_dir_fd=top)
            finally:
                os.close(fd)
    finally:
        os.close(top)
