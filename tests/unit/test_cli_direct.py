"""The short way to the daemon: the same words as the client's, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forkyard import errors, verbs
from forkyard import requests as rq
from forkyard.cli import direct
from forkyard.types import ExecResult

Handler = Callable[[str, bytes], list[bytes]]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Handler], None]]:
    """A server on the settings' socket that answers each request with what a handler gives."""
    path = tmp_path / "s"
    monkeypatch.setenv("FORKYARD_HOME", str(tmp_path))
    monkeypatch.setenv("FORKYARD_SOCKET", str(path))
    monkeypatch.delenv("FORKYARD_URL", raising=False)
    stack = contextlib.ExitStack()
    yield lambda handler: stack.enter_context(_serving(path, handler))
    stack.close()


@contextlib.contextmanager
def _serving(path: Path, handler: Handler) -> Iterator[None]:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def one(peer: socket.socket) -> None:
        # A client that has what it wants closes without a word.
        with contextlib.suppress(OSError), peer, peer.makefile("rb") as reader:
            while line := reader.readline():
                length = 0
                while (header := reader.readline()) != b"\r\n":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                for piece in handler(line.split()[1].decode(), reader.read(length)):
                    peer.sendall(piece)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


def head(status: int, length: int | None, version: str = direct.API_VERSION) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status} X\r\nforkyard-wire: {version}\r\n{size}\r\n\r\n".encode()


def whole(value: Any, status: int = 200) -> list[bytes]:
    body = msgspec.msgpack.encode(value)
    return [head(status, len(body)), body]


def chunked(data: bytes, size: int) -> list[bytes]:
    pieces = [data[at:at + size] for at in range(0, len(data), size)]
    return [head(200, None), *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


def stream(*events: rq.StreamEvent) -> bytes:
    return b"".join(verbs.frame(msgspec.msgpack.encode(event)) for event in events)


STARTED = rq.StreamEvent(kind="started", pid=12)
EXIT = rq.StreamEvent(kind="exit", result=msgspec.to_builtins(ExecResult(ok=False, exit_code=7)))


def test_the_words_are_those_of_the_contract() -> None:
    assert int(direct.API_VERSION) == verbs.API_VERSION and direct.VERSION_HEADER == verbs.VERSION_HEADER
    assert verbs.error_frame(b"x")[:4] == (1 | direct.ERROR_BIT).to_bytes(4, "big")
    assert direct.RESULT.keys() <= {field.name for field in msgspec.structs.fields(rq.Exec)} | set(
        ExecResult.__dataclass_fields__)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_output_and_result(daemon: Callable[[Handler], None], size: int) -> None:
    asked: list[tuple[str, Any]] = []
    big = bytes(range(256)) * 40

    def answer(path: str, body: bytes) -> list[bytes]:
        kind = {"/v1/spawn": rq.Spawn, "/v1/write": rq.Write, "/v1/signal": rq.Signal}[path]
        asked.append((path, msgspec.msgpack.decode(body, type=kind)))
        if path != "/v1/spawn":
            return whole(None)
        events = (STARTED, rq.StreamEvent(kind="stdout", data=big), rq.StreamEvent(kind="gap"),
                  rq.StreamEvent(kind="stderr", data=b"e", offset=5), EXIT)
        return chunked(stream(*events) + verbs.END_FRAME, size)

    daemon(answer)
    process = direct.spawn("box", ["ls", "-l"], request_id="r", timeout_s=1.5, env={"A": "b"})
    assert process is not None and process.pid == 12
    process.write(b"in")
    process.close_stdin()
    process.signal(2)
    assert list(process.stream()) == [("stdout", big), ("gap", b""), ("stderr", b"e")]
    assert (process.wait().exit_code, process.wait().timed_out) == (7, False)
    assert asked[0][1] == rq.Spawn(
        sandbox="box", argv=["ls", "-l"], request_id="r", timeout_s=1.5, env={"A": "b"})
    sent = [request for path, request in asked[1:]]
    assert [(one.pid, one.sandbox) for one in sent] == [(12, "box")] * 3
    assert (sent[0].data, sent[1].eof, sent[2].signal) == (b"in", True, 2)


def test_the_daemons_errors(daemon: Callable[[Handler], None]) -> None:
    daemon(lambda path, body: whole(errors.to_wire(errors.NotFoundError("no box", hint="h")), 404))
    with pytest.raises(errors.NotFoundError, match="no box"):
        direct.spawn("box", "true", request_id="r")


@pytest.mark.parametrize("in_frame", [True, False])
def test_a_sandbox_that_dies(daemon: Callable[[Handler], None], in_frame: bool) -> None:
    lost = errors.to_wire(errors.SandboxLostError("it died", cause="guest"))
    end = (verbs.error_frame(msgspec.msgpack.encode(lost)) if in_frame
           else stream(rq.StreamEvent(kind="error", error=lost)))
    begin = stream(STARTED, rq.StreamEvent(kind="stdout", data=b"x"))
    daemon(lambda path, body: chunked(begin + end, 1 << 20))
    process = direct.spawn("box", "true", request_id="r")
    assert process is not None
    got = []
    with pytest.raises(errors.SandboxLostError, match="it died"):
        for chunk in process.stream():
            got.append(chunk)
    assert got == [("stdout", b"x")]


def test_a_daemon_that_goes_is_followed(daemon: Callable[[Handler], None]) -> None:
    asked: list[Any] = []

    def answer(path: str, body: bytes) -> list[bytes]:
        if path == "/v1/spawn":
            first = stream(STARTED, rq.StreamEvent(kind="stdout", data=b"abc"))
            gone = verbs.error_frame(msgspec.msgpack.encode(
                errors.to_wire(errors.UnavailableError("stopping", retryable=True))))
            return chunked(first + gone, 1 << 20)
        asked.append(msgspec.msgpack.decode(body, type=rq.Attach))
        rest = stream(STARTED, rq.StreamEvent(kind="stdout", data=b"def", offset=3), EXIT)
        return chunked(rest + verbs.END_FRAME, 1 << 20)

    daemon(answer)
    process = direct.spawn("box", "true", request_id="r")
    assert process is not None
    assert b"".join(data for _, data in process.stream()) == b"abcdef"
    assert process.wait().exit_code == 7
    assert asked == [rq.Attach(sandbox="box", pid=12, stdout_offset=3)]


def test_what_it_leaves_to_the_client(
    daemon: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct.spawn("box", "true", request_id="r") is None
    daemon(lambda path, body: [head(200, 0, version="999")])
    assert direct.spawn("box", "true", request_id="r") is None
    monkeypatch.setenv("FORKYARD_URL", "https://host.test:8470")
    assert direct.spawn("box", "true", request_id="r") is None
