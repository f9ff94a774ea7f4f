"""Packs a sealed overlay layer as an image layer: ``python -m forkyard.oci.pack LAYER ARCHIVE``.

An overlay's whiteouts and opaque marks become those of an image. Prints the archive's SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tarfile
from typing import IO

__all__ = ["main", "pack"]

_BLOCK = 1 << 20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_SKIPPED = ("trusted.", "user.overlay.", "user.forkyard.", "system.")


class _Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size


def pack(layer: str, archive: IO[bytes]) -> str:
    """Write ``layer`` (a directory) as a tar archive; returns the hex digest of it."""
    out = _Hashed(archive)
    links: dict[int, str] = {}
    tar = tarfile.TarFile(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, copybufsize=_BLOCK)  # type: ignore[arg-type]
    with tar:
        _directory(tar, layer, "", links)
    return out.digest.hexdigest()


def _directory(tar: tarfile.TarFile, path: str, prefix: str, links: dict[int, str]) -> None:
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        info = entry.stat(follow_symlinks=False)
        name = prefix + entry.name
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            tar.addfile(tarfile.TarInfo(f"{prefix}.wh.{entry.name}"))
            continue
        member = tarfile.TarInfo(name)
        member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
        member.mtime = int(info.st_mtime)
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            _attributes(entry.path, member)
            tar.addfile(member)
            if _is_opaque(entry.path):
                tar.addfile(tarfile.TarInfo(f"{name}/.wh..wh..opq"))
            _directory(tar, entry.path, f"{name}/", links)
        elif info.st_nlink > 1 and info.st_ino in links:
            member.type, member.linkname = tarfile.LNKTYPE, links[info.st_ino]
            tar.addfile(member)
        elif stat.S_ISREG(info.st_mode):
            links[info.st_ino] = name
            member.size = info.st_size
            _attributes(entry.path, member)
            with open(entry.path, "rb") as file:
                tar.addfile(member, file)
        elif stat.S_ISLNK(info.st_mode):
            links[info.st_ino] = name
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
            tar.addfile(member)
        elif stat.S_ISFIFO(info.st_mode):
            member.type = tarfile.FIFOTYPE
            tar.addfile(member)


def _attributes(path: str, member: tarfile.TarInfo) -> None:
    for name in os.listxattr(path, follow_symlinks=False):
        if not name.startswith(_SKIPPED):
            value = os.getxattr(path, name, follow_symlinks=False)
            text = value.decode("utf-8", "surrogateescape")
            member.pax_headers = {**member.pax_headers, f"SCHILY.xattr.{name}": text}


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
    return False


def main() -> int:
    layer, archive = sys.argv[1:]
    with open(archive, "wb", buffering=_BLOCK) as file:
        digest = pack(layer, file)
    print(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
