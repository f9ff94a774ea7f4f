"""The toy's file tree: real files below the box's root directory, owned by the toy's users.

A process without root cannot give files away, so owners and modes are kept beside the files
in ``.owners`` and enforced here. The host's own mode always lets the host in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from forkyard.wire import Packer

OWNERS = ".owners"
MAX_LINKS = 40


class Who(NamedTuple):
    """The rights of a process."""

    uid: int
    gid: int


ROOT = Who(0, 0)


class Attributes(NamedTuple):
    uid: int
    gid: int
    mode: int


def fault(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def describe(tree: Tree, path: str) -> bytes:
    """A file's attributes as the wire has them."""
    if path in tree.virtual:
        return Packer().u32(stat.S_IFREG | 0o444).u32(0).u32(0).u64(0).u64(0).str(b"").done()
    info = os.lstat(tree.host(path))
    have = tree.attributes(path)
    mode = stat.S_IFMT(info.st_mode) | have.mode
    target = os.readlink(tree.host(path)) if stat.S_ISLNK(mode) else b""
    p = Packer().u32(mode).u32(have.uid).u32(have.gid).u64(info.st_size).u64(info.st_mtime_ns)
    return p.str(target).done()


class Tree:
    """Files by absolute guest path (``str`` with one character a byte). Errors are OSErrors."""

    def __init__(self, root: Path, virtual: dict[str, Callable[[], bytes]]) -> None:
        self.root = os.fsencode(root)
        self.virtual = virtual
        self._owners: dict[str, Attributes] = {}
        with contextlib.suppress(FileNotFoundError):
            raw = (root / OWNERS).read_bytes()
            self._owners = msgspec.msgpack.decode(raw, type=dict[str, Attributes])

    def flush(self) -> None:
        """Write the owners out: with that the disk is whole."""
        with open(self.root + b"/" + OWNERS.encode(), "wb") as file:
            file.write(msgspec.msgpack.encode(self._owners))

    # -- names

    def host(self, path: str) -> bytes:
        return self.root + path.encode("latin-1")

    def resolve(self, path: str, cwd: str, who: Who, *, follow: bool = True) -> str:
        """The path without links, dots and double slashes; the last component need not exist."""
        done = ""
        todo = [part for part in (path if path.startswith("/") else f"{cwd}/{path}").split("/") if part]
        links = 0
        while todo:
            part = todo.pop(0)
            if part == ".":
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            if len(part) > 255:
                raise fault(errno.ENAMETOOLONG)
            self._search(done or "/", who)
            here = f"{done}/{part}"
            if here == f"/{OWNERS}":
                raise fault(errno.ENOENT)
            try:
                mode = os.lstat(self.host(here)).st_mode
            except FileNotFoundError:
                if todo and here not in self._virtual_dirs():
                    raise
                done = here
                continue
            if stat.S_ISLNK(mode) and (todo or follow):
                links += 1
                if links > MAX_LINKS:
                    raise fault(errno.ELOOP)
                target = os.readlink(self.host(here)).decode("latin-1")
                if target.startswith("/"):
                    done = ""
                todo = [word for word in target.split("/") if word] + todo
                continue
            if todo and not stat.S_ISDIR(mode):
                raise fault(errno.ENOTDIR)
            done = here
        if path.endswith("/") and done and not self.is_dir(done):
            raise fault(errno.ENOTDIR)
        return done or "/"

    def resolve_new(self, path: str, cwd: str, who: Who) -> str:
        """As :meth:`resolve`, of a path of which only the beginning may exist."""
        try:
            return self.resolve(path, cwd, who)
        except FileNotFoundError:
            above, _, name = path.rstrip("/").rpartition("/")
            return f"{self.resolve_new(above or '/', cwd, who).rstrip('/')}/{name}"

    def _virtual_dirs(self) -> set[str]:
        found = set()
        for name in self.virtual:
            while name:
                name = name.rpartition("/")[0]
                found.add(name)
        return found

    # -- rights

    def attributes(self, path: str) -> Attributes:
        mode = os.lstat(self.host(path)).st_mode
        kept = self._owners.get(path)
        if kept is None:
            return Attributes(0, 0, stat.S_IMODE(mode))
        return kept

    def set(self, path: str, *, uid: int = -1, gid: int = -1, mode: int = -1) -> None:
        old = self.attributes(path)
        link = os.path.islink(self.host(path))
        self._owners[path] = Attributes(
            old.uid if uid in (-1, 0xFFFFFFFF) else uid,
            old.gid if gid in (-1, 0xFFFFFFFF) else gid,
            old.mode if mode == -1 else mode,
        )
        if mode != -1 and not link:
            os.chmod(self.host(path), mode | (0o700 if self.is_dir(path) else 0o600))

    def may(self, path: str, who: Who, want: int) -> bool:
        """``want`` is 4 to read, 2 to write, 1 to execute or search."""
        have = self.attributes(path)
        if who.uid == 0:
            return want != 1 or self.is_dir(path) or bool(have.mode & 0o111)
        shift = 6 if who.uid == have.uid else 3 if who.gid == have.gid else 0
        return (have.mode >> shift) & want == want

    def check(self, path: str, who: Who, want: int) -> None:
        if not self.may(path, who, want):
            raise fault(errno.EACCES)

    def _search(self, directory: str, who: Who) -> None:
        if directory != "/" and not os.path.exists(self.host(directory)):
            return  # one of the virtual ones
        self.check(directory, who, 1)

    def check_parent(self, path: str, who: Who) -> None:
        parent = path.rpartition("/")[0] or "/"
        if not self.is_dir(parent):
            raise fault(errno.ENOENT if not os.path.lexists(self.host(parent)) else errno.ENOTDIR)
        self.check(parent, who, 3)
        have = self.attributes(parent)
        sticky = have.mode & 0o1000 and who.uid not in (0, have.uid)
        if sticky and self.exists(path) and self.attributes(path).uid != who.uid:
            raise fault(errno.EPERM)

    # -- questions

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.host(path))

    def is_dir(self, path: str) -> bool:
        return stat.S_ISDIR(os.lstat(self.host(path)).st_mode) if self.exists(path) else False

    def is_file(self, path: str) -> bool:
        return stat.S_ISREG(os.lstat(self.host(path)).st_mode) if self.exists(path) else False

    def list(self, path: str, who: Who) -> list[str]:
        self.check(path, who, 4)
        found = [name.decode("latin-1") for name in os.listdir(self.host(path))]
        return sorted(name for name in found if name != OWNERS or path != "/")

    # -- content

    def read(self, path: str, offset: int, size: int) -> bytes:
        if path in self.virtual:
            data = self.virtual[path]()
            return data[offset : offset + size]
        with open(self.host(path), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def open(self, path: str, who: Who, *, write: bool, create: bool = False, truncate: bool = False) -> None:
        """Check that ``path`` (resolved) may be opened so, and make it if need be."""
        if path in self.virtual:
            return
        if not self.exists(path):
            if not create:
                raise fault(errno.ENOENT)
            self.check_parent(path, who)
            with open(self.host(path), "xb"):
                pass
            self.set(path, uid=who.uid, gid=who.gid, mode=0o644)
            return
        if self.is_dir(path) and write:
            raise fault(errno.EISDIR)
        self.check(path, who, 2 if write else 4)
        if truncate:
            with open(self.host(path), "r+b") as file:
                file.truncate()

    def write(self, path: str, offset: int | None, data: bytes) -> int:
        """Write at ``offset``, or at the end; where the next write goes."""
        with open(self.host(path), "r+b") as file:
            file.seek(0, os.SEEK_END) if offset is None else file.seek(offset)
            file.write(data)
            return file.tell()

    def replace(self, path: str, data: bytes, who: Who, mode: int | None) -> None:
        """Put a whole new content in the place of a file."""
        old = self.attributes(path) if self.exists(path) else None
        if old is None:
            self.check_parent(path, who)
        elif self.is_dir(path):
            raise fault(errno.EISDIR)
        else:
            self.check(path, who, 2)
        temporary = self.host(path.rpartition("/")[0] + "/.new")
        with open(temporary, "wb") as file:
            file.write(data)
        os.rename(temporary, self.host(path))
        owner = old or Attributes(who.uid, who.gid, 0o644)
        self.set(path, uid=owner.uid, gid=owner.gid, mode=owner.mode if mode is None else mode)

    # -- names that come and go

    def mkdir(self, path: str, who: Who, mode: int) -> None:
        if self.exists(path):
            raise fault(errno.EEXIST)
        self.check_parent(path, who)
        os.mkdir(self.host(path))
        self.set(path, uid=who.uid, gid=who.gid, mode=mode & ~0o022)

    def make_parents(self, path: str, who: Who) -> None:
        parent = path.rpartition("/")[0]
        if not parent or self.is_dir(parent):
            return
        if self.exists(parent):
            raise fault(errno.ENOTDIR)
        self.make_parents(parent, who)
        self.mkdir(parent, who, 0o777)

    def symlink(self, path: str, target: str, who: Who) -> None:
        if self.exists(path):
            raise fault(errno.EEXIST)
        self.check_parent(path, who)
        os.symlink(target.encode("latin-1"), self.host(path))
        self.set(path, uid=who.uid, gid=who.gid)

    def rename(self, path: str, to: str, who: Who) -> None:
        self.check_parent(path, who)
        self.check_parent(to, who)
        os.rename(self.host(path), self.host(to))
        for name in [name for name in self._owners if name == to or name.startswith(f"{to}/")]:
            del self._owners[name]
        for name in [name for name in self._owners if name == path or name.startswith(f"{path}/")]:
            self._owners[to + name[len(path) :]] = self._owners.pop(name)

    def remove(self, path: str, who: Who, *, recursive: bool) -> None:
        if not self.exists(path):
            raise fault(errno.ENOENT)
        self.check_parent(path, who)
        if not self.is_dir(path):
            os.unlink(self.host(path))
        elif recursive:
            shutil.rmtree(self.host(path))
        else:
            os.rmdir(self.host(path))
        for name in [name for name in self._owners if name == path or name.startswith(f"{path}/")]:
            del self._owners[name]
