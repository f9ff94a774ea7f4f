"""MicroVMs on the base template: the network, exposed ports, code, git, a database, a container."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_egress import audited, fetched, preset, reachable
from test_live_state import POSTGRES, PSQL
from yard_home import LENDER, YardHome, built, open_home, until

from forkyard.engines.qemu import load_kit
from forkyard.errors import UnavailableError
from forkyard.setup.microvms import kit_dir


def _lacking() -> bool:
    try:
        load_kit(kit_dir(LENDER))
    except UnavailableError:
        return True
    return False


pytestmark = [
    *(pytest.mark.root, pytest.mark.slow, pytest.mark.qemu),
    pytest.mark.skipif(os.geteuid() != 0 or _lacking(), reason="no microVMs: forkyard setup --engine qemu"),
]
UNHURRIED = pytest.mark.skipif(
    not os.environ.get("FORKYARD_TEST_ALL_MICROVMS"),
    reason="minutes without KVM: FORKYARD_TEST_ALL_MICROVMS=1 runs it",
)
# Under the translator, on a machine that others use too.
PATIENCE_S = 300.0
SHAPE = {"engine": "qemu", "mem_mb": 512, "disk_mb": 2048}
CONTAINER = Path(__file__).parent / "container.py"


@pytest.fixture(scope="module")
def home() -> Iterator[YardHome]:
    with open_home() as made:
        made.client.create_sandbox("vm", egress_allow=["@pip"], wait_s=PATIENCE_S, **SHAPE)
        yield made
        made.clear()


@pytest.fixture
def box(home: YardHome) -> Iterator[str]:
    """A fork of the module's microVM, which it boots once."""
    yield home.client.fork("vm", 1, names=["copy"]).forks[0].name
    home.client.delete_sandbox("copy")


@UNHURRIED
@pytest.mark.net
def test_pip_through_the_wire(home: YardHome, box: str) -> None:
    rules = preset("@pip")
    if not all(map(reachable, rules)):
        pytest.skip("this machine's index cannot be reached")
    command = "pip install -q six && python -c 'import six; print(six.__name__)'"
    done = home.client.shell(box, command, timeout_s=PATIENCE_S)
    assert done.stdout.splitlines()[-1:] == ["six"], done.stderr
    assert {data["name"] for data in audited(home.client, box, "egress.allowed")} <= set(rules)
    refused = home.client.shell(box, "curl -sS https://elsewhere.test/")
    assert not refused.ok and "resolve" in refused.stderr


def test_ports_of_a_microvm(home: YardHome, box: str) -> None:
    client = home.client
    client.spawn(box, "cd /etc && exec python3 -m http.server 8000 --bind 127.0.0.1", detach=True)
    url = client.expose(box, 8000)
    until(lambda: fetched(f"{url}/hostname") == b"copy\n", PATIENCE_S)
    client.checkpoint(box)
    client.rewind(box)
    until(lambda: fetched(f"{url}/hostname") == b"copy\n", PATIENCE_S)
    echo = 'import socket\\ns=socket.create_server(("127.0.0.1",7))\\nwhile 1:\\n c=s.accept()[0]\\n'
    echo += " while d:=c.recv(65536): c.sendall(d)\\n c.close()"
    client.spawn(box, f"exec python3 -c \"$(printf '{echo}')\"", user="root", detach=True)
    port = int(client.expose(box, 7).rpartition(":")[2])
    data = os.urandom(1 << 20)
    until(lambda: _through(port, data) == data, PATIENCE_S)


def _through(port: int, data: bytes) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as sock:

        def send() -> None:
            with contextlib.suppress(OSError):  # who listens is not there yet
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        got = bytearray()
        while piece := sock.recv(1 << 20):
            got += piece
        sender.join()
        return bytes(got)
    return b""


@UNHURRIED
def test_code_keeps_its_session_in_forks(home: YardHome, box: str) -> None:
    client = home.client
    assert client.run_code(box, "x = 41\nx", timeout_s=PATIENCE_S).result == "41"
    fork = client.fork(box, 1).forks[0].id
    assert client.run_code(fork, "x + 1", timeout_s=PATIENCE_S).result == "42"
    client.delete_sandbox(fork)


@UNHURRIED
def test_git_in_a_microvm(home: YardHome, box: str) -> None:
    sandbox = home.client.sandbox(box)
    sandbox.shell("git init -q -b main r && cd r && git config user.name a && git config user.email a@b.test "
                  "&& echo one > f && git add f && git commit -qm one", check=True)  # fmt: skip
    assert sandbox.git("clone", url="r", path="copy").ok
    sandbox.write_file("copy/f", "two\n")
    assert "+two" in sandbox.git("diff", path="copy").stdout
    changed = [change.path for change in sandbox.diff().added]
    assert "/home/user/copy/f" in changed and "/home/user/r/f" in changed


def test_a_container_in_a_microvm(home: YardHome, box: str) -> None:
    """With namespaces, mounts and limits of its own; and gVisor does not run it."""
    client = home.client
    argv = ["python3", "-c", CONTAINER.read_text()]
    done = client.exec(box, argv, user="root", timeout_s=PATIENCE_S)
    assert done.ok, done.stderr
    assert done.stdout.splitlines() == [
        *("pid=1 first=sh host=inner interfaces=1", "hog=137", "killed copy", "ebpf True")
    ]
    client.create_sandbox("other", engine="gvisor")
    refused = client.exec("other", argv, user="root")
    assert not refused.ok and "OSError" in refused.stderr + refused.stdout
    client.delete_sandbox("other")


@UNHURRIED
@pytest.mark.net
def test_postgresql_in_a_microvm() -> None:
    with built(POSTGRES) as template, open_home(template=template) as home:
        client = home.client
        client.create_sandbox("a", template=POSTGRES.name, wait_s=PATIENCE_S, **SHAPE)
        box = client.sandbox("a")
        start_it = "pg_ctlcluster $(ls /etc/postgresql) main start -- -t 300"
        box.shell(f"mkdir -p /run/postgresql && chown postgres /run/postgresql && {start_it}",
                  user="root", timeout_s=PATIENCE_S, check=True)  # fmt: skip
        box.exec([*PSQL, "-c", "create table t (id serial, v text)"], user="postgres", check=True)
        session = box.spawn(PSQL, user="postgres", detach=True)
        session.write("begin; insert into t (v) select 'x' from generate_series(1, 1000);\n\\echo open\n")
        assert next(session.stream()).data == b"open\n"
        session.close()
        box.checkpoint()
        client.fork("a", 1, names=["b"])
        box.rewind()
        for name in ("a", "b"):
            assert client.exec(name, [*PSQL, "-c", "select count(*) from t"], user="postgres").stdout == "0\n"
            with client.attach(name, session.pid) as again:
                again.write("insert into t (v) values ('after'); commit;\n\\echo done\n\\q\n")
                text = b"".join(chunk.data for chunk in again.stream())
            assert b"done" in text
            ask = [*PSQL, "-c", "checkpoint", "-c", "select count(*), max(id) from t"]
            assert client.exec(name, ask, user="postgres").stdout == "1001|1001\n"
