"""What tests of images need: Debian packages unpacked beside the system, small images, a registry.

Import ``packages``, ``registry`` and ``templates`` (a client whose own templates go after each test).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from host_state import eventually, processes_of
from yard_home import YardHome, until

from forkyard import Client
from forkyard.host import mounts

USER, PASSWORD = "tester", "open sesame"
# Of that password, by bcrypt, the one kind that the registry takes.
_HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
SHARED = Path("/var/lib/containers")


@pytest.fixture(scope="session")
def packages() -> Iterator[Callable[..., Path]]:
    """Fetches Debian packages and unpacks them into one directory, which it returns."""
    root = Path(tempfile.mkdtemp(prefix="fyt-debs-", dir="/var/tmp"))
    have: set[str] = set()

    def get(*names: str) -> Path:
        wanted = [name for name in names if name not in have]
        if wanted:
            fetch = ["apt-get", "-q", "download", *wanted]
            done = subprocess.run(fetch, cwd=root, capture_output=True, text=True, check=False)
            if done.returncode:
                subprocess.run(["apt-get", "-qq", "update"], check=True, capture_output=True)
                done = subprocess.run(fetch, cwd=root, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            for deb in root.glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", deb, root / "root"], check=True)
                deb.unlink()
            have.update(wanted)
        return root / "root"

    yield get
    shutil.rmtree(root)


def skopeo(*args: str) -> None:
    """Run skopeo for the test itself, without the cache that it keeps in the machine's directories."""
    inside = f'mount -t tmpfs cache {SHARED.parent} && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", inside, "sh", "skopeo", *args]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass
class Registry:
    """A registry on loopback, and the directory of its files."""

    address: str
    root: Path

    def push(self, source: str, name: str, *, login: bool = False) -> str:
        """Copy an image (in skopeo's words) into it; returns its reference."""
        reference = f"{self.address}/{name}"
        creds = ["--dest-creds", f"{USER}:{PASSWORD}"] if login else []
        skopeo("copy", "-q", "--dest-tls-verify=false", *creds, source, f"docker://{reference}")
        return reference


@contextmanager
def open_registry(programs: Path, *, password: bool = False) -> Iterator[Registry]:
    """Debian's docker-registry, on a free port of 127.0.0.1."""
    root = Path(tempfile.mkdtemp(prefix="fyt-registry-", dir="/var/tmp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    text = (
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {root}/data}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    if password:
        (root / "htpasswd").write_text(_HTPASSWD)
        text += f"auth: {{htpasswd: {{realm: tests, path: {root}/htpasswd}}}}\n"
    (root / "config.yml").write_text(text)
    with open(root / "log", "wb") as log:
        child = subprocess.Popen([programs / "usr/bin/docker-registry", "serve", root / "config.yml"],
                                 stdout=log, stderr=log)  # fmt: skip
    try:
        until(lambda: _answers(address) or child.poll() is not None)
        assert child.poll() is None, (root / "log").read_text()
        yield Registry(address, root)
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(root)


def _answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def registry(packages: Callable[..., Path]) -> Iterator[Registry]:
    """An open registry on loopback."""
    with open_registry(packages("docker-registry")) as made:
        yield made


@pytest.fixture
def templates(client: Client, yard: YardHome) -> Iterator[Client]:
    """The client of the module's home. After the test its templates go, with all that they held."""
    before = SHARED.exists()
    yield client
    for info in client.list_sandboxes():
        client.delete_sandbox(info.id)
    for info in client.list_templates():
        if info.kind != "recipe":
            client.delete_template(info.name)
    builds = yard.home / "builds"
    eventually(lambda: [*(builds / "tmp").iterdir(), *(builds / "deposits").iterdir()])
    eventually(lambda: [line for line in processes_of(builds) if "buildah" in line or "skopeo" in line])
    assert mounts.mounts_below(builds) == []
    assert SHARED.exists() == before
    eventually(yard.layers, 10)


STATIC = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "wait")) {
        puts("waiting");
        fflush(stdout);
        pause();
    }
    printf("alone, uid %d\n", (int)getuid());
    return 0;
}
"""


def static_program(directory: Path) -> Path:
    """A program that needs nothing; ``wait`` makes it wait for ever."""
    source, program = directory / "alone.c", directory / "alone"
    source.write_text(STATIC)
    subprocess.run(["gcc", "-static", "-Os", "-s", "-o", program, source], check=True)
    return program


def musl_root(packages: Callable[..., Path], directory: Path) -> Path:
    """A root directory of musl and busybox, with a program that is linked with musl."""
    debs = packages("musl", "musl-dev", "busybox-static")
    root = directory / "musl"
    for name in ("bin", "lib", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy2(debs / "bin/busybox", root / "bin/busybox")
    for applet in ("sh", "cat", "ls", "id", "sleep"):
        os.symlink("busybox", root / "bin" / applet)
    loader = next((debs / "lib").glob("ld-musl-*.so.1"))
    libc = next(debs.glob("usr/lib/*-linux-musl/libc.so"), None) or loader
    shutil.copy2(libc.resolve() if libc.exists() else loader, root / "lib" / loader.name)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\napp:x:100:101::/home/app:/bin/sh\n")
    source = directory / "m.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("from musl"); return 0; }\n')
    headers = next(debs.glob("usr/include/*-linux-musl"))
    libraries = next(debs.glob("usr/lib/*-linux-musl"))
    subprocess.run(
        ["gcc", "-nostdinc", "-isystem", headers, "-nostartfiles", "-nodefaultlibs", "-no-pie", "-fno-pie",
         f"-Wl,-dynamic-linker,/lib/{loader.name}", "-o", root / "bin/musl-program", libraries / "crt1.o",
         libraries / "crti.o", source, "-L", root / "lib", f"-l:{loader.name}", libraries / "crtn.o"],
        check=True)  # fmt: skip
    return root


def tar_of(root: Path, archive: Path, *options: str) -> Path:
    """A root directory's tar, owned by root."""
    subprocess.run(["tar", "-cf", archive, "--owner=0", "--group=0", *options, "-C", root, "."], check=True)
    return archive
