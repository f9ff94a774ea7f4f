"""``forkyard exec``: which words are whose, and stdin, stdout, stderr and exit code byte for byte."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cli_client import MemoryClient

from forkyard.cli.app import App
from forkyard.cli.main import run

Exec = Callable[..., tuple[int, bytes, bytes]]


@pytest.fixture
def client() -> MemoryClient:
    made = MemoryClient()
    made.create_sandbox("box")
    return made


@pytest.fixture
def stdin() -> Iterator[Callable[[int], None]]:
    """Puts a descriptor in place of this process's stdin."""
    before = os.dup(0)
    yield lambda fd: (os.dup2(fd, 0), None)[1]
    os.dup2(before, 0)
    os.close(before)


@pytest.fixture
def fy(client: MemoryClient, capfdbinary: pytest.CaptureFixture[bytes],
       stdin: Callable[[int], None]) -> Exec:
    def call(*args: str, data: bytes | None = None) -> tuple[int, bytes, bytes]:
        if data is None:
            null = os.open(os.devnull, os.O_RDONLY)
            stdin(null)
            os.close(null)
        else:
            read, write = os.pipe()
            stdin(read)
            os.close(read)
            threading.Thread(target=_fill, args=(write, data), daemon=True).start()
        code = run(("exec", *args), App(client))
        out, err = capfdbinary.readouterr()
        return code, out, err

    return call


def _fill(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view):]
    finally:
        os.close(fd)


def test_streams_and_exit_code_pass_through(fy: Exec) -> None:
    assert fy("box", "printf 'a\\0\\377'; printf err >&2; exit 7") == (7, b"a\0\xff", b"err")
    assert fy("box", "kill -9 $$")[0] == 137
    assert fy("nobody", "true")[0] == 3


@pytest.mark.parametrize("args, command, options", [
    (("box", "ls", "-l"), ["ls", "-l"], {}),
    (("box", "true"), "true", {}),
    (("--cwd", "/", "box", "echo", "-l", "--cwd", "/tmp"), ["echo", "-l", "--cwd", "/tmp"], {"cwd": "/"}),
    (("box", "--cwd", "/", "ls", "-n"), ["ls", "-n"], {"cwd": "/"}),
    (("--timeout", "5", "box", "--cwd=/", "-n", "echo", "--help"), ["echo", "--help"],
     {"cwd": "/", "timeout_s": 5}),
    (("box", "--", "ls", "-l"), ["ls", "-l"], {}),
    (("--", "box", "echo", "--", "x"), ["echo", "--", "x"], {}),
    (("box", "-n", "--", "echo", "--"), ["echo", "--"], {}),
    (("box", "--env", "A=1", "-e", "B=2", "true"), "true", {"env": {"A": "1", "B": "2"}}),
    (("box", "--timeout", "2m", "--user", "root", "true"), "true", {"timeout_s": 120, "user": "root"}),
])
def test_whose_words_are_whose(fy: Exec, client: MemoryClient, args: tuple[str, ...], command: object,
                               options: dict[str, object]) -> None:
    assert fy(*args)[0] == 0
    asked = {key: value for key, value in client.calls[-1][1].items() if value is not None and value != {}}
    assert asked == {"sandbox": "box", "command": command, **options}


def test_help_stands_before_the_command(fy: Exec, client: MemoryClient) -> None:
    calls = len(client.calls)
    assert b"Examples:" in fy("box", "--help")[1] and b"Examples:" in fy("--help")[1]
    assert len(client.calls) == calls


def test_stdin_is_exact(fy: Exec) -> None:
    data = os.urandom(3 << 20)
    assert fy("box", "cat", data=data) == (0, data, b"")
    assert fy("box", "cat", data=b"") == (0, b"", b"")
    assert fy("box", "cat") == (0, b"", b"")


def test_n_leaves_stdin_alone(fy: Exec) -> None:
    assert fy("-n", "box", "cat", data=b"for another") == (0, b"", b"")
    assert os.read(0, 100) == b"for another"


def test_the_end_of_the_command_is_ours(fy: Exec, client: MemoryClient, stdin: Callable[[int], None]) -> None:
    read, write = os.pipe()
    stdin(read)
    started = time.monotonic()
    assert run(("exec", "box", "exit 3"), App(client)) == 3
    assert time.monotonic() - started < 5
    os.close(write)
    os.close(read)


def test_a_closed_stdin_holds_nothing(client: MemoryClient, stdin: Callable[[int], None]) -> None:
    os.close(0)
    assert run(("exec", "box", "cat"), App(client)) == 0


def test_timeout_keeps_what_came_before(fy: Exec) -> None:
    assert fy("box", "--timeout", "0.3", "echo early; sleep 60") == (124, b"early\n", b"")


def test_an_interrupt_goes_to_the_command(client: MemoryClient) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 10
        while not client.processes and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        # The shell says when its trap stands; until then a signal would find the default.
        while b"ready" not in os.read(read, 100):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    read, write = os.pipe()
    threading.Thread(target=interrupt, daemon=True).start()
    command = f"trap 'exit 42' INT; echo ready > /proc/{os.getpid()}/fd/{write}; while :; do sleep 0.05; done"
    assert run(("exec", "-n", "box", command), App(client)) == 42
    assert client.processes[0].signals == [signal.SIGINT]
    os.close(read)
    os.close(write)


def test_a_reader_that_has_enough_ends_it(client: MemoryClient) -> None:
    read, write = os.pipe()
    before = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    os.close(read)
    try:
        assert run(("exec", "-n", "box", "yes"), App(client)) == 141
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert client.processes[0].wait(10).signal == signal.SIGPIPE
