"""Running without root: a user namespace in which an ordinary user is root over its own.

Inside, mounts, owners and gVisor work as they do for root. What needs the host's root does not: loop
devices (so disks are copied where the home is not on btrfs) and, unless they were delegated, control
groups (so CPU and memory of sandboxes are not limited).

Mounts and the ids of sandboxes' processes mean something in their own namespace only. So one process
keeps it (:func:`keep`) as long as there are sandboxes, and the next daemon enters that one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from forkyard.errors import UnsupportedError
from forkyard.host.files import write_atomic
from forkyard.host.process import start_time

__all__ = ["enter", "inside", "keep", "leave"]

_EVERY_ID = 1 << 32
_KEEPER = "namespace"


@functools.cache
def inside() -> bool:
    """Whether this process is in a user namespace other than the host's first."""
    try:
        words = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return False  # a kernel without them
    return words != ["0", "0", str(_EVERY_ID - 1)]


def enter(home: Path, socket: Path) -> None:
    """Begin this program anew inside, where an ordinary user runs it; root goes on as it is.

    Args:
        home, socket: What they are outside, where the user is not root.

    Raises:
        UnsupportedError: something is missing on this host, with what to do.
    """
    if os.geteuid() == 0:
        return
    kept = _kept(home)
    if kept is not None:
        way = ["nsenter", f"--target={kept}", "--user", "--mount", "--preserve-credentials"]
    else:
        way = ["unshare", "--user", "--map-root-user", "--map-auto", "--mount"]
    for program, package in ((way[0], "util-linux"), ("newuidmap", "uidmap")):
        if shutil.which(program) is None:
            raise UnsupportedError(
                f"running without root needs {program}",
                hint=f"as root: apt-get install {package}; or run forkyard as root",
            )
    if kept is None:
        _try(way)
    os.environ |= {"FORKYARD_HOME": str(home), "FORKYARD_SOCKET": str(socket)}
    os.execvp(way[0], [*way, "--", sys.executable, *sys.orig_argv[1:]])


def _try(way: list[str]) -> None:
    done = subprocess.run([*way, "--", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"this user gets no user namespace: {done.stderr.strip()}",
            hint="it needs ranges in /etc/subuid and /etc/subgid (usermod --add-subuids 100000-165535 "
            "--add-subgids 100000-165535 USER), and a kernel that allows it "
            "(sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
        )


def _kept(home: Path) -> int | None:
    """The process that keeps the namespace of this home's sandboxes."""
    try:
        pid, started = map(int, (home / _KEEPER).read_text().split())
    except (OSError, ValueError):
        return None
    return pid if start_time(pid) == started else None


def keep(home: Path) -> None:
    """Let this namespace outlive the daemon: its sandboxes do. Nothing outside of one."""
    if not inside() or _kept(home) is not None:
        return
    keeper = subprocess.Popen(
        ["sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    write_atomic(home / _KEEPER, f"{keeper.pid} {start_time(keeper.pid)}\n")


def leave(home: Path) -> None:
    """The home has no sandbox left: nobody has to keep its namespace. Idempotent."""
    kept = _kept(home)
    if kept is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(kept, signal.SIGKILL)
    (home / _KEEPER).unlink(missing_ok=True)
