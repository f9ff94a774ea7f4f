"""What the audit says of what was done: who, what, when, and how it ended."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from yards import TestYard, until

from forkyard import requests as rq
from forkyard.errors import NotFoundError


async def records(yard: TestYard, *kinds: str) -> list[Any]:
    found = await yard.yard.audit(rq.Audit(sandbox="one"), yard.caller)
    return [record for record in found if record.kind in kinds]


async def last(yard: TestYard, *kinds: str) -> Any:
    return (await until(lambda: records(yard, *kinds), f"{kinds} are in the audit"))[-1]


async def test_commands(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.shell("one", "echo out; exit 3", env={"KEY": "sesame-open"})
    said = await last(yard, "exec")
    assert said.actor.startswith("uid:0") and said.data["user"] == "user"
    assert (said.data["command"], said.data["exit_code"]) == ("echo out; exit 3", 3)
    assert said.data["stdout_sha256"] == hashlib.sha256(b"out\n").hexdigest()
    assert said.data["duration_ms"] > 0 and said.data["env"] == ["KEY"]
    one = await yard.yard.audit(rq.Audit(seq=said.seq), yard.caller)
    assert one == [said]
    with pytest.raises(NotFoundError, match="no audit record"):
        await yard.yard.audit(rq.Audit(seq=said.seq + 1000), yard.caller)


async def test_secrets_are_digests(yard: TestYard) -> None:
    await yard.create(name="one")
    await yard.exec("one", "echo", "--token", "hunter2", "sesame-open", env={"KEY": "sesame-open"})
    argv = (await last(yard, "exec")).data["argv"]
    assert argv[:2] == ["echo", "--token"] and all(word.startswith("hmac-sha256:") for word in argv[2:])
    raw = b"".join(path.read_bytes() for path in yard.context.audit.directory.iterdir())
    assert b"hunter2" not in raw and b"sesame-open" not in raw


async def test_a_very_long_command(yard: TestYard) -> None:
    await yard.create(name="one")
    command = "true " + "x" * 100_000
    await yard.shell("one", command)
    said = (await last(yard, "exec")).data
    assert said["command_sha256"] == hashlib.sha256(command.encode()).hexdigest()
    assert command.startswith(said["command"]) and len(said["command"]) < 20_000


async def test_streams_and_commands_that_are_cut(yard: TestYard) -> None:
    await yard.create(name="one")
    async for _ in yard.spawn("one", "echo streamed"):
        pass
    said = (await last(yard, "exec")).data
    assert said["stdout_sha256"] == hashlib.sha256(b"streamed\n").hexdigest() and said["exit_code"] == 0
    before = len(await records(yard, "exec"))

    pid = await yard.background("one", "while [ ! -e never ]; do sleep 0.05; done")
    await until(lambda: _more(yard, before), "one that runs on is in the audit")
    assert (await last(yard, "exec")).data["end"] == "left"
    await yard.yard.execs.signal(rq.Signal(sandbox="one", pid=pid, signal=9), yard.caller)
    assert (await last(yard, "process.signalled")).data == {"pid": pid, "signal": 9}

    before = len(await records(yard, "exec"))
    async with asyncio.TaskGroup() as group:
        command = "echo begun > f; while [ ! -e never ]; do sleep 0.05; done"
        task = group.create_task(yard.shell("one", command))
        await until(lambda: _has(yard), "it runs")
        task.cancel()
    await until(lambda: _more(yard, before + 1), "one whose client went is in the audit")
    ends = [record.data.get("end") for record in await records(yard, "exec")]
    assert ends[-1] == "client gone" or "client gone" in ends


async def _more(yard: TestYard, than: int) -> bool:
    return len(await records(yard, "exec")) > than


async def _has(yard: TestYard) -> bool:
    return "f" in (await yard.out("one", "ls")).split()


async def test_states_files_ports_and_lineage(yard: TestYard) -> None:
    made = await yard.create(name="one")
    await yard.write("one", file=b"four")
    await yard.read("one", "file")
    written, read = await last(yard, "file.written"), await last(yard, "file.read")
    for said in (written, read):
        assert said.data == {"path": "/home/user/file", "user": "user", "bytes": 4}
    await yard.yard.expose(rq.Expose(sandbox="one", port=8080), yard.caller)
    assert (await last(yard, "sandbox.exposed")).data["port"] == 8080
    kept = await yard.checkpoint("one", "c", keep_last=1)
    again = await yard.checkpoint("one", "d", keep_last=1)
    assert (await last(yard, "checkpoint.created")).data["parent"] == kept.id
    assert (await last(yard, "checkpoint.deleted")).data["id"] == kept.id
    await yard.rewind("one")
    assert (await last(yard, "sandbox.rewound")).data["to"] == again.id
    fork = (await yard.fork("one", 1)).forks[0]
    assert (await last(yard, "sandbox.forked")).data["forks"] == [fork.id]
    await yard.stop("one")
    await yard.start("one")
    await yard.delete("one")
    found = await yard.yard.audit(rq.Audit(sandbox=made.id), yard.caller)
    kinds = {record.kind for record in found}
    assert kinds >= {f"sandbox.{what}" for what in ("created", "stopped", "started", "deleted")}
    assert "fork.frozen" in kinds
    assert all(record.actor.startswith("uid:0/pid:") for record in found)
