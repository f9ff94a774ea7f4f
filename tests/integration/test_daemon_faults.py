"""Faults of a daemon that is a process of its own, and of a machine whose memory is full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from forkyard import CapacityError, Client, ConflictError, UnsupportedError

pytestmark = [pytest.mark.root, pytest.mark.slow]
HOG = "python3 -c 'x = b\"x\" * ({mb} << 20); print(\"up\", flush=True); import time; time.sleep(9999)'"


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Client]:  # noqa: F811
    with Client(home=own_yard.home) as client:
        yield client


@pytest.mark.parametrize("point", ["stop.frozen", "stop.saved"])
def test_a_daemon_is_killed_at_a_step_named_in_its_environment(
    own_yard: OwnYard, point: str  # noqa: F811
) -> None:
    """Before or after the catalog has it: the client's retry finds one or the other, and ends the same."""
    own_yard.out("new", "--name", "a")
    own_yard.out("exec", "a", "--", "sh", "-c", "echo kept > file")
    doomed = OwnYard(own_yard.home, own_yard.env | {"FORKYARD_FAILPOINTS": f"{point}=kill"})
    doomed.out("daemon", "restart")
    with Client(home=own_yard.home) as client:
        armed = client.health().pid
    # Its own client has not the variable, nor has the daemon that it starts in the dead one's place.
    done = own_yard.run("stop", "a")
    assert done.returncode == 0, done.stderr
    with Client(home=own_yard.home) as client:
        assert client.health().pid != armed, "the step was its last"
        assert client.get_sandbox("a").state == "stopped"
    own_yard.out("start", "a")
    assert own_yard.out("exec", "a", "--", "cat", "file") == "kept"


def test_a_failpoint_that_says_nothing_is_refused(own_yard: OwnYard) -> None:  # noqa: F811
    own_yard.out("daemon", "stop")
    wrong = OwnYard(own_yard.home, own_yard.env | {"FORKYARD_FAILPOINTS": "stop.saved=nonsense"})
    done = wrong.run("daemon", "start")
    assert done.returncode != 0 and b"no NAME=ACTION" in done.stderr, done.stderr


@pytest.mark.parametrize("mb", [380, 440])
def test_memory_is_full_while_freezing(client: Client, mb: int) -> None:
    """It is saved, or refused: the sandbox and the program that fills it run on either way."""
    client.create_sandbox("a", mem_mb=512)
    box = client.sandbox("a")
    box.shell("echo kept > file")
    hog = box.spawn(HOG.format(mb=mb), detach=True)
    assert next(iter(hog.stream())).data == b"up\n"
    for _ in range(2):
        with contextlib.suppress(CapacityError, ConflictError, UnsupportedError):
            made = box.checkpoint()
            assert made.memory
    assert box.shell("cat file").stdout == "kept\n"
    assert "<< 20" in "".join(process.command for process in box.processes())
    assert client.get_sandbox("a").state == "running"
