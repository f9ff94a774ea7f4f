"""The first file system of a microVM: the guest agent as its init, and the kernel's modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["MODULES", "build"]

# In the order in which they are loaded; a kernel that has one built in lacks its file.
MODULES = ("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console")

_DIRECTORY, _FILE, _DEVICE = 0o040755, 0o100755, 0o020600


def build(agent: Path, modules: Iterable[Path]) -> bytes:
    """An archive that the kernel unpacks (cpio's newc format, not compressed)."""
    archive = bytearray()
    archive += _entry("dev", _DIRECTORY)
    archive += _entry("dev/console", _DEVICE, device=(5, 1))
    archive += _entry("init", _FILE, agent.read_bytes())
    archive += _entry("modules", _DIRECTORY)
    for number, module in enumerate(modules):
        archive += _entry(f"modules/{number}.ko", _FILE, module.read_bytes())
    archive += _entry("TRAILER!!!", 0)
    return bytes(archive)


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    raw = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(head + raw) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
