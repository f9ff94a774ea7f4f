"""What the host's processes of a sandbox may do, as the kernel says: no more than docs/security.md lists."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from forkyard import Client
from forkyard.host.cgroup import Cgroups

pytestmark = [pytest.mark.root, pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs/security.md"
ALL_SEPARATE = {"ipc", "mnt", "net", "user", "uts"}


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Client]:  # noqa: F811
    with Client(home=own_yard.home) as client:
        yield client


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_every_host_process_of_a_sandbox_has_only_what_the_docs_list(
    client: Client,
    own_yard: OwnYard,  # noqa: F811
) -> None:
    client.create_sandbox("a")
    client.spawn("a", "sleep 9999", detach=True)
    client.spawn("a", "sleep 9999", user="root", detach=True)
    text = DOCS.read_text()
    # Its own alone: what is made ahead for others may be on its way.
    with contextlib.closing(sqlite3.connect(f"file:{own_yard.home}/catalog.db?mode=ro", uri=True)) as catalog:
        (box,) = catalog.execute(
            "SELECT box FROM sandboxes WHERE name = 'a' AND state = 'running'"
        ).fetchone()
    group = Cgroups.for_home(own_yard.home).find(box)
    assert group is not None
    seen = 0
    for pid in sorted(group.pids()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a command's that ended
            said = status(pid)
            who = f"{pid} {said['Name']} {Path(f'/proc/{pid}/cmdline').read_bytes()[:80]!r}"
            if said["State"].startswith("Z"):
                continue
            assert (said["Seccomp"], said["NoNewPrivs"]) == ("2", "1"), who
            assert f"`{said['CapEff'].lstrip('0')}`" in text, who
            assert int(said["CapPrm"], 16) | int(said["CapBnd"], 16) == int(said["CapEff"], 16), who
            names = ALL_SEPARATE & {
                name
                for name in os.listdir(f"/proc/{pid}/ns")
                if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
            }
            assert names == ALL_SEPARATE, who
            # The root, and what the gofer serves below it.
            mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
            assert len(mounts) <= 16 and not any(" /proc " in line for line in mounts), who
            networks = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
            assert {line.split(":")[0].strip() for line in networks} <= {"lo"}, who
            seen += 1
    assert seen >= 3, "the sentry, its gofer, and what runs the guest's programs"


def test_the_daemon_is_reached_by_nobody_else(client: Client) -> None:
    health = client.health()
    assert Path(health.socket).stat().st_mode & 0o777 == 0o600
    for name in ("catalog.db", "daemon.log", "boxes", "images", "audit", "store/boxes", "store/layers"):
        assert Path(health.home, name).stat().st_mode & 0o077 == 0, name
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    own = {
        os.readlink(entry)[8:-1]
        for entry in Path(f"/proc/{health.pid}/fd").iterdir()
        if os.readlink(entry).startswith("socket:[")
    }
    assert [line for line in listening.splitlines() if line.split()[9] in own] == []
