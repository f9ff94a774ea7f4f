"""Comparing what two stacks of overlay layers show, without mounting either.

A whiteout (a character device 0:0, or an empty file with overlayfs' attribute) hides what lies
below; an opaque directory hides what its namesakes below hold. At each directory only the
layers that the two stacks do not share there are listed, so that the work grows with what those
hold and not with what the stacks show.

Layers were written by guests. Every name is looked up as one component relative to a directory
that was opened without following anything, so no link in a layer leads out of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forkyard.host import userns
from forkyard.store.changed import Changed

__all__ = ["Difference", "Entry", "Layer", "Shown", "Unreadable", "compare", "extents"]

_OPENAT2 = 437
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # no other mount, no magic link, no link, nothing above
# In a user namespace the kernel uses attributes that a user may set.
_SPACE = "user" if userns.inside() else "trusted"
OPAQUE, WHITEOUT = f"{_SPACE}.overlay.opaque", f"{_SPACE}.overlay.whiteout"
_FIEMAP = 0xC020660B
_EXTENTS = 64
_LAST_EXTENT = 1
# What says of an extent where it lies but not what it holds, or something else than its address.
_NO_ADDRESS = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
_UNWRITTEN, _SHARED = 0x800, 0x2000
_CHUNK = 1 << 20
# Below this, reading is cheaper than asking where the content lies.
_ASK_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Layer:
    """A layer's directory, open.

    Args:
        local: It lies on the store's own filesystem, where equal addresses mean equal content.
    """

    def __init__(self, up: Path, *, local: bool) -> None:
        self.local = local
        self.fd = os.open(up, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    def open(self, path: str, flags: int) -> int:
        """Open ``path`` (relative, "" is the layer itself); links are not followed, at no place in it."""
        how = struct.pack("=QQQ", flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0, _RESOLVE)
        raw = os.fsencode(path) or b"."
        fd = _libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(self.fd), raw, how, ctypes.c_size_t(24))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return int(fd)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a stack shows at a path. ``layers`` are those that a directory is merged from."""

    layer: Layer
    path: str
    info: os.stat_result
    layers: tuple[Layer, ...] = ()

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.info.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.info.st_mode)

    def read(self, limit: int) -> bytes:
        """A file's content, at most ``limit`` bytes of it."""
        fd = self.layer.open(self.path, os.O_RDONLY)
        try:
            parts = []
            while limit > 0 and (data := os.read(fd, min(limit, _CHUNK))):
                parts.append(data)
                limit -= len(data)
            return b"".join(parts)
        finally:
            os.close(fd)

    def target(self) -> str:
        """Where a link says that it leads."""
        directory, _, name = self.path.rpartition("/")
        fd = self.layer.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return os.readlink(name, dir_fd=fd)
        finally:
            os.close(fd)


class Shown(Protocol):
    """What is shown at a path, whatever shows it: see :class:`Entry`."""

    @property
    def info(self) -> os.stat_result: ...

    @property
    def is_dir(self) -> bool: ...

    @property
    def is_file(self) -> bool: ...

    @property
    def is_link(self) -> bool: ...

    def read(self, limit: int) -> bytes: ...

    def target(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A path (relative to the root) at which the stacks differ, and what each shows there.
    ``content``: what a file holds or a link says differs, not only its mode or owner."""

    path: str
    old: Shown | None
    new: Shown | None
    content: bool


@dataclass(slots=True)
class Unreadable:
    """Directories that could not be looked into: their paths are longer than the kernel takes."""

    paths: list[str] = field(default_factory=list)


def compare(
    new: Sequence[Layer],
    old: Sequence[Layer],
    *,
    changed: Changed | None = None,
    leave_out: Callable[[str], bool] = lambda path: False,
    unreadable: Unreadable | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Difference]:
    """Where the stack ``new`` (top first) shows something else than ``old``, in no order.

    A file's, link's or directory's type, mode and owner count, and the content, not the times.
    Where a directory came or went, so did all that is in it.

    Args:
        changed: What the top of ``new`` changed since the top of ``old``, where that is known and
            the two stacks are the same below.
        leave_out: Paths of which nothing, nor anything below them, is looked at.
        unreadable: Receives what is left out for want of a way to name it.
        stop: Asked now and then; True ends it with InterruptedError.
    """
    todo = [("", tuple(new), tuple(old))]
    while todo:
        path, news, olds = todo.pop()
        if stop():
            raise InterruptedError("the comparison was cancelled")
        with ExitStack() as stack:
            try:
                here = _Directory(path, news, olds, stack)
                names = here.candidates(changed)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                if unreadable is not None:
                    unreadable.paths.append(path)
                continue
            for name in names:
                full = f"{path}/{name}" if path else name
                if leave_out(full):
                    continue
                now, before = here.look(name, news, full), here.look(name, olds, full)
                difference = _differ(full, before, now)
                if difference is not None:
                    yield difference
                inside = (full, now.layers if now else (), before.layers if before else ())
                if inside[1] != inside[2]:
                    todo.append(inside)


class _Directory:
    """One directory of the two merged views."""

    def __init__(self, path: str, news: tuple[Layer, ...], olds: tuple[Layer, ...], stack: ExitStack) -> None:
        shared = 0
        while shared < min(len(news), len(olds)) and news[-1 - shared] is olds[-1 - shared]:
            shared += 1
        self.own_new, self.own_old = news[: len(news) - shared], olds[: len(olds) - shared]
        self.fds: dict[Layer, int] = {}
        for layer in (*news, *olds):
            if layer not in self.fds:
                self.fds[layer] = layer.open(path, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, self.fds[layer])

    def candidates(self, changed: Changed | None) -> Iterable[str]:
        """The names at which the two may differ."""
        if changed is not None and len(self.own_new) == len(self.own_old) == 1:
            new, old = self.fds[self.own_new[0]], self.fds[self.own_old[0]]
            inode = os.fstat(new).st_ino
            if inode == os.fstat(old).st_ino:
                if inode not in changed.inodes:
                    return changed.children.get(inode, ())
                return self._changed(changed, _inodes(new), _inodes(old))
        names: set[str] = set()
        for layer in (*self.own_new, *self.own_old):
            names.update(os.listdir(self.fds[layer]))
        return names

    @staticmethod
    def _changed(changed: Changed, now: dict[str, int], before: dict[str, int]) -> Iterable[str]:
        for name in now.keys() | before.keys():
            inode = now.get(name)
            if inode != before.get(name) or inode in changed.inodes or inode in changed.children:
                yield name

    def look(self, name: str, layers: tuple[Layer, ...], path: str) -> Entry | None:
        """What the merged view of ``layers`` shows at ``name``."""
        for at, layer in enumerate(layers):
            info = self._stat(layer, name)
            if info is None:
                continue
            if self._is_whiteout(layer, name, info):
                return None
            if not stat.S_ISDIR(info.st_mode):
                return Entry(layer, path, info)
            return Entry(layer, path, info, (layer, *self._below(name, layer, layers[at + 1 :])))
        return None

    def _below(self, name: str, above: Layer, layers: tuple[Layer, ...]) -> Iterator[Layer]:
        """The layers that a directory goes on with below ``above``."""
        for layer in layers:
            if self._attribute(above, name, OPAQUE) == b"y":
                return
            info = self._stat(layer, name)
            if info is None:
                continue
            if not stat.S_ISDIR(info.st_mode):
                return
            yield layer
            above = layer

    def _stat(self, layer: Layer, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.fds[layer], follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_whiteout(self, layer: Layer, name: str, info: os.stat_result) -> bool:
        if stat.S_ISCHR(info.st_mode):
            return info.st_rdev == 0
        empty = stat.S_ISREG(info.st_mode) and info.st_size == 0
        return empty and self._attribute(layer, name, WHITEOUT) is not None

    def _attribute(self, layer: Layer, name: str, attribute: str) -> bytes | None:
        try:
            path = f"/proc/self/fd/{self.fds[layer]}/{name}"
            return os.getxattr(path, attribute, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM):
                return None
            raise


def _inodes(fd: int) -> dict[str, int]:
    with os.scandir(fd) as entries:
        return {entry.name: entry.inode() for entry in entries}


def _differ(path: str, old: Entry | None, new: Entry | None) -> Difference | None:
    if old is None or new is None:
        return None if old is new else Difference(path, old, new, True)
    if old.layer is new.layer:
        return None
    if stat.S_IFMT(old.info.st_mode) != stat.S_IFMT(new.info.st_mode):
        return Difference(path, old, new, True)
    content = not _same_content(old, new)
    was, now = old.info, new.info
    if content or (was.st_mode, was.st_uid, was.st_gid) != (now.st_mode, now.st_uid, now.st_gid):
        return Difference(path, old, new, content)
    return None


def _same_content(old: Entry, new: Entry) -> bool:
    if new.is_dir:
        return True
    if not new.is_file:
        return old.target() == new.target() if new.is_link else old.info.st_rdev == new.info.st_rdev
    if old.info.st_size != new.info.st_size:
        return False
    if new.info.st_size == 0:
        return True
    with ExitStack() as stack:
        fds = []
        for entry in (old, new):
            fds.append(entry.layer.open(entry.path, os.O_RDONLY))
            stack.callback(os.close, fds[-1])
        if old.layer.local and new.layer.local and new.info.st_size >= _ASK_BYTES and _same_blocks(*fds):
            return True
        while True:
            one, other = _full(fds[0]), _full(fds[1])
            if one != other:
                return False
            if not one:
                return True


def _full(fd: int) -> bytes:
    """The next megabyte, less only at the end of the file."""
    data = os.read(fd, _CHUNK)
    while data and len(data) < _CHUNK and (more := os.read(fd, _CHUNK - len(data))):
        data += more
    return data


def _same_blocks(one: int, other: int) -> bool:
    """Whether two files of one filesystem consist of the very same blocks."""
    mine, start = _extents(one, 0), 0
    theirs = _extents(other, 0)
    while mine is not None and mine == theirs and mine:
        logical, _, length, flags = mine[-1]
        if flags & _LAST_EXTENT:
            return True
        start = logical + length
        mine, theirs = _extents(one, start), _extents(other, start)
    return False


def extents(fd: int) -> Iterator[tuple[int, int, int]]:
    """Where a file's content lies: offset in it, address, length. What has no address that says it all is
    left out."""
    at = 0
    while found := _some_extents(fd, at):
        for logical, physical, length, flags in found:
            if not flags & (_NO_ADDRESS | _UNWRITTEN):
                yield logical, physical, length
        logical, _, length, flags = found[-1]
        if flags & _LAST_EXTENT:
            return
        at = logical + length


def _extents(fd: int, start: int) -> list[tuple[int, int, int, int]] | None:
    """Some extents from ``start``: where in the file, where on the disk, length, flags; None where
    an address does not say it all."""
    found = _some_extents(fd, start)
    if any(flags & _NO_ADDRESS for _, _, _, flags in found):
        return None
    return found or None


def _some_extents(fd: int, start: int) -> list[tuple[int, int, int, int]]:
    """As above, whatever the addresses say; none where the file system does not tell."""
    buffer = bytearray(32 + 56 * _EXTENTS)
    struct.pack_into("=QQIIII", buffer, 0, start, (1 << 64) - 1 - start, 0, 0, _EXTENTS, 0)
    try:
        fcntl.ioctl(fd, _FIEMAP, buffer)
    except OSError:
        return []
    found = []
    for at in range(struct.unpack_from("I", buffer, 20)[0]):
        logical, physical, length = struct.unpack_from("=QQQ", buffer, 32 + 56 * at)
        flags = struct.unpack_from("I", buffer, 32 + 56 * at + 40)[0]
        found.append((logical, physical, length, flags & ~_SHARED))
    return found
