"""Where archives lie: a path here, or any URL that fsspec knows. What is written appears whole."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from forkyard import errors

__all__ = ["OnBytes", "Target", "is_repeatable", "pieces"]

CHUNK = 1 << 20
OnBytes = Callable[[int], None]
"""Called with the bytes that have gone over so far."""
Url = str | os.PathLike[str]


class Target:
    """A file to be: ``open``, ``gather`` pieces (and ``flush`` when that ``is_due``), then ``commit`` or
    ``discard``. They block, except ``gather``.

    Raises (every method):
        NotFoundError, AccessDeniedError, CapacityError, UnavailableError: as the place says.
        UnsupportedError: what its URL needs is not installed.
    """

    def __init__(self, url: Url, on_progress: OnBytes | None = None) -> None:
        self._url = url
        self._shown = _shown(url)
        self._told = on_progress
        self._bytes = 0
        self._gathered = bytearray()
        # Who gives up may do so while another thread writes.
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._path: Path | None = None
        self._fresh: Path | None = None
        self._transaction: Any = None

    def open(self) -> None:
        """Make sure that it can be written."""
        path = _local(self._url)
        with _told(self._url):
            if path is None:
                fs, name = _remote(self._url)
                self._transaction = fs.transaction
                self._transaction.start()
                self._file = fs.open(name, "wb")
            elif _is_stream(path):
                self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            else:
                self._path = path
                fresh = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}")
                self._file = open(fresh, "xb", buffering=0, opener=_private)  # noqa: SIM115
                self._fresh = fresh

    def gather(self, piece: bytes | memoryview) -> None:
        """Take in what comes next."""
        self._gathered += piece

    @property
    def is_due(self) -> bool:
        """Whether so much has been gathered that it should be written."""
        return len(self._gathered) >= CHUNK

    def flush(self) -> None:
        """Write what was gathered."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._file is None:
            raise errors.ConflictError(f"writing {self._shown} was given up")
        with _told(self._url):
            view = memoryview(self._gathered)
            while view:
                view = view[self._file.write(view) :]
            view.release()
        self._bytes += len(self._gathered)
        self._gathered = bytearray()
        if self._told is not None:
            self._told(self._bytes)

    def commit(self) -> None:
        """All of it was written: from now on it is there."""
        with self._lock:
            self._flush()
            file, self._file = self._file, None
            assert file is not None
            with _told(self._url):
                try:
                    if self._fresh is not None:
                        os.fsync(file.fileno())
                finally:
                    file.close()
                if self._fresh is not None and self._path is not None:
                    self._fresh.replace(self._path)
                    self._fresh = None
                if self._transaction is not None:
                    transaction, self._transaction = self._transaction, None
                    transaction.complete(commit=True)

    def discard(self) -> None:
        """Leave nothing of it, and what was there before as it was."""
        with self._lock:
            file, self._file = self._file, None
            with contextlib.suppress(Exception):
                if file is not None:
                    file.close()
            if self._fresh is not None:
                self._fresh.unlink(missing_ok=True)
                self._fresh = None
            if self._transaction is not None:
                transaction, self._transaction = self._transaction, None
                with contextlib.suppress(Exception):
                    transaction.complete(commit=False)


def pieces(url: Url, on_progress: OnBytes | None = None) -> Iterator[bytes]:
    """What lies there, from its beginning. Raises as :class:`Target`."""
    path, count = _local(url), 0
    with _told(url):
        if path is not None:
            file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
        else:
            fs, name = _remote(url)
            file = fs.open(name, "rb")
    try:
        while True:
            with _told(url):
                piece = file.read(CHUNK)
            if not piece:
                return
            count += len(piece)
            yield piece
            if on_progress is not None:
                on_progress(count)
    finally:
        with contextlib.suppress(Exception):
            file.close()


def is_repeatable(url: Url) -> bool:
    """Whether :func:`pieces` gives the same again: a pipe is read once."""
    path = _local(url)
    return path is None or not _is_stream(path)


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe, a device or a descriptor, which nothing can be renamed to."""
    if path.parent in (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")):
        return True
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)


def _private(path: str, flags: int) -> int:
    """An archive has a sandbox's memory in it, and its environment."""
    return os.open(path, flags, 0o600)


def _local(url: Url) -> Path | None:
    """The path that it names, or None for another kind of URL."""
    text = os.fspath(url)
    if not text:
        raise errors.InvalidRequestError("the URL is empty")
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return None if "://" in text or "::" in text else Path(text)


def _shown(url: Url) -> str:
    """A URL without what may be secret in it."""
    text = os.fspath(url)
    scheme, found, rest = text.partition("://")
    if not found:
        return text
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def _remote(url: Url) -> tuple[Any, str]:
    """Its file system, ours alone, and its name there."""
    scheme = os.fspath(url).partition("://")[0][:40]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise errors.UnsupportedError(
            f"{scheme}:// needs fsspec, which is not installed here",
            hint="pip install 'forkyard[fsspec]', or use a path and copy the file yourself",
        ) from None
    try:
        # A transaction is a matter of the whole object.
        fs, name = url_to_fs(os.fspath(url), skip_instance_cache=True)
    except ImportError as error:
        raise errors.UnsupportedError(f"{scheme}:// needs another package: {error}") from None
    except ValueError as error:
        raise errors.UnsupportedError(
            f"{scheme}:// is no kind of URL that fsspec knows here: {error}",
            hint="use a path, s3://, gs://, ...",
        ) from None
    return fs, name


@contextlib.contextmanager
def _told(url: Url) -> Iterator[None]:
    """What a place raises, in forkyard's errors."""
    shown = _shown(url)
    try:
        yield
    except errors.ForkyardError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise errors.NotFoundError(f"{shown}: there is no such file or directory") from error
    except IsADirectoryError as error:
        raise errors.InvalidRequestError(f"{shown} is a directory", hint="name a file in it") from error
    except PermissionError as error:
        raise errors.AccessDeniedError(f"{shown}: access was denied") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.CapacityError(f"{shown}: no space is left there", retryable=True) from error
        raise errors.UnavailableError(f"{shown}: {_said(error, url)}", retryable=True) from error
    except Exception as error:
        # Each of fsspec's file systems has errors of its own.
        what = f"{type(error).__name__}: {_said(error, url)}"
        raise errors.UnavailableError(f"{shown}: {what}", retryable=True) from error


def _said(error: Exception, url: Url) -> str:
    """An error's text, without the secrets of the URL that it may cite."""
    text = str(error)
    parts = urlsplit(os.fspath(url))
    for secret in (parts.query, parts.password, parts.username):
        if secret:
            text = text.replace(secret, "***")
    return text
