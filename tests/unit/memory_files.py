"""The files of a yard in memory: those of the host, below its sandboxes' directories."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from forkyard import errors
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.requests import Caller

if TYPE_CHECKING:
    from memory_yard import MemoryYard

CHUNK = 256 << 10


class MemoryFiles:
    def __init__(self, yard: MemoryYard) -> None:
        self._yard = yard

    def _path(self, request: rq.PathRequest | rq.PathChange) -> Path:
        return self._yard.root(request.sandbox) / request.path

    @staticmethod
    @contextlib.contextmanager
    def _errors(path: Path | str):
        try:
            yield
        except FileNotFoundError:
            raise errors.NotFoundError(f"no such file: {path}") from None
        except OSError as error:
            raise errors.ConflictError(f"{path}: {error.strerror}") from None

    async def write_files(self, request: rq.WriteFiles, caller: Caller) -> None:
        root = self._yard.root(request.sandbox)
        for name, data in request.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if request.mode is not None:
                path.chmod(request.mode)

    async def read_files(self, request: rq.ReadFiles, caller: Caller) -> dict[str, bytes]:
        root = self._yard.root(request.sandbox)
        with self._errors(root):
            return {name: (root / name).read_bytes() for name in request.paths}

    async def list_files(self, request: rq.PathRequest, caller: Caller) -> list[ty.FileInfo]:
        path = self._path(request)
        with self._errors(path):
            return [self._info(entry) for entry in sorted(path.iterdir())]

    async def stat(self, request: rq.PathRequest, caller: Caller) -> ty.FileInfo:
        path = self._path(request)
        # pathlib drops a final "/.", which asks about what a link points to.
        with self._errors(path):
            return self._info(path.resolve() if request.path.endswith("/.") else path)

    @staticmethod
    def _info(path: Path) -> ty.FileInfo:
        info = path.lstat()
        kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
        return ty.FileInfo(
            path=str(path),
            name=path.name,
            type=kind,
            size=info.st_size,
            mode=info.st_mode & 0o7777,
            uid=info.st_uid,
            gid=info.st_gid,
            mtime=info.st_mtime,
            target=os.readlink(path) if kind == "link" else None,
        )

    async def make_dir(self, request: rq.MakeDir, caller: Caller) -> None:
        self._path(request).mkdir(parents=request.parents, exist_ok=request.parents)

    async def move(self, request: rq.MoveFile, caller: Caller) -> None:
        with self._errors(request.path):
            self._path(request).rename(self._yard.root(request.sandbox) / request.to)

    async def remove(self, request: rq.RemoveFile, caller: Caller) -> None:
        path = self._path(request)
        with self._errors(path):
            if path.is_dir() and request.recursive:
                shutil.rmtree(path)
            else:
                path.unlink()

    async def read_stream(self, request: rq.PathRequest, caller: Caller) -> AsyncIterator[bytes]:
        with self._errors(request.path), open(self._path(request), "rb") as file:  # noqa: ASYNC230
            while data := file.read(CHUNK):
                yield data
                if self._yard.fail_reads_after is not None:
                    raise errors.SandboxLostError("it died", cause="guest", sandbox=request.sandbox)

    async def write_stream(
        self, request: rq.WriteFile, chunks: AsyncIterator[bytes], caller: Caller
    ) -> None:
        path = self._path(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            with open(fresh, "wb") as file:  # noqa: ASYNC230
                async for data in chunks:
                    file.write(data)
            if request.mode is not None:
                fresh.chmod(request.mode)
            fresh.rename(path)
        finally:
            fresh.unlink(missing_ok=True)

    async def download_tar(self, request: rq.PathRequest, caller: Caller) -> AsyncIterator[bytes]:
        if self._yard.hostile_tar is not None:
            yield self._yard.hostile_tar
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(self._path(request).iterdir()):
                tar.add(path, arcname=path.name)
        yield buffer.getvalue()

    async def upload_tar(self, request: rq.PathChange, chunks: AsyncIterator[bytes], caller: Caller) -> None:
        data = b"".join([chunk async for chunk in chunks])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(self._path(request), filter="fully_trusted")
