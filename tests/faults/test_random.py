"""Thousands of random operations by several clients, the daemon killed at random: compared with a model.

The model is what clients were told. An operation whose answer came is done, one that failed is not,
and one that the daemon's death cut short is either: the next daemon says which, and that is taken
over, once it is one of both. Then memory, catalog and host have to say the same, every file has to
hold what was last written into it in that line, and every snapshot has to start.

``FORKYARD_TEST_RANDOM_S`` is how long it goes on (30), ``FORKYARD_TEST_SEED`` where it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from operations import unusable, wrong
from yard_fixtures import Lives
from yards import Home, Kind, TestYard, until

from forkyard.errors import ConflictError, ForkyardError, NotFoundError
from forkyard.host.failpoint import armed

CLIENTS = 4
MOST = 8
FAILPOINTS = (
    *("catalog.save", "create.announced", "create.saved", "start.disk", "start.engine", "start.identified"),
    *("freeze.paused", "freeze.saved", "freeze.sealed", "freeze.published", "keep.frozen", "keep.saved"),
    *("fork.announced", "fork.one", "fork.saved", "restart.ignited", "restart.saved", "stop.saved"),
    *("delete.saved", "discard.saved", "end.killed", "layers.unheld"),
)
ACTIONS = ("kill", "kill", "error", "full", "delay:0.01")


@dataclass
class Known:
    """What is known of a sandbox: its state, what its file holds, its checkpoints' files."""

    state: str
    file: bytes
    checkpoints: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Model:
    """What there is by what clients were told. A name in ``open`` has a request under way, or one
    whose outcome nobody was told: then only what is possible is checked."""

    sandboxes: dict[str, Known] = field(default_factory=dict)
    snapshots: dict[str, bytes] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)


class Clients:
    """Clients of one daemon after another, who work at the same time on names of their own choice."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.model = Model()
        self.names = 0
        self.done = 0
        self.failed = 0
        self.cut = 0
        self.log: list[str] = []
        self.renames: dict[str, str] = {}  # those under way: the new name and the old one

    # -- choosing

    def _free(self, state: str | None = None) -> list[str]:
        sandboxes = self.model.sandboxes.items()
        return [n for n, k in sandboxes if n not in self.model.open and state in (None, k.state)]

    def _new(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def choose(self) -> tuple[str, str] | None:
        """An operation and the name that it is about; None if others are about all of them."""
        running, every = self._free("running"), self._free()
        wanted: list[tuple[str, list[str]]] = [
            ("write", running), ("write", running), ("checkpoint", running), ("stop", running),
            ("start", self._free("stopped")), ("read", running), ("delete", every), ("rename", every),
            ("crash", running),
            ("rewind", [name for name in every if self.model.sandboxes[name].checkpoints]),
        ]  # fmt: skip
        if len(self.model.sandboxes) + len(self.model.open) < MOST:
            wanted += [("create", [self._new()]), ("fork", running), ("snapshot", running)]
            wanted.append(("from", [n for n in self.model.snapshots if n not in self.model.open]))
        wanted.append(("forget", [n for n in self.model.snapshots if n not in self.model.open]))
        possible = [(verb, names) for verb, names in wanted if names]
        if not possible:
            return None
        verb, names = self.chance.choice(possible)
        return verb, self.chance.choice(names)

    # -- doing

    async def one(self, yard: TestYard) -> None:
        """One operation, and what follows from its answer."""
        chosen = self.choose()
        if chosen is None:
            await asyncio.sleep(0)
            return
        verb, name = chosen
        model = self.model
        fresh = self._new()
        self.log.append(f"{verb} {name} {fresh}")
        touched = {
            "fork": [name, fresh],
            "from": [name, fresh],
            "snapshot": [name, fresh],
            "rename": [name, fresh],
        }
        names = touched.get(verb, [name])
        if verb == "rename":
            self.renames[fresh] = name
        model.open.update(dict.fromkeys(names, verb))
        known = model.sandboxes.get(name)
        content = f"{fresh}".encode()
        try:
            work = getattr(self, f"_{verb}")(yard, name, fresh, known, content)
            if self.chance.random() < 0.9 or verb == "crash":
                await work
            elif not await self._given_up(work):
                self.cut += 1
                await self._look(yard, names)
        except (ForkyardError, OSError) as error:
            self.failed += 1
            self.log.append(f"   {verb} {name}: {error}")
            if isinstance(error, NotFoundError | ConflictError) and "failpoint" not in str(error):
                raise AssertionError(f"{verb} {name}: {error}") from error
            # Told that it failed: a write may have been done all the same, anything else was not,
            # or was done whole, which the next look at the yard says.
            await self._look(yard, names)
        self.done += 1
        self.renames.pop(fresh, None)
        for each in names:
            model.open.pop(each, None)

    async def _given_up(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do it for a client that goes after a while; whether it was done before."""
        turns = self.chance.randint(1, 60)
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(work)
                while not task.done() and turns:
                    turns -= 1
                    await asyncio.sleep(0)
                task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        for _ in range(10):  # what goes on without its client begins, and takes its lock
            await asyncio.sleep(0)
        return not task.cancelled()

    async def _create(self, yard: TestYard, name: str, fresh: str, known: Any, content: bytes) -> None:
        await yard.create(name=name)
        self.model.sandboxes[name] = Known("running", b"")

    async def _write(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.write(name, file=content)
        known.file = content

    async def _read(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        assert await held(yard, name) == known.file, f"{name} has what was written"

    async def _checkpoint(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        made = await yard.checkpoint(name, fresh)
        known.checkpoints[made.id] = known.file

    async def _rewind(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        to = self.chance.choice(sorted(known.checkpoints))
        await yard.rewind(name, to)
        known.file, known.state = known.checkpoints[to], "running"

    async def _stop(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.stop(name)
        known.state = "stopped"

    async def _start(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.start(name)
        known.state = "running"

    async def _delete(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.delete(name)
        del self.model.sandboxes[name]

    async def _crash(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        """Its machine dies; it goes on from its newest checkpoint, if it has one."""
        sandbox = yard.context.sandboxes.get(name)
        assert sandbox.box is not None
        await yard.engine.sweep(sandbox.box.machine.spec.dir)
        await until(lambda: sandbox.doc.state == "failed", lambda: f"{name} is lost: {sandbox}")
        newest = sandbox.doc.checkpoint
        if newest is None:
            await yard.delete(name)
            del self.model.sandboxes[name]
        else:
            await yard.start(name)
            known.file = known.checkpoints[newest]

    async def _rename(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        from forkyard import requests as rq

        await yard.yard.rename_sandbox(rq.RenameSandbox(sandbox=name, name=fresh), yard.caller)
        self.model.sandboxes[fresh] = self.model.sandboxes.pop(name)

    async def _fork(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.fork(name, 1, names=[fresh])
        self.model.sandboxes[fresh] = Known("running", known.file)

    async def _snapshot(self, yard: TestYard, name: str, fresh: str, known: Known, content: bytes) -> None:
        await yard.snapshot(name, fresh)
        self.model.snapshots[fresh] = known.file

    async def _from(self, yard: TestYard, name: str, fresh: str, known: Any, content: bytes) -> None:
        await yard.create(name=fresh, snapshot=name)
        self.model.sandboxes[fresh] = Known("running", self.model.snapshots[name])

    async def _forget(self, yard: TestYard, name: str, fresh: str, known: Any, content: bytes) -> None:
        with contextlib.suppress(ConflictError):  # somebody was started from it
            await yard.delete_snapshot(name)
            del self.model.snapshots[name]

    # -- what nobody was told

    async def _look(self, yard: TestYard, names: list[str]) -> None:
        """Take over what there is of names whose outcome is not known, if it is possible at all."""
        model = self.model
        for fresh, name in self.renames.items():
            there = yard.context.sandboxes.find(name) or yard.context.sandboxes.find(fresh)
            if name in names and there is not None:
                async with there.lock:
                    if there.doc.name == fresh and name in model.sandboxes:
                        model.sandboxes[fresh] = model.sandboxes.pop(name)
        for name in names:
            there = yard.context.sandboxes.find(name)
            if there is not None:  # what a client gave up may be coming to its end
                async with there.lock:
                    there = yard.context.sandboxes.find(name)
            if there is not None and there.doc.state == "failed" and model.open[name] == "crash":
                await yard.delete(name)
                there = None
            known = model.sandboxes.get(name)
            if there is None:
                assert known is None or model.open[name] in ("delete", "rename", "crash"), f"{name} is gone"
                model.sandboxes.pop(name, None)
            else:
                possible = {"stop": ("running", "stopped"), "start": ("running", "stopped")}
                states = possible.get(model.open[name], ("running", "stopped"))
                assert there.doc.state in states, f"{name} is {there.doc.state}"
                if known is None:
                    known = model.sandboxes[name] = Known(there.doc.state, b"")
                known.state = there.doc.state
                infos = await yard.checkpoints(name)
                known.checkpoints = {info.id: known.checkpoints.get(info.id, b"?") for info in infos}
                if known.state == "running":
                    known.file = await held(yard, name)
                for id_, content in known.checkpoints.items():
                    if content == b"?":
                        known.checkpoints[id_] = await self._content(yard, id_)
            kept = yard.yard.snapshots.find(name)
            if kept is not None and kept.kind == "snapshot":
                model.snapshots[name] = model.snapshots.get(name) or await self._content(yard, name)
            else:
                assert name not in model.snapshots or model.open[name] == "forget", f"snapshot {name} is gone"
                model.snapshots.pop(name, None)

    async def _content(self, yard: TestYard, source: str) -> bytes:
        """What a snapshot has in the file: it has to start."""
        fork = (await yard.fork(source, 1)).forks[0]
        try:
            return await held(yard, fork.id)
        finally:
            await yard.delete(fork.id)

    async def after_death(self, yard: TestYard) -> None:
        """What a new daemon has, is what there was, or what was being done."""
        for sandbox in yard.context.sandboxes:
            if sandbox.doc.name.startswith("sb-"):  # of a look at a snapshot's content
                await yard.delete(sandbox.id)
        await self._look(yard, list(self.model.open))
        self.model.open.clear()
        self.renames.clear()
        await self.compare(yard)

    async def compare(self, yard: TestYard) -> None:
        """The yard is as the model says."""
        model = self.model
        said: list[str] = []

        async def nothing_wrong() -> bool:
            said[:] = await wrong(yard)
            return not said

        await until(nothing_wrong, lambda: f"all is well: {said}", timeout_s=10)
        there = {one.doc.name: one.doc.state for one in yard.context.sandboxes}
        assert there == {name: known.state for name, known in model.sandboxes.items()}
        assert await unusable(yard) == []
        for name, known in model.sandboxes.items():
            if known.state == "running":
                assert await held(yard, name) == known.file, f"{name} has what was written"
            assert {info.id for info in await yard.checkpoints(name)} == set(known.checkpoints)
        kept = {doc.name for doc in yard.context.snapshots.values() if doc.kind == "snapshot"}
        assert kept == set(model.snapshots)


async def held(yard: TestYard, name: str) -> bytes:
    """What the file of a sandbox holds; nothing if it was never written."""
    try:
        return await yard.read(name, "file")
    except NotFoundError:
        return b""


@pytest.fixture
def kind() -> Kind:
    return Kind("fake")


@pytest.fixture
def home(fake_home: Home) -> Home:
    return fake_home


def test_random_operations_and_deaths(lives: Lives, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("FORKYARD_TEST_SEED") or secrets.randbelow(1 << 32))
    budget_s = float(os.environ.get("FORKYARD_TEST_RANDOM_S") or 30)
    print(f"FORKYARD_TEST_SEED={seed}")
    chance = random.Random(seed)
    clients = Clients(chance)
    end, deaths, faults = time.monotonic() + budget_s, 0, 0
    try:
        while time.monotonic() < end:
            life = lives()
            life.run(clients.after_death(life.yard))
            name, action = (
                chance.choice(FAILPOINTS),
                chance.choice(["kill", "kill", "error", "full", "delay:0.01"]),
            )
            with armed(f"{name}={action}", die=life.stop) as points:
                life._armed = points
                try:
                    life.run(_work(clients, life.yard, chance.randint(20, 120)))
                except RuntimeError as error:
                    if "stopped before" not in str(error):
                        raise
            faults += name in points.reached
            if life.loop.is_running() or clients.model.open or chance.random() < 0.5:
                life.die()
                deaths += 1
            else:
                life.run(clients.compare(life.yard))
                life.die()
        life = lives()
        life.run(clients.after_death(life.yard))
        for name in clients.model.snapshots:
            assert life.run(clients._content(life.yard, name)) == clients.model.snapshots[name]
    except BaseException:
        print("\n".join(clients.log[-60:]))
        raise
    with capsys.disabled():
        counts = (
            f"{clients.done} operations, {clients.failed} told of a fault, {faults} faults, {deaths} deaths"
        )
        print(f"\nseed {seed}: {counts}")
    assert clients.done > 20


async def _work(clients: Clients, yard: TestYard, count: int) -> None:
    """Some operations, by all clients at the same time."""
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await clients.one(yard)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
