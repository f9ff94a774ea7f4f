"""A daemon dies at any moment, and the next one finds everything or nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from yard_fixtures import Lives
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.errors import CorruptSnapshotError, UnavailableError
from forkyard.host import process
from forkyard.host.failpoint import armed
from forkyard.yard import templates


def test_sandboxes_run_on(lives: Lives) -> None:
    first = lives()
    yard = first.yard
    one = first.run(yard.create(name="one", labels={"k": "v"}, ttl_min=60, cpu_weight=300))
    pid = first.run(yard.background("one", "exec counter /home/user/n"))
    first.run(yard.counting("one", "n", 3))
    fork = first.run(yard.fork("one", 1, names=["fork"]))
    first.run(yard.checkpoint("one", "c"))
    first.run(yard.create(name="stopped"))
    first.run(yard.write("stopped", file=b"kept"))
    first.run(yard.stop("stopped"))
    first.run(yard.snapshot("one", "gold"))
    records = {doc.id for doc in yard.context.snapshots.values()}
    references = yard.references()
    first.die()

    second = lives()
    yard = second.yard
    info = second.run(yard.info("one"))
    assert (info.id, info.state, info.labels) == (one.id, "running", {"k": "v"})
    assert info.expires_at == one.expires_at
    assert info.cpu_weight == 300 and yard.weight("one") == 300
    assert {doc.id for doc in yard.context.snapshots.values()} == records
    assert yard.references() == references
    before = second.run(yard.count("one", "n"))
    assert second.run(yard.counting("one", "n", before)) > before
    found = second.run(yard.yard.execs.processes(rq.SandboxRequest(sandbox="one"), yard.caller))
    assert pid in {seen.pid for seen in found}
    assert second.run(yard.out("fork", "echo $((1+1))")) == "2"
    second.run(yard.start("stopped"))
    assert second.run(yard.read("stopped", "file")) == b"kept"
    assert second.run(yard.rewind("one", "c")).state == "running"
    assert second.run(yard.create(snapshot="gold")).memory_restored
    assert second.run(yard.info("one")).cpu_weight == 300 and yard.weight("one") == 300
    second.run(yard.delete("fork"))
    assert fork.snapshot not in yard.context.snapshots
    kinds = [record.kind for record in second.run(yard.yard.audit(rq.Audit(sandbox="one"), yard.caller))]
    assert "sandbox.created" in kinds and "sandbox.rewound" in kinds


@pytest.mark.parametrize("what", ["create", "fork", "snapshot", "checkpoint", "rewind", "stop", "delete"])
@pytest.mark.parametrize("turns", [3, 12, 40, 120])
# a real machine takes seconds for each
@pytest.mark.only(lambda kind, turns, **_: not kind.real or turns in (12, 120))
def test_a_death_in_the_middle(lives: Lives, what: str, turns: int) -> None:
    first = lives()
    yard = first.yard
    first.run(yard.create(name="one"))
    first.run(yard.write("one", file=b"kept"))
    if what == "rewind":
        first.run(yard.checkpoint("one", "c"))
    works = {
        "create": lambda: yard.create(name="two"),
        "fork": lambda: yard.fork("one", 3),
        "snapshot": lambda: yard.snapshot("one", "gold"),
        "checkpoint": lambda: yard.checkpoint("one", "c"),
        "rewind": lambda: yard.rewind("one"),
        "stop": lambda: yard.stop("one"),
        "delete": lambda: yard.delete("one"),
    }
    first.begin(works[what]())
    first.go_on(turns)
    first.die()

    second = lives()
    yard = second.yard
    for sandbox in yard.context.sandboxes:
        assert sandbox.doc.state in ("running", "stopped")
        if sandbox.doc.state == "stopped":
            assert what == "stop"
            second.run(yard.start(sandbox.id))
        assert second.run(yard.out(sandbox.id, "echo usable")) == "usable"
    if what != "delete":
        assert second.run(yard.read("one", "file")) == b"kept"
    for doc in list(yard.context.snapshots.values()):
        made = second.run(yard.fork(doc.id, 1))
        assert second.run(yard.out(made.forks[0].id, "cat file")) == "kept"
        second.run(yard.delete(made.forks[0].id))
    second.run(no_strays(yard))


async def no_strays(yard: TestYard) -> None:
    """Whatever is on the host belongs to a record, once what is made ahead has been taken away."""

    async def strays() -> list[str]:
        await yard.context.machines.drop_ahead()
        boxes = {sandbox.doc.box for sandbox in yard.context.sandboxes if sandbox.doc.box}
        layers = set(yard.yard.snapshots.holders) | yard.yard.templates.layers()
        found = [stray.name for stray in yard.context.disks.stray(boxes, layers)]
        images = {doc.image for doc in yard.context.snapshots.values()}
        return found + [n for n in yard.context.images.names() if n not in images and "warm-" not in n]

    async def none() -> bool:
        return not await strays()

    await until(none, "every box, layer and image has a record")


def test_a_command_outlives_the_daemon(lives: Lives) -> None:
    first = lives()
    yard = first.yard
    first.run(yard.create(name="one"))
    command = "echo once >> ran; echo begin; while [ ! -e go ]; do sleep 0.02; done; echo end; exit 3"
    first.begin(yard.shell("one", command, request_id="asked-twice"))
    big = f"head -c {2 << 20} /dev/zero; echo middle; while [ ! -e go ]; do sleep 0.02; done; echo end"
    first.begin(yard.shell("one", big, request_id="much"))

    async def both_run() -> bool:
        found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox="one"), yard.caller)
        return len({one.handle for one in found}) == 2 and "ran" in await yard.out("one", "ls")

    first.go_on_until(both_run, "both commands run")
    first.die()

    second = lives()
    yard = second.yard
    second.begin(_go(yard))
    done = second.run(yard.shell("one", command, request_id="asked-twice"))
    assert (done.stdout, done.exit_code) == ("begin\nend\n", 3)
    much = second.run(yard.shell("one", big, request_id="much"))
    assert len(much.stdout_bytes) == (2 << 20) + len(b"middle\nend\n")
    assert much.stdout_bytes.endswith(b"\0middle\nend\n")
    assert second.run(yard.read("one", "ran")) == b"once\n"


async def _go(yard: TestYard) -> None:
    await yard.write("one", go=b"")


def test_what_died_meanwhile_is_failed_and_can_start(lives: Lives) -> None:
    first = lives()
    yard = first.yard
    first.run(yard.create(name="one"))
    first.run(yard.write("one", file=b"kept"))
    first.run(yard.checkpoint("one"))
    first.run(yard.create(name="bare"))
    first.run(yard.create(name="gone", ephemeral=True))
    specs = [sandbox.box.machine.spec.dir for sandbox in yard.context.sandboxes]
    engine = yard.engine
    first.die()

    async def end_all() -> None:
        for directory in specs:
            await engine.sweep(directory)

    asyncio.run(end_all())

    second = lives()
    yard = second.yard
    assert yard.context.sandboxes.find("gone") is None
    for name in ("one", "bare"):
        info = second.run(yard.info(name))
        assert info.state == "failed" and info.failure is not None and info.failure.cause == "unknown"
    assert second.run(yard.start("one")).state == "running"
    assert second.run(yard.read("one", "file")) == b"kept"


def test_a_lease_that_ended_meanwhile(lives: Lives) -> None:
    first = lives()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        lease = rq.Lease(pid=child.pid, start_time=process.start_time(child.pid))
        first.run(first.yard.create(name="held", ephemeral=True, lease=lease))
        first.run(first.yard.create(name="short"))
        first.run(first.yard.yard.set_ttl(rq.SetTtl(sandbox="short", ttl_min=0.0001), first.yard.caller))
        first.run(first.yard.create(name="other"))
        first.die()
    finally:
        child.kill()
        child.wait()

    second = lives()
    left = second.yard.context.sandboxes
    second.go_on_until(lambda: [one.doc.name for one in left] == ["other"], "leases and deadlines count on")


def test_a_flipped_bit_in_memory_is_found_by_the_next_daemon(lives: Lives) -> None:
    first = lives()
    first.run(first.yard.create(name="one"))
    first.run(first.yard.write("one", file=b"kept"))
    kept = first.run(first.yard.snapshot("one", "gold"))
    image = first.yard.context.images.path(first.yard.context.snapshots[kept.id].image or "")
    first.run(first.yard.context.images.settled(image.name))
    largest = max(image.iterdir(), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    first.die()

    second = lives()
    with pytest.raises(CorruptSnapshotError, match=f"{largest.name} is not what was written"):
        second.run(second.yard.create(snapshot="gold"))
    cold = second.run(second.yard.create(snapshot="gold", memory=False))
    assert second.run(second.yard.out(cold.id, "cat file")) == "kept"
    assert second.run(second.yard.out("one", "cat file")) == "kept"
    largest.write_bytes(whole)
    assert second.run(second.yard.create(snapshot="gold")).memory_restored


def test_a_machine_that_dies_during_a_rewind_that_fails(lives: Lives) -> None:
    life = lives()
    yard = life.yard
    life.run(yard.create(name="one"))
    life.run(yard.checkpoint("one", "c"))

    async def dies() -> None:
        sandbox = yard.context.sandboxes.get("one")
        assert sandbox.box is not None
        directory = sandbox.box.machine.spec.dir
        with armed("ignite.bound=delay:0.3,restart.ignited=error") as points:
            async with asyncio.TaskGroup() as group:
                rewinding = group.create_task(_fails(yard.rewind("one", "c")))
                await until(lambda: "ignite.bound" in points.reached, "the rewind is under way")
                await yard.engine.sweep(directory)
                await rewinding
        await until(lambda: sandbox.doc.state == "failed", "its death is noticed")
        await yard.start("one")

    life.run(dies())
    assert life.run(yard.out("one", "echo usable")) == "usable"


async def _fails(work: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(UnavailableError):
        await work


def test_an_upgrade_makes_warm_images_anew(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mended in how machines are launched would else never reach what is restored."""
    first = lives()
    first.run(first.yard.yard.warm_template(rq.WarmTemplate(name="base", request_id="w"), first.yard.caller))
    (old,) = (name for name in first.yard.context.images.names() if name.startswith("warm-"))
    first.die()

    monkeypatch.setattr(templates, "WARM_REVISION", templates.WARM_REVISION + 1)
    second = lives()
    yard = second.yard
    assert old not in yard.context.images.names()
    second.run(yard.yard.warm_template(rq.WarmTemplate(name="base", request_id="w2"), yard.caller))
    second.run(yard.create(name="one"))
    assert second.run(yard.out("one", "echo usable")) == "usable"
