"""Everything that lives in a sandbox goes on in its forks, and after a rewind.

The programs in ``live/`` hold one kind of state each. All are started in one sandbox, which is
forked in two and then rewound; each program checks itself in all three copies.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from yard_home import YardHome, built, client, debian_yard, newest_yard, open_home, until, yard  # noqa: F401

from forkyard import Client, ConflictError
from forkyard.client.sync_sandbox import Sandbox
from forkyard.setup.recipes import BASE, Recipe

pytestmark = [pytest.mark.root, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "live"
KINDS = re.findall(
    r"^@kind\ndef (\w+)", "".join(path.read_text() for path in sorted(PROGRAMS.glob("*.py"))), re.M
)
COPIES = ["first-fork", "second-fork", "rewound"]
WAIT = "for i in $(seq 600); do test -e {0} && exec cat {0}; sleep 0.05; done; echo no {0}"


def start(box: Sandbox, kind: str) -> None:
    """Set one kind's state up, detached."""
    box.spawn(["python3", "live/run.py", kind], detach=True).close()


def finish(box: Sandbox, kind: str) -> str:
    """Let it check itself: ``ok``, or what is wrong."""
    at = f"/tmp/live/{kind}"
    pid = box.read_text(f"{at}.ready")
    return box.shell(f"kill -{signal.SIGUSR1} {pid}; ({WAIT.format(f'{at}.result')}); cat {at}.stuck").stdout


def make_copies(home: YardHome) -> Client:
    """The sandbox with everything in it, three times."""
    home.client.create_sandbox("rewound")
    box = home.client.sandbox("rewound")
    box.upload(PROGRAMS, "live")
    for kind in KINDS:
        start(box, kind)
    for kind in KINDS:
        text = box.shell(WAIT.format(f"/tmp/live/{kind}.ready")).stdout
        assert text.strip().isdigit(), f"{kind}: {text}"
    box.checkpoint()
    home.client.fork("rewound", 2, names=COPIES[:2])
    box.rewind()
    return home.client


@pytest.fixture(scope="module", params=["debian", pytest.param("newest", marks=pytest.mark.newest)])
def copies(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Of one build at a time: a crowd of timers and threads is no company for the next test."""
    home: YardHome = request.getfixturevalue(f"{request.param}_yard")
    yield make_copies(home)
    home.clear()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_survives(copies: Client, kind: str, copy: str) -> None:
    assert finish(copies.sandbox(copy), kind) == "ok"


# -- deleted files that are still open ---------------------------------------------------------------

HOLDER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
held = open("/home/user/held open", "wb+", buffering=0)
held.write(b"content" * 10000)
os.unlink("/home/user/held open")
os.mkdir("gone"); os.chdir("gone"); os.rmdir("/home/user/gone")
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
held.seek(0)
assert held.read() == b"content" * 10000
held.write(b"more")
open("/tmp/said", "w").write("ok")
"""


@contextmanager
def holding(home: YardHome) -> Iterator[tuple[Client, Sandbox, int]]:
    """A sandbox ``holder`` whose program holds a deleted file, beside whatever else there is."""
    client = home.client  # noqa: F811
    client.create_sandbox("holder", labels={"of": "holder"})
    box = client.sandbox("holder")
    box.write_file("holder.py", HOLDER)
    with box.spawn(["python3", "holder.py"], detach=True) as process:
        assert next(process.stream()).data == b"ready\n"
    yield client, box, process.pid
    client.delete_sandboxes(labels={"of": "holder"})


def test_a_deleted_open_file_refuses_with_its_name(debian_yard: YardHome) -> None:  # noqa: F811
    with holding(debian_yard) as (client, box, pid):  # noqa: F811
        stop, fork = (lambda: client.stop_sandbox("holder")), (lambda: client.fork("holder", 2))
        for refused in (box.checkpoint, box.snapshot, fork, stop):
            with pytest.raises(ConflictError) as error:
                refused()
            assert "/home/user/held open" in str(error.value) and f"python3 [{pid}]" in str(error.value)
        ours = client.list_sandboxes(labels={"of": "holder"})
        assert [(info.name, info.state) for info in ours] == [("holder", "running")]
        # The disk alone can be had, and the sandbox is unharmed.
        client.fork("holder", names=["disk"], memory=False)
        assert client.shell("disk", "ls").stdout == box.shell("ls").stdout
        assert box.shell(f"kill -USR1 {pid}; {WAIT.format('/tmp/said')}").stdout == "ok"
        until(lambda: all(process.pid != pid for process in box.processes()))
        assert box.checkpoint().memory


@pytest.mark.newest
def test_a_deleted_open_file_survives_on_the_newest(newest_yard: YardHome) -> None:  # noqa: F811
    with holding(newest_yard) as (client, box, pid):  # noqa: F811
        client.fork("holder", names=["copy"])
        box.checkpoint()
        box.rewind()
        for name in ("holder", "copy"):
            said = client.shell(name, f"kill -USR1 {pid}; {WAIT.format('/tmp/said')}")
            assert said.stdout == "ok"


# -- how much, how often -------------------------------------------------------------------------------


def test_more_than_the_memory_fits_in_tmp(client: Client) -> None:  # noqa: F811
    client.create_sandbox("a", mem_mb=1024)
    box = client.sandbox("a")
    fill = "f = open('/tmp/big', 'wb')\nfor _ in range(1200): f.write(b'x' * (1 << 20))"
    box.exec(["python3", "-c", fill], check=True)
    assert client.usage("a").mem_mb < 300
    assert box.shell("stat -c %s /tmp/big; tail -c 2 /tmp/big").stdout == f"{1200 << 20}\nxx"
    box.shell("cp /tmp/big ~/copy; rm /tmp/big; rm ~/copy", check=True)
    box.checkpoint()
    assert client.get_sandbox("a").state == "running"


def test_a_thousand_commands_leave_nothing(client: Client) -> None:  # noqa: F811
    client.create_sandbox("a")
    box = client.sandbox("a")
    box.shell("true")
    before = box.checkpoint().size_bytes
    for _ in range(20):
        assert all(result.ok for result in client.exec_many([("a", "true")] * 50))
    assert box.processes() == [] and box.shell("ps -e | grep -c defunct").stdout == "0\n"
    assert box.checkpoint().size_bytes < before + (2 << 20)


def test_a_full_disk_is_told_and_survived(client: Client) -> None:  # noqa: F811
    client.create_sandbox("a", disk_mb=64)
    client.create_sandbox("neighbour")
    box = client.sandbox("a")
    box.write_file("kept", "kept")
    for _ in range(2):
        result = box.shell("head -c 200M /dev/urandom > big")
        assert not result.ok and result.disk_full
        assert 50 << 20 < box.stat("big").size <= 64 << 20
        assert box.read_text("kept") == "kept" and client.shell("neighbour", "echo x > y").ok
        box.shell("rm big; sync", check=True)
        # btrfs gives space back with its next transaction.
        until(lambda: box.shell("head -c 10M /dev/urandom > small && sync").ok, 40)
    client.fork("a", names=["b"])
    assert not client.shell("b", "head -c 200M /dev/urandom > big").ok
    assert client.shell("b", "stat -c %s small; cat kept").stdout == f"{10 << 20}\nkept"
    assert box.shell("echo more > more").ok


# -- a real database -----------------------------------------------------------------------------------

POSTGRES = Recipe(name="test-postgres", packages=("postgresql",), parent=BASE, env=BASE.env)
PSQL = ["psql", "-q", "-A", "-t", "-h", "/var/run/postgresql", "postgres"]


@pytest.mark.net
def test_postgresql_in_an_open_transaction() -> None:
    with built(POSTGRES) as template, open_home(template=template) as home:
        client = home.client
        client.create_sandbox("a", template=POSTGRES.name)
        box = client.sandbox("a")
        start_it = "pg_ctlcluster $(ls /etc/postgresql) main start"
        box.shell(f"mkdir -p /run/postgresql && chown postgres /run/postgresql && {start_it}",
                  user="root", timeout_s=60, check=True)  # fmt: skip
        box.exec([*PSQL, "-c", "create table t (id serial, v text)"], user="postgres", check=True)
        session = box.spawn(PSQL, user="postgres", detach=True)
        session.write("begin; insert into t (v) select 'x' from generate_series(1, 1000);\n\\echo open\n")
        assert next(session.stream()).data == b"open\n"
        session.close()
        box.checkpoint()
        client.fork("a", 2, names=["b", "c"])
        box.rewind()
        for name in ("a", "b", "c"):
            assert client.exec(name, [*PSQL, "-c", "select count(*) from t"], user="postgres").stdout == "0\n"
            with client.attach(name, session.pid) as again:
                again.write("insert into t (v) values ('after'); commit;\n\\echo done\n\\q\n")
                text = b"".join(chunk.data for chunk in again.stream())
            assert b"done" in text
            ask = [*PSQL, "-c", "checkpoint", "-c", "select count(*), max(id) from t"]
            said = client.exec(name, ask, user="postgres")
            assert said.stdout == "1001|1001\n", said
