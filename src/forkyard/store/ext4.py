"""An ext4 file system in a file, read by this program alone.

What a guest's own kernel has written is hostile input. So no kernel mounts it and no program written for
disks of one's own opens it: everything here is a read at an offset and numbers taken out of bytes, in a
language in which wrong ones make an exception. What is walked is bounded by the image's size.

Only what a microVM's disk is made with is read (see :mod:`forkyard.store.diskimages`); what a guest's
root may have turned on besides is refused by name.
"""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from forkyard.store.ext4journal import Malformed, replayed

__all__ = ["ROOT", "Ext4", "Inode", "Malformed"]

ROOT = 2
_JOURNAL = 8
_MAGIC, _EXTENT_MAGIC, _XATTR_MAGIC = 0xEF53, 0xF30A, 0xEA020000
# What changes where something lies, and is read here. Others of these bits change it too.
_FILETYPE, _RECOVER, _META_BG, _EXTENTS, _64BIT = 0x2, 0x4, 0x10, 0x40, 0x80
_READ = _FILETYPE | _RECOVER | _META_BG | _EXTENTS | _64BIT | 0x200 | 0x2000 | 0x4000
_NAMES = {0x1: "compression", 0x8: "journal_dev", 0x400: "ea_inode", 0x8000: "inline_data"}
_NAMES |= {0x10000: "encrypt", 0x20000: "casefold", 0x100: "mmp", 0x1000: "dirdata"}
_BIGALLOC = 0x200
_BY_EXTENTS, _INLINE, _ENCRYPTED = 0x80000, 0x10000000, 0x800
_PREFIXES = {1: "user.", 4: "trusted.", 6: "security."}
_ACLS = {2: "system.posix_acl_access", 3: "system.posix_acl_default"}
_MAX_DEPTH = 5
_MAX_LINK = 4096
# Whoever compares reads a file twice at most.
_READINGS = 4
_CACHED = 4096
_CHUNK = 1 << 20
_INODE = struct.Struct("<HHIIIIIHHI")
_EXTENT, _INDEX = struct.Struct("<IHHI"), struct.Struct("<IIH")


@dataclass(frozen=True, slots=True)
class Inode:
    """One file, with ``raw`` as it is on the disk."""

    number: int
    mode: int
    uid: int
    gid: int
    size: int
    links: int
    flags: int
    raw: bytes

    @property
    def mtime_ns(self) -> int:
        seconds = int(struct.unpack_from("<i", self.raw, 16)[0])
        if len(self.raw) < 140:
            return seconds * 10**9
        extra = int(struct.unpack_from("<I", self.raw, 136)[0])
        return (seconds + ((extra & 3) << 32)) * 10**9 + (extra >> 2) % 10**9

    @property
    def device(self) -> int:
        """Of a device node, its number."""
        old, new = struct.unpack_from("<II", self.raw, 40)
        if old:
            return os.makedev(old >> 8 & 0xFF, old & 0xFF)
        return os.makedev(new >> 8 & 0xFFF, new & 0xFF | new >> 12 & 0xFFF00)


class Ext4:
    """The file system in the open file ``fd``, which nothing changes and the caller closes. Blocks.

    Raises:
        Malformed: it is none, or one that is not read here. Also of every method.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = os.fstat(fd).st_size
        self._journalled: dict[int, bytes] = {}
        self._numbers: list[int] = []
        self._cache: dict[int, bytes] = {}
        self._given = 0
        self._tables: dict[int, int] = {}
        self._head(self._pread(1024, 1024))
        if self.has_journal:
            self._replay()

    def _head(self, head: bytes) -> None:
        (magic,) = struct.unpack_from("<H", head, 56)
        if magic != _MAGIC:
            raise Malformed("it is no ext4 file system")
        compat, incompat, ro_compat = struct.unpack_from("<III", head, 92)
        if unknown := incompat & ~_READ:
            low = unknown & -unknown
            raise Malformed(f"it has the feature {_NAMES.get(low, hex(low))}")
        if ro_compat & _BIGALLOC:
            raise Malformed("it has the feature bigalloc")
        self.has_journal = bool(compat & 0x4)
        inodes, low_blocks = struct.unpack_from("<II", head, 0)
        self.first_block, exponent = struct.unpack_from("<II", head, 20)
        self.blocks_per_group, _, self.inodes_per_group = struct.unpack_from("<III", head, 32)
        (self.inode_size,) = struct.unpack_from("<H", head, 88)
        high = struct.unpack_from("<I", head, 336)[0] if incompat & _64BIT else 0
        self.blocks = low_blocks | high << 32
        self.inodes = inodes
        self.descriptor_size = struct.unpack_from("<H", head, 254)[0] if incompat & _64BIT else 32
        self.first_meta_group = struct.unpack_from("<I", head, 260)[0] if incompat & _META_BG else 1 << 32
        self.sparse = bool(ro_compat & 0x1)
        self.sparse_2 = struct.unpack_from("<II", head, 588) if compat & 0x200 else None
        if exponent > 6 or not self.blocks_per_group or not self.inodes_per_group:
            raise Malformed("its head makes no sense")
        self.block_size = 1024 << exponent
        sizes = self.descriptor_size in (32, 64, 128) and self.inode_size in (128, 256, 512, 1024)
        if not sizes or self.blocks * self.block_size > self.bytes:
            raise Malformed("its head makes no sense")

    def _replay(self) -> None:
        journal = self.inode(_JOURNAL)
        places = [(first, count) for _, first, count in self._runs(journal)]
        length = journal.size // self.block_size
        if sum(count for _, count in places) < length:
            raise Malformed("its journal has holes")
        numbers = [at for first, count in places for at in range(first, first + count)]
        found = replayed(length, self.block_size, lambda at: self._from_disk(numbers[at]))
        self._journalled, self._numbers = found, sorted(found)
        self._cache.clear()
        self._tables.clear()
        head = self.block(0 if self.block_size > 1024 else 1)
        self._head(head[1024:2048] if self.block_size > 1024 else head)

    # -- blocks

    def _pread(self, at: int, size: int) -> bytes:
        data = os.pread(self.fd, size, at)
        if len(data) != size:
            raise Malformed("it ends before its end")
        return data

    def _from_disk(self, number: int) -> bytes:
        if not 0 <= number < self.blocks:
            raise Malformed(f"it points to block {number}, which it has not")
        return self._pread(number * self.block_size, self.block_size)

    def block(self, number: int) -> bytes:
        """A block as it is once the journal has been written out."""
        data = self._journalled.get(number)
        if data is None:
            data = self._cache.get(number)
        if data is None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            data = self._cache[number] = self._from_disk(number)
        return data

    def in_journal(self, first: int, count: int) -> bool:
        """Whether one of ``count`` blocks has another content than its place on the disk."""
        at = bisect_left(self._numbers, first)
        return at < len(self._numbers) and self._numbers[at] < first + count

    # -- inodes

    def inode(self, number: int) -> Inode:
        """The inode of that number."""
        if not 0 < number <= self.inodes:
            raise Malformed(f"it names inode {number}, which it has not")
        block, at = self.place(number)
        raw = self.block(block)[at : at + self.inode_size]
        mode, uid, low, _, _, _, _, gid, links, _ = _INODE.unpack_from(raw)
        (flags,) = struct.unpack_from("<I", raw, 32)
        (high,) = struct.unpack_from("<I", raw, 108)
        uid_high, gid_high = struct.unpack_from("<HH", raw, 120)
        size = low | high << 32
        return Inode(number, mode, uid | uid_high << 16, gid | gid_high << 16, size, links, flags, raw)

    def place(self, number: int) -> tuple[int, int]:
        """Where an inode lies: block, and offset in that."""
        group, index = divmod(number - 1, self.inodes_per_group)
        block, at = divmod(index * self.inode_size, self.block_size)
        return self._table(group) + block, at

    def _table(self, group: int) -> int:
        known = self._tables.get(group)
        if known is None:
            per_block = self.block_size // self.descriptor_size
            index, at = divmod(group, per_block)
            at *= self.descriptor_size
            block = self.block(self._descriptors(index, per_block))
            (known,) = struct.unpack_from("<I", block, at + 8)
            if self.descriptor_size >= 64:
                known |= struct.unpack_from("<I", block, at + 40)[0] << 32
            self._tables[group] = known
        return known

    def _descriptors(self, index: int, per_block: int) -> int:
        """The block with the ``index``-th part of the groups' descriptors."""
        if index < self.first_meta_group:
            return self.first_block + 1 + index
        group = index * per_block
        return self.first_block + group * self.blocks_per_group + self._has_super(group)

    def _has_super(self, group: int) -> bool:
        if self.sparse_2 is not None:
            return group == 0 or group in self.sparse_2
        if group <= 1 or not self.sparse:
            return True
        return any(_is_power(group, base) for base in (3, 5, 7))

    # -- content

    def _runs(self, inode: Inode) -> Iterator[tuple[int, int, int]]:
        """Where its content lies: (block in it, block on the disk, count); what is missing is zeros."""
        if inode.flags & (_INLINE | _ENCRYPTED) or not inode.flags & _BY_EXTENTS:
            if not inode.size:
                return
            raise Malformed(f"inode {inode.number} is stored in a way that is not read here")
        todo = [(inode.raw[40:100], _MAX_DEPTH + 1)]
        end, seen = 0, 0
        while todo:
            node, below = todo.pop()
            magic, count, _, depth = struct.unpack_from("<HHHH", node)
            seen += 1
            if magic != _EXTENT_MAGIC or 12 + 12 * count > len(node) or depth >= below or seen > self.blocks:
                raise Malformed(f"inode {inode.number} has a broken map")
            if depth:
                inner = [_INDEX.unpack_from(node, 12 + 12 * index) for index in range(count)]
                todo += [(self.block(low | high << 32), depth) for _, low, high in reversed(inner)]
                continue
            entries = [_EXTENT.unpack_from(node, 12 + 12 * index) for index in range(count)]
            for logical, length, high, low in entries:
                written, length = length <= 0x8000, length if length <= 0x8000 else length - 0x8000
                first = low | high << 32
                if logical < end or not length or first + length > self.blocks:
                    raise Malformed(f"inode {inode.number} has a broken map")
                end = logical + length
                if written:
                    yield logical, first, length

    def runs(self, inode: Inode) -> list[tuple[int, int, int]]:
        """Where a file's content lies: (block in it, block on the disk, count), in order; else zeros."""
        return list(self._runs(inode))

    def spend(self, blocks: int) -> None:
        """Count what is read: maps that say the same block again and again would make no end.

        Raises:
            Malformed: it is several times what the image holds.
        """
        self._given += blocks
        if self._given > _READINGS * self.blocks:
            raise Malformed("its files overlap")

    def pieces(self, inode: Inode) -> Iterator[tuple[int, bytes]]:
        """What a file holds that is not a hole: (offset, bytes), in order, up to 1 MiB each."""
        for logical, first, count in self._runs(inode):
            self.spend(count)
            at, end = logical * self.block_size, min((logical + count) * self.block_size, inode.size)
            offset = first * self.block_size - at
            while at < end:
                size = min(_CHUNK, end - at)
                number = (at + offset) // self.block_size
                if self.in_journal(number, -(-size // self.block_size)):
                    size = min(self.block_size, size)
                    yield at, self.block(number)[:size]
                else:
                    yield at, self._pread(at + offset, size)
                at += size

    def read(self, inode: Inode, limit: int) -> bytes:
        """A file's content, at most ``limit`` bytes of it."""
        parts: list[bytes] = []
        done, size = 0, min(limit, inode.size)
        for at, data in self.pieces(inode):
            if at >= size:
                break
            parts += [bytes(at - done), data[: size - at]]
            done = min(at + len(data), size)
        return b"".join(parts) + bytes(size - done)

    def target(self, inode: Inode) -> bytes:
        """Where a link says that it leads."""
        if inode.size >= _MAX_LINK:
            raise Malformed(f"inode {inode.number} is a link of {inode.size} bytes")
        if inode.size < 60 and not inode.flags & _BY_EXTENTS:
            return inode.raw[40 : 40 + inode.size]
        return self.read(inode, _MAX_LINK)

    def names(self, inode: Inode) -> dict[bytes, int]:
        """What a directory lists: inode numbers by name, itself and its parent left out."""
        if not stat.S_ISDIR(inode.mode):
            raise Malformed(f"inode {inode.number} is no directory")
        found: dict[bytes, int] = {}
        for _, first, count in self._runs(inode):
            self.spend(count)
            for number in range(first, first + count):
                self._listed(self.block(number), found)
        return found

    def _listed(self, block: bytes, found: dict[bytes, int]) -> None:
        at, size = 0, len(block)
        unpack = struct.Struct("<IHB").unpack_from
        while at + 8 <= size:
            number, length, name_length = unpack(block, at)
            # A whole block of 64 KiB does not fit in its own number.
            length = size if length in (0, 0xFFFF) and at == 0 else length
            if length < 8 or at + length > size or name_length > length - 8:
                raise Malformed("it has a broken directory")
            if number:
                name = block[at + 8 : at + 8 + name_length]
                if name not in (b".", b".."):
                    if not name or b"/" in name or b"\0" in name or name in found:
                        raise Malformed(f"it has a file of the name {name!r}, which none can have")
                    found[name] = number
            at += length

    # -- attributes

    def attributes(self, inode: Inode) -> list[tuple[str, bytes]]:
        """The extended attributes, by name."""
        found: dict[str, bytes] = {}
        raw = inode.raw
        if len(raw) > 132:
            start = 128 + struct.unpack_from("<H", raw, 128)[0]
            if start + 4 <= len(raw) and struct.unpack_from("<I", raw, start)[0] == _XATTR_MAGIC:
                self._entries(raw, start + 4, start + 4, found)
        low, high = struct.unpack_from("<I", raw, 104)[0], struct.unpack_from("<H", raw, 118)[0]
        if number := low | high << 32:
            block = self.block(number)
            if struct.unpack_from("<I", block)[0] == _XATTR_MAGIC:
                self._entries(block, 32, 0, found)
        return sorted(found.items())

    def _entries(self, data: bytes, at: int, values: int, found: dict[str, bytes]) -> None:
        while at + 16 <= len(data) and data[at : at + 4] != bytes(4):
            length, index, offset, elsewhere, size = struct.unpack_from("<BBHII", data, at)
            name = data[at + 16 : at + 16 + length]
            value = data[values + offset : values + offset + size]
            if elsewhere or len(name) != length or len(value) != size or b"\0" in name:
                raise Malformed("it has a broken attribute")
            if index in _ACLS and not name:
                found[_ACLS[index]] = _acl(value)
            elif index in _PREFIXES:
                found[_PREFIXES[index] + name.decode("utf-8", "surrogateescape")] = value
            at += (16 + length + 3) & ~3


def _acl(stored: bytes) -> bytes:
    """An access list as programs are shown it, from what ext4 stores."""
    shown = [struct.pack("<I", 2)]
    at = 4
    while at + 4 <= len(stored):
        tag, rights = struct.unpack_from("<HH", stored, at)
        at += 4
        who = 0xFFFFFFFF
        if tag in (2, 8):
            if at + 4 > len(stored):
                raise Malformed("it has a broken access list")
            (who,) = struct.unpack_from("<I", stored, at)
            at += 4
        shown.append(struct.pack("<HHI", tag, rights, who))
    return b"".join(shown)


def _is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1
