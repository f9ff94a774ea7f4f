"""What a store of disks needs of the filesystem below it, twice: on btrfs, and on anything else.

A *volume* is a directory that can be sealed whole. All methods block and are called in threads,
except :meth:`usage`, :meth:`dirty` and :meth:`limit`, which take tens of microseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Literal, Protocol

from forkyard.errors import InternalError
from forkyard.host import files
from forkyard.host.process import find_program
from forkyard.store.btrfs import QuotaKind, Volume, subvolume_id

__all__ = ["DISK_IMAGE", "Backend", "BtrfsBackend", "PlainBackend"]

# In a volume whose machine has a disk of its own, and no tree in ``up``.
DISK_IMAGE = "disk.img"


class Backend(Protocol):
    """See the module. ``tmp`` is a directory on the same filesystem whose content nobody owns."""

    kind: Literal["btrfs", "plain"]
    quota: QuotaKind

    def create(self, path: Path, parent: Path | None = None, *, go_on: bool = False) -> None:
        """Make a volume with an empty ``up`` and ``wk``, for use above the sealed one ``parent``;
        with ``go_on`` its ``up`` begins as a copy of the parent's, to be used in its place."""
        ...

    def seal(self, source: Path, target: Path) -> None:
        """Make ``target`` a read-only volume with what ``source`` holds now; whole or not at all."""
        ...

    def delete(self, path: Path) -> None:
        """Remove a volume, sealed or not. Nothing there is fine."""
        ...

    def write_out(self, path: Path) -> None:
        """Write what is dirty in a volume while it is in use."""
        ...

    def set_limit(self, path: Path, limit_bytes: int | None) -> None:
        """Limit what is charged to a volume (no effect without quotas)."""
        ...

    def limit(self, path: Path) -> int | None:
        """The limit in force, or None."""
        ...

    def usage(self, path: Path) -> int | None:
        """Bytes charged to a volume, or None if nothing counts them."""
        ...

    def dirty(self, path: Path) -> int | None:
        """Bytes of a volume that are still to be written, or None if nothing counts them."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can still be written."""
        ...

    def reclaim(self) -> None:
        """Hurry the return of deleted space."""
        ...

    def close(self) -> None:
        """Let go of the filesystem."""
        ...


class BtrfsBackend:
    """Volumes are subvolumes. ``tmp`` lies on the same filesystem."""

    kind: Literal["btrfs", "plain"] = "btrfs"

    def __init__(self, volume: Volume, tmp: Path) -> None:
        self.volume = volume
        self.quota: QuotaKind = volume.quota
        self.tmp = tmp

    def create(self, path: Path, parent: Path | None = None, *, go_on: bool = False) -> None:
        # Each subvolume counts inodes for itself, and an overlay takes all subvolumes of a
        # filesystem for one: two files of two layers with one number would be one file to
        # whoever goes by numbers, as gVisor does. A successor counts on from its parent.
        if parent is None:
            self.volume.create(path)
        else:
            self.volume.snapshot(parent, path, read_only=False)
        try:
            files.rmtree(path / "wk")
            if parent is not None and not go_on:
                old = path / "old"
                old.mkdir(mode=0o700, exist_ok=True)
                # Renamed, not removed: it costs nothing, and keeps the highest number in use.
                os.rename(path / "up", old / str(len(os.listdir(old))))
            (path / "up").mkdir(mode=0o755, exist_ok=go_on)
            (path / "wk").mkdir(mode=0o700)
        except BaseException:
            self.volume.delete(path)
            raise

    def seal(self, source: Path, target: Path) -> None:
        self.volume.snapshot(source, target, read_only=True)

    def delete(self, path: Path) -> None:
        try:
            self.volume.delete(path)
        except FileNotFoundError:
            return
        except OSError as error:
            # a plain directory, left by an interrupted move or made by hand
            if error.errno not in (errno.EINVAL, errno.ENOTDIR):
                raise
            files.rmtree(path)

    def write_out(self, path: Path) -> None:
        # A snapshot writes this one subvolume; syncfs would wait for what all the others have dirty.
        name = self.tmp / f"sync-{secrets.token_hex(8)}"
        self.volume.snapshot(path, name, read_only=True)
        self.volume.delete(name)

    def set_limit(self, path: Path, limit_bytes: int | None) -> None:
        self.volume.set_limit(subvolume_id(path), limit_bytes)

    def limit(self, path: Path) -> int | None:
        return None if self.quota == "none" else self.volume.limit(subvolume_id(path))

    def usage(self, path: Path) -> int | None:
        return None if self.quota == "none" else self.volume.usage(subvolume_id(path))

    def dirty(self, path: Path) -> int | None:
        return None if self.quota == "none" else self.volume.dirty(subvolume_id(path))

    def free_bytes(self) -> int:
        return self.volume.free_bytes()

    def reclaim(self) -> None:
        self.volume.sync()

    def close(self) -> None:
        self.volume.close()


class PlainBackend:
    """Volumes are directories, and a seal copies (sharing blocks where the filesystem can)."""

    kind: Literal["btrfs", "plain"] = "plain"
    quota: QuotaKind = "none"

    def __init__(self, root: Path, tmp: Path) -> None:
        self.root = root
        self.tmp = tmp

    def create(self, path: Path, parent: Path | None = None, *, go_on: bool = False) -> None:
        path.mkdir(mode=0o700)
        (path / "wk").mkdir(mode=0o700)
        if go_on and parent is not None:
            self._copy_all(parent, path)
        else:
            (path / "up").mkdir(mode=0o755)

    def _copy_all(self, volume: Path, into: Path) -> None:
        self._copy(volume / "up", into)
        if (volume / DISK_IMAGE).exists():
            self._copy(volume / DISK_IMAGE, into)

    def _copy(self, source: Path, into: Path) -> None:
        argv = [find_program("cp"), "-a", "--reflink=auto", "--", f"{source}", f"{into}/"]
        done = subprocess.run(argv, capture_output=True, process_group=0)
        if done.returncode != 0:
            words = done.stderr.decode("utf-8", "replace").strip()[-500:]
            if "No space left" in words or "quota" in words:
                raise OSError(errno.ENOSPC, words)
            raise InternalError(f"copying the disk failed: {words}")

    def seal(self, source: Path, target: Path) -> None:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        copy = self.tmp / f"seal-{secrets.token_hex(8)}"
        copy.mkdir(mode=0o700)
        try:
            self._copy_all(source, copy)
            with contextlib.ExitStack() as stack:
                fd = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                files.syncfs(fd)
            os.rename(copy, target)
        except BaseException:
            files.rmtree(copy)
            raise
        files.fsync_dir(target.parent)

    def delete(self, path: Path) -> None:
        trash = self.tmp / f"gone-{secrets.token_hex(8)}"
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return
        files.rmtree(trash)

    def write_out(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            files.syncfs(fd)
        finally:
            os.close(fd)

    def set_limit(self, path: Path, limit_bytes: int | None) -> None:
        pass

    def limit(self, path: Path) -> int | None:
        return None

    def usage(self, path: Path) -> int | None:
        return None

    def dirty(self, path: Path) -> int | None:
        return None

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def reclaim(self) -> None:
        pass

    def close(self) -> None:
        pass
