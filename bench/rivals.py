"""Docker and bare runsc, each by its own command line, on the same files as forkyard."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import machine
from bench.contender import Forked, argv_of_heap
from bench.ours import Build
from forkyard.host import mounts
from forkyard.host.process import become_subreaper

TIMEOUT_S = 120
FOREVER = ["sleep", "infinity"]
# What Docker's daemon needs beside itself, and a machine without it may lack.
PACKAGES = ["docker.io", "containerd", "runc", "libdevmapper1.02.1"]
# What dockerd and containerd make outside the directories that they are given.
STRAYS = ["/etc/docker", "/opt/containerd", "/run/containerd", "/run/docker"]


def _call(argv: list[str], *, data: bytes | None = None, env: dict[str, str] | None = None) -> bytes:
    done = subprocess.run(argv, input=data, capture_output=True, timeout=TIMEOUT_S, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:6])}: {done.stderr.decode(errors='replace')[-400:]}")
    return done.stdout


def _read_out(argv: list[str], env: dict[str, str] | None = None) -> int:
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        size = sum(map(len, iter(lambda: child.stdout.read1(1 << 16), b"")))
    if child.returncode:
        raise RuntimeError(f"{' '.join(argv[:6])} ended with {child.returncode}")
    return size


class Docker:
    """A dockerd of the benchmark's own; its image is the base template's root, imported.

    The programs are the machine's, or Debian's packages, unpacked for the time of the run and
    not installed.
    """

    forks_memory = False

    def __init__(self, layers: list[Path], note: Any = print) -> None:
        self.name = "docker"
        self.layers = layers
        self.note = note
        self.dir = Path(tempfile.mkdtemp(prefix="fybench-docker-", dir="/tmp"))
        self.daemon: subprocess.Popen[bytes] | None = None
        self._strays = [path for path in STRAYS if not os.path.lexists(path)]
        self._group = f"fybench{os.getpid()}"
        self._attached: dict[str, subprocess.Popen[bytes]] = {}
        self._count = itertools.count()
        self.env = dict(os.environ)

    def open(self) -> None:
        self._get_programs()
        socket = f"unix://{self.dir}/docker.sock"
        self.env |= {"DOCKER_HOST": socket, "DOCKER_CONFIG": str(self.dir / "config")}
        with (self.dir / "log").open("wb") as log:
            self.daemon = subprocess.Popen(
                [
                    "dockerd",
                    f"--data-root={self.dir}/data",
                    f"--exec-root={self.dir}/exec",
                    f"--pidfile={self.dir}/pid",
                    f"--host={socket}",
                    f"--cgroup-parent={self._group}",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--bridge=none",
                ],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(RuntimeError):
                version = self._docker("version", "--format", "{{.Server.Version}}")
                break
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start: {(self.dir / 'log').read_text()[-400:]}")
            time.sleep(0.1)
        self.note(f"docker {version.decode().strip()}")
        rootfs = self.dir / "rootfs"
        rootfs.mkdir()
        mounts.mount_overlay(self.layers, None, None, rootfs)
        tar = subprocess.Popen(["tar", "-C", rootfs, "--numeric-owner", "-c", "."], stdout=subprocess.PIPE)
        try:
            subprocess.run(
                ["docker", "import", "-", "base"],
                stdin=tar.stdout,
                stdout=subprocess.DEVNULL,
                check=True,
                env=self.env,
            )
        finally:
            tar.kill()
            tar.wait()
            mounts.unmount(rootfs)
        self.end(self.start())

    def _get_programs(self) -> None:
        self.env["PATH"] += ":/usr/sbin:/sbin"
        if shutil.which("dockerd", path=self.env["PATH"]):
            return
        self.note(f"unpacking {', '.join(PACKAGES)} from apt for the time of the run")
        apt = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
        packages = self.dir / "packages"
        packages.mkdir()
        subprocess.run([*apt, "download", *PACKAGES], cwd=packages, check=True, timeout=TIMEOUT_S)
        programs = self.dir / "programs"
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, programs], check=True)
        self.env["PATH"] = f"{programs}/usr/sbin:{programs}/usr/bin:{self.env['PATH']}"
        libraries = {str(path.parent) for path in programs.rglob("libdevmapper.so*")}
        self.env["LD_LIBRARY_PATH"] = ":".join(libraries)

    def _docker(self, *args: str, data: bytes | None = None) -> bytes:
        return _call(["docker", *args], data=data, env=self.env)

    def close(self) -> None:
        for child in self._attached.values():
            child.kill()
            child.wait()
        if self.daemon is not None and self.daemon.poll() is None:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                if left := self._docker("ps", "-aq").split():
                    self._docker("rm", "-f", *(word.decode() for word in left))
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(30)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        for target in mounts.mounts_below(self.dir):
            mounts.unmount(target)
        for path in self._strays:
            shutil.rmtree(path, ignore_errors=True)
        for group in [*Path("/sys/fs/cgroup").glob(f"*/{self._group}"), Path("/sys/fs/cgroup", self._group)]:
            for directory, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        shutil.rmtree(self.dir, ignore_errors=True)

    def start(self, image: str = "base") -> str:
        name = f"c{next(self._count)}"
        self._docker("run", "-d", "--network=none", "--name", name, image, *FOREVER)
        return name

    def run(self, box: str, argv: list[str]) -> None:
        self._docker("exec", box, *argv)

    def read_out(self, box: str, argv: list[str]) -> int:
        return _read_out(["docker", "exec", box, *argv], self.env)

    def end(self, box: str) -> None:
        self._docker("rm", "-f", box)
        if (child := self._attached.pop(box, None)) is not None:
            child.wait()

    def source(self, heap_mb: int) -> str:
        return self._with_heap("base", heap_mb) if heap_mb else self.start()

    def _with_heap(self, image: str, heap_mb: int) -> str:
        """A container whose main process has told that its heap is there."""
        name = f"c{next(self._count)}"
        argv = ["docker", "run", "--network=none", "--name", name, image, *argv_of_heap(heap_mb)]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env=self.env)
        self._attached[name] = child
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            raise RuntimeError("the container's process ended")
        return name

    def fork(self, box: str, n: int, heap_mb: int) -> Forked:
        """The disk alone: commit, then so many runs at once, each of which makes its heap anew."""
        begun = time.perf_counter()
        self._docker("commit", box, "copy")
        said = {"paused_ms": (time.perf_counter() - begun) * 1e3}
        one = (lambda _: self._with_heap("copy", heap_mb)) if heap_mb else (lambda _: self.start("copy"))
        with ThreadPoolExecutor(n) as pool:
            return Forked(list(pool.map(one, range(n))), said)

    def check_heap(self, box: str) -> None:
        return

    def checkpoint(self, box: str) -> dict[str, float]:
        self._docker("commit", box, "checkpoint")
        return {}

    def rewind(self, box: str) -> str:
        self.end(box)
        return self.start("checkpoint")

    def put(self, box: str, data: bytes) -> None:
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            member = tarfile.TarInfo("big")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        self._docker("cp", "-", f"{box}:/root", data=tar.getvalue())

    def get(self, box: str) -> int:
        with tarfile.open(fileobj=io.BytesIO(self._docker("cp", f"{box}:/root/big", "-"))) as archive:
            file = archive.extractfile("big")
            assert file is not None
            return len(file.read())

    def pids(self, box: str) -> set[int]:
        identity = self._docker("inspect", "--format", "{{.Id}}", box).decode().strip()
        return machine.pids_of(identity)

    def shared_pids(self) -> set[int]:
        assert self.daemon is not None
        return machine.pids_of("", {self.daemon.pid})


class BareRunsc:
    """runsc by its own verbs: run, exec, checkpoint -leave-running, restore, delete.

    Its checkpoints are of the memory; the disk beside them is a copy of the upper directory, taken
    while the box runs (so not of one moment, which forkyard's are).
    """

    forks_memory = True

    def __init__(self, build: Build, layers: list[Path]) -> None:
        self.name = f"runsc {build.label}"
        self.runsc = str(build.path)
        self.layers = layers
        self.dir = Path(tempfile.mkdtemp(prefix="fybench-runsc-", dir="/tmp"))
        self._count = itertools.count()
        self._images: dict[str, Path] = {}

    def open(self) -> None:
        # Its sandboxes are orphans; a parent that reaps them at once spares `delete` a wait.
        become_subreaper()
        self.end(self.start())

    def close(self) -> None:
        for box in self.dir.glob("b*"):
            with contextlib.suppress(Exception):
                self.end(box.name)
        for target in mounts.mounts_below(self.dir):
            mounts.unmount(target)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _command(self, box: Path, *words: str) -> list[str]:
        flags = [f"--root={box}/st", "--network=none", "--overlay2=none", "--ignore-cgroups"]
        return [self.runsc, *flags, *words]

    def _bundle(self, argv: list[str], upper: Path | None = None) -> Path:
        box = self.dir / f"b{next(self._count)}"
        for name in ("up", "wk", "rootfs", "st"):
            (box / name).mkdir(parents=True)
        if upper is not None:
            _call(["cp", "-a", "--reflink=auto", f"{upper}/.", str(box / "up")])
        shutil.copystat(self.layers[0], box / "up")
        mounts.mount_overlay(self.layers, box / "up", box / "wk", box / "rootfs")
        (box / "config.json").write_text(json.dumps(_spec(argv)))
        return box

    def _launch(self, box: Path, *words: str, wait_for: bytes = b"") -> None:
        command = self._command(box, *words, f"-bundle={box}", f"-pid-file={box}/pid", "b")
        reader, writer = os.pipe()
        try:
            with (box / "err").open("wb") as err:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=writer, stderr=err, timeout=TIMEOUT_S
                )
            if done.returncode:
                raise RuntimeError(f"runsc {words[0]}: {(box / 'err').read_text()[-400:]}")
            if wait_for and os.read(reader, len(wait_for)) != wait_for:
                raise RuntimeError("the box's process ended")
        finally:
            os.close(reader)
            os.close(writer)

    def start(self) -> str:
        box = self._bundle(FOREVER)
        self._launch(box, "run", "-detach")
        return box.name

    def run(self, box: str, argv: list[str]) -> None:
        _call(self._command(self.dir / box, "exec", "b", *argv))

    def read_out(self, box: str, argv: list[str]) -> int:
        return _read_out(self._command(self.dir / box, "exec", "b", *argv))

    def end(self, box: str) -> None:
        place = self.dir / box
        ours = self.pids(box)
        delete = subprocess.Popen(
            self._command(place, "delete", "-force", "b"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for pid in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        _, said = delete.communicate(timeout=TIMEOUT_S)
        for target in mounts.mounts_below(place):
            mounts.unmount(target)
        shutil.rmtree(place)
        if delete.returncode:
            raise RuntimeError(f"runsc delete: {said.decode(errors='replace')[-400:]}")

    def source(self, heap_mb: int) -> str:
        if not heap_mb:
            return self.start()
        box = self._bundle(argv_of_heap(heap_mb))
        self._launch(box, "run", "-detach", wait_for=b"ready\n")
        return box.name

    def fork(self, box: str, n: int, heap_mb: int) -> Forked:
        said = self.checkpoint(box)
        with ThreadPoolExecutor(n) as pool:
            return Forked(list(pool.map(lambda _: self._restore(box), range(n))), said)

    def _restore(self, source: str) -> str:
        place = self.dir / source
        argv = json.loads((place / "config.json").read_text())["process"]["args"]
        box = self._bundle(argv, place / "up")
        self._launch(box, "restore", "-detach", f"-image-path={self._images[source]}")
        return box.name

    def check_heap(self, box: str) -> None:
        self.run(box, ["sh", "-c", "grep -q held /proc/1/cmdline"])

    def checkpoint(self, box: str) -> dict[str, float]:
        if (old := self._images.get(box)) is not None:
            shutil.rmtree(old)
        image = self._images[box] = self.dir / f"image{next(self._count)}"
        begun = time.perf_counter()
        words = ("checkpoint", "-leave-running", "-compression=none", f"-image-path={image}", "b")
        _call(self._command(self.dir / box, *words))
        return {"paused_ms": (time.perf_counter() - begun) * 1e3}

    def rewind(self, box: str) -> str:
        fresh = self._restore(box)
        self._images[fresh] = self._images.pop(box)
        self.end(box)
        return fresh

    def put(self, box: str, data: bytes) -> None:
        _call(self._command(self.dir / box, "exec", "b", "sh", "-c", "cat > /root/big"), data=data)

    def get(self, box: str) -> int:
        return len(_call(self._command(self.dir / box, "exec", "b", "cat", "/root/big")))

    def pids(self, box: str) -> set[int]:
        return machine.pids_of(f"--root={self.dir}/{box}/st")

    def shared_pids(self) -> set[int]:
        return set()


def _spec(argv: list[str]) -> dict[str, Any]:
    capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
    path = "PATH=/opt/forkyard/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": [path],
            "cwd": "/",
            "capabilities": {name: capabilities for name in ("bounding", "effective", "permitted")},
        },
        "root": {"path": "rootfs"},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        ],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network")]},
    }
