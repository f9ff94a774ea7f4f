"""Sandboxes come, change and go."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.errors import CapacityError, ConflictError, InvalidRequestError, NotFoundError


async def test_a_new_sandbox_runs(yard: TestYard) -> None:
    made = await yard.create(name="one", labels={"a": "b"}, env={"X": "1"})
    assert (made.state, made.name, made.template, made.user) == ("running", "one", "base", "user")
    assert await yard.out("one", "echo $X; whoami; pwd") == "1\nuser\n/home/user"
    assert (await yard.info(made.id)).id == made.id
    assert await yard.out("one", "hostname") == "one"


async def test_the_second_start_comes_from_the_warm_image(yard: TestYard) -> None:
    first = await yard.create()
    await until(lambda: yard.yard.templates.info(yard.yard.templates.get("base")).warm, "base is warm")
    second = await yard.create()
    random = [(await yard.shell(one.id, "head -c 16 /dev/urandom")).stdout_bytes for one in (first, second)]
    assert len(random[0]) == 16 and random[0] != random[1]


async def test_a_name_is_taken_until_its_sandbox_is_deleted(yard: TestYard) -> None:
    first = await yard.create(name="same")
    with pytest.raises(ConflictError, match="taken"):
        await yard.create(name="same")
    await yard.delete("same")
    second = await yard.create(name="same")
    assert second.id != first.id


async def test_bad_names_and_limits_are_refused(yard: TestYard) -> None:
    for bad in [{"name": "a b"}, {"name": ""}, {"name": "sb_0123456789"}, {"mem_mb": 1}, {"type": "huge"},
                {"cpu_weight": 0}, {"cpu_weight": 10_001}, {"ttl_min": -1},
                {"env": {"a=b": "c"}}]:  # fmt: skip
        with pytest.raises(InvalidRequestError):
            await yard.create(**bad)
    with pytest.raises(NotFoundError, match="base"):
        await yard.create(template="none")


async def test_a_line_of_forks_gathers_no_endless_environment(yard: TestYard) -> None:
    much = "x" * (600 << 10)
    await yard.create(name="one", env={"A": much})
    with pytest.raises(InvalidRequestError, match="environment is larger"):
        await yard.fork("one", 1, env={"B": much})
    with pytest.raises(InvalidRequestError, match="'a=b'"):
        await yard.fork("one", 1, env={"a=b": "c"})
    assert (await yard.fork("one", 1, env={"A": much})).forks


async def test_a_weight_is_passed_on(yard: TestYard) -> None:
    """As every limit: to forks, and to what starts from a snapshot, unless they are given another."""
    assert (await yard.create(name="usual")).cpu_weight == 100
    assert (await yard.create(name="one", cpu_weight=500)).cpu_weight == 500
    assert (await yard.fork("one", 1)).forks[0].cpu_weight == 500
    # A kernel of its own goes on with the memory that it booted with.
    memory = not yard.context.engine.own_kernel
    assert (await yard.fork("one", 1, type="medium", memory=memory)).forks[0].cpu_weight == 500
    assert (await yard.fork("one", 1, cpu_weight=7)).forks[0].cpu_weight == 7
    kept = await yard.snapshot("one", "kept")
    assert (await yard.create(snapshot="kept")).cpu_weight == 500
    assert yard.weight("one") == 500 and yard.weight("usual") == 100
    await yard.checkpoint("one", "here")
    await yard.rewind("one", "here")
    assert yard.weight("one") == 500
    await yard.stop("one")
    await yard.start("one")
    assert yard.weight("one") == 500
    # One that an earlier release made.
    yard.context.snapshots[kept.id].inherits.pop("cpu_weight")
    assert (await yard.create(snapshot="kept")).cpu_weight == 100


async def test_delete_is_idempotent(yard: TestYard) -> None:
    made = await yard.create()
    gone = await yard.delete(made.id)
    assert gone is not None and gone.state == "deleted"
    assert await yard.delete(made.id) is None
    with pytest.raises(NotFoundError):
        await yard.shell(made.id, "true")


async def test_delete_while_creating_leaves_nothing(yard: TestYard) -> None:
    for turns in (0, 1, 3, 10, 40):
        pending = await yard.create(wait=False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await yard.delete(pending.id)
        assert len(yard.context.sandboxes) == 0
    waiting = asyncio.ensure_future(yard.create(name="waited"))
    while yard.context.sandboxes.find("waited") is None:  # noqa: ASYNC110 (turns, not time)
        await asyncio.sleep(0)
    await yard.delete("waited")
    with pytest.raises(ConflictError, match="deleted while"):
        await waiting


async def test_a_cancelled_creation_leaves_nothing(yard: TestYard) -> None:
    for turns in (1, 5, 30):
        task = asyncio.ensure_future(yard.create(name="half"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: len(yard.context.sandboxes) == 0, "it is gone")


async def test_rename_labels_and_list(yard: TestYard) -> None:
    one, _ = (
        await yard.create(name="one", labels={"k": "1"}),
        await yard.create(name="two", labels={"k": "2"}),
    )
    with pytest.raises(ConflictError):
        await yard.yard.rename_sandbox(rq.RenameSandbox(sandbox="one", name="two"), yard.caller)
    await yard.yard.rename_sandbox(rq.RenameSandbox(sandbox="one", name="uno"), yard.caller)
    assert (await yard.info("uno")).id == one.id
    listed = await yard.yard.list_sandboxes(rq.ListSandboxes(labels={"k": "1"}), yard.caller)
    assert [info.name for info in listed] == ["uno"]
    gone = await yard.yard.delete_sandboxes(rq.DeleteSandboxes(labels={"k": "1"}), yard.caller)
    assert [info.id for info in gone] == [one.id]
    assert len(yard.context.sandboxes) == 1
    assert await yard.yard.delete_sandboxes(rq.DeleteSandboxes(labels={}), yard.caller) == []


async def test_stop_keeps_memory_and_disk(yard: TestYard) -> None:
    made = await yard.create()
    pid = await yard.background(made.id, "counter /home/user/n")
    await yard.counting(made.id, "n", 3)
    await yard.write(made.id, kept=b"kept")
    stopped = await yard.stop(made.id)
    assert stopped.state == "stopped"
    assert yard.context.sandboxes.get(made.id).box is None
    with pytest.raises(ConflictError, match="stopped"):
        await yard.shell(made.id, "true")
    assert (await yard.stop(made.id)).state == "stopped"
    started = await yard.start(made.id)
    assert (started.state, started.memory_restored) == ("running", True)
    before = await yard.count(made.id, "n")
    assert await yard.counting(made.id, "n", before) > before
    assert await yard.read(made.id, "kept") == b"kept"
    found = await yard.yard.execs.processes(rq.SandboxRequest(sandbox=made.id), yard.caller)
    assert pid in {process.pid for process in found}
    assert (await yard.start(made.id)).state == "running"


async def test_capacity_is_refused_with_figures(yard: TestYard) -> None:
    admission = yard.yard.admission
    for name, value in (("max_sandboxes", 1), ("limit_mb", 64)):
        kept = getattr(admission, name)
        await yard.create(name="first")
        setattr(admission, name, value)
        admission.used_mb = 64.0 if name == "limit_mb" else 0.0
        with pytest.raises(CapacityError, match=r"\d+ ") as refused:
            await yard.create(name="second")
        assert refused.value.hint and refused.value.retryable
        with pytest.raises(CapacityError):
            await yard.fork("first", 2)
        assert [box.doc.name for box in yard.context.sandboxes] == ["first"]
        assert await yard.out("first", "echo unharmed") == "unharmed"
        setattr(admission, name, kept)
        admission.used_mb = 0.0
        await yard.delete("first")


async def test_a_creation_waits_for_room(yard: TestYard) -> None:
    await yard.create(name="first")
    yard.yard.admission.max_sandboxes = 1
    second = asyncio.ensure_future(yard.create(name="second", wait_s=30))
    await until(lambda: yard.context.sandboxes.find("second"), "the second is announced")
    await yard.delete("first")
    assert (await second).state == "running"


async def test_set_ttl_and_wait_for_a_state(yard: TestYard) -> None:
    made = await yard.create(ttl_min=5)
    assert made.ttl_min == 5 and made.expires_at is not None
    changed = await yard.yard.set_ttl(rq.SetTtl(sandbox=made.id, ttl_min=None), yard.caller)
    assert changed.expires_at is None
    assert (await yard.yard.wait_sandbox(rq.WaitSandbox(sandbox=made.id), yard.caller)).state == "running"


async def test_a_dead_machine_fails_its_sandbox(yard: TestYard) -> None:
    made = await yard.create()
    await yard.checkpoint(made.id, "safe")
    box = yard.context.sandboxes.get(made.id).box
    await yard.engine.sweep(box.machine.spec.dir)
    await until(lambda: yard.context.sandboxes.get(made.id).doc.state == "failed", "it has failed")
    failed = await yard.info(made.id)
    assert failed.failure is not None and failed.failure.code == "sandbox_lost"
    assert (await yard.start(made.id)).state == "running"
    assert await yard.out(made.id, "echo back") == "back"
