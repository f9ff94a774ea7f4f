"""Snapshots go from one yard to another, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from yards import Home, Kind, TestYard, new_home, opened

from forkyard import requests as rq
from forkyard.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    ForkyardError,
    InvalidRequestError,
    UnavailableError,
    UnsupportedError,
)
from forkyard.store import archive, layerstream
from forkyard.store.archive import MAGIC, Manifest, Part

toys_show_it = pytest.mark.only(lambda kind, **_: not kind.real)
# A microVM's memory goes with its disk, which is no layer of others.
layers_show_it = pytest.mark.only(lambda kind, **_: kind.name != "qemu")


@pytest.fixture(scope="session")
def other_home(kind: Kind) -> Iterator[Home]:
    with new_home(kind, store_gb=4) as home:
        yield home


@pytest.fixture
async def other(other_home: Home) -> AsyncIterator[TestYard]:
    """Another yard; nothing but what was there may be left in it."""
    async with opened(other_home) as yard:
        yield yard
        await yard.empty()
        await yard.assert_clean()


@pytest.fixture
async def gold(yard: TestYard) -> bytes:
    """The archive of a snapshot with a counter that counts, and a file."""
    box = await yard.create(name="box", env={"E": "1"}, mem_mb=300, cpu_weight=300)
    await yard.background(box.id, "exec counter /home/user/n")
    await yard.counting(box.id, "n", 2)
    await yard.write(box.id, file=b"kept")
    await yard.snapshot(box.id, "gold", labels={"k": "v"})
    return await yard.exported("gold")


async def test_memory_and_disk_go_on_in_another_yard(yard: TestYard, other: TestYard, gold: bytes) -> None:
    was = await yard.yard.get_snapshot(rq.SnapshotRequest(snapshot="gold"), yard.caller)
    snap = await other.imported(gold)
    assert (snap.name, snap.labels, snap.memory, snap.engine) == ("gold", {"k": "v"}, True, was.engine)
    assert snap.id != was.id and snap.imported_from == was.id and snap.source == was.source
    box = await other.create(name="on", snapshot="gold")
    assert box.memory_restored and box.mem_mb == 300 and box.cpu_weight == other.weight("on") == 300
    before = await other.count(box.id, "n")
    assert before >= 2 and await other.counting(box.id, "n", before) > before
    assert await other.read(box.id, "file") == b"kept"
    assert await other.out(box.id, "echo $E") == "1"
    # It is a snapshot like any other: forks, and another journey.
    forks = (await other.fork("gold", 2)).forks
    assert await other.read(forks[1].id, "file") == b"kept"
    back = await yard.imported(await other.exported(snap.id), name="back")
    assert back.imported_from == snap.id
    again = await yard.create(snapshot="back")
    assert await yard.counting(again.id, "n", before) > before
    kinds = [record.kind for record in await other.yard.audit(rq.Audit(), other.caller)]
    assert "snapshot.imported" in kinds and "snapshot.exported" in kinds


@layers_show_it
async def test_what_a_yard_has_is_not_made_twice(yard: TestYard, gold: bytes) -> None:
    layers = yard.yard.snapshots.get("gold").layers
    copy = await yard.imported(gold)
    assert copy.name is None  # its own is taken
    assert yard.yard.snapshots.get(copy.id).layers == layers
    await yard.delete("box")
    await yard.delete_snapshot("gold")
    box = await yard.create(snapshot=copy.id)
    assert await yard.read(box.id, "file") == b"kept"


@layers_show_it
async def test_without_its_template(yard: TestYard, other: TestYard, gold: bytes) -> None:
    small = await yard.exported("gold", template=False)
    assert len(small) < len(gold)
    copy = await yard.imported(small)
    assert (await yard.create(snapshot=copy.id)).memory_restored
    if yard.home.kind.real:  # toys' templates are the same to the byte, with the same times or not
        with pytest.raises(UnsupportedError, match="template"):
            await other.imported(small)


async def test_the_disk_alone(yard: TestYard, other: TestYard, gold: bytes) -> None:
    snap = await other.imported(await yard.exported("gold", memory=False), name="disk")
    assert (snap.memory, snap.name) == (False, "disk")
    box = await other.create(snapshot="disk")
    assert not box.memory_restored
    assert await other.read(box.id, "file") == b"kept"


async def test_asked_again_it_is_there_once(other: TestYard, gold: bytes) -> None:
    first = await other.imported(gold, request_id="asked")
    assert await other.imported(gold, request_id="asked") == first
    assert len(other.context.snapshots) == 1
    with pytest.raises(ConflictError):
        await other.imported(gold, name="gold")


async def refused(yard: TestYard, data: bytes, *kinds: type[ForkyardError], **options: Any) -> ForkyardError:
    """An import that fails with one of ``kinds`` and leaves nothing."""
    with pytest.raises(kinds or ForkyardError) as caught:
        await yard.imported(data, **options)
    await yard.assert_clean()
    agents = [path.name for path in (yard.home.path / "agents").iterdir()]
    assert agents == [yard.context.agent]
    return caught.value


async def test_a_client_that_goes_leaves_nothing(other: TestYard, gold: bytes) -> None:
    for part in (0.1, 0.5, 0.999):
        gone = UnavailableError("the client has gone")
        await refused(other, gold[: int(len(gold) * part)], UnavailableError, ends_with=gone)


async def test_an_archive_that_ends_early(other: TestYard, gold: bytes) -> None:
    for size in (0, 5, 12, 300, len(gold) // 2, len(gold) - 9, len(gold) - 1):
        await refused(other, gold[:size], CorruptSnapshotError)
    await refused(other, gold + b"more", CorruptSnapshotError)


async def test_a_flipped_bit_anywhere(other: TestYard, gold: bytes) -> None:
    step = len(gold) // (5 if other.home.kind.real else 150)
    for at in range(len(MAGIC) + 4, len(gold), step):
        flipped = bytearray(gold)
        flipped[at] ^= 1 << at % 8
        await refused(other, bytes(flipped), CorruptSnapshotError)


@toys_show_it
async def test_other_files_and_formats(other: TestYard, gold: bytes) -> None:
    await refused(other, b"PK\3\4" + bytes(1000), InvalidRequestError)
    newer = MAGIC + (archive.DISK_FORMAT + 1).to_bytes(4, "big") + gold[len(MAGIC) + 4 :]
    error = await refused(other, newer, UnsupportedError)
    assert "upgrade" in error.hint


@toys_show_it
async def test_what_is_too_large(other: TestYard, gold: bytes) -> None:
    def huge(manifest: Manifest) -> None:
        next(part for part in manifest.parts if part.kind == "layer").bytes = 1 << 49

    await refused(other, changed(gold, huge), CapacityError)
    other.context.disks.full = True  # type: ignore[attr-defined]
    try:
        await refused(other, gold, CapacityError)
    finally:
        other.context.disks.full = False  # type: ignore[attr-defined]


async def test_foreign_memory_is_imported_and_not_restored(other: TestYard, gold: bytes) -> None:
    def foreign(manifest: Manifest) -> None:
        manifest.fingerprint = "gvisor another-version"

    snap = await other.imported(changed(gold, foreign))
    with pytest.raises(UnsupportedError) as caught:
        await other.create(snapshot=snap.id)
    assert "memory=False" in caught.value.hint
    box = await other.create(snapshot=snap.id, memory=False)
    assert await other.read(box.id, "file") == b"kept"


def _set(**fields: Any) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        for name, value in fields.items():
            setattr(manifest, name, value)

    return change


def _take(**fields: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest.inherits.update(fields)


def _part(kind: str, **fields: Any) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        part = next(part for part in manifest.parts if part.kind == kind)
        for name, value in fields.items():
            setattr(part, name, value)

    return change


def _disk(*, beside: bool = False, **fields: Any) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        manifest.parts = [part for part in manifest.parts if beside or part.kind != "layer"]
        manifest.parts.append(Part(kind="disk", bytes=10, sha256="0" * 64, **fields))

    return change


HOSTILE: dict[str, Callable[[Manifest], None]] = {
    "a name that none can have": _set(name="a b"),
    "control characters": _set(fingerprint="\x1b]0;x\x07"),
    "an agent elsewhere": _set(agent="../../../tmp/x"),
    "no layers": lambda manifest: manifest.parts.clear(),
    "an image file elsewhere": _part("image", name="../manifest.json"),
    "an image file in the manifest's place": _part("image", name="manifest.json"),
    "a layer that is not sent": _part("layer", present=False, template=False),
    "a disk beside layers": _disk(beside=True),
    "a disk of an engine that has layers": _disk(),
    "a disk that holds more than it is long": _disk(stored=11),
    "a disk that is not sent": _disk(template=True, present=False),
    "a checksum that is none": _part("layer", sha256="x" * 64),
    "a size below zero": _part("layer", bytes=-1),
    "an unknown type": _take(type="huge"),
    "memory without end": _take(mem_mb=1 << 60),
    "no memory": _take(mem_mb=1),
    "processes without end": _take(processes=1 << 39),
    "no weight": _take(cpu_weight=0),
    "CPUs that are no number": _take(cpus="many"),
    "an environment that none can have": _take(env={"A=B": "c"}),
    "no user": _take(user=None),
}


@toys_show_it
@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_manifests(other: TestYard, gold: bytes, what: str) -> None:
    await refused(other, changed(gold, HOSTILE[what]), InvalidRequestError)


@layers_show_it
@pytest.mark.parametrize("what", ["..", "a/b", "/etc/x", "."])
async def test_a_hostile_layer(other: TestYard, gold: bytes, what: str) -> None:
    root = layerstream.Node(layerstream.DIR, mode=0o755)
    bad = layerstream.Node(layerstream.FILE, what.encode(), mode=0o644)
    stream = b"".join(map(layerstream.framed, (root, bad))) + bytes(12)
    stream += layerstream.framed(layerstream.Node(layerstream.UP))

    def put(manifest: Manifest) -> None:
        part = next(part for part in manifest.parts if part.kind == "layer")
        part.bytes, part.sha256 = len(stream), hashlib.sha256(stream).hexdigest()
        manifest.parts = [part]
        manifest.agent = ""

    await refused(other, changed(gold, put, lambda part: iter([stream])), InvalidRequestError)


@toys_show_it
async def test_a_layer_in_another_order_goes_on_as_any(other: TestYard, gold: bytes) -> None:
    """A stream that no forkyard would write, and that makes a layer all the same."""
    nodes = [layerstream.Node(layerstream.DIR, mode=0o755)]
    nodes += [layerstream.Node(layerstream.WHITEOUT, name) for name in (b"b", b"a")]
    stream = b"".join(map(layerstream.framed, [*nodes, layerstream.Node(layerstream.UP)]))

    def put(manifest: Manifest) -> None:
        part = next(part for part in manifest.parts if part.kind == "layer")
        part.bytes, part.sha256 = len(stream), hashlib.sha256(stream).hexdigest()
        manifest.parts, manifest.agent, manifest.memory_bytes = [part], "", 0

    archive_ = changed(gold, put, lambda part: iter([stream]))
    first = await other.imported(archive_)
    second = await other.imported(await other.exported(first.id), name="second")
    again = await other.imported(archive_, name="again")
    layers = [other.yard.context.snapshots[snap.id].layers for snap in (first, second, again)]
    assert layers[0] == layers[1] == layers[2]


def changed(
    data: bytes,
    change: Callable[[Manifest], None],
    content: Callable[[Part], Iterator[bytes]] | None = None,
) -> bytes:
    """An archive with another manifest, every checksum of the format right; its parts' records as
    they were, or with ``content``."""
    at = len(MAGIC) + 4
    length = int.from_bytes(data[at + 1 : at + 5], "big")
    manifest = msgspec.json.decode(data[at + 9 : at + 9 + length], type=Manifest)
    change(manifest)
    if content is not None:
        return b"".join(archive.write(manifest, content))
    head = archive._record(b"M", msgspec.json.encode(manifest))
    return data[:at] + head + data[at + 9 + length :]
