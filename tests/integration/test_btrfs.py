from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forkyard.store.btrfs import Volume, is_btrfs, is_subvolume, subvolume_id
from forkyard.store.loopfile import LoopFile

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean_host")]


@pytest_asyncio.fixture
async def volume(tmp_home) -> AsyncIterator[Volume]:
    loop = LoopFile(tmp_home / "fs.img", tmp_home / "fs", 1 << 30)
    await loop.ensure()
    await loop.ensure()
    opened = Volume(tmp_home / "fs")
    yield opened
    opened.close()
    opened.close()
    loop.close()


def test_subvolumes_and_snapshots(volume):
    root = volume.root
    assert is_btrfs(root) and not is_btrfs(root.parent)
    volume.create(root / "a")
    (root / "directory").mkdir()
    assert is_subvolume(root / "a") and not is_subvolume(root / "directory")
    assert not is_subvolume(root / "absent")
    (root / "directory").rmdir()
    (root / "a" / "f").write_text("1")
    volume.snapshot(root / "a", root / "ro", read_only=True)
    volume.snapshot(root / "a", root / "rw", read_only=False)
    (root / "a" / "f").write_text("2")
    assert (root / "ro" / "f").read_text() == "1"
    (root / "rw" / "f").write_text("3")
    with pytest.raises(OSError) as caught:
        (root / "ro" / "f").write_text("no")
    assert caught.value.errno == errno.EROFS
    ids = {subvolume_id(root / name) for name in ("a", "ro", "rw")}
    assert len(ids) == 3 and subvolume_id(root) not in ids
    with pytest.raises(FileExistsError):
        volume.create(root / "a")
    for name in ("a", "ro", "rw"):
        volume.delete(root / name)
    assert os.listdir(root) == []
    with pytest.raises(FileNotFoundError):
        volume.delete(root / "a")
    for name in ("", "x" * 256):
        with pytest.raises((ValueError, OSError)):
            volume.create(root / name)


def test_the_older_call_to_delete(volume, monkeypatch):
    from forkyard.store import btrfs

    volume.create(volume.root / "a")
    monkeypatch.setattr(btrfs, "_SNAP_DESTROY_V2", 0x9499)
    volume.delete(volume.root / "a")
    assert os.listdir(volume.root) == []


def _kind_now(root: Path) -> str:
    again = Volume(root)
    try:
        return again.quota
    finally:
        again.close()


def test_simple_quotas_charge_the_writer(volume):
    root = volume.root
    volume.create(root / "before")
    assert volume.quota == "none" and volume.usage(subvolume_id(root / "before")) is None
    kind = volume.enable_quota()
    if kind != "simple":
        pytest.skip("a kernel without simple quotas")
    assert volume.enable_quota() == "simple" and _kind_now(root) == "simple"
    volume.create(root / "a")
    a = subvolume_id(root / "a")
    assert volume.limit(a) is None
    volume.set_limit(a, 20 << 20)
    assert volume.limit(a) == 20 << 20
    (root / "a" / "f").write_bytes(os.urandom(10 << 20))
    assert volume.dirty(a) >= 10 << 20 and volume.usage(a) >= 10 << 20
    volume.snapshot(root / "a", root / "s", read_only=True)
    assert volume.dirty(a) == 0 and 10 << 20 <= volume.usage(a) < 11 << 20
    assert volume.usage(subvolume_id(root / "s")) < 1 << 20
    # what a snapshot keeps stays charged: deleted here, still held there
    os.unlink(root / "a" / "f")
    volume.sync()
    assert volume.usage(a) >= 10 << 20
    with pytest.raises(OSError) as caught:
        (root / "a" / "g").write_bytes(os.urandom(12 << 20))
    assert caught.value.errno == errno.EDQUOT
    volume.set_limit(a, None)
    assert volume.limit(a) is None
    (root / "a" / "g").write_bytes(os.urandom(12 << 20))


def test_size(volume):
    size, allocated = volume.device_bytes()
    assert size == 1 << 30 and 0 < allocated < size
    volume.resize(768 << 20)
    assert volume.device_bytes()[0] == 768 << 20
    volume.resize(1 << 30)
    assert volume.device_bytes()[0] == 1 << 30 and 0 < volume.free_bytes() <= 1 << 30
    volume.commit()
