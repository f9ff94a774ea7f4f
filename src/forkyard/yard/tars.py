"""Trees of a guest as tar streams, without a copy on the host in between."""

from __future__ import annotations

import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import PurePosixPath

from forkyard.errors import ConflictError, InvalidRequestError, NotFoundError
from forkyard.guest import Guest
from forkyard.types import FileInfo

BLOCK = tarfile.BLOCKSIZE
MAX_NAME = 64 << 10
_LONG = {b"L": "name", b"K": "linkname"}


async def pack(guest: Guest, root: str, user: str) -> AsyncIterator[bytes]:
    """The tree below ``root`` as a tar archive with relative names. Sockets, devices and FIFOs
    are left out; links are kept as links."""
    stack = [("", root.rstrip("/") or "/")]
    while stack:
        prefix, directory = stack.pop()
        for entry in await guest.list_dir(directory, user=user):
            name = prefix + entry.name
            if entry.type == "dir":
                yield _header(name, entry, tarfile.DIRTYPE)
                stack.append((f"{name}/", entry.path))
            elif entry.type == "link":
                yield _header(name, entry, tarfile.SYMTYPE)
            elif entry.type == "file":
                async for piece in _file(guest, name, entry, user):
                    yield piece
    yield bytes(2 * BLOCK)


async def _file(guest: Guest, name: str, entry: FileInfo, user: str) -> AsyncIterator[bytes]:
    """A member of the size that its header says, however the file changes meanwhile."""
    yield _header(name, entry, tarfile.REGTYPE)
    left = entry.size
    if left:
        async for chunk in guest.read_file(entry.path, user=user, length=left):
            yield chunk
            left -= len(chunk)
    if left:
        raise ConflictError(f"{entry.path} became shorter while it was read", retryable=True)
    if entry.size % BLOCK:
        yield bytes(BLOCK - entry.size % BLOCK)


def _header(name: str, entry: FileInfo, kind: bytes) -> bytes:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.mode, member.mtime = entry.mode, int(entry.mtime)
    member.uid, member.gid = entry.uid, entry.gid
    member.linkname = entry.target or ""
    member.size = entry.size if kind == tarfile.REGTYPE else 0
    # GNU's format keeps names as the bytes they are, of any length.
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


async def unpack(guest: Guest, root: str, user: str, chunks: AsyncIterator[bytes]) -> int:
    """Make the archive's tree below ``root`` as ``user``. Existing files are replaced.

    Returns:
        How many members were made.

    Raises:
        InvalidRequestError: it is no whole archive, or has a member that is no file,
            directory or link, or whose name leads out of ``root``.
    """
    reader = _Reader(chunks)
    count = 0
    made: set[str] = set()
    await guest.mkdir(root, mode=0o755, user=user)
    directories: list[tuple[str, int]] = []
    async for member in reader.members():
        path = f"{root.rstrip('/')}/{_inside(member.name)}"
        if member.isdir():
            if path not in made:
                await guest.mkdir(path, mode=0o755, user=user)
                made.add(path)
            directories.append((path, member.mode & 0o7777))
        elif member.issym():
            await _replace(guest, path, user)
            await guest.symlink(path, member.linkname, user=user)
        elif member.isreg():
            body = reader.body(member.size)
            await guest.write_file(path, body, mode=member.mode & 0o7777, user=user)
        else:
            raise InvalidRequestError(f"{member.name[:200]} is no file, directory or symbolic link")
        count += 1
    for path, mode in reversed(directories):
        # At the end: a directory may be one that its owner cannot write to.
        await guest.chmod(path, mode, user=user)
    return count


async def _replace(guest: Guest, path: str, user: str) -> None:
    try:
        await guest.remove(path, user=user)
    except NotFoundError:
        return


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise InvalidRequestError(f"the archive's member {name[:200]!r} leads out of its tree")
    return str(path)


class _Reader:
    """Takes a tar stream apart as it comes. Long names are GNU's; pax headers are understood
    for paths and sizes."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = bytearray()

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                self._buffer += await anext(self._chunks)
            except StopAsyncIteration:
                raise InvalidRequestError("the archive ends early") from None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def members(self) -> AsyncIterator[tarfile.TarInfo]:
        """Headers in order; the body of a regular file must be read before the next."""
        said: dict[str, str] = {}
        while True:
            block = await self._exactly(BLOCK)
            if not block.strip(b"\0"):
                break
            try:
                member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise InvalidRequestError(f"not a tar archive: {error}") from None
            if member.type in _LONG:
                said[_LONG[member.type]] = os.fsdecode((await self._padded(member.size)).rstrip(b"\0"))
                continue
            if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE):
                said |= _pax(await self._padded(member.size))
                continue
            member.name = said.pop("name", member.name)
            member.linkname = said.pop("linkname", member.linkname)
            member.size = int(said.pop("size", member.size))
            said.clear()
            yield member
        async for _ in self._chunks:
            pass

    async def _padded(self, size: int) -> bytes:
        if size > MAX_NAME:
            raise InvalidRequestError("the archive has a name of more than 64 KiB")
        return (await self._exactly(size + -size % BLOCK))[:size]

    async def body(self, size: int) -> AsyncIterator[bytes]:
        """A member's bytes, without its padding."""
        left = size
        while left:
            if not self._buffer:
                try:
                    self._buffer += await anext(self._chunks)
                except StopAsyncIteration:
                    raise InvalidRequestError("the archive ends early") from None
            piece = bytes(self._buffer[:left])
            del self._buffer[: len(piece)]
            left -= len(piece)
            yield piece
        if size % BLOCK:
            await self._exactly(-size % BLOCK)


def _pax(data: bytes) -> dict[str, str]:
    said: dict[str, str] = {}
    keys = {b"path": "name", b"linkpath": "linkname", b"size": "size"}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or int(length) <= len(length) or int(length) > len(data):
            raise InvalidRequestError("the archive has a malformed pax header")
        record, data = data[len(length) + 1 : int(length) - 1], data[int(length) :]
        key, _, value = record.partition(b"=")
        if key in keys:
            said[keys[key]] = os.fsdecode(value)
    return said
