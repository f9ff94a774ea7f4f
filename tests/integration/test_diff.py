"""Diffs of real sandboxes, and bringing them elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from yard_home import client, yard  # noqa: F401

from forkyard import Change, Client, Diff
from forkyard.errors import AccessDeniedError, InvalidRequestError, NotFoundError

pytestmark = [pytest.mark.root, pytest.mark.slow]

MAKE = r"""
mkdir -p repo/sub && cd repo
printf 'one\ntwo\n' > a.txt; printf 'no end' > n; : > empty; cp /bin/true tool
ln -s /etc/passwd link; printf caf > "$(printf 'caf\351')"; chmod 600 n
"""
CHANGE = r"""
cd repo; echo three >> a.txt; chmod 755 n; rm empty link; mkdir link; echo in > link/in; rm -r sub
ln -s n sub
"""


def _about(diff: Diff) -> dict[str, tuple[object, ...]]:
    return {
        change.path: (change.kind, change.mode, change.data, change.target, change.raw_path)
        for change in diff.changes
    }


def test_a_fresh_sandbox_differs_in_nothing(client: Client) -> None:  # noqa: F811
    client.create_sandbox("fresh")
    assert client.diff("fresh").empty and client.diff("fresh").patch == ""
    client.shell("fresh", "echo x > /tmp/x; echo y > /var/tmp/y; hostname; date > /dev/null")
    client.checkpoint("fresh", "point")
    client.rewind("fresh")
    (fork,) = client.fork("fresh").forks
    for sandbox in ("fresh", fork.id):
        assert client.diff(sandbox).empty


def test_kinds_modes_and_the_patch(client: Client, tmp_path: Path) -> None:  # noqa: F811
    client.create_sandbox("box")
    client.shell("box", MAKE, check=True)
    made = client.diff("box")
    kinds = {change.path.removeprefix("/home/user/"): (change.kind, change.mode) for change in made.added}
    assert kinds == {
        "repo": ("dir", 0o755), "repo/sub": ("dir", 0o755), "repo/a.txt": ("file", 0o644),
        "repo/n": ("file", 0o600), "repo/empty": ("file", 0o644), "repo/tool": ("file", 0o755),
        "repo/link": ("link", 0o777), "repo/caf\\xe9": ("file", 0o644)}  # fmt: skip
    assert not made.modified and not made.deleted and made.complete
    client.checkpoint("box", "made")
    assert client.diff("box", since="made").empty
    client.shell("box", CHANGE, check=True)
    changed = client.diff("box", since="made")
    assert [(one.path, one.old_kind, one.kind, one.content) for one in changed.modified] == [
        ("/home/user/repo/a.txt", "file", "file", True),
        ("/home/user/repo/link", "link", "dir", True),
        ("/home/user/repo/n", "file", "file", False),
        ("/home/user/repo/sub", "dir", "link", True)]  # fmt: skip
    assert [one.path for one in changed.added] == ["/home/user/repo/link/in"]
    assert [(one.path, one.mode) for one in changed.deleted] == [("/home/user/repo/empty", None)]
    # git makes the same of it
    tree = tmp_path / "tree"
    client.rewind("box", to="made")
    client.shell("box", 'rm "$(printf \'repo/caf\\351\')"')
    client.download("box", "/home/user", tree)
    (tree / "repo/link").symlink_to("/etc/passwd")  # a download leaves out what leads out
    subprocess.run(["git", "init", "-q", tree], check=True)
    patch = changed.patch.replace("a/home/user/", "a/").replace("b/home/user/", "b/")
    done = subprocess.run(["git", "apply", "-p1"], cwd=tree, input=patch.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tree / "repo/a.txt").read_text() == "one\ntwo\nthree\n"
    assert (tree / "repo/n").stat().st_mode & 0o100
    assert (tree / "repo/link/in").read_text() == "in\n" and not (tree / "repo/empty").exists()


def test_the_guest_is_not_asked(client: Client) -> None:  # noqa: F811
    """What root hides from its own programs, stops or replaces does not matter."""
    client.create_sandbox("liar")
    client.shell("liar", "echo changed > secret")
    client.shell("liar", "printf '#!/bin/sh\n' > /bin/ls; rm -f /usr/bin/git /bin/cat; ln -sf / /home/user/r",
                 user="root")  # fmt: skip
    paths = client.diff("liar").paths
    assert "/home/user/secret" in paths and "/usr/bin/ls" in paths and "/home/user/r" in paths
    assert not any(path.startswith("/home/user/r/") for path in paths)


def test_content_reaches_another_sandbox(client: Client) -> None:  # noqa: F811
    for name in ("from", "to", "second"):
        client.create_sandbox(name)
    client.shell("from", MAKE, check=True)
    made = client.diff("from")
    client.checkpoint("from", "made")
    client.shell("from", CHANGE, check=True)
    changed = client.diff("from", since="made")
    whole = client.diff("from")
    client.delete_sandbox("from")
    assert client.apply("to", made).skipped == [] and client.apply("to", changed).skipped == []
    client.apply("second", whole, paths=["repo"])
    for sandbox in ("to", "second"):
        assert _about(client.diff(sandbox)) == _about(whole)
    assert client.shell("to", "stat -c %U repo/a.txt").stdout == "user\n"
    assert client.apply("to", whole, paths=["repo/li", "elsewhere"]).files == 0


def test_whose_rights_it_takes(client: Client) -> None:  # noqa: F811
    client.create_sandbox("source")
    client.create_sandbox("target")
    script = "echo '# mine' >> /etc/profile; rm /etc/motd; install -o 5 -m 4755 /bin/true /opt/t"
    client.shell("source", script, user="root", check=True)
    diff = client.diff("source")
    with pytest.raises(AccessDeniedError, match="as user"):
        client.apply("target", diff)
    client.apply("target", diff, user="root")
    assert _about(client.diff("target")) == _about(diff)
    assert client.shell("target", "stat -c '%a %u' /opt/t").stdout == "4755 5\n"


def test_large_files_are_named_not_carried(client: Client) -> None:  # noqa: F811
    client.create_sandbox("large")
    client.shell("large", "head -c 9M /dev/urandom > big; echo small > small")
    diff = client.diff("large")
    big, small = sorted(diff.added, key=lambda one: one.path)
    assert big.omitted and big.data is None and big.size == 9 << 20 and small.data == b"small\n"
    assert not diff.complete and "big differ (too large)" in diff.patch
    with pytest.raises(InvalidRequestError, match="big"):
        client.apply("large", diff)
    assert client.apply("large", diff, paths=["small"]).files == 1


def test_since(client: Client) -> None:  # noqa: F811
    client.create_sandbox("line")
    client.shell("line", "echo 1 > one")
    snapshot = client.snapshot("line", "line-snapshot")
    client.shell("line", "echo 2 > two")
    point = client.checkpoint("line")
    client.shell("line", "rm one")
    assert client.diff("line", since="line-snapshot").paths == ["/home/user/one", "/home/user/two"]
    assert client.diff("line", since=snapshot.id).paths == ["/home/user/one", "/home/user/two"]
    assert client.diff("line", since=point.id).paths == ["/home/user/one"]
    assert client.diff("line").paths == ["/home/user/two"]
    fork = client.create_sandbox("child", snapshot="line-snapshot")
    client.shell("child", "echo more >> one")
    assert client.diff(fork.id).paths == ["/home/user/one"]
    # its origin is kept when that of its parent is not
    forked = client.fork(point.id).forks[0]
    client.delete_sandbox("line")
    client.shell(forked.id, "echo 3 > three")
    assert client.diff(forked.id).paths == ["/home/user/three"]
    client.stop_sandbox(forked.id)
    assert client.diff(forked.id).paths == ["/home/user/three"]
    with pytest.raises(NotFoundError):
        client.diff("child", since="nothing")


def test_nothing_but_full_paths_is_applied(client: Client) -> None:  # noqa: F811
    client.create_sandbox("strict")
    for path in ("relative", "/a/../etc/x", "/", "/a//b"):
        forged = Diff([Change(path, "file", 0o644, data=b"x")], [], [])
        with pytest.raises(InvalidRequestError):
            client.apply("strict", forged, user="root")


def test_many_files_and_few_changes(client: Client) -> None:  # noqa: F811
    """The comparison among 100,000 is measured in test_compare: deleting so many keeps a store busy."""
    client.create_sandbox("many", disk_mb=4000)
    script = "mkdir big; cd big; for d in $(seq 50); do mkdir $d; (cd $d; touch $(seq 150)); done"
    client.shell("many", script, check=True)
    client.checkpoint("many", "full", memory=False)
    client.shell("many", "cd big; for i in $(seq 50); do echo $i > $i/$((i*2)); done", check=True)
    (fork,) = client.fork("many", memory=False).forks
    client.shell(fork.id, "cd big; for i in $(seq 50); do echo $i > $i/$((i*3)); done", check=True)
    for sandbox, since in (("many", "full"), (fork.id, None)):
        best = min((client.diff(sandbox, since) for _ in range(3)), key=lambda diff: diff.compare_ms)
        print(f"{best.compare_ms:.1f} ms beside {best.frozen_ms:.1f} ms of freezing")
        assert len(best.modified) == 50 and best.compare_ms <= 100
