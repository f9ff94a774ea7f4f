"""Files in a guest, read and written by its agent with the named user's rights.

Paths are text (undecodable bytes as surrogates, as :func:`os.fsdecode` makes them) or bytes;
a relative one starts at the user's home. Everything here raises NotFoundError,
AccessDeniedError, ConflictError, InvalidRequestError or CapacityError for what the guest's
file system refuses, DeadlineError where nothing moves, and SandboxLostError.
"""

from __future__ import annotations

import asyncio
import os
import stat as modes
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable

from forkyard import wire
from forkyard.errors import DeadlineError, ForkyardError, InvalidRequestError, UnavailableError
from forkyard.guest.channel import Channel
from forkyard.guest.request import REQUEST_S, Request, error_of
from forkyard.types import FileInfo
from forkyard.wire import Frame, Op, Packer, Type, Unpacker, WireError

STALL_S = 60.0
# The agent reads as much at a time as it may send.
WINDOW = 2 << 20
ACK_EVERY = BATCH = 512 << 10
MAX_ENTRIES = 1_000_000
NO_MODE = 0xFFFFFFFF

_TYPES = {
    modes.S_IFREG: "file",
    modes.S_IFDIR: "dir",
    modes.S_IFLNK: "link",
    modes.S_IFIFO: "fifo",
    modes.S_IFSOCK: "socket",
    modes.S_IFCHR: "char",
    modes.S_IFBLK: "block",
}


def path_bytes(path: str | bytes) -> bytes:
    """Raises InvalidRequestError for an empty path, one with a NUL, or one over 4096 bytes."""
    data = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    if not data or b"\0" in data or len(data) > 4096:
        raise InvalidRequestError(f"{path[:100]!r} is no path")
    return data


def _info(u: Unpacker, path: bytes) -> FileInfo:
    mode, uid, gid, size, mtime, target = u.u32(), u.u32(), u.u32(), u.u64(), u.u64(), u.str()
    return FileInfo(
        path=os.fsdecode(path),
        name=os.fsdecode(path.rstrip(b"/").rpartition(b"/")[2] or b"/"),
        type=_TYPES.get(modes.S_IFMT(mode), "file"),
        size=size,
        mode=modes.S_IMODE(mode),
        uid=uid,
        gid=gid,
        mtime=mtime / 1e9,
        target=os.fsdecode(target) if modes.S_ISLNK(mode) else None,
    )


class Transfer:
    """A stream that carries one file's (or listing's) bytes, either way."""

    def __init__(self, channel: Channel, what: str, offset: int = 0) -> None:
        self._channel = channel
        self._what = what
        self.stream = channel.open(self)
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._begun = self._offset = offset
        self._wide = False
        self._granted = offset + wire.WINDOW
        self._taken = offset
        self._credit = wire.WINDOW
        self.end: Unpacker | None = None
        self.error: ForkyardError | None = None

    def on_frame(self, frame: Frame) -> None:
        if frame.type == Type.DATA:
            data = frame.payload[8:]
            offset = int.from_bytes(frame.payload[:8], "little")
            if frame.chan != wire.STDOUT or offset != self._offset or offset + len(data) > self._granted:
                raise WireError("file data that nobody asked for")
            self._moves(len(data))
            self._queue.append(data)
        elif frame.type == Type.ACK:
            u = Unpacker(frame.payload)
            u.u64()
            self._credit = max(self._credit, min(u.u64(), self._offset + (64 << 20)))
        elif frame.type in (Type.END, Type.ERROR):
            u = Unpacker(frame.payload)
            self.error = error_of(u, self._what)
            self.end = u
            self._channel.forget(self.stream)
        elif frame.type == Type.RESET:
            self.fail(UnavailableError(f"{self._what}: the transfer was damaged", retryable=True))
            self._channel.forget(self.stream)
        elif frame.type != Type.OPENED:
            raise WireError(f"a frame of type {frame.type} for a file")
        self._wake.set()

    def fail(self, error: ForkyardError) -> None:
        self.error = self.error or error
        self._wake.set()

    async def moved(self) -> None:
        """Wait until something came. Raises DeadlineError after a minute of nothing."""
        self._wake.clear()
        try:
            async with asyncio.timeout(STALL_S):
                await self._wake.wait()
        except TimeoutError:
            raise DeadlineError(f"{self._what}: nothing moved for {STALL_S:g} s", retryable=True) from None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                while self._queue:
                    # Fewer and larger pieces cost everyone who passes them on less.
                    data = b"".join(self._queue)
                    self._queue.clear()
                    yield data
                    self._taken += len(data)
                    low = self._granted - self._taken <= WINDOW - ACK_EVERY
                    if low and self.end is None and self.error is None:
                        self._granted = self._taken + WINDOW
                        payload = self._taken.to_bytes(8, "little") + self._granted.to_bytes(8, "little")
                        self._channel.send(
                            wire.encode(Type.ACK, self.stream, self._channel.epoch, payload, chan=wire.STDOUT)
                        )
                if self.error is not None:
                    raise self.error
                if self.end is not None:
                    return
                await self.moved()
        finally:
            self.close()

    def close(self) -> None:
        self._channel.forget(self.stream, reset=True)
        if self._wide:
            self._wide = False
            self._channel.narrow()

    def _moves(self, size: int) -> None:
        """So many bytes more: a file that is worth it has the wire to itself, so far as it goes."""
        self._offset += size
        if not self._wide and self._offset - self._begun > wire.WINDOW:
            self._wide = True
            self._channel.widen()

    async def send(self, data: bytes) -> bool:
        """Send a piece; False if the agent has already ended the upload."""
        view = memoryview(data)
        while view:
            if self.error is not None or self.end is not None:
                return False
            credit = self._credit - self._offset
            if credit <= 0:
                await self.moved()
                continue
            await self._channel.room()
            # All that may go goes at once: each write wakes the guest.
            frames = []
            for at in range(0, min(len(view), credit, BATCH), wire.MAX_DATA):
                part = view[at : at + min(wire.MAX_DATA, credit - at)]
                frames.append(
                    wire.encode_data(self.stream, self._channel.epoch, wire.STDIN, self._offset, part)
                )
                self._moves(len(part))
            view = view[min(len(view), credit, BATCH) :]
            self._channel.send(*frames)
        return True

    async def result(self) -> Unpacker:
        while self.end is None and self.error is None:
            await self.moved()
        if self.error is not None:
            raise self.error
        assert self.end is not None
        return self.end


class GuestFiles:
    """The file verbs of a Guest."""

    _channel: Channel

    async def _ask(self, op: Op, payload: bytes, what: str, timeout_s: float = REQUEST_S) -> Unpacker:
        request = Request(self._channel, what)
        self._channel.send(*wire.encode_request(op, request.stream, self._channel.epoch, payload))
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer()
        except TimeoutError:
            raise DeadlineError(f"{what}: no answer within {timeout_s:g} s", retryable=True) from None

    def _begin(self, op: Op, payload: bytes, what: str, offset: int = 0) -> Transfer:
        transfer = Transfer(self._channel, what, offset)
        self._channel.send(*wire.encode_request(op, transfer.stream, self._channel.epoch, payload))
        return transfer

    def _head(self, path: str | bytes, user: str) -> Packer:
        return Packer().str(user.encode()[:128]).str(path_bytes(path))

    async def stat(self, path: str | bytes, *, user: str = "root", follow: bool = True) -> FileInfo:
        u = await self._ask(Op.STAT, self._head(path, user).u8(follow).done(), _show(path))
        return _read_info(self._channel, u, path_bytes(path))

    async def list_dir(self, path: str | bytes, *, user: str = "root") -> list[FileInfo]:
        """The entries, by name. Links are described, not followed."""
        transfer = self._begin(Op.LIST, self._head(path, user).done(), _show(path))
        base = path_bytes(path).rstrip(b"/") + b"/"
        data = bytearray()
        async for chunk in transfer.chunks():
            data += chunk
            if len(data) > MAX_ENTRIES * 64:
                raise InvalidRequestError(f"{_show(path)}: too many entries to list")
        u = Unpacker(bytes(data))
        entries = []
        try:
            while u.left:
                name = u.str(255)
                if b"/" in name or name in (b"", b".", b".."):
                    raise WireError("an impossible file name")
                entries.append(_info(u, base + name))
        except WireError as e:
            self._channel.violation(str(e))
            told = f"{_show(path)}: the agent sent a malformed listing"
            raise UnavailableError(told, retryable=True) from None
        return sorted(entries, key=lambda entry: entry.name)

    async def read_file(
        self, path: str | bytes, *, user: str = "root", offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """A regular file's bytes in pieces of up to 2 MiB, as fast as they are taken."""
        if length == 0:
            return
        payload = self._head(path, user).u64(offset).u64(length or 0).done()
        transfer = self._begin(Op.READ, payload, _show(path), offset)
        async for chunk in transfer.chunks():
            yield chunk

    async def read_bytes(self, path: str | bytes, *, user: str = "root", max_bytes: int = 1 << 30) -> bytes:
        """A whole file.

        Raises:
            InvalidRequestError: it is longer than ``max_bytes``.
        """
        data = bytearray()
        async for chunk in self.read_file(path, user=user):
            data += chunk
            if len(data) > max_bytes:
                raise InvalidRequestError(f"{_show(path)} is longer than {max_bytes} bytes")
        return bytes(data)

    async def write_file(
        self,
        path: str | bytes,
        chunks: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        user: str = "root",
        parents: bool = True,
    ) -> FileInfo:
        """Replace a file whole (a temporary file, renamed at the end), or make it.

        An existing file keeps its mode unless ``mode`` is given, and a link is followed. Where
        the caller or the guest stops midway, the old content stays.
        """
        payload = self._head(path, user).u32(NO_MODE if mode is None else mode & 0o7777).u8(parents).done()
        transfer = self._begin(Op.WRITE, payload, _show(path))
        try:
            if isinstance(chunks, bytes | bytearray | memoryview):
                await transfer.send(bytes(chunks))
            elif isinstance(chunks, AsyncIterable):
                async for chunk in chunks:
                    if not await transfer.send(chunk):
                        break
            else:
                for chunk in chunks:
                    if not await transfer.send(chunk):
                        break
            if transfer.end is None and transfer.error is None:
                epoch = self._channel.epoch
                self._channel.send(wire.encode(Type.EOF, transfer.stream, epoch, chan=wire.STDIN))
            u = await transfer.result()
        finally:
            transfer.close()
        return _read_info(self._channel, u, path_bytes(path))

    async def mkdir(
        self, path: str | bytes, *, mode: int = 0o777, user: str = "root", parents: bool = True
    ) -> None:
        """Like ``mkdir -p`` with ``parents``; ``mode`` is subject to the umask 022."""
        await self._ask(Op.MKDIR, self._head(path, user).u32(mode & 0o7777).u8(parents).done(), _show(path))

    async def rename(
        self, path: str | bytes, to: str | bytes, *, user: str = "root", parents: bool = False
    ) -> None:
        await self._ask(Op.RENAME, self._head(path, user).str(path_bytes(to)).u8(parents).done(), _show(path))

    async def remove(
        self, path: str | bytes, *, recursive: bool = False, user: str = "root", timeout_s: float = 600
    ) -> None:
        """Delete a file, a link (never what it points to), an empty directory, or a whole tree."""
        payload = self._head(path, user).u8(recursive).done()
        await self._ask(Op.REMOVE, payload, _show(path), timeout_s)

    async def symlink(self, path: str | bytes, target: str | bytes, *, user: str = "root") -> None:
        """Make ``path`` a link that says ``target``."""
        await self._ask(Op.SYMLINK, self._head(path, user).str(path_bytes(target)).done(), _show(path))

    async def readlink(self, path: str | bytes, *, user: str = "root") -> str:
        u = await self._ask(Op.READLINK, self._head(path, user).done(), _show(path))
        return os.fsdecode(u.str())

    async def chmod(self, path: str | bytes, mode: int, *, user: str = "root") -> None:
        await self._ask(Op.CHMOD, self._head(path, user).u32(mode & 0o7777).done(), _show(path))

    async def chown(self, path: str | bytes, uid: int, gid: int, *, user: str = "root") -> None:
        """-1 leaves an id as it is. Links themselves are changed, not what they point to."""
        payload = self._head(path, user).u32(uid & 0xFFFFFFFF).u32(gid & 0xFFFFFFFF).done()
        await self._ask(Op.CHOWN, payload, _show(path))

    async def utime(
        self, path: str | bytes, *, atime: float, mtime: float, user: str = "root", follow: bool = True
    ) -> None:
        payload = self._head(path, user).u64(int(atime * 1e9)).u64(int(mtime * 1e9)).u8(follow).done()
        await self._ask(Op.UTIME, payload, _show(path))


def _show(path: str | bytes) -> str:
    return os.fsdecode(path)[:200]


def _read_info(channel: Channel, u: Unpacker, path: bytes) -> FileInfo:
    try:
        return _info(u, path)
    except WireError as e:
        channel.violation(str(e))
        raise UnavailableError(f"{_show(path)}: the agent sent a malformed answer", retryable=True) from None
