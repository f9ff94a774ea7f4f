"""What a listener takes of others: requests, connections, time and length."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_thread import ThreadedDaemon, until
from listening import connect, is_closed, place, plain

from forkyard import (
    CapacityError,
    Client,
    verbs,
)
from forkyard.daemon import gate, listener
from forkyard.daemon.limits import Door, Rate, place_of

SOURCE = Path(__file__).parents[2] / "src"


def test_more_requests_than_a_token_may_make(
    client: Client, daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    remote = join()
    daemon.daemon.access._listener.gate.requests = Rate(1, 2)
    token = remote._token or ""
    with plain(client.listen().url or "", token) as http:
        replies = [http.post("/v1/version", json={}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].json() | {"message": ""} == {
        **{"code": "capacity", "retryable": True, "message": "", "hint": "", "sandbox": None}
    }
    assert replies[2].headers["retry-after"] == "1"
    # A client waits for its turn.
    assert remote.version().api == verbs.API_VERSION
    daemon.daemon.access._listener.gate.requests = Rate(0.001, 0)
    with pytest.raises(CapacityError):
        remote.version()


def test_who_fails_too_often_is_put_off_and_nobody_else(
    daemon: ThreadedDaemon, url: str, join: Callable[..., Client]
) -> None:
    remote = join()
    daemon.daemon.access._listener.gate.wrong = Rate(0.01, 5)
    with plain(url, "fy_a_b") as http:
        codes = [http.post("/v1/version", json={}).status_code for _ in range(7)]
        assert codes == [401] * 5 + [429] * 2
        assert int(http.post("/v1/version").headers["retry-after"]) > 50
    assert remote.version().api == verbs.API_VERSION


def test_connections_without_a_token_are_few(
    daemon: ThreadedDaemon, url: str, join: Callable[..., Client]
) -> None:
    remote = join()
    door = daemon.daemon.access._listener.door
    door.strangers = 8
    waiting = [connect(url) for _ in range(door.strangers)]
    with pytest.raises(OSError):
        connect(url)
    waiting.pop().close()
    until(lambda: door.waiting < door.strangers)
    # One gets in, and is no stranger then; more may come from where somebody is known.
    assert remote.version().api == verbs.API_VERSION
    waiting += [connect(url) for _ in range(door.strangers)]
    for sock in waiting:
        sock.close()
    until(lambda: door.waiting == 0)


def test_many_calls_at_once_from_one_place(daemon: ThreadedDaemon, join: Callable[..., Client]) -> None:
    remote = join()
    daemon.daemon.access._listener.door.strangers = 4
    with ThreadPoolExecutor(32) as pool:
        versions = list(pool.map(lambda _: remote.version().api, range(64)))
    assert versions == [verbs.API_VERSION] * 64


def test_who_sends_too_little_or_too_much_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, daemon: ThreadedDaemon, url: str
) -> None:
    with connect(url) as sock:
        sock.sendall(b"POST /v1/version HTTP/1.1\r\nx: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                sock.sendall(b"a" * 1000)
    with connect(url) as sock:
        sock.sendall(b"not http at all\r\n\r\n" * 10)
        assert b"400" in sock.recv(1000)
    monkeypatch.setattr(listener, "HEAD_S", 0.1)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.1)
    with connect(url) as silent, connect(url) as slow:
        slow.sendall(b"POST /v1/version HTTP/1.1\r\n")
        assert is_closed(slow)
        assert is_closed(silent)
    with socket.create_connection(place(url)) as mute:
        assert is_closed(mute)
    until(lambda: daemon.daemon.access._listener.door.waiting == 0)


def test_a_body_that_stands_still(monkeypatch: pytest.MonkeyPatch, client: Client, url: str) -> None:
    monkeypatch.setattr(gate, "STALL_S", 0.1)
    token = client.new_token("t", role="run").token
    with connect(url) as sock:
        sock.sendall(
            b"POST /v1/version HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
            b"authorization: Bearer " + token.encode() + b"\r\n\r\n{"
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_body_that_is_too_long(client: Client, url: str) -> None:
    token = client.new_token("t", role="run").token
    with plain(url, token) as http:
        assert http.post("/v1/get_sandbox", content=b"x" * (verbs.MAX_BODY + 1)).status_code == 400
        assert http.get("/v1/version").status_code == 405
        assert http.post("/nothing").status_code == 404


def test_rates_and_doors() -> None:
    rate = Rate(100, 2)
    assert [rate.take("a") == 0 for _ in range(3)] == [True, True, False]
    assert rate.take("b") == 0
    until(lambda: rate.take("a") == 0)
    door = Door(strangers=2, all_strangers=3, friends=3, connections=6)
    assert [door.enter(one) for one in ("a", "a", "a", "b", "b")] == [True, True, False, True, False]
    # Where one is known, more may come at once; and strangers elsewhere have no less room for that.
    door.known("a")
    assert [door.enter(one) for one in ("a", "a", "a")] == [True, True, False]
    door.leave("a", known=True)
    assert not door.enter("a")
    door.leave("b", known=False)
    assert door.waiting == 3
    assert not door.enter("c")
    door.leave("a", known=False)
    assert door.enter("c")
    assert place_of("2001:db8::1") == place_of("2001:db8::ffff") != place_of("2001:db8:0:1::1")
    assert place_of("::ffff:10.0.0.1") == place_of("10.0.0.1") != place_of("10.0.0.2")
