"""From inside, as a plain user and as root: nothing of the host, of the yard or of a neighbour is in reach.

What looks (``inside/look.py``) is run on the host as well, where it has to find all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from forkyard import Client, Sandbox

pytestmark = [pytest.mark.root, pytest.mark.slow]
INSIDE = Path(__file__).parent / "inside"
# What gVisor makes; none of it is the host's. (Mounting by fuse and a tun are root's of a host: refused.)
DEVICES = {
    *("fd", "full", "fuse", "net", "null", "ptmx", "pts", "random", "shm"),
    *("stderr", "stdin", "stdout", "tty", "urandom", "zero"),
}


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Client]:  # noqa: F811
    with Client(home=own_yard.home) as client:
        yield client


@pytest.fixture
def box(client: Client) -> Sandbox:
    client.create_sandbox("a")
    box = client.sandbox("a")
    for script in INSIDE.iterdir():
        box.write_file(f"/tmp/{script.name}", script.read_bytes())
    return box


@pytest.fixture
def prey(own_yard: OwnYard, client: Client) -> Iterator[dict[str, Any]]:  # noqa: F811
    """A file, a process, a port, sockets and a neighbour, each with a secret in it."""
    secret = f"secret-{secrets.token_hex(12)}"
    client.create_sandbox("neighbour", env={"SECRET": secret})
    neighbour = client.sandbox("neighbour")
    neighbour.write_file(f"{secret}.txt", secret)
    neighbour.spawn("sleep 9999", detach=True)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fyt-", dir="/var/tmp")))
        (directory / "file").write_text(secret)
        process = subprocess.Popen(["sleep", "9999"], env={"SECRET": secret})
        stack.callback(process.wait)
        stack.callback(process.kill)
        port = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{secret}")
        abstract.listen()
        for listener in (port, abstract):
            thread = threading.Thread(target=_tell, args=(listener, secret), daemon=True)
            thread.start()
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield {
            "secret": secret,
            "file": str(directory / "file"),
            "inode": os.stat("/").st_ino,
            "pid": process.pid,
            "port": port.getsockname()[1],
            "addresses": ["127.0.0.1", "::1", "localhost", *_addresses()],
            "socket": client.health().socket,
            "abstract": secret,
            "names": ["catalog.db", "store.img", "daemon.json", f"{secret}.txt"],
        }


def _tell(listener: socket.socket, secret: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as found:
                found.sendall(secret.encode())


def _addresses() -> list[str]:
    """The host's own, whatever their networks."""
    shown = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    return [word.partition("/")[0] for line in shown.splitlines() for word in line.split()[3:4]]


@pytest.mark.parametrize("user", ["user", "root"])
def test_nothing_of_the_host_or_a_neighbour_is_seen(box: Sandbox, prey: dict[str, Any], user: str) -> None:
    result = box.exec(["python3", "/tmp/look.py", json.dumps(prey)], user=user, timeout_s=120)
    assert (result.stdout, result.exit_code) == ("looked\n", 0), result.stdout + result.stderr


def test_the_look_finds_all_of_it_on_the_host(prey: dict[str, Any]) -> None:
    look = [sys.executable, str(INSIDE / "look.py"), json.dumps(prey)]
    done = subprocess.run(look, capture_output=True, text=True, timeout=120)
    found = set(done.stdout.split()) - {"a_file_by_handle"}  # by a handle that is right on few file systems
    wanted = {"a_file", "a_process", "a_port", "a_unix_socket", "an_abstract_socket", "a_name", "looked"}
    assert found == wanted, done.stderr


@pytest.mark.parametrize("user", ["user", "root"])
def test_nothing_that_is_the_hosts_roots_is_let(box: Sandbox, user: str) -> None:
    knobs = [Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/kernel/hostname")]
    before = [knob.read_text() for knob in knobs]
    result = box.exec(["python3", "/tmp/push.py"], user=user, timeout_s=120)
    lines = result.stdout.splitlines()
    assert result.ok and lines[-1].startswith("tried ") and int(lines[-1].split()[1]) > 25, result.stderr
    facts = {
        line.split()[0]: set(line.split()[1:]) for line in lines if line.startswith(("devices", "networks"))
    }
    assert lines[:-3] == [], "let"
    assert facts["devices"] <= DEVICES and facts["networks"] <= {"lo"}
    assert [knob.read_text() for knob in knobs] == before
    assert box.shell("echo ok").stdout == "ok\n"
