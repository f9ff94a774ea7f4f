"""The network of real sandboxes: what is open works, what is closed is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_yard import OwnYard, own_yard, programs  # noqa: F401
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client
from forkyard.egress.presets import Presets
from forkyard.errors import InvalidRequestError

pytestmark = pytest.mark.root

# Tries targets (host, port, greeting) and says what became of each, and in how many ms.
TRY = r"""
import json, socket, ssl, sys, time
out = []
for host, port, how in json.loads(sys.argv[1]):
    begun = time.monotonic()
    try:
        if how == "name":
            said = socket.getaddrinfo(host, port)[0][4][0]
        else:
            s = socket.create_connection((host, port), 5)
            said = "connected"
            if how.startswith("tls:"):
                context = ssl._create_unverified_context()
                context.wrap_socket(s, server_hostname=how[4:] or None)
                said = "tls"
            elif how.startswith("http:"):
                s.sendall(b"GET / HTTP/1.1\r\nHost: " + how[5:].encode() + b"\r\nConnection: close\r\n\r\n")
                said = s.recv(100).decode("latin-1").split("\r\n")[0]
    except OSError as error:
        said = f"{type(error).__name__} {error}"
    out.append([host, said, round((time.monotonic() - begun) * 1e3, 1)])
print(json.dumps(out))
"""


def attempts(
    client: Client,  # noqa: F811
    sandbox: str,
    targets: list[tuple[str, int, str]],
) -> dict[str, tuple[str, float]]:
    done = client.exec(sandbox, ["python3", "-c", TRY, json.dumps(targets)], timeout_s=60, check=True)
    return {host: (said, took) for host, said, took in json.loads(done.stdout)}


def audited(client: Client, sandbox: str, kind: str) -> list[dict[str, Any]]:  # noqa: F811
    return [record.data for record in client.audit(sandbox) if record.kind == kind]


def fetched(url: str) -> bytes | None:
    """A page, or None if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return None


@functools.cache
def preset(name: str) -> list[str]:
    return asyncio.run(Presets().get(name)).rules


def own_address() -> str:
    """An address of this host's that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no route")
        return sock.getsockname()[0]


@pytest.fixture
def echo() -> Iterator[int]:
    """An echo server on the host's loopback."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65536):
                peer.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


# Talks through the proxy without end and keeps a note of how it goes.
TALK = r"""
import socket, sys, time
def note(text):
    open(sys.argv[2] + ".new", "w").write(text)
    import os; os.rename(sys.argv[2] + ".new", sys.argv[2])
try:
    s = socket.create_connection(("127.0.0.1", 3128))
    s.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % int(sys.argv[1]))
    assert s.recv(100).startswith(b"HTTP/1.1 200")
    n = 0
    while True:
        s.sendall(b"x")
        if not s.recv(1): raise OSError("end")
        n += 1
        note(f"said {n}")
        time.sleep(0.02)
except OSError as error:
    note(f"over {type(error).__name__}")
"""


def talk(client: Client, sandbox: str, port: int, note: str = "/tmp/talk") -> None:  # noqa: F811
    client.spawn(sandbox, f"exec python3 -c '{TALK}' {port} {note}", detach=True)
    until(lambda: noted(client, sandbox, note) > 0, 30)


def noted(client: Client, sandbox: str, note: str = "/tmp/talk") -> int:  # noqa: F811
    """How often it was answered; -1: it is over."""
    text = client.shell(sandbox, f"cat {note} 2>/dev/null").stdout.split()
    return 0 if not text else int(text[1]) if text[0] == "said" else -1


# -- closed -----------------------------------------------------------------------------------


def test_a_closed_network_refuses_at_once(client: Client) -> None:  # noqa: F811
    """Cases 14 and 15."""
    client.create_sandbox("shut", egress="deny")
    numbers = ["169.254.169.254", "10.0.0.1", "192.0.2.1", own_address(), "2001:db8::1"]
    targets = [(name, 443, "name") for name in ("secret.data.test", "nope.example")]
    found = attempts(client, "shut", targets + [(number, 80, "connect") for number in numbers])
    for host, (said, took) in found.items():
        assert "rror" in said and took < 1000, (host, said, took)
    assert "127.0.0.1" in client.shell("shut", "cat /etc/resolv.conf").stdout
    assert client.shell("shut", "getent hosts secret.x.test; getent ahosts secret.y.test").exit_code == 2
    asked = {data["name"] for data in audited(client, "shut", "egress.denied")}
    assert {"secret.data.test", "nope.example", "secret.x.test", "secret.y.test"} <= asked
    assert not audited(client, "shut", "egress.allowed")
    assert client.shell("shut", "getent hosts localhost && getent hosts $(hostname)").ok
    assert not client.shell("shut", "env | grep -i -e proxy; ls /run/forkyard/ca.crt").ok
    with socket.create_server(("127.0.0.1", 0)) as local:
        port = local.getsockname()[1]
        said, took = attempts(client, "shut", [("127.0.0.1", port, "connect")])["127.0.0.1"]
        assert "refused" in said and took < 1000


@pytest.mark.parametrize("rule", ["*", "*.com", "https://a.example", "@nope", "a.example:0", "0.0.0.0/0"])
def test_bad_rules_make_no_sandbox(client: Client, rule: str) -> None:  # noqa: F811
    with pytest.raises(InvalidRequestError):
        client.create_sandbox(egress_allow=[rule])
    assert client.list_sandboxes() == []


def test_what_a_policy_says_of_itself(client: Client) -> None:  # noqa: F811
    made = client.create_sandbox("one", egress_allow=["A.example", "*.b.example:8080"])
    assert (made.egress, made.egress_allow) == ("allow", ["A.example", "*.b.example:8080"])
    fork = client.fork("one").forks[0]
    assert (fork.egress, fork.egress_allow) == (made.egress, made.egress_allow)
    shut = client.fork("one", egress="deny").forks[0]
    assert (shut.egress, shut.egress_allow) == ("deny", [])
    now = client.set_egress("one", egress_allow=[])
    assert (now.egress, now.egress_allow) == ("deny", [])
    assert client.set_egress("one", "any").egress == "any"
    with pytest.raises(InvalidRequestError):
        client.set_egress("one", egress_allow=["*.com"])
    assert client.get_sandbox("one").egress == "any"


def test_defaults_of_the_environment(own_yard: OwnYard, yard: YardHome) -> None:  # noqa: F811
    own_yard.env["FORKYARD_DEFAULT_EGRESS_ALLOW"] = "a.example,b.example"
    try:
        made = own_yard.out("new", "--name", "from-env")
        shut = own_yard.out("new", "--egress", "deny")
    finally:
        del own_yard.env["FORKYARD_DEFAULT_EGRESS_ALLOW"]
    assert yard.client.get_sandbox(made).egress_allow == ["a.example", "b.example"]
    assert yard.client.get_sandbox(shut).egress == "deny"


# -- names, by every way of asking ------------------------------------------------------------

RAW = r"""
import json, socket, struct, sys
def query(name, kind):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    return struct.pack(">HHHHHH", 9, 256, 1, 0, 0, 1) + labels + b"\0" + struct.pack(">HH", kind, 1) + \
        b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0)
out = []
for name in sys.argv[1:]:
    for kind in (1, 28):
        q = query(name, kind)
        u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(5)
        u.sendto(q, ("127.0.0.1", 53)); a = u.recv(2000)
        t = socket.create_connection(("127.0.0.1", 53), 5); t.sendall(struct.pack(">H", len(q)) + q)
        n = struct.unpack(">H", t.recv(2))[0]; b = t.recv(n)
        out.append([name, kind, a[3] & 15, a[7], b[3] & 15, b[7]])
print(json.dumps(out))
"""


def test_names_by_libc_and_by_hand(client: Client) -> None:  # noqa: F811
    client.create_sandbox("names", egress_allow=["ok.example", "*.sub.example"])
    got = json.loads(
        client.exec("names", ["python3", "-c", RAW, "ok.example", "no.example"], check=True).stdout
    )
    assert got == [
        ["ok.example", 1, 0, 1, 0, 1],
        ["ok.example", 28, 0, 0, 0, 0],
        ["no.example", 1, 3, 0, 3, 0],
        ["no.example", 28, 3, 0, 3, 0],
    ]
    first = client.shell("names", "getent hosts ok.example", check=True).stdout.split()[0]
    other = client.shell("names", "getent ahosts a.b.sub.example", check=True).stdout.split()[0]
    assert first.startswith("127.") and other.startswith("127.") and first != other
    assert client.shell("names", "getent hosts sub.example").exit_code == 2
    client.checkpoint("names")
    third = client.shell("names", "getent hosts c.sub.example", check=True).stdout.split()[0]
    client.rewind("names")
    again = client.shell("names", "getent hosts d.sub.example", check=True).stdout.split()[0]
    assert len({first, other, third, again}) == 4, "an address is never used twice"


@pytest.mark.slow
def test_names_by_go(client: Client, tmp_path: Path) -> None:  # noqa: F811
    go = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(go).exists():
        pytest.skip("there is no Go")
    (tmp_path / "main.go").write_text(
        'package main\nimport ("fmt"; "net"; "os")\n'
        "func main() { a, err := net.LookupHost(os.Args[1]); fmt.Println(a, err) }\n"
    )
    env = {**os.environ, "CGO_ENABLED": "0", "GOCACHE": str(tmp_path / "cache"), "GOFLAGS": "-p=1"}
    argv = [go, "build", "-o", str(tmp_path / "look"), str(tmp_path / "main.go")]
    subprocess.run(argv, env=env, cwd=tmp_path, check=True, timeout=300)
    client.create_sandbox("go", egress_allow=["ok.example"])
    client.upload("go", str(tmp_path / "look"), "/tmp/look")
    assert client.exec("go", ["/tmp/look", "ok.example"]).stdout.startswith("[127.")
    assert "no such host" in client.exec("go", ["/tmp/look", "no.example"]).stdout


# -- connections over freezes -----------------------------------------------------------------


def test_forks_are_reset_and_the_source_goes_on(client: Client, echo: int) -> None:  # noqa: F811
    client.create_sandbox("source", egress_allow=["127.0.0.1"])
    talk(client, "source", echo)
    forks = client.fork("source", 2, prefix="copy").forks
    for fork in forks:
        until(lambda fork=fork: noted(client, fork.id) == -1, 10)
    before = noted(client, "source")
    assert before > 0
    until(lambda: noted(client, "source") > before, 10)
    talk(client, "copy1", echo, "/tmp/again")
    client.set_egress("source", egress="deny")
    until(lambda: noted(client, "source") == -1, 10)
    assert noted(client, "copy1", "/tmp/again") > 0


def test_rewind_resets_and_keeps_the_present_policy(client: Client, echo: int) -> None:  # noqa: F811
    client.create_sandbox("back", egress_allow=["127.0.0.1"])
    talk(client, "back", echo)
    client.checkpoint("back")
    before = noted(client, "back")
    assert before > 0
    until(lambda: noted(client, "back") > before, 10)
    client.rewind("back")
    until(lambda: noted(client, "back") == -1, 10)
    talk(client, "back", echo, "/tmp/again")
    client.set_egress("back", egress="deny")
    info = client.rewind("back")
    assert info.egress == "deny"
    client.spawn("back", f"exec python3 -c '{TALK}' {echo} /tmp/third", detach=True)
    until(lambda: noted(client, "back", "/tmp/third") == -1, 30)


EVERY = r"""
import socket, threading, time
held = []
def pair(family, address):
    try:
        s = socket.socket(family); s.bind((address, 0)); s.listen()
    except OSError as error:
        print("without", address, error); return
    c = socket.create_connection(s.getsockname()[:2]); a, _ = s.accept()
    c.sendall(b"x"); assert a.recv(1) == b"x"
    held.extend([s, c, a])
for address in ("127.0.0.1", "127.0.1.1", "127.64.0.200", "0.0.0.0"):
    pair(socket.AF_INET, address)
pair(socket.AF_INET6, "::1")
print(len(held) // 3, flush=True)
time.sleep(9999)
"""


def test_a_connection_over_every_address_can_be_restored(client: Client, echo: int) -> None:  # noqa: F811
    """Case 26."""
    client.create_sandbox("every", egress_allow=["127.0.0.1"])
    talk(client, "every", echo)
    client.shell("every", f"python3 -c '{EVERY}' >/tmp/every 2>&1 &", check=True)
    until(lambda: client.shell("every", "tail -n1 /tmp/every").stdout.strip() in ("4", "5"), 30)
    client.checkpoint("every")
    for _ in range(2):
        client.rewind("every")
        assert client.shell("every", "pgrep -f held >/dev/null && echo alive").stdout == "alive\n"
        talk(client, "every", echo, "/tmp/again")


def test_a_restarted_daemon_serves_the_same_sandbox(yard: YardHome, client: Client, echo: int) -> None:  # noqa: F811
    client.create_sandbox("kept", egress_allow=["127.0.0.1"])
    client.spawn("kept", "cd /etc && exec python3 -m http.server 8000", detach=True)
    url = client.expose("kept", 8000)
    pid = yard.pid
    client.shutdown("keep")
    until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    talk(client, "kept", echo)
    until(lambda: fetched(f"{url}/hostname") == b"kept\n", 30)


# -- the host and addresses -------------------------------------------------------------------


def serve_repository(dir: Path, address: str, certificate: Path | None = None) -> Iterator[str]:
    """A git repository over HTTP on one of the host's addresses, with TLS if there is a certificate."""
    run = functools.partial(subprocess.run, check=True, capture_output=True, timeout=60)
    run(["git", "init", "-q", "-b", "main", str(dir / "work")])
    (dir / "work/hello").write_text("there\n")
    run(["git", "-C", str(dir / "work"), "add", "."])
    name = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    run(["git", "-C", str(dir / "work"), *name, "commit", "-q", "-m", "one"])
    run(["git", "clone", "-q", "--bare", str(dir / "work"), str(dir / "repo.git")])
    run(["git", "-C", str(dir / "repo.git"), "update-server-info"])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), functools.partial(Quiet, directory=str(dir)))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http{'s' if certificate else ''}://{address}:{server.server_port}/repo.git"
    server.shutdown()
    server.server_close()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[str]:
    yield from serve_repository(tmp_path, own_address())


def test_an_address_of_the_host_only_where_a_rule_names_it(client: Client, repository: str) -> None:  # noqa: F811
    where = repository.split("/")[2]
    client.create_sandbox("named", egress_allow=[where])
    assert client.shell("named", f"git clone -q {repository} /tmp/r && cat /tmp/r/hello").stdout == "there\n"
    client.create_sandbox("unnamed", egress="any")
    refused = client.shell("unnamed", f"git clone -q {repository} /tmp/r")
    assert refused.exit_code == 128 and "403" in refused.stderr
    denied = audited(client, "unnamed", "egress.denied")
    assert denied and f"{denied[0]['name']}:{denied[0]['port']}" == where


def test_git_over_tls(client: Client, tmp_path: Path) -> None:  # noqa: F811
    address, pem = own_address(), tmp_path / "server.pem"
    files = ["-keyout", str(pem), "-out", str(tmp_path / "cert.pem")]
    ask = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    name = ["-addext", f"subjectAltName=IP:{address}"]
    made = ["openssl", "req", "-x509", *ask, *name, *files]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    certificate = (tmp_path / "cert.pem").read_text()
    pem.write_text(pem.read_text() + certificate)
    serving = serve_repository(tmp_path, address, pem)
    url = next(serving)
    try:
        client.create_sandbox("tls", egress_allow=[url.split("/")[2]])
        client.write_file("tls", "cert.pem", certificate)
        clone = f"GIT_SSL_CAINFO=$HOME/cert.pem git clone -q {url} /tmp/r && cat /tmp/r/hello"
        assert client.shell("tls", clone, timeout_s=60).stdout == "there\n"
        refused = client.shell("tls", f"git clone -q {url} /tmp/s", timeout_s=60)
        assert refused.exit_code == 128 and "certificate" in refused.stderr
    finally:
        next(serving, None)


def test_git_opens_one_host_for_one_operation(client: Client, repository: str) -> None:  # noqa: F811
    client.create_sandbox("granted")
    done = client.git("granted", "clone", url=repository, path="/tmp/r")
    assert done.ok, done.stderr
    assert client.read_text("granted", "/tmp/r/hello") == "there\n"
    assert not client.git("granted", "clone", url=repository, path="/tmp/s", grant=False).ok
    assert not client.shell("granted", f"git clone -q {repository} /tmp/t").ok
    assert client.get_sandbox("granted").egress == "deny"
    assert len(audited(client, "granted", "egress.granted")) == 1
    assert len(audited(client, "granted", "egress.revoked")) == 1


# -- registries that this machine is configured for --------------------------------------------


def reachable(rule: str) -> bool:
    host, _, port = rule.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port or 443)), 10):
        return True
    with contextlib.suppress(OSError), socket.create_connection((host, 80), 10):
        return True
    return False


@pytest.mark.net
@pytest.mark.slow
def test_pip(client: Client) -> None:  # noqa: F811
    rules = preset("@pip")
    if not all(map(reachable, rules)):
        pytest.skip("this machine's index cannot be reached")
    client.create_sandbox("pip", egress_allow=["@pip"])
    done = client.shell(
        "pip", "pip install -q six && python -c 'import six; print(six.__name__)'", timeout_s=300
    )
    assert done.stdout.splitlines()[-1:] == ["six"], done.stderr
    assert {data["name"] for data in audited(client, "pip", "egress.allowed")} <= set(rules)


@pytest.mark.net
@pytest.mark.slow
def test_what_a_connection_must_say(client: Client) -> None:  # noqa: F811
    index = preset("@pip")[0]
    mirror = next((host for host in preset("@apt") if ":" not in host), None)
    if mirror is None or not reachable(index) or not reachable(mirror):
        pytest.skip("this machine's sources cannot be reached")
    client.create_sandbox("said", egress_allow=[index, mirror])
    found = attempts(client, "said", [(index, 443, f"tls:{index}"), (mirror, 80, f"http:{mirror}")])
    assert (
        found[index][0] == "tls" and found[mirror][0].startswith("HTTP/1.1") and "403" not in found[mirror][0]
    )
    wrong = attempts(client, "said", [(index, 443, "tls:evil.test"), (mirror, 80, "http:evil.test")])
    assert "SSL" in wrong[index][0] and wrong[index][1] < 1000
    assert "403" in wrong[mirror][0] and wrong[mirror][1] < 1000
    assert "SSL" in attempts(client, "said", [(index, 443, "tls:")])[index][0]
    whys = [data["why"] for data in audited(client, "said", "egress.denied")]
    assert any("evil.test" in why for why in whys) and "TLS without a server name" in whys


@pytest.mark.net
@pytest.mark.slow
def test_any(client: Client) -> None:  # noqa: F811
    index = preset("@pip")[0]
    if not reachable(index):
        pytest.skip("this machine's index cannot be reached")
    client.create_sandbox("any", egress="any")
    page = f"curl -sS -o /dev/null -w '%{{http_code}} ' https://{index}/"
    direct = f"env -u https_proxy -u HTTPS_PROXY {page}"
    socks = f"{page} -x socks5h://127.0.0.1:1080"
    assert client.shell("any", f"{page}; {direct}; {socks}", timeout_s=60).stdout == "200 200 200 "


def _ssh_from_one_to_itself(client: Client) -> None:  # noqa: F811
    """Out through the proxy, and in again by the port that is exposed."""
    setup = "mkdir -p /run/sshd /root/.ssh && ssh-keygen -q -N '' -f /root/.ssh/id_ed25519 -t ed25519 && "
    setup += "cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys && /usr/sbin/sshd -p 2222"
    client.shell("apt", setup, user="root", check=True)
    port = client.expose("apt", 2222).rpartition(":")[2]
    client.set_egress("apt", egress_allow=[f"127.0.0.1:{port}", "ok.example"])
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]
    proxy = ["-o", "ProxyCommand=nc -X connect -x 127.0.0.1:3128 %h %p", "-p", port]
    done = client.exec("apt", [*ssh, *proxy, "127.0.0.1", "seq 1 50000 | md5sum"], user="root", timeout_s=60)
    assert done.stdout.split()[0] == hashlib.md5(b"".join(b"%d\n" % n for n in range(1, 50001))).hexdigest()
    refused = client.exec("apt", [*ssh, "no.example", "true"], user="root", timeout_s=60)
    assert refused.exit_code == 255 and "resolve hostname" in refused.stderr


@pytest.mark.net
@pytest.mark.slow
def test_apt_and_then_npm_musl_and_ssh(client: Client) -> None:  # noqa: F811
    if not all(map(reachable, preset("@apt"))):
        pytest.skip("this machine's package sources cannot be reached")
    client.create_sandbox("apt", type="medium", egress_allow=["@apt", "ok.example"])
    wanted = "openssh-client openssh-server netcat-openbsd musl-tools" + " nodejs" * bool(shutil.which("npm"))
    done = client.shell(
        "apt",
        f"(apt-get update -qq && apt-get install -y -qq --no-install-recommends {wanted}) 2>&1 | tail -n3",
        user="root",
        timeout_s=900,
    )
    look = (
        "#include <netdb.h>\n#include <stdio.h>\nint main(int n, char **v) { struct addrinfo *a;"
        'printf("%d\\n", getaddrinfo(v[1], "443", 0, &a)); }'
    )
    client.write_file("apt", "/tmp/look.c", look)
    compiled = client.shell(
        "apt", "cd /tmp && musl-gcc -o look look.c && ./look ok.example && ./look no.example"
    )
    assert compiled.stdout.split() == ["0", "-2"], done.stdout + compiled.stderr
    _ssh_from_one_to_itself(client)
    if "nodejs" not in wanted:
        return
    client.set_egress("apt", egress_allow=["@npm"])
    registry = preset("@npm")[0]
    if not reachable(registry):
        pytest.skip("this machine's npm registry cannot be reached")
    # Debian's npm is three hundred packages; its own archive is one.
    npm = "curl -sSf ${npm_config_registry%/}/npm/-/npm-9.9.4.tgz | tar xz && "
    npm += "node package/bin/npm-cli.js install left-pad && ls node_modules"
    done = client.shell("apt", f"mkdir /tmp/n && cd /tmp/n && {npm}", timeout_s=300)
    assert "left-pad" in done.stdout.split(), done.stderr
    node = "const d=require('dns');d.lookup('no.example',e=>console.log(e.code));"
    node += f"d.resolve4('{registry.partition(':')[0]}',(e,a)=>console.log(e,a[0].slice(0,4)))"
    assert set(client.exec("apt", ["node", "-e", node]).stdout.split("\n")) == {"ENOTFOUND", "null 127.", ""}
    started = time.monotonic()
    assert not client.shell("apt", "getent hosts " + preset("@apt")[0].partition(":")[0]).ok
    assert time.monotonic() - started < 10
