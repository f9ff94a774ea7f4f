"""A bare gVisor box with the agent as PID 1, for tests and measurements of the agent alone."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

KEEP = [
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", "SETFCAP", "SYS_ADMIN", "SYS_RESOURCE"),
]


def write_rootfs(root: Path) -> None:
    """A root directory with files of its own, and the host's /usr to be mounted on it."""
    for name in (
        "etc",
        "usr",
        "proc",
        "dev",
        "sys",
        "run",
        "root",
        "home/user",
        "tmp",
        "var/tmp",
        ".forkyard",
    ):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    os.chown(root / "home/user", 1000, 1000)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
    )
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\nextra:x:2000:user\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/machine-id").write_text("0" * 32 + "\n")


class Box:
    """One sandbox of runsc; :meth:`close` leaves nothing behind."""

    def __init__(self, runsc: str, agent: Path, dir: Path, *, platform: str = "systrap") -> None:
        self.runsc, self.dir, self.platform = runsc, dir, platform
        self.nproc = 0
        self.agent = agent
        self.pid = 0
        self.fds: tuple[int, int] = (-1, -1)

    def _base(self) -> list[str]:
        return [
            self.runsc, "--root", str(self.dir / "st"), "--network=none", f"--platform={self.platform}",
            "--overlay2=none", "--ignore-cgroups", "--host-uds=none",
        ]  # fmt: skip

    def start(self, *, root: Path | None = None, image: Path | None = None, nproc: int = 0) -> None:
        self.nproc = nproc
        rootfs = root or self.dir / "rootfs"
        if root is None:
            write_rootfs(rootfs)
            shutil.copy(self.agent, rootfs / ".forkyard/agent")
        else:
            self.dir.mkdir(parents=True, exist_ok=True)
        caps = [f"CAP_{c}" for c in KEEP]
        limits = [{"type": "RLIMIT_NPROC", "hard": self.nproc, "soft": self.nproc}] if self.nproc else []
        spec = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/.forkyard/agent"],
                "env": [],
                "cwd": "/",
                "capabilities": {k: caps for k in ("bounding", "effective", "inheritable", "permitted")},
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 65536, "soft": 1024}, *limits],
            },
            "root": {"path": str(rootfs)},
            "hostname": "box",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["ro", "rbind"]},
            ],
            "linux": {"namespaces": [{"type": t} for t in ("pid", "ipc", "uts", "mount", "network")]},
        }
        (self.dir / "config.json").write_text(json.dumps(spec))
        for name in ("in", "out"):
            os.mkfifo(self.dir / name, 0o600)
        ours = [os.open(self.dir / name, os.O_RDWR) for name in ("in", "out")]
        verb = ["restore", "-image-path", str(image)] if image else ["run"]
        where = ["-detach", "-bundle", str(self.dir), "-pid-file", str(self.dir / "pid")]
        argv = [*self._base(), *verb, *where, "box"]
        with open(self.dir / "stderr", "wb") as log:
            done = subprocess.run(argv, stdin=ours[0], stdout=ours[1], stderr=log, timeout=60)
        for fd in ours:
            os.close(fd)
        if done.returncode:
            raise RuntimeError((self.dir / "stderr").read_text()[-1000:])
        self.pid = int((self.dir / "pid").read_text())
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self.fds = (os.open(self.dir / "in", flags), os.open(self.dir / "out", flags))

    def save(self, image: Path) -> dict[str, int]:
        """Checkpoint and go on running; the sizes of the image's files."""
        argv = [
            *self._base(),
            "checkpoint",
            "-compression",
            "none",
            "-image-path",
            str(image),
            "-leave-running",
            "box",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:])
        return {f.name: f.stat().st_size for f in image.iterdir()}

    def close(self) -> None:
        died = ""
        if self.pid:
            try:
                handle = os.pidfd_open(self.pid)
            except ProcessLookupError:
                died = (self.dir / "stderr").read_text()[-3000:] or "without a word"
            else:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], 10)
                os.close(handle)
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.pid, self.fds = 0, (-1, -1)
        if (self.dir / "st/null-netns").exists():  # newer builds share an empty network namespace
            subprocess.run(["umount", "-l", str(self.dir / "st/null-netns")], capture_output=True)
        if died:
            raise RuntimeError(f"the sandbox died on its own: {died}")
