"""What microVMs are made with on this machine: a QEMU, a kernel with its modules, and KVM or not."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forkyard.engines.qemu import initramfs
from forkyard.errors import UnavailableError, UnsupportedError
from forkyard.host import process
from forkyard.host.files import sha256_file, write_atomic

__all__ = ["KERNEL", "Kit", "load_kit", "probe_version", "write_kit"]

Accelerator = Literal["kvm", "tcg"]
RECORD = "kit.json"
KERNEL = "vmlinuz"
OLDEST = (7, 2)


@dataclass(frozen=True)
class Kit:
    """See the module.

    Attributes:
        dir: Holds the kernel and ``modules/``; perhaps another home's.
        cache: Where initial file systems are kept.
        accel: What runs the guest's code: the CPU itself, or QEMU's translator.
        kernel: Name of the kernel's release.
    """

    dir: Path
    qemu: Path
    version: str
    accel: Accelerator
    kernel: str
    cache: Path

    @functools.cached_property
    def digest(self) -> str:
        """Names QEMU and kernel by their content."""
        parts = [sha256_file(self.qemu), sha256_file(self.dir / KERNEL)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]

    @property
    def modules(self) -> list[Path]:
        """Those that the kernel has as files, in the order in which they are loaded."""
        paths = [self.dir / "modules" / f"{name}.ko" for name in initramfs.MODULES]
        return [path for path in paths if path.exists()]

    def initrd(self, agent: Path) -> Path:
        """The initial file system with that agent, made if it is not there."""
        digest = hashlib.sha256(sha256_file(agent).encode())
        for module in self.modules:
            digest.update(sha256_file(module).encode())
        path = self.cache / f"initrd-{digest.hexdigest()[:16]}"
        if not path.exists():
            write_atomic(path, initramfs.build(agent, self.modules), durable=False)
        return path


def load_kit(directory: Path) -> Kit:
    """The kit that set-up left in ``directory``.

    Raises:
        UnavailableError: there is none, or QEMU has changed since.
    """
    hint = "forkyard setup --engine qemu"
    try:
        record = json.loads((directory / RECORD).read_text())
        info = os.stat(record["qemu"])
        known = (record["size"], record["mtime"])
        place = Path(record.get("dir") or directory)
        qemu = Path(record["qemu"])
        kit = Kit(place, qemu, record["version"], record["accel"], record["kernel"], directory)
    except FileNotFoundError:
        raise UnavailableError("microVMs are not set up here", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"{directory / RECORD} cannot be used: {error}", hint=hint) from None
    if known != (info.st_size, info.st_mtime):
        raise UnavailableError(f"{kit.qemu} has changed since microVMs were set up", hint=hint)
    return kit


def write_kit(kit: Kit, directory: Path) -> None:
    """Record a kit in ``directory``, where its own may be another home's."""
    info = kit.qemu.stat()
    record = {
        "qemu": str(kit.qemu),
        "version": kit.version,
        "accel": kit.accel,
        "kernel": kit.kernel,
        "dir": str(kit.dir),
        "size": info.st_size,
        "mtime": info.st_mtime,
    }
    write_atomic(directory / RECORD, json.dumps(record, indent=1) + "\n", mode=0o644)


async def probe_version(qemu: Path) -> str:
    """The version of a QEMU.

    Raises:
        UnsupportedError: it is older than 7.2, or no QEMU.
    """
    done = await process.run([str(qemu), "--version"], timeout_s=20)
    words = done.stdout.decode("utf-8", "replace").split()
    version = words[words.index("version") + 1] if "version" in words[:-1] else ""
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        numbers = ()
    if numbers < OLDEST:
        raise UnsupportedError(
            f"{qemu} is version {version or 'unknown'}; microVMs need {'.'.join(map(str, OLDEST))}",
            hint="install qemu-system-x86 of Debian 12 or later",
        )
    return version
