"""Machines that were started before anybody asked for them."""

from __future__ import annotations

import asyncio

from yard_fixtures import Lives
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.yard.machines import Box


async def warm(yard: TestYard) -> None:
    await yard.yard.warm_template(rq.WarmTemplate(name="base"), yard.caller)


def waiting(yard: TestYard, image: str = "warm-") -> list[Box]:
    """Those that were restored from this image, or one that begins so."""
    kinds = yard.context.machines.ahead.stock._kinds
    return [box for key, stock in kinds.items() if key[1].name.startswith(image) for box in stock.ready]


async def ready(yard: TestYard, image: str = "warm-") -> Box:
    """One of them, as soon as there is one."""
    return (await until(lambda: waiting(yard, image), "a machine is started ahead"))[0]


def image_of(yard: TestYard, snapshot: str) -> str:
    found = yard.yard.snapshots.get(snapshot).image
    assert found
    return found


async def box_of(yard: TestYard, ref: str) -> str:
    sandbox = yard.context.sandboxes.get(ref)
    return sandbox.doc.box


async def test_the_next_create_is_given_one(yard: TestYard) -> None:
    await warm(yard)
    await yard.create(name="one", env={"X": "1"})
    found = await ready(yard)
    made = await yard.create(name="two", mem_mb=512, cpus=0.5)
    assert await box_of(yard, "two") == found.id
    assert made.mem_mb == 512 and made.start_ms > 0
    assert await yard.out("two", "hostname; whoami; pwd; echo $FORKYARD_FORK_ID") == (
        f"two\nuser\n/home/user\n{made.id}"
    )
    await yard.write("one", file=b"one")
    await yard.write("two", file=b"two")
    assert await yard.read("one", "file") == b"one" and await yard.read("two", "file") == b"two"
    fork = (await yard.fork("two", 1)).forks[0]
    assert await yard.read(fork.id, "file") == b"two"


async def test_other_disks_and_types_are_other_machines(yard: TestYard) -> None:
    await warm(yard)
    await yard.create(name="one")
    found = await ready(yard)
    await yard.create(name="two", disk_mb=512)
    assert await box_of(yard, "two") != found.id


async def test_one_that_died_is_not_given_out(yard: TestYard) -> None:
    await warm(yard)
    await yard.create(name="one")
    found = await ready(yard)
    await yard.engine.kill(found.machine)
    await yard.create(name="two")
    assert await box_of(yard, "two") != found.id
    assert await yard.out("two", "echo usable") == "usable"


async def test_a_snapshot_in_which_nothing_runs(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.write("one", file=b"kept")
    await yard.snapshot("one", "gold")
    await yard.create(name="first", snapshot="gold")
    found = await ready(yard, image_of(yard, "gold"))
    made = await yard.create(name="second", snapshot="gold")
    assert made.memory_restored and await box_of(yard, "second") == found.id
    assert await yard.out("second", "hostname; cat file") == "second\nkept"
    await yard.write("second", file=b"changed")
    assert await yard.read("first", "file") == b"kept"


async def test_a_program_does_not_go_on_before_it_was_asked_for(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.background("one", "exec counter /home/user/n")
    await yard.counting("one", "n", 3)
    await yard.snapshot("one", "gold")
    first = await yard.create(snapshot="gold")
    await yard.counting(first.id, "n", await yard.count(first.id, "n") + 20)
    await asyncio.sleep(1)
    assert not waiting(yard, image_of(yard, "gold"))


async def test_they_go_with_what_they_stand_on(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.write("one", file=b"kept")
    await yard.snapshot("one", "gold")
    await yard.create(name="first", snapshot="gold")
    await ready(yard, image_of(yard, "gold"))
    await yard.delete("first")
    await yard.delete("one")
    await yard.delete_snapshot("gold")
    assert yard.references() == {}


def test_the_next_daemon_takes_them_away(lives: Lives) -> None:
    first = lives()
    first.run(warm(first.yard))
    first.run(first.yard.create(name="one"))
    found = first.run(ready(first.yard))
    first.die()
    second = lives()
    assert not second.yard.context.machines.box_dir(found.id).exists()
    assert second.run(second.yard.out("one", "echo on")) == "on"
