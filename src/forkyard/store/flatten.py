"""Merging overlay layers into one that shows the same.

A whiteout (a character device 0:0) hides what lies below; an opaque directory (an extended
attribute) hides what its namesakes below hold. Merged from the bottom up, both act on what
has been merged so far, and stay only where something further below needs them: a whiteout
with nothing to hide would show as a device in a directory that only one layer has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from forkyard.host import files

__all__ = ["Merge"]

_FICLONE = 0x40049409
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_OVERLAY = ("trusted.overlay.", "user.overlay.")


class Merge:
    """Merges layers into the empty directory ``target``, which will lie on ``below`` (top first)."""

    def __init__(self, target: Path, below: list[Path]) -> None:
        self.target = target
        self.below = below
        self._links: dict[int, Path] = {}

    def apply(self, layers: list[Path]) -> None:
        """Merge ``layers``, given top first."""
        for layer in reversed(layers):
            self._links.clear()
            self._directory(layer, self.target, Path(), new=False)

    def _below_has(self, relative: Path) -> bool:
        """Whether a layer below shows, or may show, something at ``relative``."""
        for layer in self.below:
            try:
                info = os.lstat(layer / relative)
            except (FileNotFoundError, NotADirectoryError):
                continue
            return not _is_whiteout(info)
        return False

    def _directory(self, source: Path, target: Path, relative: Path, *, new: bool) -> None:
        """Merge the content of ``source`` into ``target``; ``new``: nothing below shows through it."""
        with os.scandir(source) as entries:
            listed = list(entries)
        for entry in listed:
            info = entry.stat(follow_symlinks=False)
            to, inside = target / entry.name, relative / entry.name
            if _is_whiteout(info):
                files.rmtree(to)
                if not new and self._below_has(inside):
                    os.mknod(to, stat.S_IFCHR, 0)
            elif stat.S_ISDIR(info.st_mode):
                self._subdirectory(Path(entry.path), info, to, inside, new=new)
            else:
                files.rmtree(to)
                self._other(Path(entry.path), info, to)
        _copy_attributes(source, os.lstat(source), target)

    def _subdirectory(self, source: Path, info: os.stat_result, to: Path, inside: Path, *, new: bool) -> None:
        opaque = _is_opaque(source)
        try:
            there: os.stat_result | None = os.lstat(to)
        except FileNotFoundError:
            there = None
        covered = new  # does it hide all that lies below the merged layers?
        if there is not None and (opaque or not stat.S_ISDIR(there.st_mode)):
            # a whiteout that stood here still has to hide what is below
            covered = covered or _is_whiteout(there) or (stat.S_ISDIR(there.st_mode) and _is_opaque(to))
            files.rmtree(to)
            there = None
        elif there is not None:
            covered = covered or _is_opaque(to)
        covered = covered or opaque
        if there is None:
            os.mkdir(to, 0o700)
        needs_mark = covered and not new and self._below_has(inside)
        self._directory(source, to, inside, new=covered or not self._below_has(inside))
        if needs_mark:
            os.setxattr(to, _OPAQUE[0], b"y")

    def _other(self, source: Path, info: os.stat_result, to: Path) -> None:
        """Copy what is no directory."""
        if info.st_nlink > 1:
            first = self._links.get(info.st_ino)
            if first is not None and first.exists():
                os.link(first, to, follow_symlinks=False)
                return
            self._links[info.st_ino] = to
        if stat.S_ISREG(info.st_mode):
            _copy_file(source, to)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), to)
        else:
            os.mknod(to, info.st_mode, info.st_rdev)
        _copy_attributes(source, info, to)


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _is_opaque(path: Path) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


def _copy_file(source: Path, to: Path) -> None:
    with open(source, "rb", buffering=0) as reader, open(to, "xb", buffering=0) as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EPERM):
                raise
            shutil.copyfileobj(reader, writer, 1 << 20)


def _copy_attributes(source: Path, info: os.stat_result, to: Path) -> None:
    """Owner, extended attributes (but overlayfs' own), mode and times, in the order that keeps them."""
    os.chown(to, info.st_uid, info.st_gid, follow_symlinks=False)
    names: Iterable[str] = ()
    with contextlib.suppress(OSError):
        names = os.listxattr(source, follow_symlinks=False)
    for name in names:
        if not name.startswith(_OVERLAY):
            with contextlib.suppress(FileNotFoundError):
                os.setxattr(to, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(to, stat.S_IMODE(info.st_mode))
    os.utime(to, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
