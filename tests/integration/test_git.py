"""git in a sandbox, and where a password for it can be seen."""

from __future__ import annotations

import functools
import http.server
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client
from forkyard.errors import CommandFailedError, InvalidRequestError

pytestmark = [pytest.mark.root, pytest.mark.slow]

SECRET = "hunter2-and-more"
# A repository behind a password, on the sandbox's own loopback; it looks for the password in all it can see.
SERVER = """
import base64, glob, http.server, sys
WANTED = "Basic " + base64.b64encode(b"ann:hunter2-and-more").decode()

def look():
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            if b"hunter2" in open(path, "rb").read(): open("seen", "a").write(path + "\\n")
        except OSError: pass

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        look()
        if self.headers.get("Authorization") != WANTED:
            self.send_response(401); self.send_header("WWW-Authenticate", "Basic realm=x"); self.end_headers()
        else: super().do_GET()
    def log_message(self, *_): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
open("up", "w").close()
server.serve_forever()
"""


@pytest.fixture
def box(client: Client) -> str:  # noqa: F811
    return client.create_sandbox("git").id


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A repository of two commits on ``main`` and one on ``side``, as a bundle."""
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.test", *words],
                       check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for text in ("one\n", "two\n"):
        (tmp_path / "file").write_text(text)
        git("add", "-A")
        git("commit", "-qm", text.strip())
    git("branch", "side", "HEAD~1")
    git("bundle", "create", "-q", "repo.bundle", "--all")
    return tmp_path / "repo.bundle"


def test_a_bundle_from_clone_to_commit(client: Client, box: str, bundle: Path) -> None:  # noqa: F811
    client.write_file(box, "repo.bundle", bundle.read_bytes())
    sb = client.sandbox(box)
    assert sb.git("clone", url="repo.bundle", path="repo", branch="main", depth=None).ok
    assert sb.read_text("repo/file") == "two\n"
    assert sb.git("checkout", path="repo", branch="side").ok and sb.read_text("repo/file") == "one\n"
    assert sb.git("checkout", path="repo", branch="mine", ref="main", create=True).ok
    assert sb.git("status", path="repo").stdout == "## mine\n"
    sb.write_file("repo/file", "three\n")
    patch = sb.git("diff", path="repo").stdout
    assert "-two" in patch and "+three" in patch
    assert sb.git("checkout", path="repo", paths=["file"]).ok and sb.git("diff", path="repo").stdout == ""
    assert sb.git("apply", path="repo", patch=patch).ok and sb.read_text("repo/file") == "three\n"
    sb.write_file("repo/other file", "x")
    assert sb.git("add", path="repo", paths=["other file"]).ok
    assert sb.git("status", path="repo").stdout == '## mine\n M file\nA  "other file"\n'
    assert "other file" in sb.git("diff", path="repo", staged=True).stdout
    assert sb.git("commit", path="repo", message="-m is no option", all=True).ok
    assert sb.git("commit", path="repo", message="nothing").exit_code == 1
    log = sb.git("log", path="repo", limit=1).stdout
    assert "-m is no option" in log and "Author: user <user@localhost>" in log
    sb.write_file("repo/file", "four\n")
    assert sb.git("commit", path="repo", message="by", author="Ann Lee <ann@b.test>", all=True).ok
    assert "Ann Lee <ann@b.test>" in sb.git("log", path="repo", limit=1, paths=["file"]).stdout
    assert sb.git("fetch", path="repo").ok
    assert sb.git("fetch", path="repo", url="../repo.bundle", branch="side").ok
    missing = sb.git("clone", url="none.bundle", path="none")
    assert not missing.ok and "none.bundle" in missing.stderr
    with pytest.raises(CommandFailedError):
        sb.git("checkout", path="repo", ref="nowhere", check=True)


def test_a_password_is_nowhere_but_in_the_request(
    yard: YardHome, client: Client, box: str, bundle: Path  # noqa: F811
) -> None:
    client.write_file(box, "server.py", SERVER)
    client.write_file(box, "repo.bundle", bundle.read_bytes())
    bare = "git clone -q --bare repo.bundle repo.git && git -C repo.git update-server-info"
    client.shell(box, bare, check=True)
    server = client.spawn(box, "exec python3 server.py", detach=True)
    until(lambda: client.shell(box, "test -e up").ok)
    url = "http://127.0.0.1:8000/repo.git"

    refused = client.git(box, "clone", url=url, path="refused", grant=False)
    assert not refused.ok and "could not read Username" in refused.stderr
    wrong = client.git(box, "clone", url=url, path="wrong", username="ann", password="no", grant=False)
    assert not wrong.ok and "Authentication failed" in wrong.stderr
    client.shell(box, "git config --global credential.helper store", check=True)
    cloned = client.git(box, "clone", url=url, path="a", username="ann", password=SECRET, grant=False)
    assert cloned.ok, cloned.stderr
    in_url = url.replace("//", f"//ann:{SECRET}@")
    assert client.git(box, "clone", url=in_url, path="b", grant=False).ok
    assert client.git(box, "fetch", url=url, path="a", username="ann", token=SECRET, grant=False).ok
    assert client.read_text(box, "b/file") == "two\n"

    server.signal(15)
    client.remove(box, "server.py")
    assert not client.shell(box, "test -e seen").ok, client.read_text(box, "seen")
    assert not client.shell(box, f"grep -r {SECRET[:7]} ~ /tmp /var/tmp", user="root").ok
    assert SECRET not in str(client.audit(box))
    record = [one.data for one in client.audit(box) if one.kind == "git"][-1]
    assert (record["host"], record["port"], record["granted"]) == ("127.0.0.1", 8000, False)
    assert len(record["credential_sha256"]) == 64
    assert SECRET.encode() not in (yard.home / "daemon.log").read_bytes()


def own_address() -> str:
    """An address of this host that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but its loopback")
        return probe.getsockname()[0]


@pytest.fixture
def served(bundle: Path) -> Iterator[tuple[str, Path]]:
    """The bundle's repository over HTTP at an address of this host: its URL and directory."""
    bare = bundle.parent / "bare" / "repo.git"
    command = f"git clone -q --bare {bundle.parent} {bare} && git -C {bare} update-server-info"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    handler = functools.partial(Quiet, directory=str(bare.parent))
    with http.server.ThreadingHTTPServer((own_address(), 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{server.server_address[0]}:{server.server_port}/repo.git", bare
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_host_is_open_for_its_operation_only(
    client: Client, box: str, served: tuple[str, Path]  # noqa: F811
) -> None:
    url, bare = served
    assert not client.git(box, "clone", url=url, path="closed", grant=False, timeout_s=20).ok
    cloned = client.git(box, "clone", url=url, path="repo", timeout_s=30)
    assert cloned.ok and client.read_text(box, "repo/file") == "two\n", cloned
    assert not client.shell(box, f"curl -sf -m 5 {url}/HEAD").ok
    assert not client.git(box, "fetch", path="repo", grant=False, timeout_s=20).ok

    work = bare.parent / "work"
    command = f"git clone -q {bare} {work} && git -C {work} push -q origin HEAD:new"
    command += f" && git -C {bare} update-server-info"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert client.git(box, "fetch", path="repo", timeout_s=30).ok
    assert "origin/new" in client.shell(box, "git -C repo branch -r").stdout
    # The repository is the sandbox's, so it does not say which host is opened.
    client.shell(box, "git -C repo remote set-url origin http://192.0.2.1:8080/x.git", check=True)
    assert not client.git(box, "fetch", path="repo", timeout_s=20).ok
    kinds = [one.kind for one in client.audit(box)]
    assert kinds.count("egress.granted") == kinds.count("egress.revoked") == 2
    assert client.get_sandbox(box).egress == "deny"


def test_what_cannot_be_asked(client: Client, box: str) -> None:  # noqa: F811
    for operation, options in (
        ("clone", {}), ("push", {}), ("status", {"depth": 1}), ("commit", {}), ("checkout", {}),
        ("clone", {"url": "ext::sh -c id"}), ("clone", {"url": "--upload-pack=x"}),
        ("clone", {"url": "https://h.test/x", "password": "a\nb"}),
        ("clone", {"url": "a.bundle", "password": "x"}), ("log", {"ref": "--output=x"}),
        ("fetch", {"password": "x"}), ("commit", {"message": "m", "author": "nobody"}),
    ):
        with pytest.raises(InvalidRequestError):
            client.git(box, operation, **options)
