"""The host goes down and comes back: what ran is lost and says so, what was kept is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lives import Life, bury
from yard_fixtures import Lives
from yards import until

from forkyard import requests as rq
from forkyard.errors import ConflictError, CorruptSnapshotError
from forkyard.host import mounts, process
from forkyard.store import images


def go_down(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a host which loses its power takes along: processes, mounts, loop devices, groups, its id."""
    home, context = life.home, life.yard.context
    life.die()
    bury()

    async def end() -> None:
        for directory in sorted((home.path / "boxes").iterdir()):
            await context.engine.sweep(home.short / "boxes" / directory.name)
        for name in context.machines.cgroups.names():
            if (group := context.machines.cgroups.find(name)) is not None:
                await group.delete()
        for target in reversed(mounts.mounts_below(home.path)):
            mounts.unmount(target)
        await until(lambda: not _loops(home.path), lambda: f"the loop device goes: {_loops(home.path)}")

    asyncio.run(end())
    context.machines.cgroups.close()
    monkeypatch.setattr(process, "boot_id", lambda: "the next boot")


def _loops(home: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [str(file) for file in files if file.read_text().startswith(f"{home}/")]


def test_a_reboot(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_SETTLE_AFTER_S", 3600.0)  # only what is hurried is on disk
    first = lives()
    yard = first.yard
    first.run(yard.create(name="one", ttl_min=60))
    first.run(yard.write("one", file=b"kept"))
    first.run(yard.background("one", "exec counter /home/user/n"))
    first.run(yard.counting("one", "n", 2))
    mark = first.run(yard.checkpoint("one", "c"))
    expires_at = first.run(yard.info("one")).expires_at
    first.run(yard.write("one", file=b"later"))
    first.run(yard.create(name="bare"))
    first.run(yard.create(name="passing", ephemeral=True))
    first.run(yard.create(name="stopped"))
    first.run(yard.write("stopped", file=b"kept"))
    first.run(yard.stop("stopped"))
    gold = first.run(yard.snapshot("one", "gold"))
    first.run(yard.snapshot("one", "young"))
    for doc in list(yard.context.snapshots.values()):
        if doc.id in (mark.id, gold.id) or doc.kind == "stop":
            first.run(yard.context.images.settled(doc.image or ""))
    go_down(first, monkeypatch)

    second = lives()
    yard = second.yard
    assert yard.context.sandboxes.find("passing") is None
    for name in ("one", "bare"):
        info = second.run(yard.info(name))
        assert info.state == "failed" and info.failure is not None
        assert (info.failure.code, info.failure.cause) == ("sandbox_lost", "host")
        assert "restarted" in info.failure.message
    # The state of its checkpoint, memory included; time went on meanwhile.
    back = second.run(yard.start("one"))
    assert back.memory_restored and back.expires_at == expires_at
    assert second.run(yard.read("one", "file")) == b"kept"
    second.run(yard.counting("one", "n", second.run(yard.count("one", "n"))))
    with pytest.raises(ConflictError, match="nothing to start from"):
        second.run(yard.start("bare"))
    assert second.run(yard.start("stopped")).memory_restored
    assert second.run(yard.read("stopped", "file")) == b"kept"
    made = second.run(yard.create(snapshot="gold"))
    assert made.memory_restored and second.run(yard.read(made.id, "file")) == b"later"
    with pytest.raises(CorruptSnapshotError, match="not yet on disk when the host went down") as caught:
        second.run(yard.create(snapshot="young"))
    assert "memory=False" in caught.value.hint
    made = second.run(yard.create(snapshot="young", memory=False))
    assert second.run(yard.read(made.id, "file")) == b"later"
    # The template's own image was never flushed: made anew.
    assert second.run(yard.out(second.run(yard.create(name="new")).id, "echo usable")) == "usable"
    records = second.run(yard.yard.audit(rq.Audit(sandbox="bare"), yard.caller))
    assert "sandbox.failed" in [record.kind for record in records]
