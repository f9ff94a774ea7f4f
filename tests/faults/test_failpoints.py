"""Each step of each operation fails, is late while its client goes, or is the daemon's last.

Afterwards what the daemon knows, what the catalog says and what the host has are the same; the
source runs and has its files; nothing half done is to be seen; and the same request, made again
under the same id, is done once.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from operations import OPERATIONS, Operation, unusable, wrong
from yard_fixtures import Lives
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.errors import CapacityError, ForkyardError, InvalidRequestError
from forkyard.host import failpoint
from forkyard.host.failpoint import armed
from forkyard.store.catalog import Catalog

SOURCE = Path(failpoint.__file__).parents[1]
CASES = [(name, point) for name, operation in OPERATIONS.items() for point in operation.points]
# What each takes on a real engine is seconds: of those, the steps that differ from a toy's.
ON_REAL = {
    ("fork", "freeze.paused"),
    ("fork", "freeze.sealed"),
    ("fork", "start.engine"),
    ("rewind", "start.heard"),
    ("rewind", "restart.saved"),
    ("stop", "stop.saved"),
    ("create", "disk.limited"),
    ("create", "disk.mounted"),
    ("snapshot", "layer.recorded"),
    ("pull a template", "layer.filled"),
    ("import a snapshot", "layer.filled"),
    ("import a snapshot", "import.saved"),
}
# Reached by a real store only; and those that have tests of their own: a box made ahead, below, and an
# outgoing connection, in tests/unit/test_egress_broker.py.
REAL_ONLY = {"disk.limited", "disk.mounted", "layer.recorded", "layer.filled"}
ELSEWHERE = {"blank.prepared", "egress.connected"}
ALL_CASES = [*CASES, *sorted(ON_REAL - set(CASES))]


toy_shows_it = pytest.mark.only(lambda kind, **_: not kind.real)
at_each_step = pytest.mark.only(
    lambda kind, case, **_: case in ON_REAL if kind.real else case[1] not in REAL_ONLY
)


@pytest.fixture(params=ALL_CASES, ids=[f"{name}-{point}" for name, point in ALL_CASES])
def case(request: pytest.FixtureRequest) -> tuple[Operation, str]:
    name, point = request.param
    return OPERATIONS[name], point


async def ready(yard: TestYard, operation: Operation) -> None:
    """A sandbox with a file, and nothing under way."""
    await yard.create(name="one")
    await yard.write("one", file=b"kept")
    templates = yard.yard.templates
    await until(lambda: templates.images(templates.get("base")), "the template is warm")
    if operation.prepare is not None:
        await operation.prepare(yard)
    await sound(yard)


async def sound(yard: TestYard) -> None:
    """Wait for whatever is still on its way; then everything agrees and works."""
    said: list[str] = []

    async def nothing_wrong() -> bool:
        # what a client gave up may still be coming to its end
        said[:] = await wrong(yard) or await unusable(yard)
        return not said

    await until(nothing_wrong, lambda: f"all is well: {said}", timeout_s=10)


async def kept(yard: TestYard, operation: Operation) -> None:
    """The source is unharmed."""
    found = yard.context.sandboxes.find("one")
    if operation.keeps_one or found is not None:
        assert found is not None
        if found.doc.egress != "deny":  # a toy's agent has no network
            await yard.yard.set_egress(rq.SetEgress(sandbox="one", egress="deny"), yard.caller)
        if found.doc.state == "stopped":
            await yard.start("one")
        assert await yard.read("one", "file") == b"kept"


async def again(yard: TestYard, operation: Operation) -> None:
    """The same request once more."""
    await operation.run(yard)
    assert operation.done(yard), "the retry works, once"
    await sound(yard)
    await kept(yard, operation)


@toy_shows_it
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table_is_what_is_reached(lives: Lives, name: str) -> None:
    operation, life = OPERATIONS[name], lives()
    life.run(ready(life.yard, operation))
    with armed() as points:
        life.run(operation.run(life.yard))
    assert operation.done(life.yard)
    if name == "pull a template":  # its warm image is made behind it
        assert set(operation.points) <= set(points.reached)
    else:
        assert set(points.reached) - ELSEWHERE == set(operation.points)


def test_every_failpoint_is_exercised() -> None:
    named: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        named |= set(re.findall(r"\bfailpoint(?:_in_thread)?\(\"([a-z._]+)\"\)", path.read_text()))
    assert len(named) > 40
    assert named == {point for _, point in ALL_CASES} | ELSEWHERE


def test_what_cannot_be_understood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in ("fork.saved", "fork.saved=explode", "fork.saved=delay:soon"):
        monkeypatch.setenv("FORKYARD_FAILPOINTS", spec)
        with pytest.raises(InvalidRequestError, match="NAME=ACTION"):
            failpoint.arm_from_environment()


@toy_shows_it
@pytest.mark.parametrize("action", ["error", "full", "delay:0.05", "kill"])
def test_a_box_made_ahead_fails(lives: Lives, action: str) -> None:
    operation, life = OPERATIONS["create"], lives()
    life.run(ready(life.yard, operation))
    if life.die_of(f"blank.prepared={action}", operation.run(life.yard)):
        life = lives()
    else:
        life.run(until(lambda: "blank.prepared" in life.reached, "one is made ahead"))
    life.run(sound(life.yard))
    life.run(again(life.yard, operation))


@at_each_step
@pytest.mark.parametrize("action", ["error", "full", "readonly"])
def test_a_step_fails(lives: Lives, case: tuple[Operation, str], action: str) -> None:
    operation, point = case
    life = lives()
    life.run(ready(life.yard, operation))

    async def fails() -> None:
        with armed(f"{point}={action}") as points:
            try:
                await operation.run(life.yard)
            except (ForkyardError, OSError) as error:
                assert "failpoint" in str(error) or "full" in str(error), error
            assert point in points.reached

    life.run(fails())
    life.run(sound(life.yard))
    life.run(again(life.yard, operation))


@at_each_step
def test_the_client_goes_at_a_step(lives: Lives, case: tuple[Operation, str]) -> None:
    operation, point = case
    life = lives()
    life.run(ready(life.yard, operation))

    async def is_cancelled() -> None:
        with armed(f"{point}=delay:0.05") as points:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(operation.run(life.yard))
                await until(lambda: point in points.reached or task.done(), f"{point} is reached")
                task.cancel()
            assert point in points.reached

    life.run(is_cancelled())
    life.run(sound(life.yard))
    life.run(again(life.yard, operation))


@at_each_step
def test_the_daemon_dies_at_a_step(lives: Lives, case: tuple[Operation, str]) -> None:
    operation, point = case
    first = lives()
    first.run(ready(first.yard, operation))
    assert first.die_of(f"{point}=kill", operation.run(first.yard)), f"{point} is reached"

    second = lives()
    second.run(sound(second.yard))
    second.run(again(second.yard, operation))


@toy_shows_it
@pytest.mark.parametrize("name", ["create", "fork", "rewind", "stop", "start", "snapshot", "delete"])
@pytest.mark.parametrize("saves", [0, 1, 2])
def test_the_catalog_stays_full(lives: Lives, name: str, saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, life = OPERATIONS[name], lives()
    life.run(ready(life.yard, operation))
    real, left = Catalog.save, saves

    async def save(self: Catalog, **documents: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise CapacityError("the disk is full", retryable=True)
        await real(self, **documents)

    monkeypatch.setattr(Catalog, "save", save)
    try:
        life.run(operation.run(life.yard))
    except CapacityError:
        assert left < 0
    monkeypatch.setattr(Catalog, "save", real)
    assert life.run(unusable(life.yard)) == []
    life.run(again(life.yard, operation))
