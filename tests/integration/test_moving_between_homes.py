"""A snapshot leaves one home by a file, a pipe or a URL, and goes on in another with its own daemon."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_state import eventually
from own_yard import OwnYard, programs  # noqa: F401
from yard_home import GONE_S, YardHome, open_home, yard  # noqa: F401

from forkyard import AsyncClient
from forkyard.errors import CorruptSnapshotError, UnsupportedError

pytestmark = [pytest.mark.root, pytest.mark.slow]

COUNTER = """
import os, time
n, token = 0, os.urandom(8).hex()
while True:
    n += 1
    open("n.new", "w").write(f"{n} {token}")
    os.rename("n.new", "n")
    time.sleep(0.02)
"""
CHANGES = """
set -e
rm /etc/issue
rm -r /usr/share/doc && mkdir -m 750 /usr/share/doc && echo new > /usr/share/doc/file
echo data > one && ln one two && ln -s nowhere dangling && chmod 640 one
truncate -s 2G sparse && printf end >> sparse
touch -d @1700000000.123456789 one
mkfifo pipe
echo mine > owned && chown 1234:4321 owned
head -c 3000000 /dev/urandom > random && sha256sum random > sum
"""
LOOK = """
set -e
! test -e /etc/issue
ls /usr/share/doc; stat -c '%a' /usr/share/doc
stat -c '%h %a' one
test one -ef two
readlink dangling
stat -c '%s' sparse; tail -c 3 sparse; echo
stat -c '%u:%g' owned
stat -c '%F' pipe
sha256sum -c sum
stat -c '%y' one
"""


@pytest.fixture(scope="module")
def other() -> Iterator[YardHome]:
    with open_home() as home:
        yield home


@pytest.fixture
def both(yard: YardHome, other: YardHome) -> Iterator[tuple[YardHome, YardHome]]:  # noqa: F811
    """Two homes; what a test makes in them is deleted, and nothing may be left."""
    yield yard, other
    yard.clear()
    other.clear()


def test_a_program_and_its_disk_go_on_elsewhere(both: tuple[YardHome, YardHome], tmp_path: Path) -> None:
    here, there = (home.client for home in both)
    box = here.create_sandbox("work", labels={"k": "v"})
    here.write_file(box.id, "counter.py", COUNTER)
    here.spawn(box.id, "exec python3 counter.py", detach=True)
    here.shell(box.id, "until test -s n; do sleep 0.02; done", check=True)
    here.shell(box.id, CHANGES, user="root", check=True)
    seen = here.shell(box.id, LOOK, user="root", check=True).stdout
    here.snapshot(box.id, "ready")
    count, token = here.read_text(box.id, "n").split()
    told: list[int] = []
    exported = here.export_snapshot("ready", tmp_path / "ready.fy", on_progress=told.append)
    here.delete_sandbox(box.id)
    here.delete_snapshot("ready")
    size = (tmp_path / "ready.fy").stat().st_size
    assert told == sorted(told) and told[-1] == size
    assert [path.name for path in tmp_path.iterdir()] == ["ready.fy"]

    snap = there.import_snapshot(tmp_path / "ready.fy", "arrived")
    assert (snap.name, snap.memory, snap.imported_from) == ("arrived", True, exported.id)
    on = there.create_sandbox("on", snapshot="arrived")
    assert on.memory_restored
    now, same = there.read_text(on.id, "n").split()
    assert same == token, "it is the same process"
    there.shell(on.id, f"until test $(cut -d' ' -f1 n) -gt {max(int(now), int(count))}; do sleep 0.02; done",
                timeout_s=20, check=True)  # fmt: skip
    assert there.shell(on.id, LOOK, user="root", check=True).stdout == seen
    # Both borrow one base: it was not made a second time. And holes have stayed holes.
    (layer,) = [layer for layer in both[1].layers() if layer.startswith("s-")]
    sparse = both[1].home / "store/layers" / layer / "up/home/user/sparse"
    assert sparse.stat().st_size > 2 << 30 and sparse.stat().st_blocks * 512 < 1 << 20 and size < 1 << 30


async def test_urls_and_the_asynchronous_client(both: tuple[YardHome, YardHome], tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/snap"
    async with AsyncClient(home=both[0].home) as here, AsyncClient(home=both[1].home) as there:
        box = await here.create_sandbox("work")
        await here.write_file(box.id, "file", b"kept")
        await here.checkpoint(box.id, "c")
        (point,) = await here.list_checkpoints(box.id)
        await here.export_snapshot(point.id, url, template=False)
        snap = await there.import_snapshot(url)
        on = await there.create_sandbox(snapshot=snap.id)
        assert on.memory_restored
        assert await there.read_file(on.id, "file") == b"kept"
        with pytest.raises(UnsupportedError):
            await here.export_snapshot(point.id, "nosuch://x/y")


def test_the_command_line(both: tuple[YardHome, YardHome], programs: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    import json

    elsewhere = OwnYard(both[1].home, programs.env | {"FORKYARD_HOME": str(both[1].home)})
    programs.out("new", "--name", "work")
    programs.out("exec", "work", "sh", "-c", "echo kept > file")
    programs.out("snapshot", "work", "ready")
    path = str(tmp_path / "ready.fy")
    said = json.loads(programs.out("export", "ready", path, "--no-template", "--json"))
    assert said["bytes"] == Path(path).stat().st_size and said["snapshot"]["name"] == "ready"
    said = json.loads(elsewhere.out("import", path, "--name", "moved", "--json"))
    assert said["snapshot"]["importedFrom"] and said["snapshot"]["name"] == "moved"
    elsewhere.out("new", "--name", "on", "--from", "moved")
    assert elsewhere.out("exec", "on", "cat", "file") == "kept"
    done = elsewhere.run("import", path, "--name", "moved")
    assert done.returncode == 4 and b"taken" in done.stderr
    # Through a pipe, as over ssh.
    sent = programs.run("export", "ready", "-", "--no-template")
    assert sent.returncode == 0
    assert uuid.UUID(elsewhere.out("import", "-", stdin=sent.stdout))
    assert elsewhere.run("import", str(tmp_path / "none")).returncode == 3


def test_a_client_that_is_killed_leaves_nothing(
    both: tuple[YardHome, YardHome],
    programs: OwnYard,  # noqa: F811
    tmp_path: Path,
) -> None:
    here, there = both
    box = here.client.create_sandbox("work")
    here.client.shell(box.id, "head -c 20000000 /dev/urandom > random", check=True)
    here.client.snapshot(box.id, "ready")
    path = tmp_path / "ready.fy"
    here.client.export_snapshot("ready", path, template=False)
    data = path.read_bytes()
    argv = [sys.executable, "-m", "forkyard.cli", "import", "-"]
    env = programs.env | {"FORKYARD_HOME": str(there.home)}
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, env=env)
    assert client.stdin is not None
    client.stdin.write(data[: len(data) * 3 // 4])
    client.stdin.flush()
    tmp = there.home / "images"
    eventually(lambda: not list(tmp.glob("*.tmp")), 30)
    client.kill()
    client.wait()
    client.stdin.close()
    eventually(lambda: list(tmp.glob("*.tmp")) + there.layers() + there.images(), GONE_S)
    assert there.client.list_snapshots() == []
    with pytest.raises(CorruptSnapshotError):
        path.write_bytes(data[:-1])
        there.client.import_snapshot(path)
    assert not list(tmp.glob("*.tmp")) and there.layers() == [] and there.images() == []
