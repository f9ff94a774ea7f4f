"""Trees of files as tar streams: packing what is here, and unpacking what a sandbox sent.

What comes out of a sandbox is hostile. Nothing is written outside the target, through a link,
or as a device; links that lead out of the tree are not made; set-user-id bits are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from forkyard import errors
from forkyard.types import Transfer

CHUNK = 1 << 20
_BLOCK = tarfile.BLOCKSIZE


class Packer:
    """Makes a tar stream of the tree at ``root``; iterate it, then read :meth:`transfer`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = 0
        self._bytes = 0
        self._skipped: list[str] = []

    def transfer(self) -> Transfer:
        return Transfer(files=self._files, size_bytes=self._bytes, skipped=self._skipped)

    def __iter__(self) -> Iterator[bytes]:
        self._files = self._bytes = 0
        self._skipped = []
        yield from self._pack(self._root, "")
        yield b"\0" * (2 * _BLOCK)

    def _pack(self, directory: Path, prefix: str) -> Iterator[bytes]:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = prefix + entry.name
            info = entry.stat(follow_symlinks=False)
            member = tarfile.TarInfo(name)
            member.mode = stat.S_IMODE(info.st_mode)
            member.mtime = int(info.st_mtime)
            member.uid, member.gid = info.st_uid, info.st_gid
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
                yield _header(member)
                yield from self._pack(Path(entry.path), name + "/")
            elif stat.S_ISLNK(info.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(entry.path)
                self._files += 1
                yield _header(member)
            elif stat.S_ISREG(info.st_mode):
                self._files += 1
                yield from self._file(entry.path, member)
            else:
                self._skipped.append(name)

    def _file(self, path: str, member: tarfile.TarInfo) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:
            member.size = left = os.fstat(file.fileno()).st_size
            self._bytes += left
            yield _header(member)
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise errors.ConflictError(f"{path} became shorter while it was read")
                left -= len(data)
                yield data
        if rest := member.size % _BLOCK:
            yield b"\0" * (_BLOCK - rest)


def _header(member: tarfile.TarInfo) -> bytes:
    # GNU's format keeps names as the bytes they are, of any length.
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


class Unpacker:
    """Unpacks a tar stream below ``target`` while it comes in.

    ``feed`` it from any thread, then ``finish``; ``abort`` gives up. Existing files are
    replaced, existing directories merged.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._pieces: queue.Queue[bytes | memoryview | None] = queue.Queue(16)
        self._buffer = memoryview(b"")
        self._ended = False
        self._error: BaseException | None = None
        self._tree = _Tree(target)
        self._thread = threading.Thread(target=self._run, name="unpack", daemon=True)
        self._thread.start()

    def feed(self, piece: bytes | memoryview) -> None:
        if self._error is not None:
            raise self._error
        self._pieces.put(piece)

    def finish(self) -> Transfer:
        """Wait until all is written. Raises what went wrong."""
        self._pieces.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return Transfer(files=self._tree.files, size_bytes=self._tree.bytes, skipped=self._tree.skipped)

    def abort(self) -> None:
        self._pieces.put(None)
        self._thread.join()

    def read(self, size: int) -> bytes:
        """For tarfile: up to ``size`` bytes, none at the end."""
        if not self._buffer and not self._ended:
            piece = self._pieces.get()
            if piece is None:
                self._ended = True
            else:
                self._buffer = memoryview(piece)
        data = bytes(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return data

    def _run(self) -> None:
        try:
            with self._tree, tarfile.open(fileobj=self, mode="r|", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
                for member in tar:
                    self._tree.put(tar, member)
        except (tarfile.TarError, EOFError) as error:
            self._error = errors.UnavailableError(f"the stream is not a whole tar archive: {error}")
        except BaseException as error:
            self._error = error
        finally:
            # Whoever feeds must not wait for a reader that is gone.
            while not self._ended:
                self._ended = self._pieces.get() is None


class _Tree:
    """A directory that is written to by names, never through links."""

    def __init__(self, target: Path) -> None:
        self.files = 0
        self.bytes = 0
        self.skipped: list[str] = []
        self._as_root = os.geteuid() == 0
        self._made: set[tuple[str, ...]] = set()
        self._links: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []
        self._dirs: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []
        target.mkdir(parents=True, exist_ok=True)
        self._root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._root)

    def put(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one member. Raises ConflictError where a link or a directory here is in its way."""
        with _in_the_way(member.name):
            self._put(tar, member)

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if parts is None:
            self.skipped.append(member.name)
        elif member.isdir():
            if parts:
                with self._directory(parts):
                    self._dirs.append((parts, member))
        elif not parts:
            self.skipped.append(member.name)
        elif member.isreg():
            self._file(tar, parts, member)
        elif member.issym():
            # Made last, so that no file of this archive can be written through one.
            self._links.append((parts, member))
        elif member.islnk():
            self._hard_link(parts, member)
        else:
            self.skipped.append(member.name)

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        """The directory, made where it is missing; a link in its place is refused."""
        fd = os.dup(self._root)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _file(self, tar: tarfile.TarFile, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        source = tar.extractfile(member)
        assert source is not None
        with self._directory(parts[:-1]) as parent:
            _clear(parts[-1], parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, 0o600, dir_fd=parent)
            try:
                left = member.size
                while left:
                    data = source.read(min(CHUNK, left))
                    if not data:
                        raise EOFError(f"{member.name} ends early")
                    left -= len(data)
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                self._dress(fd, member)
            finally:
                os.close(fd)
        self._made.add(parts)
        self.files += 1
        self.bytes += member.size

    def _hard_link(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        source = _parts(member.linkname)
        if source is None or source not in self._made:
            self.skipped.append(member.name)
            return
        with self._directory(source[:-1]) as there, self._directory(parts[:-1]) as here:
            _clear(parts[-1], here)
            os.link(source[-1], parts[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        self._made.add(parts)
        self.files += 1

    def _finish(self) -> None:
        for parts, member in self._links:
            if not _stays_inside(parts, member.linkname):
                self.skipped.append(member.name)
                continue
            with _in_the_way(member.name), self._directory(parts[:-1]) as parent:
                _clear(parts[-1], parent)
                os.symlink(member.linkname, parts[-1], dir_fd=parent)
                if self._as_root:
                    os.chown(parts[-1], member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            self.files += 1
        for parts, member in reversed(self._dirs):
            with self._directory(parts) as fd:
                self._dress(fd, member)

    def _dress(self, fd: int, member: tarfile.TarInfo) -> None:
        if self._as_root:
            os.fchown(fd, member.uid, member.gid)
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))


@contextlib.contextmanager
def _in_the_way(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
            raise
        raise errors.ConflictError(
            f"{name!r} cannot be written: {os.strerror(error.errno)}",
            hint="something of another kind is in its place; download to another directory",
        ) from None


def _clear(name: str, parent: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _parts(name: str) -> tuple[str, ...] | None:
    """The words of a relative path that stays where it is; None for any other."""
    if name.startswith("/"):
        return None
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    return None if ".." in parts else parts


def _stays_inside(parts: tuple[str, ...], target: str) -> bool:
    """Whether a link at ``parts`` that says ``target`` leads to something in the tree.

    ``..`` counts only at the beginning: after the name of another link it would lead up from
    wherever that one points.
    """
    path = PurePosixPath(target)
    if not target or path.is_absolute():
        return False
    words = list(path.parts)
    up = 0
    while words and words[0] == "..":
        words.pop(0)
        up += 1
    return ".." not in words and up <= len(parts) - 1
