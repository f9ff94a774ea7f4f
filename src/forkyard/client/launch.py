"""Starting this machine's daemon when none answers."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from forkyard import errors

NEEDED = ("uvicorn", "click")
"""What ``forkyard[host]`` brings, and the daemon cannot do without."""

DEADLINE_S = 30.0
TAIL_BYTES = 2000


def answers(path: Path) -> bool:
    """Whether somebody listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except PermissionError:
            raise errors.AccessDeniedError(
                f"this user may not use the daemon at {path}", hint="run as root or as the daemon's user"
            ) from None
        except OSError:
            return False
    return True


def ensure(
    home: Path, path: Path, *, start: bool = True, wait_s: float = 0, deadline_s: float = DEADLINE_S
) -> None:
    """Return when a daemon listens on ``path``, having started one if none did.

    Without ``start``, somebody else has ``wait_s`` to start it.

    Any number of clients may do this at once: the home's lock lets one daemon live, and all
    find it. It belongs to none of them.

    Raises:
        UnavailableError: with the end of the daemon's log, or what is missing.
        AccessDeniedError: the socket is another user's.
    """
    if answers(path):
        return
    if not start:
        patience = time.monotonic() + wait_s
        while time.monotonic() < patience:
            time.sleep(0.02)
            if answers(path):
                return
        raise errors.UnavailableError(
            f"no daemon answers at {path}", hint="forkyard daemon start", retryable=True
        )
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise errors.UnavailableError(
            f"no daemon answers at {path}, and none can be started: {', '.join(missing)} is not installed",
            hint="pip install 'forkyard[host]'",
        )
    deadline = time.monotonic() + deadline_s
    while True:
        word, detail = _start(home, path, deadline)
        if word == "ready" and answers(path):
            return
        if word == "taken":
            # Another client's daemon, or one that is just going: wait for either to be clear.
            while time.monotonic() < deadline:
                if answers(path):
                    return
                if not _lives(int(detail or 0)):
                    break
                time.sleep(0.02)
        elif word == "died":
            raise errors.UnavailableError(
                f"the daemon did not start: {detail or 'it said nothing'}", hint="forkyard doctor"
            )
        if time.monotonic() >= deadline:
            raise errors.UnavailableError(
                f"the daemon did not answer at {path} within {deadline_s:g} s: {_tail(home, 0)}",
                hint="forkyard doctor",
                retryable=True,
            )
        time.sleep(0.02)


def _start(home: Path, path: Path, deadline: float) -> tuple[str, str]:
    """Start one and wait for its word: ``ready``, ``taken`` (and by which pid), ``died`` (and
    its last words) or ``late``."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open(home / "daemon.log", "ab", buffering=0, opener=_private)  # noqa: SIM115
    except OSError as error:
        raise errors.UnavailableError(
            f"no daemon runs, and none can be started in {home}: {error.strerror}",
            hint="run as root, or set FORKYARD_HOME to a directory of your own",
        ) from None
    before = log.tell()
    ours, theirs = os.pipe()
    try:
        with log:
            command = [sys.executable, "-P", "-m", "forkyard.daemon.main", "--detach", "--home", str(home)]
            command += ["--socket", str(path), "--ready-fd", str(theirs)]
            # A session of its own, so that a terminal's Ctrl-C is not its business; the parent of
            # the daemon ends at once, so that it is nobody's child here.
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(theirs,),
                env=_environment(),
                check=False,
            )
    finally:
        os.close(theirs)
    try:
        left = max(0.0, deadline - time.monotonic())
        # Not select(): a program with a thousand files open has higher descriptors than it takes.
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        if not poll.poll(left * 1000):
            return "late", ""
        word, _, detail = os.read(ours, 100).decode("ascii", "replace").strip().partition(" ")
    finally:
        os.close(ours)
    return (word, detail) if word else ("died", _tail(home, before))


def _environment() -> dict[str, str]:
    """The client's, with a path by which the same forkyard is found from any directory."""
    env = dict(os.environ)
    package = str(Path(__file__).resolve().parents[2])
    path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if not any(Path(entry, "forkyard").is_dir() for entry in path):
        path.append(package)
    env["PYTHONPATH"] = os.pathsep.join(path)
    return env


def _tail(home: Path, since: int) -> str:
    try:
        with open(home / "daemon.log", "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(since if since <= size else 0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-12:])


def _lives(pid: int) -> bool:
    if pid <= 0:
        # It holds the lock and has not yet said who it is.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _private(path: str, flags: int) -> int:
    """Whoever starts the daemon first makes its log, whatever its umask."""
    return os.open(path, flags, 0o600)
