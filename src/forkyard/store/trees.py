"""What disk images show, as trees: for comparing them, and for machines that share the host's kernel.

A layer that is an image becomes a tree once, beside the layers and under its name; the tree goes with the
layer. It is made by :mod:`forkyard.store.ext4`, since guests have written those images, with the steps of an
import from somebody's archive; files share the image's blocks where the file system can.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from forkyard.errors import CorruptSnapshotError, InvalidRequestError
from forkyard.store import imagediff
from forkyard.store.backend import Backend
from forkyard.store.ext4 import ROOT, Ext4, Inode, Malformed
from forkyard.store.layers import Layers
from forkyard.store.layerstream import DIR, FIFO, FILE, LINK, SAME, SOCKET, UP, Filler, Node, framed, is_kept
from forkyard.store.overlay import Difference

__all__ = ["Trees", "compare", "make_tree"]

T = TypeVar("T")
_KINDS = {stat.S_IFREG: FILE, stat.S_IFLNK: LINK, stat.S_IFIFO: FIFO, stat.S_IFSOCK: SOCKET}
_FICLONERANGE = 0x4020940D


class Trees:
    """The trees of image layers, in one directory."""

    def __init__(self, root: Path, tmp: Path, backend: Backend, layers: Layers) -> None:
        self.root = root
        self.tmp = tmp
        self.backend = backend
        self.layers = layers
        self._making: dict[str, asyncio.Lock] = {}

    async def make(self, layers: Iterable[str], thread: Callable[..., Awaitable[Any]]) -> None:
        """See that those of ``layers`` that are images have their trees.

        Raises:
            CorruptSnapshotError: one cannot be read.
        """
        for layer in layers:
            image, path = self.layers.image(layer), self.root / layer
            if image is None or path.exists():
                continue
            # Kept as long as the tree: who waits and who comes later take turns, also after a failure.
            async with self._making.setdefault(layer, asyncio.Lock()):
                if not path.exists():
                    await thread(self._make, layer, image, path)

    def _make(self, layer: str, image: Path, path: Path) -> None:
        volume = self.tmp / f"tree-{secrets.token_hex(8)}"
        self.backend.create(volume)
        try:
            with opened(image, layer) as fs:
                make_tree(fs, volume / "up")
            self.backend.seal(volume, path)
        finally:
            self.backend.delete(volume)

    def drop(self, layer: str) -> None:
        """Delete the tree of a layer. Idempotent. Blocks."""
        self._making.pop(layer, None)
        self.backend.delete(self.root / layer)

    def strays(self, known: Iterable[str]) -> list[str]:
        """Those of no known layer."""
        return sorted({path.name for path in self.root.iterdir()} - set(known))


@contextlib.contextmanager
def opened(image: Path, name: str) -> Iterator[Ext4]:
    """The file system of an image; what turns out to be wrong with it is told with ``name``.

    Raises:
        CorruptSnapshotError: it cannot be read.
    """
    fd = os.open(image, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Ext4(fd)
    except (Malformed, struct.error) as error:
        raise CorruptSnapshotError(
            f"the disk {name} cannot be read without its guest's kernel: {error}",
            hint="start it as a microVM and look inside",
        ) from None
    finally:
        os.close(fd)


def compare(
    new: tuple[str, Path],
    old: tuple[str, Path],
    take: Callable[[Iterator[Difference]], T],
    *,
    leave_out: Callable[[str], bool],
    stop: Callable[[], bool],
) -> T:
    """What ``take`` makes of the differences between two images, each with the name that it is called by.

    Raises:
        CorruptSnapshotError: one cannot be read. InterruptedError: ``stop`` said so.
    """
    with opened(old[1], old[0]) as before, opened(new[1], new[0]) as now:
        return take(imagediff.compare(now, before, leave_out=leave_out, stop=stop))


def make_tree(image: Ext4, up: Path) -> None:
    """Fill the empty directory ``up`` with what an image shows. Device nodes are left out.

    Raises:
        Malformed: it shows what cannot be. OSError: no room, say.
    """
    writing: Inode | None = None

    def content(fd: int) -> None:
        assert writing is not None
        os.ftruncate(fd, writing.size)
        _copy(image, writing, fd)

    filler = Filler(up, content)
    try:
        for node, inode in _walk(image):
            writing = inode
            filler.feed(framed(node))
        filler.finish()
    except InvalidRequestError as error:
        raise Malformed(error.message) from None
    finally:
        filler.close()


def _walk(image: Ext4) -> Iterator[tuple[Node, Inode | None]]:
    root = image.inode(ROOT)
    names = image.names(root)
    lost = names.get(imagediff.LOST)
    if lost is not None and not image.names(image.inode(lost)):
        del names[imagediff.LOST]
    links: dict[int, int] = {}
    seen = {ROOT}
    yield _node(image, DIR, b"", root), None
    stack = [iter(sorted(names.items()))]
    while stack:
        name, number = next(stack[-1], (b"", 0))
        if not number:
            stack.pop()
            yield Node(UP), None
            continue
        inode = image.inode(number)
        if stat.S_ISDIR(inode.mode):
            if number in seen:
                raise Malformed("a directory of it is in two places")
            seen.add(number)
            yield _node(image, DIR, name, inode), None
            stack.append(iter(sorted(image.names(inode).items())))
            continue
        kind = _KINDS.get(stat.S_IFMT(inode.mode))
        if kind is None:
            continue
        link = 0
        if inode.links > 1:
            if number in links:
                yield Node(SAME, name, link=links[number]), None
                continue
            link = links[number] = len(links) + 1
        yield _node(image, kind, name, inode, link), inode


def _node(image: Ext4, kind: int, name: bytes, inode: Inode, link: int = 0) -> Node:
    return Node(
        kind,
        name,
        stat.S_IMODE(inode.mode),
        inode.uid,
        inode.gid,
        inode.mtime_ns,
        # What an overlay would take for its own words is not the guest's to say.
        [(key, value) for key, value in image.attributes(inode) if is_kept(key, value) and not _is_own(key)],
        inode.size if kind == FILE else 0,
        link,
        image.target(inode) if kind == LINK else b"",
    )


def _is_own(attribute: str) -> bool:
    return attribute.startswith(("trusted.", "user.overlay."))


def _copy(image: Ext4, inode: Inode, target: int) -> None:
    """Give an empty file of the right size the content of ``inode``."""
    size = image.block_size
    for logical, first, count in image.runs(inode):
        at = logical * size
        if at >= inode.size:
            break
        if image.in_journal(first, count) or not _clone(image.fd, first * size, count * size, target, at):
            for offset, data in image.pieces(inode):
                os.pwrite(target, data, offset)
            return
        image.spend(count)


def _clone(source: int, start: int, length: int, target: int, at: int) -> bool:
    """Have part of a file share blocks with another's; False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, start, length, at))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL):
            return False
        raise
    return True
