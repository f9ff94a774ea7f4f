"""Files of a sandbox, through its agent, with the rights of a user of the guest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from forkyard.errors import InvalidRequestError
from forkyard.guest import Guest
from forkyard.requests import (
    Caller,
    MakeDir,
    MoveFile,
    PathChange,
    PathRequest,
    ReadFiles,
    RemoveFile,
    WriteFile,
    WriteFiles,
)
from forkyard.types import FileInfo
from forkyard.yard import tars
from forkyard.yard.commands import resolve
from forkyard.yard.context import actor
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.model import Sandbox

MAX_READ_FILES = 256 << 20


class Files:
    """The file verbs. A relative path starts at the sandbox's working directory, ``~`` at its
    user's home; files that are made belong to the user."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context

    @contextlib.asynccontextmanager
    async def _at(
        self, ref: str, path: str, user: str | None
    ) -> AsyncIterator[tuple[Sandbox, Guest, str, str]]:
        """The sandbox, its guest, the full path and the user; it counts as used meanwhile."""
        sandbox, box = await self.lifecycle.running(ref)
        who = user or sandbox.doc.user
        sandbox.active_calls += 1
        try:
            yield sandbox, box.guest, await self._full(box.guest, sandbox, path, who), who
        finally:
            sandbox.active_calls -= 1
            sandbox.touch()

    @staticmethod
    async def _full(guest: Guest, sandbox: Sandbox, path: str, user: str) -> str:
        if not path:
            raise InvalidRequestError("an empty path")
        if path == "~" or path.startswith("~/"):
            home = (await guest.lookup_user(user)).home
            return home + path[1:]
        return resolve(path, sandbox.doc.workdir)

    def _audit(
        self, kind: str, sandbox: Sandbox, caller: Caller, path: str, user: str, **data: object
    ) -> None:
        self.context.audit.append(kind, sandbox.id, actor(caller), {"path": path, "user": user, **data})

    async def write_files(self, request: WriteFiles, caller: Caller) -> None:
        """Write small files; parents are made."""
        for path, data in request.files.items():
            async with self._at(request.sandbox, path, request.user) as (sandbox, guest, full, user):
                await guest.write_file(full, data, mode=request.mode, user=user)
                self._audit("file.written", sandbox, caller, full, user, bytes=len(data))

    async def read_files(self, request: ReadFiles, caller: Caller) -> dict[str, bytes]:
        """Read small files."""
        found = {}
        room = MAX_READ_FILES
        for path in request.paths:
            async with self._at(request.sandbox, path, request.user) as (sandbox, guest, full, user):
                found[path] = await guest.read_bytes(full, user=user, max_bytes=room)
                room -= len(found[path])
                self._audit("file.read", sandbox, caller, full, user, bytes=len(found[path]))
        return found

    async def list_files(self, request: PathRequest, caller: Caller) -> list[FileInfo]:
        """A directory's entries, by name."""
        async with self._at(request.sandbox, request.path, request.user) as (_, guest, full, user):
            return await guest.list_dir(full, user=user)

    async def stat(self, request: PathRequest, caller: Caller) -> FileInfo:
        """One file; a link is described, not followed."""
        async with self._at(request.sandbox, request.path, request.user) as (_, guest, full, user):
            return await guest.stat(full, user=user, follow=False)

    async def make_dir(self, request: MakeDir, caller: Caller) -> None:
        """Make a directory."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            mode = 0o755 if request.mode is None else request.mode
            await guest.mkdir(full, mode=mode, user=user, parents=request.parents)
            self._audit("file.made_dir", sandbox, caller, full, user)

    async def move(self, request: MoveFile, caller: Caller) -> None:
        """Rename a file or a tree; onto a directory moves into it, as mv does."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            to = await self._full(guest, sandbox, request.to, user)
            await guest.rename(full, to, user=user, parents=True)
            self._audit("file.moved", sandbox, caller, full, user, to=to)

    async def remove(self, request: RemoveFile, caller: Caller) -> None:
        """Delete a file, a link or a tree."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            await guest.remove(full, recursive=request.recursive, user=user)
            self._audit("file.removed", sandbox, caller, full, user)

    async def read_stream(self, request: PathRequest, caller: Caller) -> AsyncIterator[bytes]:
        """One file's bytes as they come."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            size = 0
            async for chunk in guest.read_file(full, user=user):
                size += len(chunk)
                yield chunk
            self._audit("file.read", sandbox, caller, full, user, bytes=size)

    async def write_stream(self, request: WriteFile, chunks: AsyncIterator[bytes], caller: Caller) -> None:
        """Replace one file whole: nothing of it is seen before its last byte came."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            info = await guest.write_file(full, chunks, mode=request.mode, user=user)
            self._audit("file.written", sandbox, caller, full, user, bytes=info.size)

    async def download_tar(self, request: PathRequest, caller: Caller) -> AsyncIterator[bytes]:
        """A file or a tree as a tar archive, with paths relative to it."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            async for piece in tars.pack(guest, full, user):
                yield piece
            self._audit("file.downloaded", sandbox, caller, full, user)

    async def upload_tar(self, request: PathChange, chunks: AsyncIterator[bytes], caller: Caller) -> None:
        """Unpack a tar archive of a file or a tree at the path."""
        async with self._at(request.sandbox, request.path, request.user) as (sandbox, guest, full, user):
            count = await tars.unpack(guest, os.path.normpath(full), user, chunks)
            self._audit("file.uploaded", sandbox, caller, full, user, files=count)
