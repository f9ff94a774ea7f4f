"""Unpacks image layers, in order, into a root directory: ``python -m forkyard.oci.unpack <job.json``.

It changes its root to the directory first: whatever a layer's paths and links say, they lead to
nothing outside. Whiteouts (``.wh.name``) and opaque marks (``.wh..wh..opq``) act on what earlier
layers left; on an overlay's merged root that becomes the overlay's own whiteouts. Numeric owners,
modes, times, extended attributes and hard links are kept; devices are left out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from typing import IO, Any

__all__ = ["Unpacker", "complete", "main"]

_BLOCK = 1 << 20
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_META = ".wh..wh."
_ZSTD = b"\x28\xb5\x2f\xfd"
_XATTR = "SCHILY.xattr."
# An image's word must not become an overlay's.
_REFUSED = ("trusted.overlay.", "user.overlay.", "user.forkyard.")
_SHOWN = 20
# No image is so deep; what is deeper is to cost whoever unpacks it, and removes it, its stack.
_DEEPEST = 256


class Unpacker:
    """Unpacks layers into the current root directory; call :meth:`layer` for each, lowest first.

    Attributes:
        entries, bytes: What was unpacked.
        skipped: Names that were left out, the first few.
    """

    def __init__(self, *, digest: bool = False) -> None:
        self.entries = 0
        self.bytes = 0
        self.skipped: list[str] = []
        self._skips = 0
        self._lines: list[bytes] | None = [] if digest else None
        self._fresh: set[str] = set()
        self._known: set[str] = set()
        self._directories: list[tuple[str, tarfile.TarInfo]] = []

    def digest(self) -> str:
        """Of names, kinds, modes and contents of all that was unpacked; not of times and owners."""
        return hashlib.sha256(b"".join(sorted(self._lines or []))).hexdigest()

    def layer(self, file: IO[bytes], mode: str) -> None:
        """Unpack one layer, a tar archive that tarfile opens with ``mode``."""
        self._fresh.clear()
        self._known.clear()
        self._directories.clear()
        with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
            for member in tar:
                self._put(tar, member)
                if mode.startswith("r:"):
                    tar.members = []  # else it remembers every one
        for path, member in reversed(self._directories):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    os.utime(path, (member.mtime, member.mtime))

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if ".." in parts:
            self._skip(member.name)
            return
        if len(parts) > _DEEPEST:
            raise tarfile.TarError(f"{member.name[:80]}... lies {len(parts)} directories deep")
        path = "/".join(parts) or "."
        if parts and parts[-1].startswith(_WHITEOUT):
            self._whiteout("/".join(parts[:-1]) or ".", parts[-1])
            return
        if len(parts) > 1:
            self._parent("/".join(parts[:-1]))
        content = b""
        if member.isdir():
            self._directory(path)
            self._directories.append((path, member))
        elif member.isreg():
            self._clear(path)
            content = self._file(tar, path, member)
        elif member.issym():
            self._clear(path)
            os.symlink(member.linkname, path)
            content = member.linkname.encode("utf-8", "surrogateescape")
        elif member.islnk():
            self._link(path, member)
            content = b"=" + member.linkname.encode("utf-8", "surrogateescape")
        elif member.isfifo():
            self._clear(path)
            os.mkfifo(path)
        else:
            self._skip(member.name)
            return
        self._fresh.add(path)
        self.entries += 1
        if not member.islnk():
            self._dress(path, member)
        if self._lines is not None:
            mode = b"%o" % (member.mode & 0o7777) if not member.issym() else b"-"
            name = path.encode("utf-8", "surrogateescape")
            self._lines.append(b"\0".join((name, member.type, mode, content)) + b"\n")

    def _skip(self, name: str) -> None:
        self._skips += 1
        if self._skips <= _SHOWN:
            self.skipped.append(name)

    # -- making room

    def _parent(self, path: str) -> None:
        """Make the directory that an entry lies in, if no entry made it."""
        if path in self._known:
            return
        try:
            there = stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if not there:
            above = os.path.dirname(path)
            if above:
                self._parent(above)
            self._clear(path)
            os.mkdir(path, 0o755)
        while path and path not in self._known:
            self._known.add(path)
            self._fresh.add(path)
            path = os.path.dirname(path)

    def _directory(self, path: str) -> None:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                return
        except FileNotFoundError:
            pass
        else:
            self._clear(path)
        os.mkdir(path, 0o755)

    def _clear(self, path: str) -> None:
        """Remove what is at ``path``."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
            self._known.clear()
            shutil.rmtree(path)
        else:
            # It may have been a link that led to directories.
            if path in self._known:
                self._known.clear()

    def _whiteout(self, parent: str, name: str) -> None:
        if name == _OPAQUE:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._clear_older(parent)
        elif not name.startswith(_META):
            path = name.removeprefix(_WHITEOUT)
            path = path if parent == "." else f"{parent}/{path}"
            with contextlib.suppress(NotADirectoryError):
                if path not in self._fresh:
                    self._clear(path)
                elif stat.S_ISDIR(os.lstat(path).st_mode):
                    self._clear_older(path)

    def _clear_older(self, directory: str) -> None:
        """Remove what earlier layers left in a directory."""
        for name in os.listdir(directory):
            path = name if directory == "." else f"{directory}/{name}"
            if path not in self._fresh:
                self._clear(path)
            elif stat.S_ISDIR(os.lstat(path).st_mode):
                self._clear_older(path)

    # -- the kinds

    def _file(self, tar: tarfile.TarFile, path: str, member: tarfile.TarInfo) -> bytes:
        source = tar.extractfile(member)
        assert source is not None
        digest = hashlib.sha256() if self._lines is not None else None
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = member.size
            while left:
                data = source.read(min(_BLOCK, left))
                if not data:
                    raise EOFError(f"{member.name} ends early")
                left -= len(data)
                if digest is not None:
                    digest.update(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        self.bytes += member.size
        return digest.digest() if digest is not None else b""

    def _link(self, path: str, member: tarfile.TarInfo) -> None:
        target = "/".join(part for part in member.linkname.split("/") if part not in ("", "."))
        if target == path:
            return
        self._clear(path)
        os.link(target, path, follow_symlinks=False)

    def _dress(self, path: str, member: tarfile.TarInfo) -> None:
        """Owner, mode, attributes and times, in the order that keeps them."""
        with contextlib.suppress(PermissionError):
            os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR):
                self._attribute(path, key.removeprefix(_XATTR), value)
        if not member.isdir():
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _attribute(self, path: str, name: str, value: str) -> None:
        if name.startswith(_REFUSED):
            return
        raw = value.encode("utf-8", "surrogateescape")
        try:
            os.setxattr(path, name, raw, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EINVAL):
                raise
            self._skip(f"{path}: {name}")


# -- what every root needs


def complete(*, user: str, workdir: str, dns: str | None) -> dict[str, Any]:
    """Make what a sandbox needs in a root and an image may lack.

    Args:
        user: The image's USER (``name``, ``uid`` or either with ``:group``); its own ``/workspace``
            and working directory are made for it where they are missing.
        dns: Content of ``/etc/resolv.conf``, which in an image is whatever its builder had.

    Returns:
        ``{"uid", "gid"}`` of the user.

    Raises:
        LookupError: the root has no such user or group.
    """
    uid, gid = _ids(user)
    for path, mode in (("proc", 0o555), ("sys", 0o555), ("dev", 0o755), (".forkyard", 0o755), ("run", 0o755),
                       ("tmp", 0o1777), ("var/tmp", 0o1777), ("etc", 0o755)):  # fmt: skip
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
    for path in ("/workspace", workdir):
        if not os.path.isdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.makedirs(path)
            os.chown(path, uid, gid)
    if dns is not None:
        _replace("etc/resolv.conf", dns)
        if not os.path.exists("etc/hosts") or not os.path.getsize("etc/hosts"):
            _replace("etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
    return {"uid": uid, "gid": gid}


def _replace(path: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o644)


def _ids(user: str) -> tuple[int, int]:
    name, _, group = user.partition(":")
    uid, gid = 0, 0
    if name.isdigit():
        uid = int(name)
        gid = next((int(row[3]) for row in _rows("etc/passwd", 4) if row[2] == name), 0)
    elif name not in ("", "root"):
        row = next((row for row in _rows("etc/passwd", 4) if row[0] == name), None)
        if row is None:
            raise LookupError(f"the image's USER {user!r} is not in its /etc/passwd")
        uid, gid = int(row[2]), int(row[3])
    if group.isdigit():
        gid = int(group)
    elif group:
        row = next((row for row in _rows("etc/group", 3) if row[0] == group), None)
        if row is None:
            raise LookupError(f"the group of the image's USER {user!r} is not in its /etc/group")
        gid = int(row[2])
    return uid, gid


def _rows(path: str, least: int) -> list[list[str]]:
    try:
        with open(path, errors="replace") as file:
            rows = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []
    return [row for row in rows if len(row) >= least and row[2].isdigit()]


# -- the program


def _open(path: str) -> tuple[IO[bytes], str]:
    """A layer's file and how tarfile should open it, whatever compressed it."""
    file = open(path, "rb", buffering=_BLOCK)  # noqa: SIM115
    magic = file.read(4)
    file.seek(0)
    if magic == _ZSTD:
        unzip = subprocess.Popen(["zstd", "-dcq"], stdin=file, stdout=subprocess.PIPE, bufsize=_BLOCK)
        assert unzip.stdout is not None
        return unzip.stdout, "r|"
    if magic[:2] == b"\x1f\x8b" or magic[:3] == b"BZh" or magic == b"\xfd7zX":
        return file, "r|*"
    return file, "r:"


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do what ``job`` says: ``root``, ``layers`` (paths, lowest first), ``digest``, ``complete``."""
    files = [_open(path) for path in job["layers"]]
    os.chroot(job["root"])
    os.chdir("/")
    os.umask(0o022)
    unpacker = Unpacker(digest=bool(job.get("digest")))
    for file, mode in files:
        unpacker.layer(file, mode)
        file.close()
    done: dict[str, Any] = {"entries": unpacker.entries, "bytes": unpacker.bytes, "skipped": unpacker.skipped}
    if job.get("digest"):
        done["digest"] = unpacker.digest()
    if job.get("complete") is not None:
        done |= complete(**job["complete"])
    return done


def main(argv: Iterable[str] = ()) -> int:
    """Exit code 1 and one line on stderr if the layers cannot be unpacked."""
    # After the change of root nothing more can be imported.
    io.BytesIO(b"").read()
    "x".encode("idna")
    try:
        print(json.dumps(run(json.load(sys.stdin))))
    except (tarfile.TarError, EOFError, LookupError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
