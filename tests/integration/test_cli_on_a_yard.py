"""The command line on a real yard."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

pytestmark = pytest.mark.root


@pytest.fixture
def box(own_yard: OwnYard) -> str:  # noqa: F811
    own_yard.out("new", "--name", "box", "--ttl", "10m")
    return "box"


def test_new_info_delete(own_yard: OwnYard) -> None:  # noqa: F811
    done = own_yard.run("new", "--name", "one", "--ttl", "600", "--type", "small")
    assert done.returncode == 0 and done.stdout.decode().strip().startswith("sb_")
    assert len(done.stdout.split()) == 1 and b"ready" in done.stderr
    info = json.loads(own_yard.out("info", "one"))["sandbox"]
    assert (info["name"], info["state"], info["type"], info["ttlMin"]) == ("one", "running", "small", 10)
    assert info["id"] == done.stdout.decode().strip() and info["memoryRestored"] in (True, False)
    again = own_yard.run("new", "--name", "one", "--json")
    assert again.returncode == 4
    assert json.loads(again.stdout.splitlines()[-1])["event"] == "failed"
    assert own_yard.out("delete", "one") == "one"
    missing = own_yard.run("info", "one")
    assert (missing.returncode, missing.stdout) == (3, b"") and missing.stderr.startswith(b"forkyard: ")
    ready = json.loads(own_yard.out("new", "--name", "one", "--json").splitlines()[-1])
    assert ready["event"] == "ready" and ready["name"] == "one" and ready["start_ms"] > 0
    own_yard.out("delete", ready["id"], "--yes")


def test_exec_is_transparent(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    done = own_yard.run("exec", box, "printf 'a\\0\\377b'; printf err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"a\0\xffb", b"err")
    data = os.urandom(5 << 20)
    assert own_yard.run("exec", box, "cat", stdin=data).stdout == data
    assert own_yard.out("exec", box, "wc", "-c", stdin=data) == str(len(data))
    assert own_yard.out("exec", box, "--env", "A=x y\n$z", "printenv", "A") == "x y\n$z"
    assert own_yard.out("exec", "--cwd", "/tmp", box, "pwd") == "/tmp"
    assert own_yard.out("exec", box, "--user", "root", "--", "id", "-u") == "0"
    assert own_yard.run("exec", box, "no-such-program", "x").returncode == 127
    assert own_yard.run("exec", box, "kill -9 $$").returncode == 137
    assert own_yard.run("exec", "nobody", "true").returncode == 3


def test_exec_timeout_keeps_output(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    started = time.monotonic()
    done = own_yard.run("exec", box, "--timeout", "0.5", "echo early; sleep 60")
    assert (done.returncode, done.stdout) == (124, b"early\n") and time.monotonic() - started < 10


def test_exec_streams_and_does_not_wait_for_stdin(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    command = [sys.executable, "-m", "forkyard.cli", "exec", box, "echo one; read -r x; echo got $x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=own_yard.env) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        process.stdin.write(b"it\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got it\n"
        # Stdin is still open here: only the command's end may end it.
        assert process.wait(20) == 0


def test_an_interrupt_ends_the_command(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    command = [sys.executable, "-m", "forkyard.cli", "exec", "-n", box,
               "trap 'echo bye; exit 9' INT; echo on; while :; do sleep 0.05; done"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=own_yard.env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"bye\n" and process.wait(20) == 9


def test_a_command_ends_with_its_client(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    command = [sys.executable, "-m", "forkyard.cli", "exec", "-n", box, "echo on; exec sleep 987"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=own_yard.env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        process.kill()
    gone = "for i in $(seq 100); do pgrep -f '[s]leep 987' || exit 0; sleep 0.1; done; exit 1"
    own_yard.out("exec", "-n", box, gone)


def test_cp_both_ways(own_yard: OwnYard, box: str, tmp_path: Path) -> None:  # noqa: F811
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "emoji 🙂\nb'\".txt").write_bytes(os.urandom(100_000))
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    own_yard.out("cp", str(tree), f"{box}:there")
    assert own_yard.out("exec", box, "./there/run.sh") == "ran"
    own_yard.out("cp", str(tree), f"{box}:there")
    assert own_yard.out("exec", box, "./there/tree/run.sh") == "ran"
    back = tmp_path / "back"
    own_yard.out("cp", f"{box}:there", str(back))
    name = "emoji 🙂\nb'\".txt"
    assert (back / "sub" / name).read_bytes() == (tree / "sub" / name).read_bytes()
    own_yard.out("cp", "-", f"{box}:/workspace/data", stdin=b"x\0y")
    assert own_yard.run("cp", f"{box}:data", "-").stdout == b"x\0y"
    own_yard.out("cp", f"{box}:/workspace/data", f"{tmp_path}/into/")
    assert (tmp_path / "into" / "data").read_bytes() == b"x\0y"
    own_yard.out("cp", str(tree / "run.sh"), f"{box}:/workspace")
    assert own_yard.out("exec", box, "./run.sh") == "ran"
    assert own_yard.run("cp", f"{box}:none", str(tmp_path / "x")).returncode == 3


def test_fork_checkpoint_rewind_tree(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    own_yard.out("exec", box, "echo before > state; (sleep 876 &) >/dev/null 2>&1")
    ids = own_yard.out("fork", box, "-n", "3", "--prefix", "f-", "--ttl", "5m").splitlines()
    assert len(ids) == 3 and sorted(own_yard.names()) == ["box", "f-1", "f-2", "f-3"]
    one = json.loads(own_yard.out("fork", box, "--type", "small", "--ttl", "600", "--wait", "--json"))
    assert one["id"].startswith("sb_") and one["ttlMin"] == 10
    many = json.loads(own_yard.out("fork", box, "-n", "2", "--json"))["forks"]
    assert len({fork["name"] for fork in many}) == 2
    point = own_yard.out("checkpoint", "f-1", "--label", "good")
    own_yard.out("exec", "f-1", "rm state; pkill sleep")
    assert own_yard.run("exec", "f-1", "cat state").returncode == 1
    assert own_yard.out("rewind", "f-1") == ids[0]
    assert own_yard.out("exec", "f-1", "cat state; pgrep sleep >/dev/null && echo alive") == "before\nalive"
    assert point in own_yard.out("checkpoints", "ls", "f-1")
    picture = own_yard.out("tree")
    assert "└── " in picture and all(name in picture for name in ("box", "f-1", "f-2", "f-3"))
    own_yard.out("delete", *own_yard.names())


def test_snapshot_new_from(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    own_yard.out("exec", box, "echo kept > state")
    answer = json.loads(own_yard.out("snapshot", box, "kept"))
    assert answer["ok"] and answer["type"] == "snapshot.named.info"
    shown = answer["snapshot"]
    assert (shown["name"], shown["status"], shown["type"]) == ("kept", "ready", "small")
    assert shown["sourceSandboxId"] == json.loads(own_yard.out("info", box))["sandbox"]["id"]
    assert shown["sizeBytes"] > 0
    for source in ("kept", shown["snapshotId"]):
        made = own_yard.out("new", "--from", source)
        assert own_yard.out("exec", made, "cat state") == "kept"
        assert json.loads(own_yard.out("info", made))["sandbox"]["memoryRestored"] is True
        own_yard.out("delete", made)
    own_yard.out("snapshots", "delete", "kept")


def test_stop_start_goes_on(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    own_yard.out("exec", box, "(sleep 765 &) >/dev/null 2>&1")
    own_yard.out("stop", box)
    assert json.loads(own_yard.out("info", box))["sandbox"]["state"] == "stopped"
    own_yard.out("start", box)
    assert own_yard.run("exec", box, "pgrep sleep").returncode == 0


def test_daemon_status_and_restart(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    before = json.loads(own_yard.out("daemon", "status", "--json"))
    assert before["home"] == str(own_yard.home) and before["sandboxes"] == 1 and before["pid"] > 0
    own_yard.out("exec", box, "echo here > state")
    after = json.loads(own_yard.out("daemon", "restart", "--json"))
    assert after["pid"] != before["pid"] and after["sandboxes"] == 1
    assert own_yard.out("exec", box, "cat state") == "here"
    own_yard.out("daemon", "stop")
    assert own_yard.run("daemon", "status").returncode == 6
    assert own_yard.out("exec", box, "cat state") == "here"


def test_top_and_audit(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    own_yard.out("exec", box, "echo audited")
    assert own_yard.out("top", "--once").splitlines()[1].startswith("box")
    lines = own_yard.out("audit", "ls", box, "--json").splitlines()
    assert any("echo audited" in json.dumps(json.loads(line)) for line in lines)


@contextlib.contextmanager
def terminal(own: OwnYard, *args: str) -> Iterator[tuple[int, int]]:
    """``forkyard`` on a terminal of its own: its pid and the terminal's other end."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "forkyard.cli", *args], own.env)
    try:
        yield pid, fd
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(fd)


def until(fd: int, word: bytes, timeout_s: float = 20) -> bytes:
    """What the terminal shows up to ``word``."""
    seen = b""
    deadline = time.monotonic() + timeout_s
    while word not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([fd], [], [], left)[0], f"no {word!r} in {seen!r}"
        try:
            seen += os.read(fd, 4096)
        except OSError:
            raise AssertionError(f"it ended without {word!r}: {seen!r}") from None
    return seen


def test_shell_is_a_terminal(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    with terminal(own_yard, "shell", box) as (pid, fd):
        before = termios.tcgetattr(fd)
        os.write(fd, b"echo mark-$((20 + 22)); tty\n")
        assert b"mark-42" in until(fd, b"/dev/pts/")  # both may come at once
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
        os.write(fd, b"until stty size | grep -q '33 99'; do sleep 0.1; done; echo resi''zed\n")
        if b"$ " not in until(fd, b"resized").rpartition(b"resized")[2]:
            until(fd, b"$ ")
        # The guest's terminal may lose a key that comes while the shell changes its mode: a space.
        os.write(fd, b"  sleep 60\n")
        until(fd, b"sleep 60")
        time.sleep(1)  # a Ctrl-C before the program has the terminal is the shell's own
        os.write(fd, b"\x03")
        until(fd, b"$ ")
        os.write(fd, b"  echo after-$?; exit 5\n")
        until(fd, b"after-130")
        deadline = time.monotonic() + 20
        while (status := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                select.select([fd], [], [], 0.1)[0] and os.read(fd, 4096)
        assert os.waitstatus_to_exitcode(status[1]) == 5
        assert termios.tcgetattr(fd)[3] == before[3]


def test_a_closed_network_is_told_on_a_terminal(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    """What a program says of it is a name that does not resolve, or nothing at all."""
    piped = own_yard.run("exec", "-n", box, "getent hosts piped.invalid")
    assert (piped.returncode, piped.stderr) == (2, b"")
    with terminal(own_yard, "exec", "-n", box, "getent hosts nowhere.invalid; exit 3") as (_, fd):
        assert b"box may not reach" in until(fd, b"--allow nowhere.invalid,")
    with terminal(own_yard, "exec", "-n", box, "getent hosts other.invalid; echo done; exit 0") as (pid, fd):
        seen = until(fd, b"done\r\n")
        with contextlib.suppress(OSError):  # the terminal's end
            while piece := os.read(fd, 4096):
                seen += piece
        assert b"reach" not in seen and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_delete_asks_on_a_terminal(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    with terminal(own_yard, "delete", box) as (_, fd):
        until(fd, b"Delete box?")
        os.write(fd, b"n\n")
        until(fd, b"n\r\n")
    assert own_yard.names() == ["box"]


def test_a_loop_of_execs_is_quick(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    times = []
    for _ in range(10):
        started = time.monotonic()
        assert own_yard.run("exec", "-n", box, "true").returncode == 0
        times.append(time.monotonic() - started)
    assert sorted(times)[len(times) // 2] < 1.0, times


def test_a_daemon_that_stopped_still_ends_its_sandboxes(own_yard: OwnYard, box: str) -> None:  # noqa: F811
    told = own_yard.run("daemon", "stop").stderr.decode()
    assert "--sandboxes delete" in told
    assert "has stopped" in own_yard.run("daemon", "stop", "--sandboxes", "delete").stderr.decode()
    assert own_yard.names() == []


def test_a_group_alone_shows_its_verbs(own_yard: OwnYard) -> None:  # noqa: F811
    told = own_yard.run("snapshots")
    assert told.returncode == 2 and b"\n  ls " in told.stderr and b"\n  delete " in told.stderr
