"""Starting, finding, restarting and losing the daemon: the real process, over a yard in memory.

The daemon that is started is the real one but for its yard: a ``sitecustomize`` that only these
tests put on the path gives it one in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forkyard import AsyncClient, Client, UnavailableError
from forkyard.client import launch
from forkyard.daemon.main import TAKEN

HERE = Path(__file__).parent
DEADLINE_S = 20

IN_MEMORY = '''
import sys
if "forkyard.daemon.main" in sys.orig_argv:
    import asyncio, contextlib, types

    @contextlib.asynccontextmanager
    async def open_yard(settings, install):
        from memory_yard import MemoryYard
        boxes = settings.home / "boxes"
        boxes.mkdir(exist_ok=True)
        if (settings.home / "broken").exists():
            raise RuntimeError("the yard is broken")
        async with asyncio.TaskGroup() as tasks:
            yard = MemoryYard(boxes, tasks)
            yield yard
            yard.kill()

    async def quick_setup(settings):
        return False

    async def install(packages):
        raise RuntimeError("a yard in memory needs no packages")

    given = {"forkyard.yard.yard": open_yard, "forkyard.setup": quick_setup, "forkyard.setup.apt": install}
    for name, value in given.items():
        module = sys.modules[name] = types.ModuleType(name)
        setattr(module, value.__name__, value)
    sys.modules["forkyard.setup"].apt = sys.modules["forkyard.setup.apt"]
'''


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="fyh"))
    site = home / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(IN_MEMORY)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{HERE}")
    monkeypatch.setenv("FORKYARD_HOME", str(home))
    yield home
    with_daemon = home / "daemon.json"
    if with_daemon.exists():
        pid = json.loads(with_daemon.read_text())["pid"]
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
            until(lambda: not alive(pid))
    shutil.rmtree(home)


def daemon_of(home: Path) -> dict:
    return json.loads((home / "daemon.json").read_text())


def test_the_first_call_starts_a_daemon_that_is_nobodys_child(home: Path) -> None:
    with Client() as client:
        assert client.health().ok
        about = daemon_of(home)
        assert about["pid"] == client.health().pid
        assert about["socket"] == str(home / "daemon.sock")
    pid = about["pid"]
    assert (home / "daemon.sock").stat().st_mode & 0o777 == 0o600
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    # A terminal that hangs up is not its business.
    os.kill(pid, signal.SIGHUP)
    with Client() as client:
        assert client.health().pid == pid
    os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(pid))
    assert not (home / "daemon.sock").exists()
    assert not (home / "daemon.json").exists()
    lines = (home / "daemon.log").read_text().splitlines()
    assert [line.split(" ", 3)[1] for line in lines] == ["info"] * len(lines)
    assert "stopped" in lines[-1]


def test_clients_at_the_same_time_share_one_daemon(home: Path) -> None:
    code = "from forkyard import Client; print(Client().health().pid)"

    def one(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(one, range(4)))) == 1


def test_a_second_daemon_goes_quietly(home: Path) -> None:
    with Client() as client:
        pid = client.health().pid
        second = subprocess.run(
            [sys.executable, "-m", "forkyard.daemon.main", "--foreground"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert second.returncode == TAKEN
        assert str(pid) in second.stderr
        assert client.health().pid == pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_dies_is_started_again(home: Path, how: signal.Signals) -> None:
    with Client() as client:
        first = client.health().pid
        os.kill(first, how)
        until(lambda: not alive(first))
        assert client.health().pid != first


def test_shutdown(home: Path) -> None:
    with Client() as client:
        pid = client.health().pid
        client.shutdown()
        until(lambda: not alive(pid))
    with pytest.raises(UnavailableError):
        Client(start=False).version()


async def test_the_asynchronous_client_starts_it_too(home: Path) -> None:
    async with AsyncClient() as client:
        assert (await client.health()).pid == daemon_of(home)["pid"]


def test_a_daemon_that_cannot_start_says_why(home: Path) -> None:
    (home / "broken").touch()
    with pytest.raises(UnavailableError, match="the yard is broken"):
        Client().version()
    (home / "broken").unlink()
    with Client() as client:
        assert client.version().api


def test_settings_that_are_wrong_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    (home / "config.toml").write_text("storegb = 3\n")
    with pytest.raises(UnavailableError, match="store_gb"):
        client.version()


def test_without_the_hosts_packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "NEEDED", ("uvicorn", "no_such_package"))
    with pytest.raises(UnavailableError) as caught:
        Client().version()
    assert caught.value.hint == "pip install 'forkyard[host]'"


def test_a_home_that_cannot_be(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(UnavailableError, match="none can be started"):
        Client(home=home / "file" / "below").version()


def test_a_stale_socket_is_replaced(home: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home / "daemon.sock"))
    with Client() as client:
        assert client.health().ok


def test_a_command_goes_on_over_a_restart(home: Path) -> None:
    with Client() as client, ThreadPoolExecutor(1) as pool:
        first = client.health().pid
        future = pool.submit(client.list_sandboxes)
        assert future.result(DEADLINE_S) == []
        os.kill(first, signal.SIGTERM)
        # Each call finds the old daemon, none, or the new one.
        pids = {client.health().pid for _ in range(50)}
        assert pids - {first}
