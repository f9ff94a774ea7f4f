"""The agent's memory is part of every image of its machine: what it needed for a while goes back."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import plain_agent
import pytest
from plain_agent import Wire

from forkyard.guest import SpawnSpec

ME = plain_agent.ME
LENGTH = sum(len(f"{i}\n") for i in range(1, 300_001))


@pytest.fixture
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    agent = plain_agent.build(tmp_path_factory.mktemp("agent"))
    with plain_agent.running(agent, tmp_path_factory.mktemp("wire")) as w:
        yield w


def kilobytes(pid: int) -> int:
    """Resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


async def test_what_floods_and_transfers_used_goes_back(wire: Wire, tmp_path: Path) -> None:
    async with plain_agent.attached(wire) as guest:
        await guest.ping()
        before = kilobytes(wire.process.pid)
        for count in (1, 8):  # the first frees large pieces while smaller ones are still in use
            floods = [
                await guest.spawn(SpawnSpec(["sh", "-c", "seq 300000; sleep 1000"], {}, user=ME))
                for _ in range(count)
            ]
            steady = await guest.spawn(SpawnSpec(["sh", "-c", "seq 3000; sleep 1000"], {}, user=ME))
            await guest.write_file(str(tmp_path / "f"), os.urandom(3 << 20), user=ME)
            assert len(await guest.read_bytes(str(tmp_path / "f"), user=ME)) == 3 << 20
            async with asyncio.timeout(30):
                for flood in floods:
                    async for item in flood.output():
                        if item.offset + len(item.data) == LENGTH:
                            flood.kill_tree()  # and the rest is read, so that the agent forgets it
            await guest.quiesce(5)
            await guest.unquiesce()
            await guest.ping()
            steady.kill_tree()
            async for _ in steady.output():
                pass
        async with asyncio.timeout(10):
            while (after := kilobytes(wire.process.pid)) > before + 700:
                assert guest.error is None
                await asyncio.sleep(0.05)
        assert after <= before + 700


async def test_small_pieces_of_a_flood_travel_together(wire: Wire) -> None:
    """Both streams, each whole and in order; a turn and a frame for every write would be 8192."""
    code = "import os\nfor n in range(4096):\n    for fd in (1, 2): os.write(fd, b'%07d\\n' % n * 512)\n"
    spec = SpawnSpec([sys.executable, "-c", code], {}, user=ME)
    async with plain_agent.attached(wire) as guest:
        process = await guest.spawn(spec)
        got: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async with asyncio.timeout(60):
            async for item in process.output():
                got[item.kind].append(item.data)
        expected = b"".join(b"%07d\n" % n * 512 for n in range(4096))
        assert {kind: b"".join(parts) for kind, parts in got.items()} == dict.fromkeys(got, expected)
        assert len(got["stdout"]) + len(got["stderr"]) < 1500
