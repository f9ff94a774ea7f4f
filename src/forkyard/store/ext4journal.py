"""What the journal of an ext4 file system holds that has not come to its place yet.

A file system that was in use when its disk was sealed is its blocks with those of the committed
transactions on top; whoever mounts it writes them there first. Here they are only looked up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

__all__ = ["Malformed", "replayed"]

_MAGIC = 0xC03B3998
_DESCRIPTOR, _COMMIT, _SUPER_1, _SUPER_2, _REVOKE = 1, 2, 3, 4, 5
_REVOKES, _WIDE, _ASYNC_COMMIT, _SUMS_2, _SUMS_3 = 0x1, 0x2, 0x4, 0x8, 0x10
_KNOWN = _REVOKES | _WIDE | _SUMS_2 | _SUMS_3
_ESCAPED, _SAME_UUID, _LAST = 1, 2, 8
_HEADER = struct.Struct(">III")


class Malformed(Exception):
    """It is no such file system, or one that is not read here."""


def replayed(length: int, block_size: int, read: Callable[[int], bytes]) -> dict[int, bytes]:
    """The blocks of the file system, by number, as the journal has them.

    Args:
        length: Of the journal, in blocks.
        read: Gives one of its blocks.

    Raises:
        Malformed: it is no journal, or has what is not known here.
    """
    head = read(0)
    magic, kind, _ = _HEADER.unpack_from(head)
    if magic != _MAGIC or kind not in (_SUPER_1, _SUPER_2):
        raise Malformed("its journal has no head")
    size, end, first, sequence, start = struct.unpack_from(">5I", head, 12)
    features = struct.unpack_from(">I", head, 40)[0] if kind == _SUPER_2 else 0
    if size != block_size or not 0 < first < end <= length or features & ~_KNOWN:
        raise Malformed("its journal is of a kind that is not read here")
    if not start:
        return {}
    return _Log(read, block_size, first, end, features).blocks(start, sequence)


class _Log:
    def __init__(
        self, read: Callable[[int], bytes], block_size: int, first: int, end: int, features: int
    ) -> None:
        self.read = read
        self.block_size = block_size
        self.first = first
        self.end = end
        self.wide = bool(features & _WIDE)
        self.tail = 4 if features & (_SUMS_2 | _SUMS_3) else 0
        self.sums_3 = bool(features & _SUMS_3)
        self.tag_size = 16 if self.sums_3 else (12 if self.wide else 8) + 2 * bool(features & _SUMS_2)

    def blocks(self, start: int, sequence: int) -> dict[int, bytes]:
        """What the committed transactions from ``start`` on come to."""
        written: list[tuple[int, int, int, bool]] = []
        revoked: dict[int, int] = {}
        open_written: list[tuple[int, int, int, bool]] = []
        open_revoked: list[int] = []
        at = start
        for _ in range(self.end):
            block = self.read(at)
            magic, kind, its = _HEADER.unpack_from(block)
            if magic != _MAGIC or its != sequence:
                break
            at = self._next(at)
            if kind == _DESCRIPTOR:
                for number, escaped in self._tags(block):
                    open_written.append((number, its, at, escaped))
                    at = self._next(at)
            elif kind == _REVOKE:
                open_revoked += self._revoked(block)
            elif kind == _COMMIT:
                written += open_written
                revoked.update(dict.fromkeys(open_revoked, its))
                open_written, open_revoked = [], []
                sequence = (sequence + 1) & 0xFFFFFFFF
            else:
                break
        found: dict[int, bytes] = {}
        for number, its, place, escaped in written:
            if revoked.get(number, -1) < its:
                data = self.read(place)
                found[number] = _MAGIC.to_bytes(4, "big") + data[4:] if escaped else data
        return found

    def _next(self, at: int) -> int:
        return at + 1 if at + 1 < self.end else self.first

    def _tags(self, block: bytes) -> list[tuple[int, bool]]:
        """The blocks that follow a descriptor: where they belong, and whether the first word was changed."""
        found = []
        at = _HEADER.size
        while at + self.tag_size <= self.block_size - self.tail:
            if self.sums_3:
                number, flags, high = struct.unpack_from(">III", block, at)
            else:
                number, _, flags = struct.unpack_from(">IHH", block, at)
                high = struct.unpack_from(">I", block, at + 8)[0] if self.wide else 0
            found.append((number | high << 32 if self.wide else number, bool(flags & _ESCAPED)))
            at += self.tag_size + (0 if flags & _SAME_UUID else 16)
            if flags & _LAST:
                break
        return found

    def _revoked(self, block: bytes) -> list[int]:
        end = min(struct.unpack_from(">I", block, _HEADER.size)[0], self.block_size - self.tail)
        size, form = (8, ">Q") if self.wide else (4, ">I")
        return [struct.unpack_from(form, block, at)[0] for at in range(16, end - size + 1, size)]
