"""Snapshots, forks, checkpoints and rewinds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.engines.base import Machine, MachineSpec
from forkyard.errors import (
    ConflictError,
    CorruptSnapshotError,
    ForkError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
)


@pytest.fixture
async def box(yard: TestYard) -> str:
    """A sandbox with a counter that counts, and a file."""
    made = await yard.create(name="box", labels={"k": "v"}, env={"E": "1"}, auto_stop_min=90)
    await yard.background(made.id, "exec counter /home/user/n")
    await yard.counting(made.id, "n")
    await yard.write(made.id, file=b"kept")
    return made.id


async def pids(yard: TestYard, ref: str) -> set[int]:
    found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox=ref), yard.caller)
    return {one.pid for one in found if "counter" in one.command and one.handle == str(one.pid)}


async def test_fork_copies_memory_processes_and_disk(yard: TestYard, box: str) -> None:
    counter = await pids(yard, box)
    result = await yard.fork(box, 8, prefix="f")
    assert [one.name for one in result.forks] == [f"f{n}" for n in range(1, 9)]
    assert result.paused_ms > 0 and result.total_ms > 0
    randoms, hosts = set(), set()
    for one in result.forks:
        assert (one.state, one.memory_restored, one.parent) == ("running", True, box)
        assert (one.labels, one.auto_stop_min, one.snapshot) == ({"k": "v"}, 90, result.snapshot)
        assert await pids(yard, one.id) == counter
        before = await yard.count(one.id, "n")
        assert await yard.counting(one.id, "n", before) > before
        assert await yard.read(one.id, "file") == b"kept"
        assert await yard.out(one.id, "echo $E") == "1"
        randoms.add((await yard.shell(one.id, "head -c 16 /dev/urandom")).stdout_bytes)
        hosts.add(await yard.out(one.id, "hostname; cat /etc/machine-id"))
    assert len(randoms) == len(hosts) == 8
    # Copies are apart from each other and from their source.
    await yard.write("f1", file=b"changed")
    assert await yard.read("f2", "file") == await yard.read(box, "file") == b"kept"
    before = await yard.count(box, "n")
    assert await yard.counting(box, "n", before) > before
    snapshots = await yard.yard.list_snapshots(rq.ListSnapshots(), yard.caller)
    assert snapshots == []


async def test_the_hidden_snapshot_goes_with_its_last_user(yard: TestYard, box: str) -> None:
    result = await yard.fork(box, 2)
    await yard.delete(box)
    assert await yard.out(result.forks[0].id, "cat file") == "kept"
    await yard.delete(result.forks[0].id)
    assert result.snapshot in yard.context.snapshots
    await yard.delete(result.forks[1].id)
    assert yard.context.snapshots == {} and yard.references() == {}


async def test_fork_of_a_fork(yard: TestYard, box: str) -> None:
    line = box
    for depth in range(3):
        (child,) = (await yard.fork(line, 1)).forks
        await yard.write(child.id, **{f"depth{depth}": b"x"})
        line = child.id
    assert {"depth0", "depth1", "depth2", "file", "n"} <= set((await yard.out(line, "ls")).split())
    assert len(await pids(yard, line)) == 1
    parents = [info.parent for info in await yard.yard.list_sandboxes(rq.ListSandboxes(), yard.caller)]
    assert parents.count(None) == 1


async def test_forks_of_one_source_at_once(yard: TestYard, box: str) -> None:
    results = await asyncio.gather(*(yard.fork(box, 2) for _ in range(3)))
    ids = {one.id for result in results for one in result.forks}
    assert len(ids) == 6
    for one in ids:
        assert await yard.read(one, "file") == b"kept"


async def test_fork_overrides_and_refusals(yard: TestYard, box: str) -> None:
    (one,) = (await yard.fork(box, 1, names=["own"], labels={"x": "y"}, env={"F": "2"}, ttl_min=5)).forks
    assert (one.name, one.labels, one.ttl_min) == ("own", {"x": "y"}, 5)
    assert await yard.out("own", "echo $E$F") == "12"
    for bad in [{"n": 0}, {"n": 2, "names": ["a"]}, {"n": 2, "names": ["a", "a"]}, {"mem_mb": 1},
                {"names": ["bad name"]}]:  # fmt: skip
        with pytest.raises(InvalidRequestError):
            await yard.fork(box, **bad)
    with pytest.raises(ConflictError):
        await yard.fork(box, 1, names=["own"])
    with pytest.raises(NotFoundError):
        await yard.fork("nothing")
    assert len(yard.context.sandboxes) == 2


async def test_fork_without_memory(yard: TestYard, box: str) -> None:
    (one,) = (await yard.fork(box, 1, memory=False)).forks
    assert not one.memory_restored
    assert await pids(yard, one.id) == set()
    assert await yard.read(one.id, "file") == b"kept"


class Failing:
    """An engine whose ``at``-th restore fails, after the machine was there."""

    def __init__(self, engine: Any, at: int) -> None:
        self.engine = engine
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def restore(self, spec: MachineSpec, image: Path, prepared: Any = None) -> Machine:
        self.left -= 1
        fails = self.left == 0
        machine = await self.engine.restore(spec, image, prepared)
        if fails:
            await self.engine.kill(machine)
            raise InternalError("this restore was made to fail")
        return machine


async def test_all_forks_or_none(yard: TestYard, box: str) -> None:
    machines = yard.context.machines
    real = machines.engines
    machines.engines = {name: Failing(engine, 3) for name, engine in real.items()}
    try:
        with pytest.raises(ForkError, match="made to fail"):
            await yard.fork(box, 5, prefix="f")
    finally:
        machines.engines = real
    assert [one.doc.name for one in yard.context.sandboxes] == ["box"]
    assert yard.context.snapshots == {}
    before = await yard.count(box, "n")
    assert await yard.counting(box, "n", before) > before
    assert len((await yard.fork(box, 2, prefix="f")).forks) == 2


async def test_a_cancelled_fork_leaves_nothing(yard: TestYard, box: str) -> None:
    for turns in (1, 10, 60, 200):
        task = asyncio.ensure_future(yard.fork(box, 3))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task])
        assert done.pop().cancelled() or len(yard.context.sandboxes) == 4
        for one in yard.context.sandboxes:
            if one.id != box:
                await yard.delete(one.id)
        await until(lambda: yard.context.snapshots == {}, "no snapshot is left")
    assert await yard.read(box, "file") == b"kept"


async def test_named_snapshots(yard: TestYard, box: str) -> None:
    kept = await yard.snapshot(box, "gold", labels={"s": "1"})
    assert (kept.name, kept.source, kept.memory, kept.labels) == ("gold", box, True, {"s": "1"})
    assert kept.size_bytes > 0 and kept.exclusive_bytes > 0
    with pytest.raises(ConflictError, match="taken"):
        await yard.snapshot(box, "gold")
    await yard.delete(box)
    one = await yard.create(snapshot="gold", name="one")
    other = await yard.create(snapshot=kept.id, name="other", memory=False)
    assert (one.memory_restored, other.memory_restored) == (True, False)
    assert await yard.out("one", "echo $E") == "1"
    assert len(await pids(yard, "one")) == 1 and await pids(yard, "other") == set()
    assert await yard.read("other", "file") == b"kept"
    (three,) = (await yard.fork("gold", 1)).forks
    with pytest.raises(ConflictError, match="one") as refused:
        await yard.delete_snapshot("gold")
    assert "other" in refused.value.message and three.name in refused.value.message
    for ref in ("one", "other", three.id):
        await yard.delete(ref)
    await yard.delete_snapshot("gold")
    with pytest.raises(NotFoundError):
        await yard.create(snapshot="gold")


async def test_a_snapshot_of_a_stopped_sandbox(yard: TestYard, box: str) -> None:
    await yard.stop(box)
    await yard.snapshot(box, "cold")
    forks = (await yard.fork(box, 2)).forks
    assert yard.context.sandboxes.get(box).doc.state == "stopped"
    for one in forks:
        assert len(await pids(yard, one.id)) == 1
    await yard.start(box)
    restored = await yard.create(snapshot="cold")
    assert await yard.read(restored.id, "file") == b"kept"


async def test_checkpoint_and_rewind(yard: TestYard, box: str) -> None:
    counter = await pids(yard, box)
    first = await yard.checkpoint(box, "first")
    at = await yard.count(box, "n")
    await yard.write(box, file=b"spoiled", more=b"1")
    await yard.shell(box, "rm -f n")
    for _ in range(3):
        back = await yard.rewind(box)
        assert (back.id, back.state, back.checkpoint) == (box, "running", first.id)
        assert back.memory_restored
        assert await yard.read(box, "file") == b"kept"
        assert await pids(yard, box) == counter
        assert await yard.counting(box, "n", at) > at
        with pytest.raises(NotFoundError):
            await yard.read(box, "more")
        await yard.write(box, file=b"spoiled again", more=b"2")
    assert [one.label for one in await yard.checkpoints(box)] == ["first"]


async def test_branches_of_checkpoints(yard: TestYard, box: str) -> None:
    async def mark(name: str) -> str:
        await yard.write(box, state=name.encode())
        return (await yard.checkpoint(box, name)).id

    await mark("a")
    b = await mark("b")
    await yard.rewind(box, "a")
    c = await mark("c")
    infos = {one.label: one for one in await yard.checkpoints(box)}
    assert infos["c"].parent == infos["a"].id and infos["b"].parent == infos["a"].id
    await yard.write(box, state=b"lost")
    assert (await yard.rewind(box)).checkpoint == c
    assert await yard.read(box, "state") == b"c"
    assert (await yard.rewind(box, b)).checkpoint == b
    assert await yard.read(box, "state") == b"b"
    # The middle of the line may go: what came after it keeps its own state.
    await yard.yard.delete_checkpoint(rq.DeleteCheckpoint(sandbox=box, checkpoint="a"), yard.caller)
    assert {one.label: one.parent for one in await yard.checkpoints(box)} == {"b": None, "c": None}
    await yard.rewind(box, "c")
    assert await yard.read(box, "state") == b"c"
    await yard.yard.delete_checkpoint(rq.DeleteCheckpoint(sandbox=box, checkpoint="c"), yard.caller)
    with pytest.raises(ConflictError, match="no checkpoint"):
        await yard.rewind(box)
    with pytest.raises(NotFoundError):
        await yard.rewind(box, "c")
    assert await yard.read(box, "state") == b"c"


async def test_keep_last(yard: TestYard, box: str) -> None:
    for number in range(5):
        await yard.write(box, state=str(number).encode())
        await yard.checkpoint(box, str(number), keep_last=2)
    assert [one.label for one in await yard.checkpoints(box)] == ["3", "4"]
    await yard.rewind(box, "3")
    assert await yard.read(box, "state") == b"3"
    with pytest.raises(InvalidRequestError):
        await yard.checkpoint(box, keep_last=0)


async def test_a_fork_of_a_checkpoint(yard: TestYard, box: str) -> None:
    kept = await yard.checkpoint(box)
    await yard.write(box, file=b"later")
    (one,) = (await yard.fork(kept.id, 1)).forks
    assert await yard.read(one.id, "file") == b"kept"
    with pytest.raises(ConflictError, match="in use"):
        await yard.yard.delete_checkpoint(rq.DeleteCheckpoint(sandbox=box, checkpoint=kept.id), yard.caller)
    await yard.delete(box)
    assert await yard.out(one.id, "cat file") == "kept"


async def test_a_failed_rewind_keeps_the_present(yard: TestYard, box: str) -> None:
    await yard.checkpoint(box, "c")
    await yard.write(box, file=b"present")
    machines = yard.context.machines
    real = machines.engines
    machines.engines = {name: Failing(engine, 1) for name, engine in real.items()}
    try:
        with pytest.raises(InternalError, match="made to fail"):
            await yard.rewind(box)
    finally:
        machines.engines = real
    assert (await yard.info(box)).state == "running"
    assert await yard.read(box, "file") == b"present"
    # and it is watched as before: its death is noticed
    sandbox = yard.context.sandboxes.get(box)
    assert sandbox.box is not None
    await yard.engine.sweep(sandbox.box.machine.spec.dir)
    await until(lambda: sandbox.doc.state == "failed", "its death is noticed")
    assert (await yard.rewind(box)).state == "running"
    assert await yard.read(box, "file") == b"kept"


async def test_foreign_and_damaged_memory_is_refused(yard: TestYard, box: str) -> None:
    kept = await yard.snapshot(box, "gold")
    doc = yard.context.snapshots[kept.id]
    ours, doc.fingerprint = doc.fingerprint, "other/1"
    with pytest.raises(UnsupportedError, match="other/1"):
        await yard.create(snapshot="gold")
    assert await yard.out((await yard.create(snapshot="gold", memory=False)).id, "cat file") == "kept"
    mark = await yard.checkpoint(box)
    yard.context.snapshots[mark.id].fingerprint = "other/1"
    with pytest.raises(UnsupportedError, match="other/1"):
        await yard.rewind(box)
    assert not (await yard.rewind(box, memory=False)).memory_restored
    assert await yard.out(box, "cat file") == "kept"
    doc.fingerprint = ours
    name = "state" if yard.home.kind.name == "qemu" else "checkpoint.img"
    image = yard.context.images.path(doc.image or "") / name
    whole, at = image.read_bytes(), image.stat()
    image.write_bytes(whole[:-1])
    with pytest.raises(CorruptSnapshotError, match="bytes"):
        await yard.create(snapshot="gold")
    with pytest.raises(ForkError):
        await yard.fork("gold", 2)
    assert len(yard.context.sandboxes) == 2
    image.write_bytes(whole)
    os.utime(image, ns=(at.st_atime_ns, at.st_mtime_ns))  # what was written into is not believed else
    assert (await yard.create(snapshot="gold")).memory_restored


async def test_the_tree_shows_who_came_from_what(yard: TestYard, box: str) -> None:
    await yard.checkpoint(box, "c")
    (one,) = (await yard.fork(box, 1, names=["child"])).forks
    nodes = {node.id: node for node in await yard.yard.tree(rq.Tree(), yard.caller)}
    assert nodes[box].parent == "template:base"
    seen = nodes[one.id]
    while seen.id != box:
        seen = nodes[seen.parent or ""]
    assert {node.name for node in await yard.yard.tree(rq.Tree(root="child"), yard.caller)} == {"child"}
