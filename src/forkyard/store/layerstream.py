"""A layer as one stream of bytes, the same for the same content wherever it lies, and back.

The stream is a walk: each entry is a length and a :class:`Node` (msgpack); a directory's entries
follow it in the order of their names, up to a node of kind :data:`UP`; a file's content follows
it in pieces, each with its offset and length, up to an empty one. Blocks of zeros are left out, so a
sparse file costs what is written in it. Names are single components: no stream can name a
place outside its layer, and each step is taken relative to a directory that was made (or opened)
without following anything.

Kept are owners, modes, times (in nanoseconds), attributes, hard links, and what the overlay
reads: whiteouts and opaque directories. Device nodes are left out: no guest can use one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec

from forkyard.errors import InvalidRequestError, UnsupportedError
from forkyard.host import userns
from forkyard.host.files import rmtree
from forkyard.store import overlay

__all__ = ["BLOCK", "Filler", "Node", "framed", "is_kept", "pack", "write_sparse"]

BLOCK = 1 << 20
"""The longest piece that :func:`pack` gives."""
_GRAIN = 64 << 10
_MAX_NODE = 8 << 20
_ZEROS = bytes(_GRAIN)
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

DIR, FILE, LINK, WHITEOUT, FIFO, SOCKET, SAME, UP = range(8)
"""``SAME`` is one more name of the entry that had this ``link``."""

_OPAQUE, _WHITE = "trusted.overlay.opaque", "trusted.overlay.whiteout"
# As this machine's overlay has them, which an archive does not know.
_HERE = {_OPAQUE: overlay.OPAQUE, _WHITE: overlay.WHITEOUT}
_COMMON = {here: name for name, here in _HERE.items()}
_KEPT = ("user.", "trusted.", "security.capability", "system.posix_acl_access", "system.posix_acl_default")
# What a stack's own bookkeeping says: where a copy came from (of another file system by then), and ours.
_LEFT_OUT = ("trusted.overlay.", "user.overlay.", "user.forkyard.")


class Node(msgspec.Struct, array_like=True, frozen=True):
    """One entry. ``link`` is not 0 where the entry has further names."""

    kind: int
    name: bytes = b""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    attributes: list[tuple[str, bytes]] = []
    size: int = 0
    link: int = 0
    target: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Node).decode


def is_kept(attribute: str, value: bytes) -> bool:
    """Whether an attribute of a file, by the name that an archive has for it, is part of a layer."""
    if attribute == _OPAQUE:
        return value in (b"y", b"x")
    if attribute == _WHITE:
        return True
    return attribute.startswith(_KEPT) and not attribute.startswith(_LEFT_OUT)


# -- out


def pack(root: Path) -> Iterator[bytes]:
    """The layer in ``root``, which nothing changes meanwhile, in pieces of up to :data:`BLOCK` bytes."""
    gathered = bytearray()
    for piece in _walk(root):
        gathered += piece
        while len(gathered) >= BLOCK:
            yield bytes(gathered[:BLOCK])
            del gathered[:BLOCK]
    if gathered:
        yield bytes(gathered)


def framed(node: Node) -> bytes:
    """A node as it is in a stream."""
    raw = _encode(node)
    return len(raw).to_bytes(4, "big") + raw


def _walk(root: Path) -> Iterator[bytes]:
    links: dict[int, int] = {}
    fd = os.open(root, _DIR)
    try:
        yield framed(_directory(b"", fd))
        stack = [_names(fd)]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                yield framed(Node(UP))
                if stack:
                    fd = _move(fd, "..")
                continue
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                fd = _move(fd, name)
                yield framed(_directory(os.fsencode(name), fd))
                stack.append(_names(fd))
            else:
                yield from _entry(fd, name, info, links)
    finally:
        os.close(fd)


def _names(fd: int) -> Iterator[str]:
    return iter(sorted(os.listdir(fd), key=os.fsencode))


def _move(fd: int, name: str | bytes) -> int:
    """The directory ``name`` of ``fd``, which is closed."""
    there = os.open(name, _DIR, dir_fd=fd)
    os.close(fd)
    return there


def _directory(name: bytes, fd: int) -> Node:
    info = os.fstat(fd)
    return Node(
        DIR, name, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, _attributes(fd)
    )


def _attributes(where: int | str) -> list[tuple[str, bytes]]:
    follow = not isinstance(where, str)
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listxattr(where, follow_symlinks=follow)):
            with contextlib.suppress(OSError):
                value = os.getxattr(where, name, follow_symlinks=follow)
                common = _COMMON.get(name, name)
                if is_kept(common, value):
                    found.append((common, value))
    return found


def _entry(fd: int, name: str, info: os.stat_result, links: dict[int, int]) -> Iterator[bytes]:
    mode, raw = info.st_mode, os.fsencode(name)
    if stat.S_ISCHR(mode) and info.st_rdev == 0:
        yield framed(Node(WHITEOUT, raw))
        return
    kinds = {stat.S_IFREG: FILE, stat.S_IFLNK: LINK, stat.S_IFIFO: FIFO, stat.S_IFSOCK: SOCKET}
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is None:
        return
    link = 0
    if info.st_nlink > 1:
        known = links.get(info.st_ino)
        if known is not None:
            yield framed(Node(SAME, raw, link=known))
            return
        link = links[info.st_ino] = len(links) + 1
    attributes = _attributes(f"/proc/self/fd/{fd}/{name}")
    target = os.readlink(raw, dir_fd=fd) if kind == LINK else b""
    size = info.st_size if kind == FILE else 0
    yield framed(
        Node(
            kind,
            raw,
            stat.S_IMODE(mode),
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            attributes,
            size,
            link,
            target,
        )
    )
    if kind == FILE:
        yield from _content(fd, name, size)


def _content(directory: int, name: str, size: int) -> Iterator[bytes]:
    if size:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            for offset, data in _runs(fd, size):
                yield offset.to_bytes(8, "big") + len(data).to_bytes(4, "big")
                yield data
        finally:
            os.close(fd)
    yield size.to_bytes(8, "big") + bytes(4)


def _runs(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """What is not zeros, by content alone: where a file has holes depends on who wrote it, and where."""
    at = 0
    while at < size:
        if size > _GRAIN:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
        window = os.pread(fd, min(BLOCK, size - at), at)
        if not window:
            return  # it became shorter; its checksum will not be what it was
        for begin, end in data_runs(window):
            yield at + begin, window[begin:end]
        at += BLOCK


def data_runs(block: bytes) -> Iterator[tuple[int, int]]:
    """Where a block of up to :data:`BLOCK` bytes is not zeros, grain by grain."""
    view = memoryview(block)
    begin = None
    for at in range(0, len(block), _GRAIN):
        grain = view[at : at + _GRAIN]
        if grain == _ZEROS[: len(grain)]:
            if begin is not None:
                yield begin, at
                begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, len(block)


def write_sparse(fd: int, block: bytes, at: int) -> None:
    """Write ``block`` at an offset of a new file, zeros left out. The caller sets the size at the end."""
    view = memoryview(block)
    for begin, end in data_runs(block):
        _write(fd, view[begin:end], at + begin)


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


# -- in


class Filler:
    """Makes a layer in the empty directory ``up`` from its stream; ``feed`` it, then ``finish``.

    Args:
        content: Writes a file's content where the stream has none, to the open file that it is given.

    Whoever gives up calls :meth:`close` and removes the directory. Methods block. Beside ``up``, a
    directory ``links`` exists meanwhile.

    Raises:
        InvalidRequestError: it is no stream of a layer, or one that no layer can come from.
        UnsupportedError: the file system here lacks what it needs.
    """

    def __init__(self, up: Path, content: Callable[[int], None] | None = None) -> None:
        self._content = content
        self._links = up.with_name("links")
        self._buffer = bytearray()
        self._stack: list[Node] = []
        self._held: set[int] = set()
        self._as_root = os.geteuid() == 0
        self._fd = os.open(up, _DIR)
        self._links_fd = -1
        self._steps = self._run()
        self._need: int | None = next(self._steps)

    def feed(self, data: bytes) -> None:
        """Take in what comes next."""
        self._buffer += data
        at = 0
        while self._need is not None and len(self._buffer) - at >= self._need:
            piece = bytes(memoryview(self._buffer)[at : at + self._need])
            at += self._need
            try:
                self._need = self._steps.send(piece)
            except StopIteration:
                self._need = None
            except (OSError, OverflowError, msgspec.MsgspecError) as error:
                raise _complaint(error) from error
        del self._buffer[:at]
        if self._need is None and self._buffer:
            raise InvalidRequestError("a layer in the archive goes on after its end")

    def finish(self) -> None:
        """All has been fed."""
        if self._need is not None:
            raise InvalidRequestError("a layer in the archive ends before its end")
        self.close()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._steps.close()
        for fd in (self._fd, self._links_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._links_fd = -1
        rmtree(self._links)

    def _run(self) -> Generator[int, bytes, None]:
        """Asks for so many bytes, again and again."""
        while True:
            length = int.from_bytes((yield 4), "big")
            if not 0 < length <= _MAX_NODE:
                raise InvalidRequestError(f"a layer in the archive has an entry of {length} bytes")
            node = _decode((yield length))
            if not self._stack:
                if node.kind != DIR or node.name:
                    raise InvalidRequestError("a layer in the archive does not begin with its root")
                self._stack.append(_checked(node))
            elif node.kind == UP:
                self._dress(self._fd, self._stack.pop())
                if not self._stack:
                    return
                self._fd = _move(self._fd, "..")
            else:
                _check_name(node.name)
                yield from self._make(_checked(node))

    def _make(self, node: Node) -> Generator[int, bytes, None]:
        name = node.name
        if node.kind == DIR:
            os.mkdir(name, 0o700, dir_fd=self._fd)
            self._fd = _move(self._fd, name)
            self._stack.append(node)
        elif node.kind == FILE:
            yield from self._file(node)
        elif node.kind == WHITEOUT:
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=self._fd)
        elif node.kind == SAME:
            if node.link not in self._held:
                raise InvalidRequestError(f"{_shown(name)} is a name of something that the archive lacks")
            os.link(
                str(node.link), name, src_dir_fd=self._links_fd, dst_dir_fd=self._fd, follow_symlinks=False
            )
        elif node.kind in (LINK, FIFO, SOCKET):
            if node.kind == LINK:
                os.symlink(node.target, name, dir_fd=self._fd)
            else:
                os.mknod(name, stat.S_IFIFO if node.kind == FIFO else stat.S_IFSOCK, dir_fd=self._fd)
            self._dress_by_name(node)
        else:
            raise InvalidRequestError(f"{_shown(name)} is of the unknown kind {node.kind}")
        if node.link and node.kind not in (DIR, SAME):
            self._hold(node)

    def _hold(self, node: Node) -> None:
        """Keep a name for what has further ones."""
        if self._links_fd < 0:
            self._links.mkdir(mode=0o700)
            self._links_fd = os.open(self._links, _DIR)
        self._held.add(node.link)
        os.link(
            node.name, str(node.link), src_dir_fd=self._fd, dst_dir_fd=self._links_fd, follow_symlinks=False
        )

    def _file(self, node: Node) -> Generator[int, bytes, None]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(node.name, flags, 0o600, dir_fd=self._fd)
        try:
            end = 0
            if self._content is not None:
                self._content(fd)
            while self._content is None:
                head = yield 12
                offset, length = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
                if not length:
                    break
                if length > BLOCK or offset < end or offset + length > node.size:
                    raise InvalidRequestError(f"{_shown(node.name)} has content that lies outside it")
                end = offset + length
                _write(fd, (yield length), offset)
            os.ftruncate(fd, node.size)
            self._dress(fd, node)
        finally:
            os.close(fd)

    def _dress(self, fd: int, node: Node) -> None:
        # In this order: a new owner takes capabilities and set-user-id bits away.
        with self._owners():
            os.fchown(fd, node.uid, node.gid)
        os.fchmod(fd, node.mode)
        for name, value in _settable(node):
            os.setxattr(fd, name, value)
        os.utime(fd, ns=(node.mtime_ns, node.mtime_ns))

    def _dress_by_name(self, node: Node) -> None:
        """What cannot be opened."""
        with self._owners():
            os.chown(node.name, node.uid, node.gid, dir_fd=self._fd, follow_symlinks=False)
        path = f"/proc/self/fd/{self._fd}/{os.fsdecode(node.name)}"
        if node.kind != LINK:
            os.chmod(node.name, node.mode, dir_fd=self._fd)
        for name, value in _settable(node):
            os.setxattr(path, name, value, follow_symlinks=False)
        times = (node.mtime_ns, node.mtime_ns)
        os.utime(node.name, ns=times, dir_fd=self._fd, follow_symlinks=False)

    def _owners(self) -> contextlib.AbstractContextManager[None]:
        """Only root gives files away."""
        return contextlib.nullcontext() if self._as_root else contextlib.suppress(PermissionError)


def _settable(node: Node) -> Iterator[tuple[str, bytes]]:
    """Its attributes by their names here; "trusted." ones are the host's root's alone to set."""
    for name, value in node.attributes:
        here = _HERE.get(name, name)
        if not (here.startswith("trusted.") and userns.inside()):
            yield here, value


def _check_name(name: bytes) -> None:
    if not 0 < len(name) <= 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise InvalidRequestError(f"the archive has an entry of the name {_shown(name)}, which none can have")


def _checked(node: Node) -> Node:
    """Raises InvalidRequestError for figures and attributes that :func:`pack` never gives."""
    ids = all(0 <= one < (1 << 32) - 1 for one in (node.uid, node.gid))
    sizes = 0 <= node.size < 1 << 62 and abs(node.mtime_ns) < 1 << 62
    if not ids or not sizes or not 0 <= node.mode <= 0o7777:
        raise InvalidRequestError(f"{_shown(node.name)} has an owner, mode, size or time that none can have")
    for name, value in node.attributes:
        if "\0" in name or not is_kept(name, value):
            raise InvalidRequestError(
                f"{_shown(node.name)} has the attribute {name[:80]!r}, which none may have"
            )
    return node


def _shown(name: bytes) -> str:
    return repr(os.fsdecode(name[:80]))


def _complaint(error: Exception) -> Exception:
    """What went wrong, in this module's terms; a full disk stays what it is."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE):
            return error
        if error.errno == errno.EOPNOTSUPP:
            return UnsupportedError(
                f"the store's file system cannot keep what a layer holds: {error.strerror}",
                hint="import it where the store is on btrfs",
            )
        return InvalidRequestError(f"a layer in the archive cannot be made: {error.strerror}")
    return InvalidRequestError(f"a layer in the archive is malformed: {error}")
