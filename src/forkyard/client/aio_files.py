"""The client's verbs for files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from forkyard import errors
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client._protocol import to_thread
from forkyard.client.aio_transport import PATIENCE_S, AsyncTransport
from forkyard.client.trees import Packer, Unpacker
from forkyard.types import FileInfo, Transfer

Data = bytes | bytearray | memoryview | str | IO[bytes] | Iterable[bytes]


class AsyncFiles:
    _transport: AsyncTransport

    async def write_file(
        self,
        sandbox: str,
        path: str,
        data: Data,
        mode: int | None = None,
        user: str | None = None,
        *,
        request_id: str | None = None,
    ) -> None:
        """Write a file whole, its parents made; it is the default user's unless ``user`` says.

        Args:
            data: Bytes, text, a file object or an iterable of bytes, of any size.
            mode: Its permissions; None keeps those of a file that was there, else 0644.
        """
        small = isinstance(data, bytes | bytearray | memoryview | str) and len(data) <= protocol.INLINE_FILE
        if small and (raw := protocol.as_bytes(data)) is not None:
            await self._transport.call(
                "write_files",
                protocol.made(
                    rq.WriteFiles,
                    sandbox=sandbox,
                    files={protocol.path_of(path): raw},
                    mode=mode,
                    user=user,
                    request_id=request_id or protocol.new_request_id(),
                ),
            )
            return
        request = protocol.made(
            rq.WriteFile,
            sandbox=sandbox,
            path=protocol.path_of(path),
            mode=mode,
            user=user,
            request_id=request_id or protocol.new_request_id(),
        )
        if isinstance(data, str):
            data = protocol.utf8(data)
        if isinstance(data, bytes | bytearray | memoryview):
            whole = data
            await self._transport.send("write_file", request, lambda: protocol.slices(whole), repeatable=True)
        else:
            parts = data
            await self._transport.send(
                "write_file", request, lambda: protocol.chunks_of(parts), repeatable=False
            )

    async def write_files(
        self,
        sandbox: str,
        files: Mapping[str, bytes | str],
        mode: int | None = None,
        user: str | None = None,
        *,
        request_id: str | None = None,
    ) -> None:
        """Write many files, ``{path: data}``; each is whole, together they are not."""
        base = request_id or protocol.new_request_id()
        small: dict[str, bytes] = {}
        for path, data in files.items():
            raw = protocol.as_bytes(data)
            if raw is None:
                raise errors.InvalidRequestError(f"{path}: data is bytes or text, not {type(data).__name__}")
            if len(raw) > protocol.INLINE_FILE:
                await self.write_file(sandbox, path, raw, mode, user)
            else:
                small[protocol.path_of(path)] = raw
        for index, group in enumerate(protocol.batches(small)):
            await self._transport.call(
                "write_files",
                protocol.made(
                    rq.WriteFiles,
                    sandbox=sandbox,
                    files=group,
                    mode=mode,
                    user=user,
                    request_id=base if not index else f"{base}.{index}",
                ),
            )

    async def read_file(self, sandbox: str, path: str, user: str | None = None) -> bytes:
        """The file's bytes. Raises NotFoundError if there is none."""
        tries = 0
        while True:
            parts: list[Any] = []
            try:
                async with contextlib.aclosing(self._pieces("read_file", sandbox, path, user)) as pieces:
                    async for piece in pieces:
                        parts.append(piece)
                return b"".join(parts)
            except errors.UnavailableError as error:
                tries += 1
                if not error.retryable or tries == 3:
                    raise
                await self._transport.reach(PATIENCE_S)

    async def _pieces(self, verb: str, sandbox: str, path: str, user: str | None) -> Any:
        request = protocol.made(rq.PathRequest, sandbox=sandbox, path=protocol.path_of(path), user=user)
        stream = await self._transport.open(verb, request, partial=True)
        try:
            while pieces := await stream.read():
                for piece in pieces:
                    yield piece
        finally:
            await stream.close()

    async def read_text(
        self,
        sandbox: str,
        path: str,
        user: str | None = None,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
    ) -> str:
        """The file's text."""
        return (await self.read_file(sandbox, path, user)).decode(encoding, errors)

    async def read_files(
        self, sandbox: str, paths: Sequence[str], user: str | None = None
    ) -> dict[str, bytes]:
        """Many small files in one call, ``{path: data}``. Raises NotFoundError if one is missing."""
        return await self._transport.call(
            "read_files",
            protocol.made(
                rq.ReadFiles, sandbox=sandbox, paths=[protocol.path_of(path) for path in paths], user=user
            ),
        )

    async def list_files(self, sandbox: str, path: str = ".", user: str | None = None) -> list[FileInfo]:
        """What is in a directory, by name."""
        request = protocol.made(rq.PathRequest, sandbox=sandbox, path=protocol.path_of(path), user=user)
        return await self._transport.call("list_files", request)

    async def stat(self, sandbox: str, path: str, user: str | None = None) -> FileInfo:
        """About one file; a link is described, not followed."""
        return await self._transport.call(
            "stat", protocol.made(rq.PathRequest, sandbox=sandbox, path=protocol.path_of(path), user=user)
        )

    async def make_dir(
        self,
        sandbox: str,
        path: str,
        mode: int | None = None,
        user: str | None = None,
        *,
        parents: bool = True,
        request_id: str | None = None,
    ) -> None:
        """Make a directory. With ``parents`` the ones above too, and one that is there is no error."""
        await self._transport.call(
            "make_dir",
            protocol.made(
                rq.MakeDir,
                sandbox=sandbox,
                path=protocol.path_of(path),
                mode=mode,
                user=user,
                parents=parents,
                request_id=request_id or protocol.new_request_id(),
            ),
        )

    async def move(
        self, sandbox: str, path: str, to: str, user: str | None = None, *, request_id: str | None = None
    ) -> None:
        """Rename; a file at ``to`` is replaced."""
        await self._transport.call(
            "move",
            protocol.made(
                rq.MoveFile,
                sandbox=sandbox,
                path=protocol.path_of(path),
                to=protocol.path_of(to),
                user=user,
                request_id=request_id or protocol.new_request_id(),
            ),
        )

    async def remove(
        self,
        sandbox: str,
        path: str,
        user: str | None = None,
        *,
        recursive: bool = True,
        request_id: str | None = None,
    ) -> None:
        """Remove a file or a tree. Raises NotFoundError if it is not there."""
        await self._transport.call(
            "remove",
            protocol.made(
                rq.RemoveFile,
                sandbox=sandbox,
                path=protocol.path_of(path),
                user=user,
                recursive=recursive,
                request_id=request_id or protocol.new_request_id(),
            ),
        )

    async def upload(
        self, sandbox: str, local: str | os.PathLike[str], remote: str, user: str | None = None
    ) -> Transfer:
        """Copy a file or a tree into the sandbox, modes kept.

        A tree's content becomes the content of ``remote``, merged with what is there. A file
        becomes ``remote``, or goes into it under its own name if that is a directory or ends in a slash.
        """
        source = Path(local)
        if os.path.isdir(source):
            packer = Packer(source)
            request = protocol.made(
                rq.PathChange, sandbox=sandbox, path=remote, user=user, request_id=protocol.new_request_id()
            )
            await self._transport.send("upload", request, lambda: packer, repeatable=True)
            return packer.transfer()
        try:
            file = open(source, "rb", buffering=0)  # noqa: ASYNC230, SIM115
        except FileNotFoundError:
            raise errors.NotFoundError(f"there is no {source} here") from None
        with file:
            info = os.fstat(file.fileno())
            if remote.endswith("/") or await self._is_dir(sandbox, remote, user):
                remote = f"{remote.rstrip('/')}/{source.name}"
            await self.write_file(sandbox, remote, file, info.st_mode & 0o7777, user)
        return Transfer(files=1, size_bytes=info.st_size)

    async def _is_dir(self, sandbox: str, path: str, user: str | None) -> bool:
        try:
            kind = (await self.stat(sandbox, path, user)).type
            if kind == "link":
                kind = (await self.stat(sandbox, path.rstrip("/") + "/.", user)).type
        except (errors.NotFoundError, errors.ConflictError, errors.InvalidRequestError):
            return False
        return kind == "dir"

    async def download(
        self, sandbox: str, remote: str, local: str | os.PathLike[str], user: str | None = None
    ) -> Transfer:
        """Copy a file or a tree out of the sandbox; modes are kept, and owners where root copies.

        Placed like :meth:`upload` does. Nothing is written outside ``local``: links that lead out
        of the tree, devices and set-user-id bits are left out (see ``Transfer.skipped``).
        """
        target = Path(local)
        if await self._is_dir(sandbox, remote, user):
            unpacker = await to_thread(Unpacker, target)
            try:
                tree = remote.rstrip("/") + "/."
                async with contextlib.aclosing(self._pieces("download", sandbox, tree, user)) as pieces:
                    async for piece in pieces:
                        await to_thread(unpacker.feed, piece)
            except BaseException:
                await to_thread(unpacker.abort)
                raise
            return await to_thread(unpacker.finish)
        info = await self.stat(sandbox, remote, user)
        if os.fspath(local).endswith("/") or os.path.isdir(target):
            os.makedirs(target, exist_ok=True)
            target = target / Path(remote).name
        return await self._download_file(sandbox, remote, target, user, info)

    async def _download_file(
        self, sandbox: str, remote: str, target: Path, user: str | None, info: FileInfo
    ) -> Transfer:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name[:200]}.{protocol.new_request_id()[:8]}")
        size = 0
        try:
            with open(fresh, "xb", buffering=0) as file:  # noqa: ASYNC230
                async with contextlib.aclosing(self._pieces("read_file", sandbox, remote, user)) as pieces:
                    async for piece in pieces:
                        view = memoryview(piece)
                        size += len(view)
                        while view:
                            view = view[file.write(view) :]
                if info.type == "file":
                    if os.geteuid() == 0:
                        os.fchown(file.fileno(), info.uid, info.gid)
                    os.fchmod(file.fileno(), info.mode & 0o777)
            fresh.replace(target)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        return Transfer(files=1, size_bytes=size)
