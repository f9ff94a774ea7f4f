from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator

import msgspec
import pytest

from forkyard.errors import CorruptSnapshotError, InternalError, NotFoundError, UnsupportedError
from forkyard.host import process
from forkyard.store.images import MANIFEST, Images


@pytest.fixture
def images(tmp_path):
    return Images(tmp_path / "images")


async def _make(images: Images, name: str, pages: bytes = b"p" * 5000):
    directory = images.temporary(name)
    directory.mkdir()
    (directory / "pages.img").write_bytes(pages)
    (directory / "checkpoint.img").write_bytes(b"state")
    return await images.publish(name, fingerprint="gvisor/1", agent="abc", layers=["l1", "base"])


@contextlib.asynccontextmanager
async def _started(images: Images) -> AsyncIterator[None]:
    class Group:
        def create_task(self, work, name=None):
            self.task = tg.create_task(work)

    async with asyncio.TaskGroup() as tg:
        group = Group()
        images.start(group)
        yield
        group.task.cancel()


async def test_published_whole(images):
    images.temporary("a").mkdir()
    assert not images.exists("a") and images.names() == [] and not images.exists("")
    manifest = await _make(images, "a")
    assert images.exists("a") and images.names() == ["a"]
    assert manifest.files["pages.img"].size == 5000 and manifest.layers == ["l1", "base"]
    assert images.size("a") >= 5005 and sorted(os.listdir(images.path("a"))) == [
        "checkpoint.img",
        MANIFEST,
        "pages.img",
    ]
    again = Images(images.root)
    assert again.manifest("a") == manifest and again.verify_quick("a") == manifest
    with pytest.raises(NotFoundError):
        images.manifest("b")
    for name in ("../a", "a/b", ".hidden", "a.tmp"):
        with pytest.raises(InternalError):
            images.path(name)


async def test_settling_adds_checksums(images):
    await _make(images, "a")
    async with _started(images):
        async with asyncio.timeout(10):
            await images.settled("a")
    digest = hashlib.sha256(b"p" * 5000).hexdigest()
    for each in (images, Images(images.root)):
        assert each.manifest("a").settled and each.manifest("a").files["pages.img"].sha256 == digest
        await each.verify_full("a")


async def test_an_image_that_goes_while_it_settles(images):
    await _make(images, "a", os.urandom(1 << 20))
    await _make(images, "b")
    async with _started(images), asyncio.timeout(10), asyncio.TaskGroup() as tg:
        tg.create_task(images.settled("a"))
        await asyncio.sleep(0)
        await images.delete_async("a")
        tg.create_task(images.settled("b"))
    assert images.names() == ["b"] and os.listdir(images.root) == ["b"]


async def test_an_image_of_an_earlier_daemon_is_read_whole_once(images):
    await _make(images, "a")
    async with _started(images):
        await images.settled("a")
    pages = images.path("a") / "pages.img"
    later = Images(images.root)
    await later.verify("a")
    at = pages.stat()
    pages.write_bytes(b"p" * 4999 + b"X")
    # As the medium would damage it, which tells no time.
    os.utime(pages, ns=(at.st_atime_ns, at.st_mtime_ns))
    await images.verify("a")  # this one wrote it
    await later.verify("a")  # and this one has read it
    with pytest.raises(CorruptSnapshotError, match=r"pages\.img is not what was written"):
        await Images(images.root).verify("a")
    os.utime(pages, (1, 1))
    for one in (images, later):
        with pytest.raises(CorruptSnapshotError, match=r"pages\.img is not what was written"):
            await one.verify("a")
    pages.write_bytes(b"short")
    with pytest.raises(CorruptSnapshotError):
        await later.verify("a")


async def test_an_image_that_was_written_into_before_it_settled(images):
    await _make(images, "a")
    pages = images.path("a") / "pages.img"
    pages.write_bytes(b"p" * 4999 + b"X")
    os.utime(pages, (1, 1))  # a clock that ticks every 4 ms may not have
    async with _started(images), asyncio.timeout(10):
        await images.settled("a")
    assert not images.manifest("a").settled  # no checksum vouches for it
    with pytest.raises(CorruptSnapshotError, match="written into"):
        await images.verify("a")


async def test_damage_is_found_and_named(images):
    await _make(images, "a")
    async with _started(images):
        await images.settled("a")
    pages = images.path("a") / "pages.img"
    pages.write_bytes(b"p" * 4999 + b"X")
    images.verify_quick("a")
    with pytest.raises(CorruptSnapshotError, match=r"pages\.img is not what was written"):
        await images.verify_full("a")
    pages.write_bytes(b"short")
    with pytest.raises(CorruptSnapshotError, match=r"pages\.img has 5 bytes, not 5000"):
        images.verify_quick("a")
    pages.unlink()
    with pytest.raises(CorruptSnapshotError, match=r"pages\.img is missing"):
        await images.verify_full("a")
    for content in (b"{", b'{"format": 1}'):
        (images.path("a") / MANIFEST).write_bytes(content)
        with pytest.raises(CorruptSnapshotError, match="manifest"):
            Images(images.root).verify_quick("a")
    (images.path("a") / MANIFEST).write_bytes(b'{"format": 2, "new": "things"}')
    with pytest.raises(UnsupportedError, match="newer"):
        Images(images.root).verify_quick("a")
    (images.path("a") / MANIFEST).unlink()
    with pytest.raises(CorruptSnapshotError):
        Images(images.root).verify_quick("a")


async def test_one_that_was_not_settled_when_the_host_went_down(images, monkeypatch):
    await _make(images, "a")
    monkeypatch.setattr(process, "boot_id", lambda: "another boot")
    with pytest.raises(CorruptSnapshotError, match="host went down"):
        Images(images.root).verify_quick("a")


async def test_linked_copies_outlive_each_other(images):
    await _make(images, "a")
    await images.link("a", "b")
    assert (images.path("a") / "pages.img").stat().st_ino == (images.path("b") / "pages.img").stat().st_ino
    images.delete("a")
    images.delete("a")
    assert images.names() == ["b"] and images.verify_quick("b").fingerprint == "gvisor/1"
    with pytest.raises(NotFoundError):
        await images.link("a", "c")
    async with _started(images):
        await images.settled("b")
    await images.verify_full("b")


async def test_leftovers_of_a_crash_go(images):
    await _make(images, "kept")
    for name in ("half", "warm-x"):
        images.temporary(name).mkdir()
    (images.root / "warm-x.tmp" / "pages.img").write_bytes(b"old")
    again = Images(images.root)
    again.temporary("warm-x").mkdir()  # a new attempt finds nothing in its way
    async with _started(Images(images.root)):
        async with asyncio.timeout(10):
            while len(os.listdir(images.root)) > 1:  # noqa: ASYNC110  (only the directory tells)
                await asyncio.sleep(0.005)
    assert images.names() == ["kept"]
    assert msgspec.json.decode((images.path("kept") / MANIFEST).read_bytes())["format"] == 1
