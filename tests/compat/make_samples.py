"""Write samples of this version's formats, which its successors have to read.

To be run (``python tests/compat/make_samples.py``), and its files committed, when a format gets a new
version; samples of older ones stay as they are. Nothing is overwritten. The yard is one of toy machines,
whose records are a real one's.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]

from yards import Kind, TestYard, new_home, opened  # noqa: E402

from forkyard import wire  # noqa: E402
from forkyard.host import process  # noqa: E402
from forkyard.rollouts import journal  # noqa: E402
from forkyard.rollouts.types import Phases, Sample, Verdict  # noqa: E402
from forkyard.store import archive  # noqa: E402
from forkyard.store.images import FORMAT as IMAGE  # noqa: E402
from forkyard.store.images import MANIFEST  # noqa: E402
from forkyard.store.schema import MIGRATIONS  # noqa: E402
from forkyard.types import Change, Diff  # noqa: E402
from forkyard.yard import templates  # noqa: E402

SAMPLES = HERE / "samples"
DIFF = Diff(
    added=[Change("new", "file", 0o644, size=3, data=b"new")],
    modified=[Change("link", "link", 0o777, old_kind="file", old_mode=0o755, target="new", content=True)],
    deleted=[Change("old", "dir", None, old_kind="dir", old_mode=0o700)],
    patch="--- a/new\n+++ b/new\n",
    complete=False,
    skipped=["deep"],
)
SAMPLE = Sample(
    task="t/1",
    sample=1,
    key="k" * 16,
    seed=7,
    outcome="failed",
    reward=0.25,
    verdict=Verdict(False, 0.25, "one of two", {"test_a": "passed", "test_b": "failed"}, {"lines": [1]}),
    message="",
    phases=Phases(0.1, 0.2, 3.0, 1.0, 0.05, 0.4),
    retries=1,
    started_at=1.5,
    ended_at=6.5,
    sandbox="sb_1",
    transcript="transcripts/k.msgpack",
    diff="diffs/k.msgpack",
    audit=(3, 9),
    cluster="c",
    metadata={"m": 1},
    episode="episodes/k.json",
    trajectory="t" * 8,
    suspicions=[{"kind": "network", "evidence": "example.org"}],
    prepared="snap_1",
)


def keep(name: str, text: str) -> None:
    path = SAMPLES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)
        print(f"made {name}")


async def fill(yard: TestYard) -> None:
    """One of each: running, a fork, stopped, napping, deleted; snapshot, checkpoint, a kept reply."""
    await yard.create(name="one", labels={"k": "v"}, ttl_min=30_000_000)
    await yard.write("one", file=b"kept")
    await yard.shell("one", "true", user="root")
    await yard.checkpoint("one", "c")
    await yard.fork("one", 1, names=["child"])
    kept = await yard.snapshot("one", "gold", labels={"s": "1"})
    await yard.context.images.settled(kept.id)
    await yard.create(name="stopped", snapshot="gold")
    await yard.stop("stopped")
    await yard.create(name="gone")
    await yard.delete("gone")
    await yard.context.catalog.put_reply("req_1", "fork", 0, b'{"n":1}', 1.0)


def dump(catalog: Path) -> str:
    connection = sqlite3.connect(catalog)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    text = "\n".join([*connection.iterdump(), f"PRAGMA user_version = {version};"]) + "\n"
    connection.close()
    return re.sub("X'([0-9A-F]+)'", _readable, text).replace(process.boot_id(), "boot-of-then")


def _readable(blob: re.Match[str]) -> str:
    text = bytes.fromhex(blob[1]).decode().replace("'", "''")
    return f"CAST('{text}' AS BLOB)"


def first_catalog() -> str:
    """What schema 1 had: a table more."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(MIGRATIONS[0])
    connection.execute("INSERT INTO intents VALUES ('in_1', 'fork', '{}', 1.0)")
    text = "\n".join([*connection.iterdump(), "PRAGMA user_version = 1;"])
    connection.close()
    return text + "\n"


async def of_a_yard() -> None:
    with new_home(Kind("fake")) as home:
        async with opened(home) as yard:
            await fill(yard)
            kept = yard.yard.snapshots.find("gold")
            assert kept is not None and kept.image is not None
            manifest = (yard.context.images.path(kept.image) / MANIFEST).read_text()
            doc = yard.yard.templates.get("base")
            shaped = templates.limits("small", yard.context.engine)
            warm = {
                "revision": templates.WARM_REVISION,
                "agent": yard.context.agent,
                "fingerprint": yard.context.engine.fingerprint(),
                "plain": yard.yard.templates._image_name(doc, shaped),
            }
            template = (home.path / "templates" / "base.json").read_text()
            log = yard.context.audit
            await log.flush()
            keep("audit-1/head", " ".join(map(str, log.head)) + "\n")
            (day,) = (home.path / "audit").glob("*.jsonl")
            keep("audit-1/2026-01-01.jsonl", day.read_text())
            catalog = dump(home.path / "catalog.db").replace(str(home.path), "/home-of-it")
            keep(f"catalog-{len(MIGRATIONS)}.sql", catalog)
            exported = await yard.exported("gold", memory=False)
            await yard.empty()
            await yard.assert_clean()
        if not (path := SAMPLES / f"archive-{archive.FORMAT}.fysnap").exists():
            path.write_bytes(exported)
            print(f"made {path.name}")
        keep(f"image-{IMAGE}.json", manifest + "\n")
        keep("template-1.json", template + "\n")
        keep(f"warm-{templates.WARM_REVISION}.json", json.dumps(warm, indent=1) + "\n")


def of_a_run() -> None:
    directory = SAMPLES / f"run-{journal.FORMAT}"
    if directory.exists():
        return
    with journal.open_journal(directory, {"run": "run_1", "began_at": 1.0}) as run:
        run.keep_tasks({"t/1": {"prompt": "do it"}})
        run.keep("diffs", "k", journal.pack_diff(DIFF))
        run.keep("transcripts", "k", journal.pack_transcript([{"role": "user", "content": "x"}])[0])
        run.keep("episodes", "k", b'{"log": []}')
        run.append(SAMPLE)
    (directory / journal.LOCK).unlink()
    print(f"made {directory.name}")


def of_the_wire() -> None:
    frames = {
        "attach": wire.encode_attach(3, bytes(range(16)), 5)[wire.MAX_FRAME :],
        "hello": wire.encode(wire.Type.HELLO, 0, 3, bytes(range(16)) + b"\x01\x00rest"),
        "data": wire.encode_data(9, 3, wire.STDOUT, 1 << 33, b"output"),
        "request": wire.encode_request(wire.Op.STAT, 11, 3, b"path")[0],
    }
    text = json.dumps({name: frame.hex() for name, frame in frames.items()}, indent=1)
    keep(f"wire-{wire.VERSION}.json", text + "\n")


if __name__ == "__main__":
    asyncio.run(of_a_yard())
    of_a_run()
    of_the_wire()
    keep("catalog-1.sql", first_catalog())
