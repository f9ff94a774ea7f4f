from __future__ import annotations

import asyncio
import sqlite3
import time

import msgspec
import pytest
import pytest_asyncio

from forkyard.errors import ConflictError, InternalError, UnavailableError
from forkyard.store.catalog import Catalog
from forkyard.store.schema import MIGRATIONS


class Box(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    name: str
    state: str = "running"
    snapshot: str | None = None
    resume: str | None = None
    layers: list[str] = []
    labels: dict[str, str] = {}
    created_at: float = 1.0
    more: int = 0


class Snap(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    kind: str = "snapshot"
    name: str | None = None
    parent: str | None = None
    layers: list[str] = []
    image: str | None = None
    created_at: float = 1.0


@pytest_asyncio.fixture
async def catalog(tmp_path):
    opened = await Catalog.open(tmp_path / "catalog.db")
    yield opened
    await opened.close()


async def _reopened(catalog: Catalog) -> Catalog:
    await catalog.close()
    return await Catalog.open(catalog.path)


async def test_documents_come_back(catalog):
    box = Box(id="sb_1", name="a", labels={"k": "v"}, layers=["l1"], more=7)
    await catalog.save(sandboxes=[box], snapshots=[Snap(id="s1", name="n", layers=["l1", "l2"], image="i1")])
    again = await _reopened(catalog)
    sandboxes, snapshots = await again.load(Box, Snap)
    assert sandboxes == [box] and [s.name for s in snapshots] == ["n"]
    assert (await again.snapshots(Snap))[0].image == "i1"
    await again.save(gone=["s1"])
    assert await again.snapshots(Snap) == []
    await again.close()
    await again.close()
    with pytest.raises(InternalError):
        await again.sandboxes(Box)


async def test_names_are_unique_among_the_live_and_free_after_delete(catalog):
    await catalog.save(sandboxes=[Box(id="sb_1", name="a")])
    with pytest.raises(ConflictError):
        await catalog.save(sandboxes=[Box(id="sb_0", name="new"), Box(id="sb_2", name="a")])
    assert [b.id for b in await catalog.sandboxes(Box)] == ["sb_1"]  # the other one was undone with it
    await catalog.save(sandboxes=[Box(id="sb_1", name="a", state="deleted")])
    await catalog.save(sandboxes=[Box(id="sb_2", name="a", state="failed")])
    assert [b.id for b in await catalog.sandboxes(Box)] == ["sb_2"]
    assert [b.id for b in await catalog.sandboxes(Box, deleted=True)] == ["sb_1"]


async def test_snapshot_names(catalog):
    await catalog.save(snapshots=[Snap(id="s1", name="n"), Snap(id="c1", kind="checkpoint", name="n")])
    await catalog.save(snapshots=[Snap(id="c2", kind="checkpoint", name="n"), Snap(id="s2"), Snap(id="s3")])
    with pytest.raises(ConflictError):
        await catalog.save(snapshots=[Snap(id="s4", name="n")])
    await catalog.save(gone=["s1"], snapshots=[Snap(id="s4", name="n")])  # in one: the name moves on


async def test_one_failing_transaction_spares_those_it_was_committed_with(catalog):
    async def save(n: int) -> bool:
        try:
            await catalog.save(sandboxes=[Box(id=f"sb_{n}", name="same" if n % 2 else f"own{n}")])
        except ConflictError:
            return False
        return True

    async with asyncio.TaskGroup() as tg:
        tasks = [tg.create_task(save(n)) for n in range(40)]
    assert sum(task.result() for task in tasks) == 21
    assert len(await catalog.sandboxes(Box)) == 21


async def test_an_error_in_a_transaction_is_the_callers(catalog):
    def work(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO replies VALUES ('x', 0, 'k', x'00', 1)")
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await catalog.tx(work)
    assert await catalog.get_reply("x", "k", 0) is None


async def test_a_cancelled_write_is_over_when_the_caller_goes_on(catalog):
    async def save() -> None:
        await catalog.save(sandboxes=[Box(id="sb_1", name="a")])

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(save())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    assert len(await catalog.sandboxes(Box)) == 1


async def test_replies(catalog):
    now = time.time()
    await catalog.put_reply("r1", "fork", 0, b"\x00body", now)
    assert await catalog.get_reply("r1", "fork", 0, newer_than=now - 1) == b"\x00body"
    assert await catalog.get_reply("r1", "fork", 0, newer_than=now) is None
    assert await catalog.get_reply("r1", "fork", 1000) is None  # another user's
    assert await catalog.get_reply("r1", "stop", 0) is None
    await catalog.prune(time.time() + 2 * 24 * 3600)
    assert await catalog.get_reply("r1", "fork", 0) is None


async def test_deleted_sandboxes_are_forgotten_after_a_month(catalog):
    await catalog.save(sandboxes=[Box(id="sb_1", name="a", state="deleted"), Box(id="sb_2", name="b")])
    await catalog.prune(time.time() + 40 * 24 * 3600)
    assert await catalog.sandboxes(Box, deleted=True) == []
    assert len(await catalog.sandboxes(Box)) == 1


async def test_a_newer_schema_and_a_damaged_file_are_refused(tmp_path):
    path = tmp_path / "catalog.db"
    catalog = await Catalog.open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    await catalog.close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(UnavailableError, match="newer"):
        await Catalog.open(path)
    path.write_bytes(b"no database at all, whatever its name" * 100)
    with pytest.raises(InternalError, match="cannot be read"):
        await Catalog.open(path)
