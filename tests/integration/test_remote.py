"""A client of another machine on a real yard: over HTTPS, on the loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import AccessDeniedError, Client, NotFoundError

pytestmark = [pytest.mark.root, pytest.mark.slow]

SOURCE = Path(__file__).parents[2] / "src"
BEGIN = """
import sys, time
from forkyard import Client
from forkyard.client import holding
holding.GRACE_S = 1.0
client = Client()
box = client.create_sandbox(ephemeral=True)
(fork,) = client.fork(box.id, 1).forks
hold = holding._hold_of(client._transport.remote)

def held(other_than=None):
    while hold._stream in (None, other_than):
        time.sleep(0.01)
    return hold._stream

first = held()
print(box.id, fork.id, flush=True)
sys.stdin.readline()
held(first)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def access(client: Client) -> Iterator[tuple[str, str]]:  # noqa: F811
    """Where the yard listens, and a token that may use it."""
    url = client.listen("127.0.0.1:0").url or ""
    yield url, client.new_token("tester", role="run").token
    with contextlib.suppress(NotFoundError):
        client.revoke_token("tester")
    client.listen(off=True)


def test_all_of_it_from_another_machine(
    client: Client,  # noqa: F811
    access: tuple[str, str],
    tmp_path: Path,
) -> None:
    with Client(access[0], token=access[1]) as remote:
        box = remote.create_sandbox("far")
        assert remote.shell("far", "cat", stdin="in").stdout == "in"
        tree = tmp_path / "tree"
        tree.mkdir()
        data = os.urandom(5 << 20)
        (tree / "data").write_bytes(data)
        remote.upload("far", tree, "tree")
        remote.run_code("far", "x = 41")
        fork = remote.fork("far", 1).forks[0]
        assert remote.run_code(fork.id, "print(x + 1)").stdout == "42\n"
        remote.download(fork.id, "tree", tmp_path / "back")
        assert (tmp_path / "back/data").read_bytes() == data
        process = remote.spawn(fork.id, "while read line; do echo $line$line; done", pty=False)
        process.write(b"ab\n")
        process.close_stdin()
        assert b"".join(chunk.data for chunk in process.stream()) == b"abab\n"
        remote.checkpoint("far")
        remote.remove("far", "tree")
        remote.rewind("far")
        assert remote.read_file("far", "tree/data") == data
        with remote.pool("far", 1) as pool:
            assert remote.shell(pool.acquire().id, "echo pooled").ok
        result = remote.explore("far", ["false", "echo won"])
        assert result.winner is not None
        assert remote.delete_sandbox(box.id) is not None
    token = client.list_tokens()[0]
    actors = {record.actor for record in client.audit(sandbox=box.id) if record.kind != "egress.closed"}
    assert f"token:{token.id}/tester" in actors
    kinds = {record.kind for record in client.audit(sandbox=box.id) if record.actor.startswith("token:")}
    assert {"sandbox.created", "exec", "file.uploaded", "fork.frozen", "sandbox.deleted"} <= kinds


def test_a_killed_client_loses_its_lease(client: Client, access: tuple[str, str]) -> None:  # noqa: F811
    environment = os.environ | {
        "FORKYARD_URL": access[0],
        "FORKYARD_TOKEN": access[1],
        "PYTHONPATH": str(SOURCE),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", BEGIN],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        ids = child.stdout.readline().split()
        assert len(ids) == 2
        # The daemon is replaced meanwhile: the client comes back to the next one by itself.
        before = client.health().pid
        client.shutdown()
        until(lambda: not Path(f"/proc/{before}").exists())
        assert client.health().pid != before
        assert {one.id for one in client.list_sandboxes()} == set(ids)
        assert child.stdin is not None
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "held\n"
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: client.list_sandboxes() == [], 40)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def test_a_revoked_token_cuts_what_runs(client: Client, access: tuple[str, str]) -> None:  # noqa: F811
    with Client(access[0], token=access[1]) as remote:
        box = remote.create_sandbox()
        process = remote.spawn(box.id, "echo begun; sleep 600")
        assert next(iter(process.stream())).data == b"begun\n"
        client.revoke_token("tester")
        until(lambda: not [one for one in client.processes(box.id) if "sleep 600" in one.command])
        with pytest.raises(AccessDeniedError):
            process.wait()
