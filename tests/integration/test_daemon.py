"""The daemon comes and goes; sandboxes, commands and their output stay."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host_state import processes_of
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from forkyard import Client, ForkyardError, NotFoundError

pytestmark = [pytest.mark.root, pytest.mark.slow]
DEADLINE_S = 30
COUNT = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done"


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Client]:  # noqa: F811
    with Client(home=own_yard.home) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_commands_and_streams_outlive_the_daemon(client: Client, how: signal.Signals) -> None:
    client.create_sandbox("lives")
    box = client.sandbox("lives")
    box.shell("echo kept > file")
    before = client.health().pid
    with ThreadPoolExecutor(1) as pool, box.spawn("sleep 1000") as sleeper:
        running = pool.submit(box.shell, f"touch began; {COUNT}; exit 7")
        spawned = box.spawn(COUNT)
        stream = spawned.stream()
        output = [next(stream).data]
        until(lambda: box.shell("test -e began").ok)
        os.kill(before, how)
        result = running.result(DEADLINE_S)
        assert (result.stdout.split(), result.exit_code) == (list("123456"), 7)
        output += [chunk.data for chunk in stream]
        assert b"".join(output).split() == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert spawned.wait().ok
        assert client.health().pid != before
        assert box.read_text("file") == "kept\n"
        sleeper.signal(signal.SIGKILL)
        assert sleeper.wait().signal == signal.SIGKILL
    client.delete_sandbox("lives")


def test_a_flood_is_whole_over_the_daemons_death(client: Client) -> None:
    """What the daemon had passed on, and its connection not yet written, is still the agent's."""
    client.create_sandbox("floods")
    box = client.sandbox("floods")
    count = 1_500_000
    whole = b"".join(b"%d\n" % i for i in range(1, count + 1))
    for turn in range(3):
        pid = client.health().pid
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        with box.spawn(f"seq {count} & seq {count} >&2; wait") as flood:
            for number, chunk in enumerate(flood.stream()):
                assert chunk.kind != "gap", f"output was lost after {sum(map(len, output['stdout']))} bytes"
                output[chunk.kind].append(chunk.data)
                if number == 10 * (turn + 1):
                    os.kill(pid, signal.SIGKILL)
                elif number < 10 * (turn + 1):
                    time.sleep(0.02)  # a reader that is slower than the command
            assert flood.wait().ok
        assert [b"".join(output[kind]) == whole for kind in ("stdout", "stderr")] == [True, True]
    client.delete_sandbox("floods")


def test_a_retried_create_makes_one_sandbox_over_a_restart(client: Client) -> None:
    first = client.create_sandbox("once", request_id="the-same")
    pid = client.health().pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.health().pid != pid)
    again = client.create_sandbox("once", request_id="the-same")
    assert again.id == first.id
    assert [info.id for info in client.list_sandboxes()] == [first.id]
    client.delete_sandbox("once")


def test_an_ephemeral_sandbox_goes_with_its_process(own_yard: OwnYard, client: Client) -> None:  # noqa: F811
    code = (
        "import sys, time; from forkyard import Client; c = Client(home=sys.argv[1]);"
        "c.create_sandbox('brief', ephemeral=True); print('made', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(own_yard.home)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "made\n"
        assert client.get_sandbox("brief").state == "running"
        holder.kill()
    until(lambda: all(info.name != "brief" for info in client.list_sandboxes()))
    with pytest.raises(NotFoundError):
        client.get_sandbox("brief")


def test_a_client_that_goes_ends_its_command(own_yard: OwnYard, client: Client) -> None:  # noqa: F811
    client.create_sandbox("a")
    code = "import sys; from forkyard import Client; Client(home=sys.argv[1]).shell('a', 'sleep 4242')"
    box = client.sandbox("a")

    def sleeps() -> bool:
        return any("4242" in process.command for process in box.processes())

    with subprocess.Popen([sys.executable, "-c", code, str(own_yard.home)]) as caller:
        until(sleeps)
        caller.kill()
    until(lambda: not sleeps())
    client.delete_sandbox("a")


def test_trees_there_and_back(client: Client, tmp_path) -> None:
    client.create_sandbox("a")
    box = client.sandbox("a")
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "script").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "script").chmod(0o755)
    (source / "emoji \N{SNAKE} a\nb'\".txt").write_text("x")
    (source / ("x" * 255)).write_bytes(os.urandom(1 << 20))
    (source / "link").symlink_to("sub/script")
    assert box.upload(source, "tree").files == 4
    assert box.shell("tree/link").stdout == "ran\n"
    box.shell("ln -s /etc tree/out; ln -s ../.. tree/up; chmod u+s tree/sub/script")
    got = box.download("tree", tmp_path / "target")
    assert sorted(got.skipped) == ["out", "up"]
    for path in source.rglob("*"):
        copy = tmp_path / "target" / path.relative_to(source)
        assert copy.is_symlink() == path.is_symlink()
        if path.is_file():
            assert copy.read_bytes() == path.read_bytes()
            assert copy.stat().st_mode == path.stat().st_mode
    # The home's alias is a link, and a tree all the same.
    assert box.download("/workspace/tree/sub", tmp_path / "sub").files == 1
    client.delete_sandbox("a")


def test_where_the_daemon_says_it_is(own_yard: OwnYard, client: Client) -> None:  # noqa: F811
    about = json.loads((own_yard.home / "daemon.json").read_text())
    health = client.health()
    assert (about["pid"], about["socket"]) == (health.pid, health.socket)
    assert (own_yard.home / "daemon.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("delay_s", [0.1, 0.3, 0.6])
def test_a_shutdown_ends_also_what_is_being_made(
    client: Client, own_yard: OwnYard, delay_s: float, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr("forkyard.client.sync_transport.PATIENCE_S", 2.0)  # for a daemon that does not come
    client.create_sandbox("source")
    client.snapshot("source", "state")
    before = client.health().pid

    def forks() -> None:
        with Client(home=own_yard.home, start=False) as mine, contextlib.suppress(ForkyardError):
            while True:
                mine.fork("state", 2)

    with ThreadPoolExecutor(2) as pool:
        making = [pool.submit(forks) for _ in range(2)]
        time.sleep(delay_s)
        with Client(home=own_yard.home, start=False) as other:
            other.shutdown("delete")
        until(lambda: not Path(f"/proc/{before}").exists())
        # Whoever ends sandboxes with the daemon means all of them.
        assert [line for line in processes_of(own_yard.home) if "runsc" in line] == []
        for one in making:
            one.result(DEADLINE_S)
    assert client.list_sandboxes() == []
    client.delete_snapshot("state")
