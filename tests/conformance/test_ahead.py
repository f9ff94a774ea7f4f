"""Machines that were started before anybody asked for them."""

from __future__ import annotations

import asyncio

import pytest
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
    # A kernel of its own has booted with its memory.
    mem_mb = 1024 if yard.context.engine.own_kernel else 512
    made = await yard.create(name="two", mem_mb=mem_mb, cpus=0.5, cpu_weight=700)
    assert await box_of(yard, "two") == found.id
    assert yard.weight("two") == 700
    assert made.mem_mb == mem_mb and made.start_ms > 0
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


async def test_one_that_died_a_moment_ago_costs_nothing(yard: TestYard) -> None:
    await warm(yard)
    await yard.create(name="one")
    found = await ready(yard)
    # As dead as it gets, and nobody has been told yet.
    found.guest.lost = lambda error: None  # type: ignore[method-assign]
    found.machine.died.clear()
    await yard.engine.kill(found.machine)
    found.machine.died.clear()
    await yard.create(name="two")
    assert await box_of(yard, "two") != found.id
    assert await yard.out("two", "echo usable") == "usable"


async def test_a_damaged_image_of_a_template_is_made_anew(yard: TestYard) -> None:
    await warm(yard)
    image = next(name for name in yard.context.images.names() if name.startswith("warm-"))
    file = next(path for path in yard.context.images.path(image).iterdir() if path.name != "manifest.json")
    file.write_bytes(b"")
    made = await yard.create(name="one")
    assert made.state == "running" and await yard.out("one", "echo usable") == "usable"
    await until(lambda: yard.yard.templates.info(yard.yard.templates.get("base")).warm, "base is warm again")
    await yard.create(name="two")


async def test_they_go_with_their_snapshot_though_its_disk_stays(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.snapshot("one", "gold")
    image = image_of(yard, "gold")
    await yard.create(name="first", snapshot="gold")
    await ready(yard, image)
    await yard.snapshot("first", "later")
    await yard.delete("first")
    await yard.delete_snapshot("gold")
    assert not waiting(yard, image)


@pytest.mark.only(lambda kind, **_: kind.real)
async def test_a_hook_that_ends_a_program_does_not_hide_it(yard: TestYard) -> None:
    await yard.create(name="one", user="root")
    pid = await yard.background("one", "exec counter /root/n")
    await yard.counting("one", "/root/n", 3)
    hook = f"#!/bin/sh\nkill -9 {pid}\n"
    await yard.shell("one", "mkdir -p /etc/forkyard/on-fork.d")
    files = {"/etc/forkyard/on-fork.d/10": hook.encode()}
    await yard.yard.files.write_files(rq.WriteFiles(sandbox="one", files=files, mode=0o755), yard.caller)
    await yard.snapshot("one", "gold")
    await yard.create(name="first", snapshot="gold")
    assert not (await yard.shell("first", f"grep counter /proc/{pid}/stat | grep -v ' Z '")).ok
    await asyncio.sleep(1)
    assert not waiting(yard, image_of(yard, "gold"))
