"""The store's file is never written through two loop devices."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from forkyard.host import mounts
from forkyard.store.disks import DiskStore

pytestmark = [pytest.mark.root, pytest.mark.slow]


@dataclass
class Settings:
    store_gb: int = 2


def devices(image: Path) -> list[str]:
    """The loop devices that have the file."""
    found = Path("/sys/block").glob("loop*/loop/backing_file")
    return [path.parent.parent.name for path in found if path.read_text().strip() == str(image)]


async def test_a_store_that_was_left_in_use_is_mounted_again_from_its_device(tmp_home):
    store = DiskStore(tmp_home, Settings())
    await store.open()
    if store.kind != "btrfs" or not (tmp_home / "store.img").exists():
        pytest.skip("the store of this host is no file")
    device = devices(tmp_home / "store.img")
    held = os.open(store.root / "layers", os.O_RDONLY)
    try:
        await store.close(unmount=True)
        assert not mounts.is_mount(tmp_home / "store")
        assert devices(tmp_home / "store.img") == device, "it was in use, so it must be there still"
        again = DiskStore(tmp_home, Settings())
        await again.open()
        assert devices(tmp_home / "store.img") == device
        (again.root / "layers" / "new").mkdir()
        assert os.stat("new", dir_fd=held), "it is not the same filesystem"
        (again.root / "layers" / "new").rmdir()
    finally:
        os.close(held)
    await again.close(unmount=True)
    assert devices(tmp_home / "store.img") == []


async def test_a_store_that_another_home_uses_stays(tmp_home):
    store = DiskStore(tmp_home, Settings())
    await store.open()
    if store.kind != "btrfs" or not (tmp_home / "store.img").exists():
        pytest.skip("the store of this host is no file")
    pin = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", pin, str(store.root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # noqa: ASYNC220
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        await store.close(unmount=True)
        assert mounts.is_mount(tmp_home / "store")
        other.stdin.close()
    await store.open()
    await store.close(unmount=True)
    assert not mounts.is_mount(tmp_home / "store")
