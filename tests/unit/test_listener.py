"""Clients of another machine: the listener, its tokens and certificates, over a yard in memory."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_thread import ThreadedDaemon, until
from listening import DEADLINE_S, place, plain

from forkyard import (
    AccessDeniedError,
    AsyncClient,
    Client,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    access,
    verbs,
)
from forkyard.cli.main import run
from forkyard.client import holding
from forkyard.daemon import gate, listener, tls

SOURCE = Path(__file__).parents[2] / "src"


# Tokens and rights.


def test_nothing_listens_unless_it_is_told_to(client: Client, daemon: ThreadedDaemon) -> None:
    assert client.listen().address is None
    state = client.listen("127.0.0.1:0")
    host, port = place(state.url or "")
    socket.create_connection((host, port)).close()
    assert client.listen() == state
    assert client.listen(off=True).address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    assert not (daemon.daemon.base / "listen.json").exists()


def test_everything_that_a_local_client_does(join: Callable[..., Client]) -> None:
    remote = join()
    remote.create_sandbox("a")
    assert remote.shell("a", "cat", stdin=b"in").stdout == "in"
    process = remote.spawn("a", "cat; echo done")
    process.write(b"x\n")
    process.close_stdin()
    assert b"".join(chunk.data for chunk in process.stream()) == b"x\ndone\n"
    data = os.urandom(3 << 20)
    remote.write_file("a", "f", data)
    assert remote.read_file("a", "f") == data
    large = b"z" * (5 << 20)  # longer than what goes in the request itself
    assert len(remote.shell("a", "cat", stdin=large).stdout_bytes) == len(large)
    assert remote.delete_sandbox("a") is not None


async def test_the_asynchronous_client_too(daemon: ThreadedDaemon) -> None:
    async with AsyncClient(socket=daemon.socket, start=False) as local:
        url = (await local.listen("127.0.0.1:0")).url
        token = (await local.new_token("a", role="run")).token
        async with AsyncClient(url, token=token) as remote:
            await remote.create_sandbox("a", ephemeral=True)
            results = await asyncio.gather(*(remote.shell("a", f"echo {n}") for n in range(10)))
            assert [result.stdout.strip() for result in results] == [str(n) for n in range(10)]


def test_a_token_is_shown_once_and_kept_as_a_hash(client: Client, daemon: ThreadedDaemon, url: str) -> None:
    made = client.new_token("a", role="read", ttl_s=100)
    path = daemon.daemon.base / "tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.token.rpartition("_")[2] not in path.read_text()
    assert client.list_tokens() == [made.info]
    assert made.info.expires_at == pytest.approx(time.time() + 100, abs=20)
    with pytest.raises(ConflictError, match="called 'a'"):
        client.new_token("a", role="read")
    for wrong in ({}, {"allow": ["exe"]}, {"allow": ["new_token"]}):
        with pytest.raises(InvalidRequestError):
            client.new_token("b", **wrong)
    with pytest.raises(NotFoundError):
        client.revoke_token("b")


def test_a_token_has_rights_by_verb(join: Callable[..., Client]) -> None:
    runs, reads, admin = join(role="run"), join(role="read"), join(role="admin")
    some = join(role="read", allow=["exec"])
    box = runs.create_sandbox("a")
    assert [one.id for one in reads.list_sandboxes()] == [box.id]
    assert some.shell("a", "echo yes").stdout == "yes\n"
    for may_not, verb in (
        (lambda: reads.shell("a", "true"), "exec"),
        (lambda: reads.spawn("a", "true"), "spawn"),
        (lambda: reads.write_file("a", "f", b"x" * (2 << 20)), "write_file"),
        (lambda: some.delete_sandbox("a"), "delete_sandbox"),
        (lambda: runs.delete_template("base"), "delete_template"),
        (lambda: runs.shutdown(), "shutdown"),
        (lambda: admin.new_token("more", role="admin"), "new_token"),
        (lambda: admin.list_tokens(), "list_tokens"),
        (lambda: admin.listen(off=True), "listen"),
    ):
        with pytest.raises(AccessDeniedError, match=rf"no right to {verb}"):
            may_not()


def test_roles_name_verbs_and_the_rest_is_for_admins() -> None:
    every = {*verbs.VERBS, *verbs.STREAMS, *verbs.FILES}
    assert every > access.RUN > access.READ
    assert every > access.LOCAL
    changing = {
        name for table in (verbs.VERBS, verbs.STREAMS, verbs.FILES) for name in table if table[name].changes
    }
    assert not access.READ & changing
    assert access.rights("admin", [], frozenset(every)) == every - access.LOCAL | {access.NEAR}
    assert {"build_template", "import_snapshot", "delete_template", "shutdown"} <= every - access.RUN
    # Whoever makes sandboxes may keep them.
    assert access.rights(None, ["fork"], frozenset(every)) == {"fork", "version", "hold_lease"}


@pytest.mark.parametrize("verb", ["prepare", "pull_template"])
def test_what_runs_on_the_host_needs_its_own_right(client: Client, url: str, verb: str) -> None:
    token = client.new_token("t", role="run").token
    spec = {"name": "x", "dockerfile": "FROM scratch"}
    with plain(url, token) as http:
        reply = http.post(f"/v1/{verb}", json={"specs": [spec]} if verb == "prepare" else {"spec": spec})
    assert reply.status_code == 403
    assert "build_template" in reply.json()["message"]


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("create_sandbox", {"egress_allow": ["10.0.0.1"]}),
        ("create_sandbox", {"egress_allow": ["ok.example", "localhost:22"]}),
        ("fork", {"source": "a", "egress_allow": ["[::1]:80"]}),
        ("set_egress", {"sandbox": "a", "egress_allow": ["169.254.0.0/16"]}),
        ("git", {"sandbox": "a", "operation": "clone", "url": "http://127.1/x"}),
        ("pull_template", {"spec": {"image": "127.0.0.1:5000/x"}}),
        ("prepare", {"specs": [{"image": "registry:5000/x"}]}),
        ("create_sandbox", {"image": "localhost/x"}),
    ],
)
def test_what_is_near_the_daemon_takes_a_right(
    client: Client, url: str, verb: str, body: dict[str, object]
) -> None:
    """Who is elsewhere is not let into the networks of the daemon's machine by the way."""
    token = client.new_token("t", role="run").token
    with plain(url, token) as http:
        reply = http.post(f"/v1/{verb}", json=body)
        assert reply.status_code == 403 and "private_network" in reply.json()["message"], reply.text


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("pull_template", {"spec": {"image": "registry.example/x"}}),
        ("prepare", {"specs": [{"image": "registry.example:5000/x"}]}),
        ("create_sandbox", {"image": "registry.example/x"}),
    ],
)
@pytest.mark.parametrize("address", ["10.1.2.3", "169.254.169.254", "::ffff:127.0.0.1", "fd00::1"])
def test_a_registrys_name_that_leads_near_takes_the_right_too(
    client: Client,
    url: str,
    verb: str,
    body: dict[str, object],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(0, 0, 0, "", ("93.184.216.34", 443)), (0, 0, 0, "", (address, 443))]

    token = client.new_token("t", role="run").token
    near = client.new_token("near", role="run", allow=["private_network"]).token
    with plain(url, token) as http, plain(url, near) as https:
        http.get("/openapi.json")  # connected before names lead elsewhere
        https.get("/openapi.json")
        monkeypatch.setattr(gate.socket, "getaddrinfo", look_up)
        reply = http.post(f"/v1/{verb}", json=body)
        assert reply.status_code == 403 and asked == ["registry.example"], reply.text
        assert "private_network" in reply.json()["message"], reply.text
        if verb == "create_sandbox":  # the others this yard cannot do
            assert https.post(f"/v1/{verb}", json=body).status_code == 200
            assert len(asked) == 1


def test_the_right_to_what_is_near_may_be_given(client: Client, url: str) -> None:
    token = client.new_token("near", role="run", allow=["private_network"]).token
    with plain(url, token) as http:
        reply = http.post("/v1/create_sandbox", json={"egress_allow": ["10.0.0.1"]})
        assert reply.status_code == 200, reply.text


def test_one_verb_is_no_way_to_another(client: Client, url: str) -> None:
    token = client.new_token("t", allow=["create_sandbox", "prepare", "fork"]).token
    with plain(url, token) as http:
        for body, right in (
            ({"egress": "any"}, "set_egress"),
            ({"egress_allow": ["ok.example"]}, "set_egress"),
            ({"image": "registry.example/x"}, "pull_template"),
        ):
            reply = http.post("/v1/create_sandbox", json=body)
            assert reply.status_code == 403 and right in reply.json()["message"], reply.text
        reply = http.post("/v1/prepare", json={"specs": [], "disk_budget_mb": 0})
        assert reply.status_code == 403 and "delete_template" in reply.json()["message"]
        assert http.post("/v1/create_sandbox", json={"egress": "deny"}).status_code == 200
        assert http.post("/v1/expose", json={"sandbox": "a", "port": 1}).status_code == 403


def test_who_has_no_token_or_a_wrong_one(client: Client, url: str) -> None:
    good = client.new_token("t", role="admin").token
    with plain(url) as http:
        for shown in (
            None,
            "",
            "Bearer",
            "Bearer x",
            "Basic " + good,
            "Bearer " + good[:-1],
            "Bearer fy__",
            b"\xff",
        ):
            reply = http.post("/v1/version", headers={} if shown is None else {"authorization": shown})
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["connection"] == "close"
        assert http.post("/v1/nothing").status_code == 401
    with pytest.raises(AccessDeniedError, match="not known"), Client(url, token=good + "0") as wrong:
        wrong.version()
    with pytest.raises(AccessDeniedError, match="no token"), Client(url) as none:
        none.version()


def test_a_revoked_token_is_refused_at_once_and_its_streams_end(
    client: Client, daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    remote, other = join(), join()
    remote.create_sandbox("a")
    process = remote.spawn("a", "cat")
    staying = other.spawn("a", "cat")
    client.revoke_token("t0")
    with pytest.raises(AccessDeniedError, match="not known"):
        remote.version()
    until(lambda: daemon.yard.execs.cancelled == 1)
    with pytest.raises(AccessDeniedError, match="not known"):
        process.wait()
    staying.close_stdin()
    assert staying.wait().ok
    assert [one.name for one in client.list_tokens()] == ["t1"]


def test_a_token_expires_and_its_streams_with_it(client: Client, daemon: ThreadedDaemon, url: str) -> None:
    token = client.new_token("t", role="run", ttl_s=0.5).token
    with Client(url, token=token) as remote:
        remote.create_sandbox("a")
        process = remote.spawn("a", "cat")
        until(lambda: daemon.yard.execs.cancelled == 1)
        with pytest.raises(AccessDeniedError, match="expired"):
            process.wait()
    assert client.list_tokens() == []


def test_a_request_id_is_its_tokens_own(join: Callable[..., Client]) -> None:
    one, other = join(), join()
    made = one.create_sandbox("a", request_id="same")
    assert one.create_sandbox("a", request_id="same") == made
    assert other.create_sandbox("b", request_id="same").id != made.id


def test_the_yard_is_told_which_token_asks(
    client: Client, daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    from forkyard.yard.context import actor

    join().create_sandbox("a")
    (token,) = client.list_tokens()
    assert actor(daemon.yard.callers[-1]) == f"token:{token.id}/t0"
    client.revoke_token(token.id)
    kinds = [(kind, data.get("token")) for kind, _, data in daemon.yard.records]
    assert kinds == [("access.listen", None), ("access.token", token.id), ("access.revoked", token.id)]


def test_damaged_tokens_let_nobody_in(
    client: Client, daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    remote = join()
    path = daemon.daemon.base / "tokens.json"
    text = path.read_text()
    path.write_text(text[:-20])
    before = daemon.times_up
    daemon.restart()
    until(lambda: daemon.times_up > before)
    assert "cannot be read" in (client.listen().problem or "")
    with pytest.raises(UnavailableError):
        client.new_token("more", role="run")
    assert path.read_text() == text[:-20]
    path.write_text(text)
    daemon.restart()
    until(lambda: daemon.times_up > before + 1)
    assert remote.version().api == verbs.API_VERSION


# The certificate.


def test_another_certificate_than_the_pinned_one_is_shown_nothing(client: Client, url: str) -> None:
    token = client.new_token("t", role="run").token
    pin = url.partition("#")[2]
    with Client(url.partition("#")[0], token=token, ca=pin) as remote:
        remote.version()
    wrong = "sha256:" + "0" * 64
    for kept in (
        Client(url.partition("#")[0], token=token, ca=wrong),
        Client(url.replace(pin, wrong), token=token),
    ):
        with pytest.raises(AccessDeniedError, match="pinned"), kept:
            kept.version()
    with (
        pytest.raises(AccessDeniedError, match="not trusted"),
        Client(url.partition("#")[0], token=token) as remote,
    ):
        remote.version()


def test_a_certificate_that_changes_under_a_client(
    client: Client, daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    remote = join()
    remote.version()
    for path in (daemon.daemon.base / "tls").iterdir():
        path.unlink()
    client.listen(client.listen().address)
    with pytest.raises(AccessDeniedError, match="not trusted"):
        remote.version()


def test_ones_own_certificate(client: Client, daemon: ThreadedDaemon, tmp_path: Path) -> None:
    cert, key = tls.own(tmp_path / "mine", "127.0.0.1")
    assert key.stat().st_mode & 0o777 == 0o600
    state = client.listen("127.0.0.1:0", cert=cert, key=key)
    assert state.cert == str(cert)
    token = client.new_token("t", role="run").token
    bare = (state.url or "").partition("#")[0]
    # Its names are checked then.
    for host in ("127.0.0.1", "localhost"):
        with Client(bare.replace("127.0.0.1", host), token=token, ca=cert) as remote:
            remote.version()
    named = Client(bare.replace("127.0.0.1", "127.1"), token=token, ca=cert)
    with pytest.raises(AccessDeniedError, match="mismatch"), named:
        named.version()
    other = tls.own(tmp_path / "other", "127.0.0.1")[1]
    for wrong in ((cert, other), (key, key), (tmp_path / "none", key)):
        with pytest.raises(InvalidRequestError):
            client.listen("127.0.0.1:0", cert=wrong[0], key=wrong[1])
    # A mistake leaves it as it was.
    assert client.listen() == state


def test_an_address_that_cannot_be_had_changes_nothing(client: Client, url: str) -> None:
    state = client.listen()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UnavailableError, match="cannot listen"),
    ):
        client.listen(f"127.0.0.1:{taken.getsockname()[1]}")
    for wrong in ("127.0.0.1:none", ":8470", "127.0.0.1:70000", "", "a:b:c", "a..b:8470"):
        with pytest.raises((InvalidRequestError, UnavailableError)):
            client.listen(wrong)
    assert client.listen() == state
    socket.create_connection(place(url)).close()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 8470),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1", "::1", 8470),
        ("[::1]", "::1", 8470),
        ("[::]:99", "::", 99),
        ("name:2", "name", 2),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert listener.split(address, 8470) == (host, port)


def test_nothing_is_said_in_clear(url: str) -> None:
    with socket.create_connection(place(url), timeout=DEADLINE_S) as sock:
        sock.sendall(b"POST /v1/version HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while data := _received(sock):
            answer += data
    assert b"HTTP" not in answer
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError), socket.create_connection(place(url)) as sock:
        context.wrap_socket(sock)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1000)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    "wrong",
    [
        "http://host:8470",
        "host:8470",
        "https://",
        "https://h/path",
        "https://u@h",
        "https://h:x",
        "https://h#x",
    ],
)
def test_urls_that_are_none(wrong: str) -> None:
    with pytest.raises(InvalidRequestError):
        Client(wrong, token="t")


def test_a_daemon_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    for trust in ("", "#sha256:" + "0" * 64):
        with pytest.raises(UnavailableError, match="does not answer: Connection refused") as caught:
            Client(f"https://127.0.0.1:{port}{trust}", token="t").version()
        assert "forkyard daemon listen" in caught.value.hint


# Restarts, leases, pickles.


def test_a_command_goes_on_over_a_restart(daemon: ThreadedDaemon, join: Callable[..., Client]) -> None:
    remote = join()
    remote.create_sandbox("a")
    process = remote.spawn("a", "read x; echo $x", detach=True)
    before = daemon.times_up
    daemon.restart()
    until(lambda: daemon.times_up > before)
    process.write(b"still\n")
    assert process.wait().stdout == "still\n"


def test_a_lease_is_held_until_the_client_closes(daemon: ThreadedDaemon, join: Callable[..., Client]) -> None:
    remote = join()
    kept, ephemeral = remote.create_sandbox("a"), remote.create_sandbox("b", ephemeral=True)
    until(lambda: len(daemon.yard.held) == 1)
    lease = daemon.yard.leases[ephemeral.id]
    assert lease is not None and lease.pid is None
    assert daemon.yard.held[0].lease == lease.stream
    before = daemon.times_up
    daemon.restart()
    until(lambda: daemon.times_up > before and len(daemon.yard.held) == 1)
    remote.close()
    until(lambda: not daemon.yard.held)
    assert list(daemon.yard.boxes) == [kept.id]


def test_a_process_that_is_killed_holds_nothing(daemon: ThreadedDaemon, client: Client, url: str) -> None:
    token = client.new_token("t", role="run").token
    code = (
        "import os, forkyard; client = forkyard.Client()\n"
        "client.create_sandbox('a', ephemeral=True); os.fork(); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"FORKYARD_URL": url, "FORKYARD_TOKEN": token, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        until(lambda: len(daemon.yard.held) == 1)
        child.kill()
        # Its child lives on, and holds nothing.
        until(lambda: not daemon.yard.held)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_process_cannot_hold_a_lease_from_afar(client: Client, url: str) -> None:
    token = client.new_token("t", role="run").token
    with plain(url, token) as http:
        reply = http.post(
            "/v1/create_sandbox", json={"ephemeral": True, "lease": {"pid": 1, "start_time": 1}}
        )
    assert reply.status_code == 400
    assert "hold_lease" in reply.json()["hint"]


def test_a_token_travels_in_a_pickle_only_if_the_program_said_it(
    monkeypatch: pytest.MonkeyPatch, client: Client, url: str
) -> None:
    token = client.new_token("t", role="run").token
    with Client(url, token=token) as said:
        assert token.encode() in pickle.dumps(said)
        pickle.loads(pickle.dumps(said)).version()
        assert token not in repr(said) + repr(said._transport) + repr(said._transport.remote)
    monkeypatch.setenv("FORKYARD_URL", url)
    monkeypatch.setenv("FORKYARD_TOKEN", token)
    with Client() as from_environment:
        text = pickle.dumps(from_environment)
    assert token.encode() not in text
    pickle.loads(text).version()
    monkeypatch.delenv("FORKYARD_TOKEN")
    with pytest.raises(AccessDeniedError, match="no token"):
        pickle.loads(text).version()


def test_a_port_of_another_machine_is_not_exposed_here(join: Callable[..., Client]) -> None:
    with pytest.raises(UnsupportedError, match="another one"):
        join().expose("a", 80)


@pytest.mark.parametrize("word", ["start", "stop", "restart"])
def test_the_command_line_starts_and_stops_nothing_from_afar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], client: Client, url: str, word: str
) -> None:
    monkeypatch.setenv("FORKYARD_URL", url)
    monkeypatch.setenv("FORKYARD_TOKEN", client.new_token("t", role="admin").token)
    assert run(["daemon", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pid"] == os.getpid()
    assert run(["daemon", word]) == 1
    assert "another machine's" in capsys.readouterr().err
    assert client.version().api == verbs.API_VERSION


# The machine's own socket.


@pytest.mark.root
def test_another_user_is_refused_on_the_socket(daemon: ThreadedDaemon) -> None:
    code = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "own = socket.socket(socket.AF_UNIX)\n"
        "own.connect(sys.argv[1])\n"
        "own.sendall(b'POST /v1/version HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n'\n"
        "            b'content-type: application/json\\r\\n\\r\\n')\n"
        "print(own.makefile().read())\n"
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _as_nobody(code, daemon)
    assert "PermissionError" in caught.value.stderr
    # Were the file open to all, the kernel's word on who connects still holds.
    daemon.socket.chmod(0o666)
    daemon.daemon.base.chmod(0o755)
    answer = _as_nobody(code, daemon)
    assert answer.startswith("HTTP/1.1 403")
    assert json.loads(answer.partition("\n\n")[2])["code"] == "access_denied"


def _as_nobody(code: str, daemon: ThreadedDaemon) -> str:
    run = [sys.executable, "-c", code, str(daemon.socket)]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout


def test_holding_begins_with_the_first_ephemeral_one(
    daemon: ThreadedDaemon, join: Callable[..., Client]
) -> None:
    remote = join()
    remote.create_sandbox("a")
    remote.fork("a", 2)
    hold = holding._hold_of(remote._transport.remote)
    assert hold._over is None
    box = remote.create_sandbox("b", ephemeral=True)
    assert hold._over is not None
    remote.delete_sandbox(box.id)
    assert hold._over is None
