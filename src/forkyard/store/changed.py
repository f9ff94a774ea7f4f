"""Which files of a btrfs snapshot changed since an older one, from the filesystem's own records.

A writable subvolume's blocks are copied when they change, and each carries the number of the
transaction that wrote it. So what a later snapshot has changed since an earlier one of the same
line is found in the blocks younger than the earlier one, without looking at what stayed as it was.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Changed", "Lineage", "changed_since", "lineage"]

_TREE_SEARCH_V2 = 3 << 30 | 112 << 16 | 0x94 << 8 | 17
_SUBVOL_INFO = 2 << 30 | 504 << 16 | 0x94 << 8 | 60
_INODE_ITEM, _INODE_REF, _INODE_EXTREF = 1, 12, 13
_FIRST_INODE = 256
_LAST = (1 << 64) - 1
_BUFFER = 1 << 18
_HEADER = struct.Struct("=QQQII")
_KEY = struct.Struct("=QQQQQQQIIII32xQ")
_NO_UUID = bytes(16)


@dataclass(frozen=True, slots=True)
class Lineage:
    """A subvolume's place among the others; ``made`` is the transaction that it was made in."""

    uuid: bytes
    parent: bytes
    made: int


@dataclass(slots=True)
class Changed:
    """What a snapshot has changed, by inode number.

    Attributes:
        inodes: Those that changed, or whose directory listing did.
        children: The names in each directory through which they are reached.
    """

    inodes: set[int] = field(default_factory=set)
    children: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))


def lineage(volume: Path) -> Lineage:
    """Raises OSError where ``volume`` is no subvolume, or the kernel will not tell."""
    fd = os.open(volume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        buffer = bytearray(504)
        fcntl.ioctl(fd, _SUBVOL_INFO, buffer)
    finally:
        os.close(fd)
    made = struct.unpack_from("Q", buffer, 352)[0]
    return Lineage(bytes(buffer[296:312]), bytes(buffer[312:328]), made)


def changed_since(new: Path, old: Path, between: Iterable[Path] = ()) -> Changed | None:
    """What the snapshot ``new`` changed since the snapshot ``old``, or None where ``old`` is not
    known to be an ancestor's past.

    Args:
        between: Other subvolumes that the line may lead through, such as the box's own.

    Raises:
        OSError: the kernel will not tell.
    """
    then, now = lineage(old), lineage(new)
    known = {one.uuid: one for one in map(lineage, between)}
    for _ in range(len(known) + 2):
        if then.uuid in (now.uuid, now.parent):
            break
        if now.parent == then.parent != _NO_UUID and then.made <= now.made:
            break  # both of one subvolume, the older one first
        following = known.get(now.parent)
        if following is None:
            return None
        now = following
    else:
        return None
    fd = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _collect(fd, then.made)
    finally:
        os.close(fd)


def _collect(fd: int, since: int) -> Changed:
    changed = Changed()
    for objectid, kind, _, item in _search(fd, _FIRST_INODE, _LAST, since + 1):
        # blocks hold neighbours too: the inode says itself which transaction changed it
        if kind == _INODE_ITEM and struct.unpack_from("Q", item, 8)[0] > since:
            changed.inodes.add(objectid)
    todo = list(changed.inodes)
    seen = set(todo)
    while todo:
        inode = todo.pop()
        for parent, name in _names(fd, inode):
            changed.children[parent].add(os.fsdecode(name))
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return changed


def _names(fd: int, inode: int) -> Iterator[tuple[int, bytes]]:
    """Every (directory, name) of an inode."""
    if inode == _FIRST_INODE:
        return
    for objectid, kind, offset, item in _search(fd, inode, inode, 0, _INODE_REF, _INODE_EXTREF):
        at = 0
        while objectid == inode and at < len(item):
            if kind == _INODE_REF:
                parent, head = offset, 10
            elif kind == _INODE_EXTREF:
                parent, head = struct.unpack_from("Q", item, at)[0], 18
            else:
                break
            size = struct.unpack_from("H", item, at + head - 2)[0]
            yield parent, bytes(item[at + head : at + head + size])
            at += head + size


def _search(
    fd: int, first: int, last: int, transaction: int, min_type: int = 0, max_type: int = 255
) -> Iterator[tuple[int, int, int, memoryview]]:
    """The items of the subvolume of ``fd`` in blocks written in ``transaction`` or later."""
    at = (first, min_type, 0)
    buffer = bytearray(_KEY.size + _BUFFER)
    view = memoryview(buffer)
    while True:
        _KEY.pack_into(
            buffer, 0, 0, at[0], last, at[2], _LAST, transaction, _LAST, at[1], max_type, 1 << 20, 0, _BUFFER
        )
        fcntl.ioctl(fd, _TREE_SEARCH_V2, buffer)
        count = struct.unpack_from("I", buffer, 64)[0]
        if not count:
            return
        offset = _KEY.size
        for _ in range(count):
            _, objectid, key, kind, size = _HEADER.unpack_from(buffer, offset)
            offset += _HEADER.size
            yield objectid, kind, key, view[offset : offset + size]
            offset += size
        at = _next(objectid, kind, key)
        if at > (last, max_type, _LAST):
            return


def _next(objectid: int, kind: int, offset: int) -> tuple[int, int, int]:
    if offset < _LAST:
        return objectid, kind, offset + 1
    return (objectid, kind + 1, 0) if kind < 255 else (objectid + 1, 0, 0)
