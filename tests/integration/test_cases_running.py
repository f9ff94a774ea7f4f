"""Running commands: what sandboxes for agents got wrong in public, with the right values.

The numbers are those of the collected cases; each test covers the kind, not one trigger.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client, ForkyardError
from forkyard.client.sync_sandbox import Sandbox

pytestmark = pytest.mark.root


@pytest.fixture
def box(client: Client) -> Sandbox:  # noqa: F811
    """A new sandbox."""
    return client.sandbox(client.create_sandbox().id)


def commands(box: Sandbox) -> str:
    return "\n".join(process.command for process in box.processes())


# -- 1: children that stay -----------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "sleep 20 & echo hi",
        "nohup sleep 20 & echo hi",
        "(sleep 20 &) ; echo hi",
        "setsid sleep 20 & echo hi",
        "sh -c 'sleep 20 & sleep 20 & echo hi'",
        "python3 -c 'import subprocess; subprocess.Popen([\"sleep\", \"20\"])'; echo hi",
        "sleep 20 >&2 & echo hi",
    ],
)
def test_1_a_child_that_holds_stdout_does_not_hold_the_call(box: Sandbox, command: str) -> None:
    begun = time.monotonic()
    result = box.shell(command)
    assert (result.stdout, result.exit_code, result.timed_out) == ("hi\n", 0, False)
    assert time.monotonic() - begun < 1.5
    assert "sleep 20" in commands(box), "the child was killed with its parent"


def test_1_what_comes_just_after_the_end_is_kept(box: Sandbox) -> None:
    result = box.shell("(sleep 0.05; echo late) & exit 0")
    assert (result.stdout, result.exit_code) == ("late\n", 0)
    result = box.shell("(sleep 0.05; echo late >&2) & exit 3")
    assert (result.stderr, result.exit_code) == ("late\n", 3)


def test_1_a_child_is_not_killed_for_writing_later(box: Sandbox) -> None:
    box.shell("(for i in $(seq 40); do echo tick $i; sleep 0.05; done; touch ~/done) & echo started")
    until(lambda: box.shell("test -e ~/done").ok)
    box.shell("rm ~/done")


# -- 2, 3: time limits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "setsid sh -c 'trap \"\" TERM; while :; do :; done'",
        "trap '' TERM HUP INT; sleep 600; sleep 600",
        "(setsid sleep 600 &); (setsid setsid sleep 600 &); sleep 600",
        "python3 -c 'import os, time\nif os.fork(): time.sleep(600)\nos.setsid()\n"
        "if os.fork(): os._exit(0)\ntime.sleep(600)'",
        "sh -c 'kill -STOP $$'",
        "nohup sh -c 'while :; do sleep 600; done' >/dev/null 2>&1 & wait",
    ],
)
def test_2_nothing_survives_a_time_limit(box: Sandbox, command: str) -> None:
    begun = time.monotonic()
    result = box.shell(f"echo begun; {command}", timeout_s=1)
    took = time.monotonic() - begun
    assert result.timed_out and not result.ok and result.stdout == "begun\n"
    assert 1 <= took < 2.5
    until(lambda: not box.processes(), 2)


def test_3_output_before_a_time_limit_is_kept(box: Sandbox) -> None:
    result = box.shell("echo a; sleep 60", timeout_s=1)
    assert (result.stdout, result.timed_out, result.signal) == ("a\n", True, signal.SIGKILL)
    result = box.shell("echo out; echo err >&2; exec sleep 60", timeout_s=0.5)
    assert (result.stdout, result.stderr, result.timed_out) == ("out\n", "err\n", True)
    result = box.shell("head -c 3000000 /dev/zero; sleep 60", timeout_s=2)
    assert len(result.stdout_bytes) == 3_000_000 and result.timed_out
    result = box.shell("yes", timeout_s=0.5, max_output=1000)
    assert result.timed_out and result.truncated and len(result.stdout_bytes) == 1000
    python = "import time; print('unflushed, but a line'); time.sleep(60)"
    result = box.exec(["python3", "-u", "-c", python], timeout_s=1)
    assert result.stdout == "unflushed, but a line\n"


# -- 4: what cannot be started ---------------------------------------------------------------


def test_4_missing_and_not_executable(box: Sandbox) -> None:
    box.write_file("plain", "echo no\n")
    box.write_file("script", "#!/no/such/interpreter\n", mode=0o755)
    for command, code in (
        (["no-such-program"], 127),
        (["./no-such-file"], 127),
        (["/no/such/dir/x"], 127),
        (["./script"], 127),
        (["./plain"], 126),
        (["/etc"], 126),
    ):
        result = box.exec(command)
        assert result.exit_code == code and command[0] in result.stderr, (command, result)
        assert box.shell(command[0]).exit_code == code, command
    with box.spawn(["no-such-program"]) as process:
        result = process.wait()
    assert result.exit_code == 127 and "no-such-program" in result.stderr


def test_4_other_exit_codes_are_exact(box: Sandbox) -> None:
    for code in (0, 1, 2, 77, 124, 126, 127, 137, 255):
        result = box.shell(f"exit {code}")
        assert (result.exit_code, result.signal, result.ok) == (code, None, code == 0)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGHUP):
        result = box.shell(f"kill -{int(number)} $$")
        assert (result.exit_code, result.signal) == (128 + number, number)


# -- 5, 6: large output and input ------------------------------------------------------------


@pytest.mark.slow
def test_5_huge_output_is_bounded_everywhere(yard: YardHome, box: Sandbox) -> None:  # noqa: F811
    before = yard.rss_mb()
    command = "head -c 500M /dev/zero | tr '\\0' x; echo end >&2"
    result = box.shell(command, max_output=1 << 20)
    assert (result.exit_code, result.truncated, result.stderr) == (0, True, "end\n")
    assert result.stdout_bytes == b"x" * (1 << 20)
    assert result.omitted_bytes == (500 << 20) - (1 << 20)
    assert yard.rss_mb() - before < 50


def test_5_which_part_is_kept(box: Sandbox) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 10_001)).encode()
    for keep, expected in (
        ("head", whole[:1000]),
        ("tail", whole[-1000:]),
        ("both", whole[:500] + whole[-500:]),
    ):
        result = box.shell("seq 10000", max_output=1000, keep=keep)
        assert result.stdout_bytes == expected and result.omitted_bytes == len(whole) - 1000
    assert box.shell("seq 10000", max_output=0).stdout == ""
    assert not box.shell("seq 10000", max_output=len(whole)).truncated


def test_6_stdin(box: Sandbox) -> None:
    begun = time.monotonic()
    assert box.exec(["cat"]).stdout == "" and time.monotonic() - begun < 1
    begun = time.monotonic()
    assert box.exec(["wc", "-c"], stdin=b"x" * 10_000_000).stdout == "10000000\n"
    assert time.monotonic() - begun < 2
    assert box.exec(["cat"], stdin="text \N{SNAKE}").stdout == "text \N{SNAKE}"
    # Who reads a part only, or nothing, gets no error.
    assert box.exec(["head", "-c", "3"], stdin=b"y" * 5_000_000).stdout == "yyy"
    assert box.exec(["true"], stdin=b"y" * 5_000_000).ok


def test_6_fifty_megabytes_with_zeros_are_exact(box: Sandbox, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 25 + bytes(25 << 20)
    source = tmp_path / "data"
    source.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    with source.open("rb") as file:
        assert box.exec(["sha256sum"], stdin=file).stdout.split()[0] == digest
    result = box.exec(["cat"], stdin=data, max_output=64 << 20)
    assert hashlib.sha256(result.stdout_bytes).hexdigest() == digest


# -- 7, 8: background commands ---------------------------------------------------------------


@pytest.mark.slow
def test_7_a_background_command_is_found_again(client: Client) -> None:  # noqa: F811
    client.create_sandbox("a")
    box = client.sandbox("a")
    with box.spawn("i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done", detach=True) as server:
        first = next(server.stream()).data
    assert first.startswith(b"tick 1\n")
    box.checkpoint()
    box.rewind()
    client.fork("a", names=["b"])
    for name in ("a", "b"):
        listed = [p for p in client.processes(name) if p.handle and p.pid == server.pid]
        assert len(listed) == 1 and "tick" in listed[0].command
        assert listed[0].detached
        with client.attach(name, server.pid) as again:
            text = b""
            for chunk in again.stream():
                text += chunk.data
                if text.count(b"\n") > 20:
                    break
            numbers = [int(line.split()[1]) for line in text.splitlines()[:-1]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "output has a gap"
            again.signal(signal.SIGKILL)
        until(lambda name=name: all(p.pid != server.pid for p in client.processes(name)))


def test_8_no_time_limit_is_the_default_and_looking_changes_nothing(client: Client) -> None:  # noqa: F811
    made = client.create_sandbox("a", ttl_min=30)
    box = client.sandbox("a")
    box.shell("sleep 1000 & true", timeout_s=2)
    with box.spawn("sleep 1000", detach=True, timeout_s=None) as process:
        pass
    with box.attach(process.pid):
        assert client.get_sandbox("a").expires_at == made.expires_at
    box.checkpoint()
    box.rewind()
    assert client.get_sandbox("a").expires_at == made.expires_at
    assert commands(box).count("sleep 1000") >= 2, "the time limit of one command ended others"


# -- 9: terminals ----------------------------------------------------------------------------


class Terminal:
    """A PTY in a sandbox, read up to words."""

    def __init__(self, box: Sandbox, command: str, **size: int) -> None:
        self.process = box.spawn(command, pty=True, **size)
        self.output = self.process.stream()
        self.seen = b""

    def until(self, word: bytes) -> None:
        while word not in self.seen:
            self.seen += next(self.output).data
        self.seen = self.seen.partition(word)[2]

    def write(self, text: str) -> None:
        self.process.write(text)


def test_9_terminal(box: Sandbox) -> None:
    terminal = Terminal(box, "bash --norc -i", rows=33, cols=99)
    terminal.write("stty size; tty\n")
    terminal.until(b"33 99")
    terminal.until(b"/dev/pts/")
    terminal.write("trap 'echo win''ch' WINCH\n")
    terminal.write("echo rea''dy\n")
    terminal.until(b"ready")
    terminal.process.resize(40, 120)
    terminal.write("stty size\n")
    terminal.until(b"40 120")
    terminal.write("echo sle''eps; sleep 60\n")
    terminal.until(b"sleeps")
    until(lambda: "sleep 60" in commands(box))
    begun = time.monotonic()
    terminal.write("\x03")
    terminal.write("echo rc-$?\n")
    terminal.until(b"rc-130")
    assert time.monotonic() - begun < 1
    terminal.write("exit 5\n")
    assert terminal.process.wait().exit_code == 5


def test_9_resize_signals_the_foreground(box: Sandbox) -> None:
    code = (
        "import signal, os, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('winch', *os.get_terminal_size(), flush=True))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)\n"
    )
    box.write_file("winch.py", code)
    terminal = Terminal(box, "exec python3 winch.py")
    terminal.until(b"ready")
    terminal.process.resize(50, 132)
    terminal.until(b"winch 132 50")
    begun = time.monotonic()
    terminal.write("\x03")
    result = terminal.process.wait()
    assert result.signal == signal.SIGINT or result.exit_code in (1, 130)
    assert time.monotonic() - begun < 1


def test_9_a_daemon_that_ignores_sigint_changes_nothing(yard: YardHome, box: Sandbox) -> None:  # noqa: F811
    yard.client.shutdown()
    until(lambda: not (yard.home / "daemon.json").exists())
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "from forkyard import Client; print(Client(home=sys.argv[1]).health().pid)"
    )
    started = subprocess.run([sys.executable, "-c", code, str(yard.home)], capture_output=True, check=True)
    assert int(started.stdout) == yard.pid
    for command in ("echo up; exec sleep 60", "echo up; sleep 60"):
        terminal = Terminal(box, command)
        terminal.until(b"up")
        until(lambda: "sleep 60" in commands(box))
        begun = time.monotonic()
        terminal.write("\x03")
        result = terminal.process.wait()
        assert result.exit_code == 130 and time.monotonic() - begun < 1
    process = box.spawn("exec sleep 60")
    process.signal(signal.SIGINT)
    assert process.wait().exit_code == 130


# -- 10: environment -------------------------------------------------------------------------


def test_10_environment_is_exact_and_not_on_the_host(yard: YardHome, client: Client) -> None:  # noqa: F811
    secret = f"s3cret-{os.getpid()}"
    values = {
        "NEWLINES": "a\nb\n\nc\n",
        "QUOTES": "'\"`\\",
        "DOLLAR": "$HOME ${X} $(id) %s %%",
        "EMPTY": "",
        "SPACES": "  two  ",
        "UNICODE": "gr\u00fc\u00df \N{SNAKE}",
        "SECRET": secret,
        "EQUALS": "a=b=c",
        "LONG": "x" * 100_000,
    }
    client.create_sandbox("a", env=values)
    box = client.sandbox("a")
    for extra, names in (({}, values), ({"MORE": "m\n$e", "EMPTY": "now"}, values)):
        with box.spawn("env -0; exec sleep 60", env=extra) as process:
            text = b""
            for chunk in process.stream():
                text += chunk.data
                if text.endswith(b"\0") and b"UNICODE=" in text and b"LONG=" in text:
                    break
            got = dict(item.split("=", 1) for item in text.decode().split("\0") if item)
            assert {name: got.get(name) for name in names | extra} == {**values, **extra}
            for entry in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        seen = (entry / name).read_bytes()
                    except OSError:
                        continue
                    assert secret.encode() not in seen or int(entry.name) == os.getpid(), entry
    assert secret not in (yard.home / "daemon.log").read_text()
    assert all(secret not in str(record.data) for record in client.audit("a"))


# -- 11, 12: limits --------------------------------------------------------------------------


BOMBS = {
    "shell": "bomb() { bomb | bomb & }; bomb; sleep 30",
    "bash": "bash -c ':() { : | : & }; :; sleep 30'",
    "sleepers": "python3 -c 'import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(1)'",
    "spinners": "python3 -c 'import os\nwhile True:\n try: os.fork()\n except OSError: pass'",
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_11_a_fork_bomb_hurts_only_itself(client: Client, bomb: str) -> None:  # noqa: F811
    # What others run on this machine takes its share of the same time.
    limit_s = 5 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    client.create_sandbox("bomb")
    client.create_sandbox("neighbour")
    with ThreadPoolExecutor(1) as pool:
        going_off = pool.submit(client.shell, "bomb", BOMBS[bomb], timeout_s=60)
        time.sleep(3)  # the bomb's own time
        for name in ("neighbour", "bomb"):
            begun = time.monotonic()
            result = client.shell(name, "echo ok", user="root", timeout_s=2 * limit_s)
            assert result.stdout == "ok\n" and time.monotonic() - begun < limit_s, (name, result)
        ended = going_off.result(90)
    # The crowd is ended for its number or, where that comes first, for its memory.
    assert ended.exit_code == 137 and (ended.process_limit or ended.oom) and not ended.timed_out, ended
    told = [record.data for record in client.audit("bomb") if record.kind == "exec"]
    assert any(data.get("process_limit") or data.get("oom") for data in told)
    for name in ("neighbour", "bomb"):
        until(lambda name=name: client.shell(name, "echo ok", timeout_s=5).stdout == "ok\n", 30)
        assert client.get_sandbox(name).state == "running"


def test_11_many_idle_processes_are_no_bomb(box: Sandbox) -> None:
    result = box.shell("for i in $(seq 150); do sleep 60 & done; sleep 3; echo ok", timeout_s=60)
    assert result.stdout == "ok\n" and not result.process_limit
    assert commands(box).count("sleep 60") == 150


HOGS = {
    "one": "python3 -c 'x = bytearray(4 << 30)'",
    "slow": "python3 -c '\nx = []\nwhile True: x.append(bytearray(b\"y\" * (1 << 20)))'",
    "thirty": "for i in $(seq 30); do python3 -c 'x = bytearray(b\"y\" * (40 << 20)); "
    "import time; time.sleep(30)' & done; wait",
    "shm": "head -c 200M /dev/zero > /dev/shm/fill; python3 -c 'x = bytearray(b\"y\" * (700 << 20))'",
    "memfd": "python3 -c '\nimport os\nfd = os.memfd_create(\"x\")\n"
    "for _ in range(2000): os.write(fd, b\"y\" * (1 << 20))'",
    "child": "python3 -c '\nimport subprocess, sys\n"
    "sys.exit(subprocess.call([\"python3\", \"-c\", \"x = bytearray(4 << 30)\"]))'",
}


@pytest.mark.slow
@pytest.mark.parametrize("hog", HOGS)
def test_12_out_of_memory_costs_the_command_not_the_sandbox(client: Client, hog: str) -> None:  # noqa: F811
    client.create_sandbox("a", mem_mb=512)
    box = client.sandbox("a")
    box.shell("echo kept > ~/file; echo kept > /tmp/file")
    result = box.shell(HOGS[hog], timeout_s=60)
    # A shell whose child was killed may end by itself, with the number that says so.
    assert (result.exit_code, result.oom) == (137, True), result
    assert result.signal in (signal.SIGKILL, None)
    box.shell("rm -f /dev/shm/fill")
    assert box.shell("cat ~/file /tmp/file").stdout == "kept\nkept\n"
    info = client.get_sandbox("a")
    assert info.state == "running" and info.failure is None
    assert any(record.kind == "process.oom" for record in client.audit("a"))


# -- 13: names -------------------------------------------------------------------------------


NAMES = ["emoji \N{SNAKE} a\nb'\".txt", "-rf", "--", "x" * 255, " ", "a\\b", "*?[x]", "$(id)", "\x01\x7f"]
NAMES.append("\u00e9" * 127)


def test_13_file_names(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number, name in enumerate(NAMES):
        data = os.urandom(1000 + number)
        box.write_file(f"names/{name}", data)
        assert box.read_file(f"names/{name}") == data
        (source / name).write_bytes(data)
    assert sorted(info.name for info in box.list_files("names")) == sorted(NAMES)
    box.download("names", tmp_path / "down")
    box.upload(source, "again")
    assert box.shell("diff -r names again && ls -a again | wc -l").ok
    for name in NAMES:
        assert (tmp_path / "down" / name).read_bytes() == (source / name).read_bytes()
        box.move(f"names/{name}", f"names/{name[:200]}.")
        box.remove(f"names/{name[:200]}.")
    assert box.list_files("names") == []
    for bad in ("", "a\0b"):
        with pytest.raises(ForkyardError):
            box.write_file(bad, b"")


def test_13_a_download_stays_in_its_target(box: Sandbox, tmp_path: Path) -> None:
    box.shell(
        "mkdir -p tree/sub && cd tree && echo in > sub/file && chmod 755 sub/file && ln -s sub/file good && "
        "ln -s /etc out && ln -s /etc/passwd pass && ln -s ../.. up && ln -s ../outside sideways && "
        "ln -s sub/../../x sneaky && mkfifo fifo && ln -s self self && cd .. && echo secret > outside"
    )
    target = tmp_path / "target"
    (tmp_path / "outside").write_text("host's own")
    got = box.download("tree", target)
    assert sorted({*got.skipped} - {"fifo"}) == ["out", "pass", "sideways", "sneaky", "up"]
    files = {str(p.relative_to(target)) for p in target.rglob("*") if not p.is_dir() or p.is_symlink()}
    assert files <= {"sub/file", "good", "self"} and {"sub/file", "good"} <= files
    assert (target / "sub/file").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(target / "good") == "sub/file"
    assert (tmp_path / "outside").read_text() == "host's own"


def test_13_modes_and_owners_are_kept(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "tool"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(0o755)
    box.upload(source, "tool")
    assert box.exec(["./tool"]).stdout == "ran\n"
    for mode in (0o755, 0o600, 0o444, 0o700):
        box.write_file("m", b"x", mode=mode)
        assert box.stat("m").mode & 0o7777 == mode and box.stat("m").uid == 1000
        box.download("m", tmp_path / "m")
        assert (tmp_path / "m").stat().st_mode & 0o777 == mode
        (tmp_path / "m").unlink()
        box.remove("m")
    box.write_file("/root/r", b"x", user="root")
    assert box.exec(["stat", "-c", "%u", "/root/r"], user="root").stdout == "0\n"
    # Overwriting keeps what stands there: a mode, an owner, a link.
    box.shell("echo old > kept; chmod 640 kept; ln -s kept link")
    box.write_file("kept", b"new")
    assert box.stat("kept").mode & 0o7777 == 0o640


# -- 16: open streams over a rewind ------------------------------------------------------------


@pytest.mark.slow
def test_16_open_handles_over_a_rewind(client: Client) -> None:  # noqa: F811
    client.create_sandbox("a")
    box = client.sandbox("a")
    terminal = Terminal(box, "bash --norc -i")
    terminal.write("X=kept; echo rea''dy\n")
    terminal.until(b"ready")
    streaming = Terminal(box, "while :; do echo tick; sleep 0.02; done")
    streaming.until(b"tick")
    box.checkpoint()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(box.shell, "sleep 60")
        until(lambda: "sleep 60" in commands(box))
        begun = time.monotonic()
        box.rewind()
        with pytest.raises(ForkyardError) as lost:
            waiting.result(10)
    for reader in (terminal, streaming):
        with pytest.raises(ForkyardError) as error:
            for _ in reader.output:
                pass
        assert error.value.code == lost.value.code and "rewound" in str(error.value), error.value
    assert time.monotonic() - begun < 10
    assert box.shell("echo new").stdout == "new\n"
    # The programs themselves are there as of the checkpoint, and can be attached to.
    again = box.attach(terminal.process.pid)
    output = again.stream()
    again.write("echo $X-on\n")
    text = b""
    while b"kept-on" not in text:
        text += next(output).data
    again.close()
