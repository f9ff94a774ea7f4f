"""A store with damage in it: found before use, named, and the rest of the yard works."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yard_fixtures import Lives
from yards import Home, Kind, TestYard, kinds, new_home, opened

from forkyard.errors import (
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from forkyard.setup.doctor import check_store
from forkyard.yard.storecheck import Damage, StoreCheck


@pytest.fixture
def kind() -> Kind:
    """Damage is done to files, which a toy's home has as a real one's has them."""
    return Kind("fake")


@pytest.fixture
def home(fake_home: Home) -> Home:
    return fake_home


async def fill(yard: TestYard) -> None:
    """Two snapshots with memory, a stopped sandbox, one with a checkpoint."""
    await yard.create(name="one")
    await yard.write("one", file=b"kept")
    for name in ("gold", "silver"):
        kept = await yard.snapshot("one", name)
        await yard.context.images.settled(kept.id)
    await yard.checkpoint("one", "c")
    await yard.create(name="stopped", snapshot="silver")
    await yard.stop("stopped")
    await yard.stop("one")


async def check(home: Home, *, repair: bool = False) -> list[Damage]:
    disks = home.disks()
    await disks.open()
    found = StoreCheck(home.path, disks)
    damages = await found.run()
    if repair:
        await found.repair()
    return damages


def of(yard: TestYard, name: str) -> Any:
    found = yard.yard.snapshots.find(name)
    assert found is not None
    return found


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


HARMS: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "gone": Path.unlink}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_image(lives: Lives, home: Home, harm: str) -> None:
    first = lives()
    first.run(fill(first.yard))
    image = first.yard.context.images.path(of(first.yard, "gold").image)
    HARMS[harm](max(image.iterdir(), key=lambda path: path.stat().st_size))
    first.die()

    (damage,) = asyncio.run(check(home))
    assert (damage.kind, damage.name) == ("image", image.name)
    assert damage.needed_by == ("snapshot gold",) and "disk stays" in damage.repair
    asyncio.run(check(home, repair=True))
    assert asyncio.run(check(home)) == []

    second = lives()
    for name in ("gold", "silver"):
        made = second.run(second.yard.create(snapshot=name))
        assert made.memory_restored == (name == "silver")
        assert second.run(second.yard.read(made.id, "file")) == b"kept"
    second.run(second.yard.start("stopped"))


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_damaged_manifest(lives: Lives, home: Home, harm: str) -> None:
    first = lives()
    first.run(fill(first.yard))
    manifest = first.yard.context.images.path(of(first.yard, "gold").image) / "manifest.json"
    first.die()
    if harm == "flipped":
        manifest.write_bytes(b"[" + manifest.read_bytes()[1:])
    else:
        HARMS[harm](manifest)
    second = lives()
    with pytest.raises(CorruptSnapshotError):
        second.run(second.yard.create(snapshot="gold"))
    assert second.run(second.yard.create(snapshot="silver")).memory_restored
    assert [damage.kind for damage in asyncio.run(check(home))] == ["image"]


def test_a_layer_that_is_gone(lives: Lives, home: Home) -> None:
    first = lives()
    first.run(fill(first.yard))
    layer = of(first.yard, "gold").layers[0]
    first.run(first.yard.context.disks.drop_layer(layer))
    first.die()

    (damage,) = asyncio.run(check(home))
    assert (damage.kind, damage.name) == ("layer", layer) and "snapshot gold" in damage.needed_by
    second = lives()
    with pytest.raises((NotFoundError, CorruptSnapshotError)):
        second.run(second.yard.create(snapshot="gold"))
    assert second.run(second.yard.create(name="works", snapshot="silver")).state == "running"
    second.die()

    asyncio.run(check(home, repair=True))
    third = lives()
    assert third.yard.yard.snapshots.find("gold") is None
    assert third.run(third.yard.read("works", "file")) == b"kept"
    assert asyncio.run(check(home)) == []


def test_a_layer_that_cannot_be_read(lives: Lives, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lives()
    first.run(fill(first.yard))
    layer = of(first.yard, "gold").layers[0]
    bad = first.yard.context.disks.layer_path(layer) / "home/user/file"
    inode = bad.stat().st_ino
    first.die()
    real = os.read

    def read(fd: int, size: int) -> bytes:
        if os.fstat(fd).st_ino == inode:
            raise OSError(5, "Input/output error")
        return real(fd, size)

    # No file system here can be made to have a bad block.
    monkeypatch.setattr(os, "read", read)
    found = asyncio.run(check(home))
    monkeypatch.undo()
    assert [(damage.kind, damage.name) for damage in found] == [("layer", layer)]
    assert str(bad) in found[0].why and "Input/output" in found[0].why
    lives()


def pages(home: Home) -> Path:
    return home.path / "catalog.db"


def settle(home: Home) -> None:
    """Fold the log into the file, as an orderly end does."""
    connection = sqlite3.connect(pages(home))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "row"])
def test_a_damaged_catalog(home: Home, harm: str) -> None:
    async def filled() -> None:
        async with opened(home) as yard:
            await fill(yard)

    asyncio.run(filled())
    settle(home)
    path = pages(home)
    raw = path.read_bytes()
    if harm == "row":
        connection = sqlite3.connect(path)
        connection.execute("UPDATE snapshots SET doc = substr(doc, 9) WHERE name = 'gold'")
        connection.commit()
        connection.close()
    elif harm == "flipped":  # the pages behind the first: tables and their indices
        path.write_bytes(raw[:4096] + bytes(byte ^ 255 for byte in raw[4096:8192]) + raw[8192:])
    elif harm == "cut":
        os.truncate(path, len(raw) // 4096 // 2 * 4096)
    else:
        path.write_bytes(b"no catalog" * 1000)

    async def refused() -> None:
        with pytest.raises(InternalError, match="cannot be read") as caught:
            async with opened(home):
                pass
        assert "doctor --store" in caught.value.hint

    asyncio.run(refused())
    boxes = sorted(path.name for path in (home.path / "images").iterdir())
    found = asyncio.run(check(home))
    assert {damage.kind for damage in found} >= {"record" if harm == "row" else "catalog"}
    assert sorted(path.name for path in (home.path / "images").iterdir()) == boxes, "looking changes nothing"
    asyncio.run(check(home, repair=True))

    async def works() -> None:
        async with opened(home) as yard:
            if harm == "row":
                assert yard.yard.snapshots.find("gold") is None
                assert (await yard.create(snapshot="silver")).memory_restored
                await yard.start("one")
            if harm == "flipped":  # the sandboxes' table: their states are kept under another name
                rescued = [doc for doc in yard.context.snapshots.values() if "recovered" in doc.labels]
                assert len(rescued) == 3 and not list(yard.context.sandboxes)
                made = await yard.create(snapshot=rescued[0].id)
                assert await yard.read(made.id, "file") == b"kept"
            await yard.create(name="new")
            assert await yard.out("new", "echo usable") == "usable"
            await yard.empty()
            await yard.assert_clean()

    asyncio.run(works())
    assert [d for d in asyncio.run(check(home)) if d.kind != "image"] == []


def everything(home: Home) -> dict[str, str]:
    """The content of all files, but for the locks and logs that looking at a database makes."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.path.rglob("*"))
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    }


def test_a_store_of_a_newer_version_is_refused_unharmed(home: Home) -> None:
    async def filled() -> None:
        async with opened(home) as yard:
            await fill(yard)

    asyncio.run(filled())
    settle(home)
    connection = sqlite3.connect(pages(home))
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = everything(home)

    async def refused() -> None:
        with pytest.raises(UnavailableError, match="newer forkyard"):
            async with opened(home):
                pass
        assert [damage.kind for damage in await check(home)] == ["newer"]
        with pytest.raises(UnavailableError, match="newer forkyard"):
            await check(home, repair=True)

    asyncio.run(refused())
    assert everything(home) == before
    connection = sqlite3.connect(pages(home))
    connection.execute("PRAGMA user_version = 2")
    connection.close()

    async def works() -> None:
        async with opened(home) as yard:
            await yard.start("one")
            assert await yard.read("one", "file") == b"kept"
            await yard.empty()
            await yard.assert_clean()

    asyncio.run(works())


def test_an_image_of_a_newer_version_is_left_alone(lives: Lives, home: Home) -> None:
    first = lives()
    first.run(fill(first.yard))
    manifest = first.yard.context.images.path(of(first.yard, "gold").image) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    first.die()
    (damage,) = asyncio.run(check(home, repair=True))
    assert (damage.kind, damage.needed_by, damage.repair) == ("newer", ("snapshot gold",), "")
    assert manifest.exists()
    second = lives()
    assert second.run(second.yard.create(snapshot="gold", memory=False)).state == "running"


def test_a_damaged_template(lives: Lives, home: Home) -> None:
    first = lives()
    first.run(fill(first.yard))
    first.die()
    record = home.path / "templates" / "other.json"
    record.write_text("{torn")
    (damage,) = asyncio.run(check(home, repair=True))
    assert (damage.kind, damage.name) == ("template", "other") and not record.exists()
    second = lives()
    assert second.run(second.yard.create(name="new")).state == "running"


def test_repairing_wants_the_home_for_itself(home: Home) -> None:
    import fcntl

    (home.path / "store").mkdir(exist_ok=True)
    held = os.open(home.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="a daemon has this store"):
            asyncio.run(check_store(home.settings, repair=True))
    finally:
        os.close(held)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("engine", [param for param in kinds() if param.id == "gvisor-debian13"])
def test_a_real_store(engine: Kind) -> None:
    with new_home(engine, store_gb=4) as home:

        async def filled() -> Path:
            async with opened(home) as yard:
                await yard.create(name="one")
                kept = await yard.snapshot("one", "gold")
                await yard.context.images.settled(kept.id)
                await yard.delete("one")
                return yard.context.images.path(kept.id)

        image = asyncio.run(filled())
        assert asyncio.run(check_store(home.settings)) == []
        flip(max(image.iterdir(), key=lambda path: path.stat().st_size))
        (damage,) = asyncio.run(check_store(home.settings, repair=True))
        assert (damage.kind, damage.needed_by) == ("image", ("snapshot gold",))
        assert asyncio.run(check_store(home.settings)) == []

        async def works() -> None:
            async with opened(home) as yard:
                made = await yard.create(snapshot="gold")
                assert not made.memory_restored and await yard.out(made.id, "echo usable") == "usable"
                await yard.empty()

        asyncio.run(works())
