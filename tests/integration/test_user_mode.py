"""An ordinary user's yard: nothing of it is root's, and it forks all the same."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_state import eventually
from small_root import write_root
from yard_home import LENDER

from forkyard.config import __file__ as a_source
from forkyard.host import mounts
from forkyard.setup.runsc import read_engine

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("clean_host")]

USER = f"fy-test-{os.getpid()}"
LIMIT_S = 240


@pytest.fixture
def user(tmp_path: Path) -> Iterator[pwd.struct_passwd]:
    """A user of this host for the time of a test, with subordinate ids as every new user has."""
    if shutil.which("newuidmap") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "uidmap"], check=True, capture_output=True)
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", USER], check=True)
    try:
        yield pwd.getpwnam(USER)
    finally:
        eventually(lambda: processes_of_user(USER), 30)
        subprocess.run(["userdel", "--remove", USER], check=True, capture_output=True)


def processes_of_user(name: str) -> list[str]:
    done = subprocess.run(["ps", "-o", "pid=,args=", "-U", name], capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.fixture
def run(user: pwd.struct_passwd) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs a Python program as the user: with this Python and these packages, wherever they lie."""
    top = Path(tempfile.mkdtemp(prefix="fy-user-"))
    top.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, top)

        def readable(path: Path, name: str) -> Path:
            target = top / name
            target.mkdir()
            mounts.bind_read_only(path, target)
            stack.callback(mounts.unmount, target)
            return target

        python = readable(Path(sys.base_prefix), "python") / "bin" / f"python3.{sys.version_info.minor}"
        paths = [readable(Path(a_source).parents[1], "src")]
        paths += [readable(Path(path), f"site{at}") for at, path in enumerate(site.getsitepackages())]
        env = {
            "HOME": user.pw_dir,
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": f"{python.parents[1]}/lib",
            "FORKYARD_HOME": f"{user.pw_dir}/yard",
            "FORKYARD_BASE_FROM": "/nowhere",
        }

        def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [python, "-c", program, *args],
                env=env, cwd="/", user=user.pw_uid, group=user.pw_gid, extra_groups=[],
                capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip

        yield run
        if Path(user.pw_dir, "yard/catalog.db").exists():
            run("from forkyard import Client; Client().shutdown('delete')")


@pytest.fixture
def archive(user: pwd.struct_passwd, tmp_path: Path) -> Path:
    """A root file system of this host's programs, and the engine, in the user's home."""
    root = tmp_path / "root"
    write_root(root, programs=True)
    home = Path(user.pw_dir)
    with tarfile.open(home / "root.tar", "w") as tar:
        tar.add(root, ".")
    engine = read_engine(LENDER)
    assert engine is not None
    (home / "yard/engine").mkdir(parents=True)
    shutil.copy(engine["runsc"], home / "yard/engine/runsc")
    record = {**engine, "runsc": str(home / "yard/engine/runsc")}
    (home / "yard/engine/engine.json").write_text(json.dumps(record))
    for path in (home, *home.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    return home / "root.tar"


FIRST = """
import sys
from forkyard import Client
client = Client()
client.pull_template("small", sys.argv[1])
box = client.create_sandbox("one", template="small").id
count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/m; mv /tmp/m /tmp/n; sleep 0.01; done"
client.spawn(box, count, detach=True)
client.shell(box, "mkdir d; echo kept > d/f", check=True)
anew = "rm -r /usr/local/bin && mkdir /usr/local/bin && echo new > /usr/local/bin/x"
client.shell(box, anew, user="root", check=True)
client.checkpoint(box)
client.shell(box, "rm -r d", check=True)
client.rewind(box)
made = client.fork(box, 2, prefix="copy").forks
for info in made:
    assert client.shell(info.id, "cat d/f; ls /usr/local/bin").stdout == "kept\\nx\\n"
diff = client.diff(box)
assert {"/usr/local/bin/counter", "/usr/local/bin/plain.txt"} == {change.path for change in diff.deleted}
assert "/usr/local/bin/x" in {change.path for change in diff.added}
client.stop_sandbox("copy1")
print(client.health().pid)
"""
SECOND = """
from forkyard import Client
client = Client()
before = [int(client.shell(name, "cat /tmp/n").stdout) for name in ("one", "copy2")]
client.start_sandbox("copy1")
for name in ("one", "copy1", "copy2"):
    assert client.shell(name, "cat d/f").stdout == "kept\\n"
    made = client.shell(name, "touch /tmp/f && ls -n /tmp/f && id -u", user="user", check=True).stdout
    assert made.split()[2] == made.split()[-1] == "1000", made
while any(int(client.shell(n, "cat /tmp/n").stdout) <= b for n, b in zip(("one", "copy2"), before)):
    pass
client.shutdown("delete")
"""


def test_an_ordinary_user(run: Callable[..., subprocess.CompletedProcess[str]], user: pwd.struct_passwd,
                          archive: Path) -> None:  # fmt: skip
    """Create, fork, rewind, stop; the daemon killed, and all of it found again by the next one."""
    first = run(FIRST, str(archive))
    assert first.returncode == 0, first.stderr
    pid = int(first.stdout)
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"Uid:\t{user.pw_uid}\t{user.pw_uid}" in status
    os.kill(pid, 9)
    second = run(SECOND)
    assert second.returncode == 0, second.stderr
    assert eventually(lambda: processes_of_user(USER), 30) is None


def test_a_user_without_subordinate_ids_is_told(
    run: Callable[..., subprocess.CompletedProcess[str]], user: pwd.struct_passwd
) -> None:
    for table in ("--del-subuids", "--del-subgids"):
        name = "/etc/subuid" if "uid" in table else "/etc/subgid"
        line = next(x for x in Path(name).read_text().splitlines() if x.startswith(f"{USER}:"))
        start, count = map(int, line.split(":")[1:])
        subprocess.run(["usermod", table, f"{start}-{start + count - 1}", USER], check=True)
    done = run("from forkyard import Client; Client().health()")
    assert done.returncode != 0 and "/etc/subuid" in done.stderr, done.stderr
