"""A second home: the engine and the base template of a ready one, used where they lie.

Tests, demonstrations and users without patience get a home of their own in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from forkyard.config import Settings
from forkyard.engines.qemu import load_kit
from forkyard.engines.qemu.kit import write_kit
from forkyard.errors import ConflictError, UnavailableError
from forkyard.host import mounts
from forkyard.host.files import rmtree, write_atomic
from forkyard.setup import runsc
from forkyard.setup.templates import layer_paths, read_template, write_template
from forkyard.store.disks import DiskStore
from forkyard.store.loopfile import GIB, LoopFile

__all__ = ["SYSTEM_HOME", "find_lender", "quick_setup"]

SYSTEM_HOME = Path("/var/lib/forkyard")

# Descriptors that keep other homes' stores mounted for as long as this process lives.
_PINS: dict[Path, int] = {}


def find_lender(settings: Settings) -> Path | None:
    """The ready home whose engine and base this one uses, or None."""
    if settings.runsc is not None:
        return None
    other = settings.base_from or SYSTEM_HOME
    if os.path.realpath(other) == os.path.realpath(settings.home):
        return None
    own = read_template(settings.home, "base")
    if own is not None and own.get("from") != str(other):
        return None
    if runsc.read_engine(other) is None or read_template(other, "base") is None:
        return None
    return other


async def quick_setup(settings: Settings) -> bool:
    """Make a home ready in well under a second by using a ready one's engine and base, read-only.

    The daemon calls this, with its home's lock held, before it opens its yard; in a home
    that is set up by itself it does nothing. It also mounts the other home's store if that is not, as
    after a reboot, and keeps it mounted while this process lives.

    Returns:
        Whether the home uses another's engine and base.
    """
    other = find_lender(settings)
    if other is None:
        return False
    await _mount_store(other, settings)
    home = settings.home
    engine = runsc.read_engine(other)
    template = read_template(other, "base")
    assert engine is not None and template is not None
    paths = layer_paths(other, template["layers"])
    if not all(path.is_dir() for path in paths):
        return False
    (home / "engine").mkdir(parents=True, exist_ok=True)
    if runsc.read_engine(home) is None or runsc.read_engine(home) != engine:
        write_atomic(runsc.engine_file(home), json.dumps(engine, indent=1) + "\n", mode=0o644)
    _borrow_microvms(other, home)
    _copy_warm_images(other, home)
    mine = read_template(home, "base")
    if mine is not None and mine["key"] == template["key"]:
        return True
    disks = DiskStore(home, settings)
    await disks.open()
    try:
        for layer, path in zip(template["layers"], paths, strict=True):
            with contextlib.suppress(ConflictError):
                await disks.reference_layer(layer, path)
    finally:
        await disks.close(unmount=False)
    write_template(home, template | {"from": str(other)})
    return True


def _borrow_microvms(other: Path, home: Path) -> None:
    """Use the other home's QEMU and kernel, if it has any and this one none of its own."""
    own = home / "engine" / "qemu"
    with contextlib.suppress(UnavailableError):
        kit = load_kit(other / "engine" / "qemu")
        with contextlib.suppress(UnavailableError):
            load_kit(own)
            return
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_kit(kit, own)


def _copy_warm_images(other: Path, home: Path) -> None:
    """Take over the memory images of templates: a megabyte each, and named by all that they depend on."""
    for image in (other / "images").glob("warm-*"):
        target = home / "images" / image.name
        try:
            manifest = json.loads((image / "manifest.json").read_bytes())
        except (OSError, ValueError):
            continue
        if manifest["layers"] or target.exists():
            continue  # those of a warm command need a disk of that home's own
        target.parent.mkdir(mode=0o700, exist_ok=True)
        # The name of what a crash may leave and the daemon removes.
        scratch = target.with_name(f"{image.name}.tmp")
        rmtree(scratch)
        try:
            shutil.copytree(image, scratch)
            scratch.rename(target)
        except OSError:
            # Gone meanwhile, or no room: the first start is a cold boot then.
            rmtree(scratch)


async def _mount_store(home: Path, settings: Settings) -> None:
    store = home / "store"
    image = home / "store.img"
    if image.exists() and not mounts.is_mount(store):
        await LoopFile(image, store, settings.store_gb * GIB).ensure()
    if home not in _PINS:
        _PINS[home] = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
