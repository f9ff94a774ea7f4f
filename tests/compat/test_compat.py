"""Every format that forkyard ever wrote can be read, or is refused with the reason and unharmed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from make_samples import DIFF, SAMPLE
from yards import Home, Kind, TestYard, opened

from forkyard import wire
from forkyard.audit.check import verify
from forkyard.audit.log import AuditLog
from forkyard.errors import UnavailableError, UnsupportedError
from forkyard.rollouts import journal
from forkyard.store import archive, images
from forkyard.store.schema import MIGRATIONS
from forkyard.types import SandboxInfo
from forkyard.yard import templates
from forkyard.yard.model import SandboxDoc, SnapshotDoc

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def kind() -> Kind:
    return Kind("fake")


def catalog_of(home: Path, version: int) -> Path:
    """The sample of a catalog's version as the file that it was."""
    path = home / "catalog.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript((SAMPLES / f"catalog-{version}.sql").read_text())
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    return path


def test_every_version_of_every_format_has_a_sample() -> None:
    wanted = {f"catalog-{version}.sql" for version in range(1, len(MIGRATIONS) + 1)}
    wanted |= {f"image-{version}.json" for version in range(1, images.FORMAT + 1)}
    wanted |= {f"run-{version}" for version in range(1, journal.FORMAT + 1)}
    wanted |= {f"archive-{version}.fysnap" for version in range(1, archive.FORMAT + 1)}
    wanted |= {f"wire-{version}.json" for version in range(wire.VERSION_MIN, wire.VERSION + 1)}
    wanted |= {f"warm-{templates.WARM_REVISION}.json", "template-1.json", "audit-1"}
    there = {path.name for path in SAMPLES.iterdir()}
    assert wanted <= there, f"python tests/compat/make_samples.py makes {sorted(wanted - there)}"
    sizes = {path.name: path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()}
    assert {name: size for name, size in sizes.items() if size > 32 << 10} == {}


async def test_a_catalog_of_the_first_version(fake_home: Home) -> None:
    await fake_home.make_base()
    path = catalog_of(fake_home.path, 1)
    async with opened(fake_home) as yard:
        await yard.create(name="new")
        assert await yard.out("new", "echo usable") == "usable"
        await yard.empty()
        await yard.assert_clean()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


@pytest.mark.parametrize("version", range(2, len(MIGRATIONS) + 1))
async def test_a_store_of_each_version_goes_on(fake_home: Home, version: int, tmp_path: Path) -> None:
    await fake_home.make_base()
    catalog = catalog_of(fake_home.path, version)
    await _disks_of(fake_home, catalog, tmp_path)
    async with opened(fake_home) as yard:
        states = {one.doc.name: one.doc.state for one in yard.context.sandboxes}
        assert states == {"one": "failed", "child": "failed", "stopped": "stopped"}
        one = await yard.info("one")
        assert one.labels == {"k": "v"} and one.tainted and one.failure is not None
        assert (one.failure.code, one.failure.cause) == ("sandbox_lost", "host")
        gold = yard.yard.snapshots.find("gold")
        assert gold is not None and gold.labels == {"s": "1"} and gold.inherits["user"] == "user"
        assert [info.label for info in await yard.checkpoints("one")] == ["c"]
        assert await yard.context.catalog.get_reply("req_1", "fork", 0) == b'{"n":1}'
        # Nothing of the memory has come along, and it says so; the disk has.
        for name in ("stopped", "one"):
            assert (await yard.start(name, memory=False)).state == "running"
            assert await yard.read(name, "file") == b"kept"
        made = await yard.create(snapshot="gold", memory=False)
        assert await yard.read(made.id, "file") == b"kept"
        await yard.empty()
        await yard.assert_clean()


async def _disks_of(home: Home, catalog: Path, tmp_path: Path) -> None:
    """The layers that the sample's records name, each with the file that was in it."""
    connection = sqlite3.connect(catalog)
    named = [json.loads(row[0]) for row in connection.execute("SELECT layers FROM snapshots")]
    connection.close()
    disks = home.disks()
    await disks.open()
    # A toy's layer holds all of a disk.
    shutil.copytree(disks.layer_path("base"), tmp_path / "up", symlinks=True)
    (tmp_path / "up/home/user/file").write_bytes(b"kept")
    for layer in sorted({layer for layers in named for layer in layers} - {"base"}):
        await disks.import_layer(layer, tmp_path / "up")
    await disks.close(unmount=False)


async def test_a_newer_store_is_left_byte_for_byte(fake_home: Home) -> None:
    """Also with the log that its daemon's death left beside it."""
    await fake_home.make_base()
    path = catalog_of(fake_home.path, len(MIGRATIONS))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA wal_autocheckpoint = 0")
    writer.execute("CREATE TABLE of_the_future (x)")
    writer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    log = path.with_name("catalog.db-wal")
    left = {name: name.read_bytes() for name in (path, log)}
    writer.close()
    for name, content in left.items():
        name.write_bytes(content)
    before = _files(fake_home.path)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="newer forkyard") as caught:
            async with opened(fake_home):
                pass
        assert "upgrade" in caught.value.hint
        assert _files(fake_home.path) == before
    assert len(log.read_bytes()) > 0


def _files(home: Path) -> dict[str, str]:
    """All files by content, but for the lock file that reading a log makes."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


@pytest.mark.parametrize("version", range(1, images.FORMAT + 1))
async def test_an_image_manifest_of_each_version(tmp_path: Path, version: int) -> None:
    (tmp_path / "old").mkdir()
    shutil.copy(SAMPLES / f"image-{version}.json", tmp_path / "old" / images.MANIFEST)
    found = images.Images(tmp_path).manifest("old")
    assert found.settled and found.layers[-1] == "base" and found.wire == 1
    assert found.fingerprint == "fake/1" and found.files["checkpoint.img"].sha256


@pytest.mark.parametrize("version", range(1, archive.FORMAT + 1))
async def test_an_archive_of_each_version_is_imported(fake_yard: TestYard, version: int) -> None:
    kept = await fake_yard.imported((SAMPLES / f"archive-{version}.fysnap").read_bytes())
    assert (kept.name, kept.labels, kept.memory) == ("gold", {"s": "1"}, False)
    made = await fake_yard.create(snapshot="gold")
    assert await fake_yard.read(made.id, "file") == b"kept"


OTHERS = {
    "newer image": ({"format": images.FORMAT + 1}, "newer forkyard"),
    "newer wire": ({"wire": wire.VERSION + 1}, f"wire version {wire.VERSION + 1}"),
    "another runsc": ("gvisor/20990101/0123456789ab/systrap/avx", "by gvisor/20990101/.*, this is fake"),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_memory_that_cannot_be_restored_here_is_refused_and_its_disk_starts(
    fake_yard: TestYard, other: str
) -> None:
    what, why = OTHERS[other]
    await fake_yard.create(name="one")
    await fake_yard.write("one", file=b"kept")
    await fake_yard.checkpoint("one", "c")
    await fake_yard.snapshot("one", "gold")
    await fake_yard.stop("one")
    docs = list(fake_yard.context.snapshots.values())
    assert {doc.kind for doc in docs} == {"snapshot", "checkpoint", "stop"}
    for doc in docs:
        assert doc.image is not None
        await fake_yard.context.images.settled(doc.image)
        if isinstance(what, str):
            doc.fingerprint = what
        else:
            path = fake_yard.context.images.path(doc.image) / images.MANIFEST
            path.write_text(json.dumps({**json.loads(path.read_text()), **what}))
            fake_yard.context.images._manifests.pop(doc.image)
    works: list[Callable[..., Awaitable[SandboxInfo]]] = [
        lambda **options: fake_yard.start("one", **options),
        lambda **options: fake_yard.rewind("one", "c", **options),
        lambda **options: fake_yard.create(snapshot="gold", **options),
    ]
    for work in works:
        with pytest.raises(UnsupportedError, match=why) as caught:
            await work()
        assert "memory=False" in caught.value.hint
        made = await work(memory=False)
        assert not made.memory_restored and await fake_yard.read(made.id, "file") == b"kept"
    gold = fake_yard.yard.snapshots.find("gold")
    assert gold is not None and fake_yard.context.images.exists(gold.image or ""), "kept for who can"


def test_records_of_unknown_fields_are_read() -> None:
    """A release may add a field without a new version of the store."""
    connection = sqlite3.connect(":memory:")
    connection.executescript((SAMPLES / f"catalog-{len(MIGRATIONS)}.sql").read_text())
    for table, kind in (("sandboxes", SandboxDoc), ("snapshots", SnapshotDoc)):
        for (raw,) in connection.execute(f"SELECT doc FROM {table}"):
            doc = {**json.loads(raw), "of_the_future": 1}
            assert msgspec.json.decode(json.dumps(doc), type=kind).id == doc["id"]
    connection.close()


def test_a_template_and_its_warm_images() -> None:
    doc = msgspec.json.decode((SAMPLES / "template-1.json").read_bytes(), type=templates.TemplateDoc)
    assert (doc.name, doc.layers, doc.user, doc.workdir) == ("base", ["base"], "user", "/home/user")


async def test_warm_images_are_found_by_the_version_that_made_them_and_by_no_other(
    fake_yard: TestYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = json.loads((SAMPLES / f"warm-{templates.WARM_REVISION}.json").read_text())
    doc = msgspec.json.decode((SAMPLES / "template-1.json").read_bytes(), type=templates.TemplateDoc)
    monkeypatch.setattr(fake_yard.context, "agent", sample["agent"])
    shaped = templates.limits("small", fake_yard.context.engine)
    find = fake_yard.yard.templates
    assert find._image_name(doc, shaped) == sample["plain"], "raise WARM_REVISION, and make a sample"
    for module, name, value in (
        (templates, "WARM_REVISION", 99),
        (fake_yard.context.engine, "fingerprint", lambda: "other/1"),
        (fake_yard.context, "agent", "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert find._image_name(doc, shaped) != sample["plain"]


async def test_an_audit_log_is_verified_and_continued(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "audit-1", tmp_path / "audit")
    seq, head = (tmp_path / "audit/head").read_text().split()
    verdict = verify(tmp_path / "audit", (int(seq), head))
    assert verdict.ok and verdict.seq == int(seq), verdict
    log = AuditLog(tmp_path / "audit")
    assert "sandbox.created" in {record.kind for record in log.read()}
    await log.open()
    assert log.head == (int(seq), head)
    assert log.append("test", None, "test", {}) == int(seq) + 1
    await log.close()
    assert verify(tmp_path / "audit", (int(seq), head)).ok


@pytest.mark.parametrize("version", range(1, journal.FORMAT + 1))
def test_a_run_of_each_version_is_read_and_continued(tmp_path: Path, version: int) -> None:
    run = tmp_path / "run"
    shutil.copytree(SAMPLES / f"run-{version}", run)
    assert journal.read_samples(run) == [SAMPLE] and journal.read_tasks(run) == {"t/1": {"prompt": "do it"}}
    assert journal.unpack_diff(journal.read_file(run, SAMPLE.diff or "")) == DIFF
    with journal.open_journal(run, {"run": "another"}) as opened_run:
        assert opened_run.run == "run_1" and opened_run.samples == {("t/1", 1): SAMPLE}


@pytest.mark.parametrize("version", range(wire.VERSION_MIN, wire.VERSION + 1))
def test_frames_of_each_version_of_the_wire(version: int) -> None:
    """The agent of its day is in every memory image."""
    sample = {
        name: bytes.fromhex(frame)
        for name, frame in json.loads((SAMPLES / f"wire-{version}.json").read_text()).items()
    }
    decoder = wire.Decoder()
    decoder.hunt(bytes(range(16)))
    noise = b"half a frame" + bytes(wire.MAX_FRAME)
    hello, data = decoder.feed(noise + sample["hello"] + sample["data"])
    assert (hello.type, hello.epoch, hello.payload[-4:]) == (wire.Type.HELLO, 3, b"rest")
    assert (data.type, data.stream, data.chan, data.intact) == (wire.Type.DATA, 9, wire.STDOUT, True)
    assert data.payload == (1 << 33).to_bytes(8, "little") + b"output"
    assert wire.encode_request(wire.Op.STAT, 11, 3, b"path") == [sample["request"]]
    assert sample["attach"].endswith(bytes(range(16)) + (5).to_bytes(8, "little"))
