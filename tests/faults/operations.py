"""What the yard does, as operations that a fault can be put into, and what must hold after one."""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yards import TestYard

from forkyard import requests as rq
from forkyard.errors import ForkyardError
from forkyard.yard.model import SandboxDoc, SnapshotDoc

Step = Callable[[TestYard], Awaitable[Any]]


@dataclass(frozen=True)
class Operation:
    """``run`` is the request under test, made with a fixed request id; ``done`` says whether all of its
    effect is there, and ``points`` names the failpoints that it reaches."""

    run: Step
    done: Callable[[TestYard], bool]
    points: tuple[str, ...]
    prepare: Step | None = None
    keeps_one: bool = True


def _sandboxes(yard: TestYard) -> dict[str, str]:
    return {one.doc.name: one.doc.state for one in yard.context.sandboxes}


def _kinds(yard: TestYard) -> collections.Counter[str]:
    return collections.Counter(doc.kind for doc in yard.context.snapshots.values())


async def _create(yard: TestYard) -> None:
    await yard.create(name="two", request_id="asked")


async def _from_snapshot(yard: TestYard) -> None:
    await yard.create(name="two", snapshot="gold", request_id="asked")


async def _fork(yard: TestYard) -> None:
    made = await yard.fork("one", 2, request_id="asked")
    assert len(made.forks) == 2
    assert await yard.read(made.forks[0].id, "file") == b"kept"


async def _snapshot(yard: TestYard) -> None:
    await yard.snapshot("one", "gold", request_id="asked")


async def _checkpoint(yard: TestYard) -> None:
    await yard.checkpoint("one", "c", request_id="asked")


async def _before_import(yard: TestYard) -> None:
    await yard.snapshot("one", "gold")
    (yard.home.path / "gold.fy").write_bytes(await yard.exported("gold"))
    await yard.delete_snapshot("gold")


async def _import(yard: TestYard) -> None:
    await yard.imported((yard.home.path / "gold.fy").read_bytes(), request_id="asked")


async def _delete_snapshot(yard: TestYard) -> None:
    if yard.yard.snapshots.find("gold") is not None:
        await yard.delete_snapshot("gold")


async def _before_rewind(yard: TestYard) -> None:
    await yard.checkpoint("one", "c")
    await yard.write("one", **{"/tmp/later": b"x"})


def _rewound(yard: TestYard) -> bool:
    return yard.context.sandboxes.get("one").doc.generation > 1


async def _egress(yard: TestYard) -> None:
    await yard.yard.set_egress(
        rq.SetEgress(sandbox="one", egress_allow=["example.test"], request_id="asked"), yard.caller
    )


async def _expose(yard: TestYard) -> None:
    await yard.yard.expose(rq.Expose(sandbox="one", port=80, request_id="asked"), yard.caller)


async def _warm(yard: TestYard) -> None:
    await yard.yard.warm_template(rq.WarmTemplate(name="base", request_id="asked"), yard.caller)


async def _cool(yard: TestYard) -> None:
    for image in yard.yard.templates.images(yard.yard.templates.get("base")):
        yard.context.images.delete(image)


def _warmed(yard: TestYard) -> bool:
    return bool(yard.yard.templates.images(yard.yard.templates.get("base")))


async def _pull(yard: TestYard) -> None:
    deposit = "0123456789abcdef"

    async def chunks() -> Any:
        yield archive(yard.home.path)

    await yard.yard.deposit(rq.Deposit(id=deposit), chunks(), yard.caller)
    spec = rq.TemplateSpec(name="pulled", image="root.tar", format="tar", deposit=deposit)
    async for event in yard.yard.pull_template(rq.MakeTemplate(spec=spec), yard.caller):
        assert event.error is None, event


def archive(home: Path) -> bytes:
    """A root's tar."""
    import io
    import tarfile

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for path in ("etc", "tmp"):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    return file.getvalue()


# What reaches which failpoints, in the order in which they are first reached, on every engine.
START = (
    *("ignite.network", "start.laid_out", "start.disk", "start.engine", "start.heard", "start.identified"),
    *("ignite.bound", "ignite.equipped"),
)
CREATE = ("catalog.save", "create.announced", *START, "create.ignited", "create.saved")
FREEZE = (
    *("freeze.written_out", "freeze.paused", "freeze.saved", "freeze.sealed", "image.manifest"),
    "freeze.published",
)
KEEP = (*FREEZE, "keep.frozen", "catalog.save", "keep.saved")
END = ("end.killed", "end.removed")
RESTART = ("restart.reserved", *START, "restart.ignited", "catalog.save", "restart.saved")

OPERATIONS: dict[str, Operation] = {
    "create": Operation(_create, lambda y: _sandboxes(y).get("two") == "running", CREATE),
    "create from a snapshot": Operation(
        _from_snapshot,
        lambda y: _sandboxes(y).get("two") == "running",
        CREATE,
        prepare=lambda y: y.snapshot("one", "gold"),
    ),
    "fork": Operation(
        _fork,
        lambda y: len(_sandboxes(y)) == 3,
        (*KEEP, "create.announced", "fork.announced", *START, "fork.one", "fork.started", "fork.saved"),
    ),
    "snapshot": Operation(_snapshot, lambda y: _kinds(y)["snapshot"] == 1, KEEP),
    "import a snapshot": Operation(
        _import,
        lambda y: _kinds(y)["snapshot"] == 1,
        ("import.received", "image.manifest", "catalog.save", "import.saved"),
        prepare=_before_import,
    ),
    "delete a snapshot": Operation(
        _delete_snapshot,
        lambda y: _kinds(y)["snapshot"] == 0,
        ("catalog.save", "discard.saved", "layers.unheld"),
        prepare=lambda y: y.snapshot("one", "gold"),
    ),
    "checkpoint": Operation(_checkpoint, lambda y: _kinds(y)["checkpoint"] == 1, KEEP),
    "rewind": Operation(
        lambda y: y.rewind("one", "c"),
        _rewound,
        (*RESTART, *END, "rewind.restarted"),
        prepare=_before_rewind,
    ),
    "stop": Operation(
        lambda y: y.stop("one"),
        lambda y: _sandboxes(y)["one"] == "stopped",
        (*FREEZE, "stop.frozen", "catalog.save", "stop.saved", *END),
    ),
    "start": Operation(
        lambda y: y.start("one"),
        lambda y: _sandboxes(y)["one"] == "running",
        (*RESTART, "discard.saved"),
        prepare=lambda y: y.stop("one"),
    ),
    "delete": Operation(
        lambda y: y.delete("one"),
        lambda y: "one" not in _sandboxes(y),
        ("catalog.save", "delete.saved", *END, "discard.saved", "layers.unheld"),
        prepare=lambda y: y.checkpoint("one", "c"),
        keeps_one=False,
    ),
    "snapshot of a stopped one": Operation(
        _snapshot,
        lambda y: _kinds(y)["snapshot"] == 1,
        ("image.linked", "keep.frozen", "catalog.save", "keep.saved"),
        prepare=lambda y: y.stop("one"),
    ),
    "warm a template": Operation(
        _warm,
        _warmed,
        (
            *START[1:6],
            *("template.booted", *FREEZE[:4], *END, "template.frozen", "image.manifest"),
        ),
        prepare=_cool,
    ),
    "pull a template": Operation(
        _pull,
        lambda y: y.yard.templates.find("pulled") is not None,
        ("template.made", "template.warmed", "template.put"),
    ),
    # A toy's agent has no network: the policy of one that is stopped can be changed all the same.
    "set egress": Operation(
        _egress,
        lambda y: y.context.sandboxes.get("one").doc.egress == "allow",
        ("egress.read", "egress.changed", "catalog.save", "change.saved"),
        prepare=lambda y: y.stop("one"),
    ),
    "expose a port": Operation(
        _expose,
        lambda y: bool(y.context.sandboxes.get("one").doc.exposed),
        ("catalog.save", "change.saved"),
    ),
}


async def wrong(yard: TestYard) -> list[str]:
    """What is not as it must be whenever nothing is under way: memory, catalog and host say the same."""
    context = yard.context
    await context.machines.drop_ahead()
    found: list[str] = []
    sandboxes, snapshots = await context.catalog.load(SandboxDoc, SnapshotDoc)
    for kind, rows, docs in (
        ("sandbox", sandboxes, [one.doc for one in context.sandboxes]),
        ("snapshot", snapshots, list(context.snapshots.values())),
    ):
        written = {doc.id: _essence(doc) for doc in rows}
        known = {doc.id: _essence(doc) for doc in docs}
        for id_ in written.keys() | known.keys():
            if written.get(id_) != known.get(id_):
                found.append(f"{kind} {id_}: {written.get(id_)} in the catalog, {known.get(id_)} in memory")
    holders: collections.Counter[str] = collections.Counter()
    for doc in [*sandboxes, *snapshots]:
        holders.update(doc.held() if isinstance(doc, SandboxDoc) else doc.layers)
    if dict(holders) != yard.references():
        found.append(f"layers are held {dict(holders)}, counted {yard.references()}")
    boxes = {one.doc.box for one in context.sandboxes if one.doc.box}
    layers = set(holders) | yard.yard.templates.layers()
    found += [f"stray {stray.kind} {stray.name}" for stray in context.disks.stray(boxes, layers)]
    images = {doc.image for doc in context.snapshots.values()}
    found += [f"stray image {n}" for n in context.images.names() if n not in images and "warm-" not in n]
    found += [f"leftover {path.name}" for path in context.images.root.iterdir() if path.name.endswith(".tmp")]
    groups = set(context.machines.cgroups.names()) - boxes
    found += [f"stray control group {name}" for name in groups]
    for sandbox in context.sandboxes:
        if sandbox.doc.state not in ("running", "stopped"):
            found.append(f"{sandbox.doc.name} is {sandbox.doc.state}")
        if (sandbox.doc.state == "running") != (sandbox.box is not None):
            found.append(f"{sandbox.doc.name} is {sandbox.doc.state} with the machine {sandbox.box}")
    return found


def _essence(doc: Any) -> tuple[Any, ...]:
    if isinstance(doc, SandboxDoc):
        return doc.name, doc.state, doc.box, tuple(doc.layers), doc.checkpoint, doc.resume, doc.egress
    return doc.kind, doc.name, tuple(doc.layers), doc.image, doc.parent


async def unusable(yard: TestYard) -> list[str]:
    """The running sandboxes that do not work."""
    found = []
    for sandbox in yard.context.sandboxes:
        if sandbox.doc.state == "running":
            try:
                assert await yard.out(sandbox.id, "echo usable") == "usable"
            except (ForkyardError, AssertionError) as error:
                found.append(f"{sandbox.doc.name} does not work: {error}")
    return found
