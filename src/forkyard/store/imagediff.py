"""Comparing what two images of a disk show, without mounting either: :mod:`forkyard.store.overlay`'s for
machines with kernels of their own.

Images that began as copies of each other share what neither has written, and the store's file system
tells where. What lies in those blocks on both sides is the same without being read.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forkyard.store.ext4 import ROOT, Ext4, Inode, Malformed
from forkyard.store.overlay import Difference, extents

__all__ = ["ImageEntry", "compare"]

# Made by mke2fs, in every image.
LOST = b"lost+found"


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """What an image shows at a path; see :class:`forkyard.store.overlay.Shown`."""

    image: Ext4
    inode: Inode

    @property
    def info(self) -> os.stat_result:
        one = self.inode
        seconds = one.mtime_ns // 10**9
        return os.stat_result((one.mode, one.number, 0, one.links, one.uid, one.gid, one.size, 0, seconds, 0))

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.inode.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.inode.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.inode.mode)

    def read(self, limit: int) -> bytes:
        """A file's content, at most ``limit`` bytes of it."""
        return self.image.read(self.inode, limit)

    def target(self) -> str:
        """Where a link says that it leads."""
        return os.fsdecode(self.image.target(self.inode))


class _Shared:
    """Where two images have the very same blocks."""

    def __init__(self, new: Ext4, old: Ext4) -> None:
        self.images = new, old
        self.alike = new.block_size == old.block_size
        self.begins: list[int] = []
        self.ends: list[int] = []
        if self.alike:
            for start, end in _common(new.fd, old.fd):
                self.begins.append(-(-start // new.block_size))
                self.ends.append(end // new.block_size)

    def has(self, first: int, count: int) -> bool:
        """Whether ``count`` blocks are the same in both, without looking at them."""
        at = bisect_right(self.begins, first) - 1
        if at < 0 or first + count > self.ends[at]:
            return False
        return not any(image.in_journal(first, count) for image in self.images)


def compare(
    new: Ext4,
    old: Ext4,
    *,
    leave_out: Callable[[str], bool] = lambda path: False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Difference]:
    """Where ``new`` shows something else than ``old``; see :func:`forkyard.store.overlay.compare`.

    Raises:
        Malformed: an image is not read here. InterruptedError: ``stop`` said so.
    """
    shared = _Shared(new, old)
    todo: list[tuple[str, int, int]] = [("", ROOT, ROOT)]
    seen: tuple[set[int], set[int]] = set(), set()
    while todo:
        path, *numbers = todo.pop()
        if stop():
            raise InterruptedError("the comparison was cancelled")
        for number, known in zip(numbers, seen, strict=True):
            # A directory has one name.
            if number in known:
                raise Malformed("a directory of it is in two places")
            if number:
                known.add(number)
        now = new.names(new.inode(numbers[0])) if numbers[0] else {}
        if numbers[0] == numbers[1] and _same(shared, new.inode(numbers[0]), numbers[0]):
            before = now
        else:
            before = old.names(old.inode(numbers[1])) if numbers[1] else {}
        for name in now if now is before else now.keys() | before.keys():
            full = os.fsdecode(path.encode("utf-8", "surrogateescape") + b"/" + name if path else name)
            if leave_out(full) or (not path and name == LOST):
                continue
            here = _inode(new, now.get(name, 0))
            if now.get(name) == before.get(name) and here is not None and _same(shared, here, here.number):
                was: Inode | None = here
                difference = None
            else:
                was = _inode(old, before.get(name, 0))
                difference = _differ(full, shared, was, here)
            if difference is not None:
                yield difference
            inside = [one.number if one and stat.S_ISDIR(one.mode) else 0 for one in (here, was)]
            if any(inside):
                todo.append((full, inside[0], inside[1]))


def _inode(image: Ext4, number: int) -> Inode | None:
    if not number:
        return None
    found = image.inode(number)
    if not found.links:
        raise Malformed(f"it has a name for inode {number}, which is free")
    return found


def _same(shared: _Shared, inode: Inode, number: int) -> bool:
    """Whether an inode and all its content lie in blocks that both images have."""
    images = shared.images
    if not shared.alike or images[0].place(number) != images[1].place(number):
        return False
    if not shared.has(images[0].place(number)[0], 1):
        return False
    return _same_content(shared, inode)


def _same_content(shared: _Shared, inode: Inode) -> bool:
    if not (stat.S_ISREG(inode.mode) or stat.S_ISDIR(inode.mode) or inode.size >= 60):
        return True
    # A map of more than the inode's own four entries lies in blocks that may differ.
    if inode.raw[46:48] != b"\0\0":
        return False
    return all(shared.has(first, count) for _, first, count in shared.images[0].runs(inode))


def _differ(path: str, shared: _Shared, was: Inode | None, now: Inode | None) -> Difference | None:
    new, old = shared.images
    before, after = ImageEntry(old, was) if was else None, ImageEntry(new, now) if now else None
    if was is None or now is None:
        return None if was is now else Difference(path, before, after, True)
    if stat.S_IFMT(was.mode) != stat.S_IFMT(now.mode):
        return Difference(path, before, after, True)
    content = not _equal(shared, was, now)
    if content or (was.mode, was.uid, was.gid) != (now.mode, now.uid, now.gid):
        return Difference(path, before, after, content)
    return None


def _equal(shared: _Shared, was: Inode, now: Inode) -> bool:
    new, old = shared.images
    if stat.S_ISDIR(now.mode):
        return True
    if stat.S_ISLNK(now.mode):
        return old.target(was) == new.target(now)
    if not stat.S_ISREG(now.mode):
        return was.device == now.device
    if was.size != now.size:
        return False
    runs = new.runs(now)
    if shared.alike and runs == old.runs(was) and all(shared.has(first, n) for _, first, n in runs):
        return True
    return _same_bytes(old.pieces(was), new.pieces(now))


def _same_bytes(one: Iterator[tuple[int, bytes]], other: Iterator[tuple[int, bytes]]) -> bool:
    """Whether two files of one length hold the same; what is not given is zeros."""
    nothing = (-1, b"")
    (at, mine), (there, theirs) = next(one, nothing), next(other, nothing)
    while mine and theirs:
        start = max(at, there)
        if _filled(mine[: start - at]) or _filled(theirs[: start - there]):
            return False
        mine, theirs = mine[start - at :], theirs[start - there :]
        size = min(len(mine), len(theirs))
        if mine[:size] != theirs[:size]:
            return False
        at = there = start + size
        mine, theirs = mine[size:], theirs[size:]
        if not mine:
            at, mine = next(one, nothing)
        if not theirs:
            there, theirs = next(other, nothing)
    for rest, pieces in ((mine, one), (theirs, other)):
        if _filled(rest) or any(_filled(data) for _, data in pieces):
            return False
    return True


def _filled(data: bytes) -> bool:
    return bool(data.strip(b"\0"))


def _common(one: int, other: int) -> Iterator[tuple[int, int]]:
    """Where two files have the same blocks of the file system that they lie on; neighbours are joined."""
    mine, theirs = list(extents(one)), list(extents(other))
    begin = end = -1
    i = j = 0
    while i < len(mine) and j < len(theirs):
        (at, place, size), (at_2, place_2, size_2) = mine[i], theirs[j]
        low, high = max(at, at_2), min(at + size, at_2 + size_2)
        if low < high and place - at == place_2 - at_2:
            if low != end:
                if end > begin:
                    yield begin, end
                begin = low
            end = high
        if at + size <= at_2 + size_2:
            i += 1
        else:
            j += 1
    if end > begin:
        yield begin, end
