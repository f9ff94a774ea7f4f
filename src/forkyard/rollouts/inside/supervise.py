"""Runs as root in a grading copy: starts the tests as the code's user, and writes what they report
into a file that only root reads. The last record says how their process ended.

    python -I -S supervise.py JOB
"""

import contextlib
import json
import os
import pwd
import secrets
import select
import signal
import subprocess
import sys
import time

MAX_BYTES = 12 << 20
MAX_LINE = 1 << 20
DRAIN_S = 0.5
HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    with open(os.path.join(HERE, "private", "kept.json")) as file:
        kept = json.load(file)
    uid, gid, home = account(job["user"])
    if job["user"] == "nobody":
        give(job["workdir"], uid, gid)
    with open(os.path.join(HERE, "pytest.ini"), "w") as file:
        file.write(job["config"])
    alone = job["isolate"] == "process"
    environment = {
        **os.environ,
        **job["env"],
        "HOME": home,
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for name in (
        "PYTEST_ADDOPTS",
        "PYTEST_PLUGINS",
        "PYTHONSTARTUP",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PYTHONBREAKPOINT",
        "FORKYARD_SEED",
    ):
        environment.pop(name, None)
    python = [kept["base"], "-I", "-S"] if alone else [kept["python"]]
    out, into = os.pipe()
    key = secrets.token_hex(16)
    who = {} if alone else {"user": uid, "group": gid, "extra_groups": []}
    # Nobody may follow its memory or its descriptors in /proc but root: the key is in them.
    child = subprocess.Popen(
        [*python, os.path.join(HERE, "run_tests.py"), str(into)],
        stdin=subprocess.PIPE,
        pass_fds=(into,),
        env=environment,
        start_new_session=True,
        cwd=HERE if alone else job["workdir"],
        **who,
    )
    os.close(into)
    job = {**job, "key": key, "uid": uid, "gid": gid, "home": home, "python": kept["python"]}
    try:
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass
    deadline = time.monotonic() + (job["timeout_s"] or 1e9)
    with open(job["report"], "x") as report:
        os.fchmod(report.fileno(), 0o600)
        for record in records(out, child, deadline, key):
            report.write(json.dumps(record) + "\n")
        timed_out = child.poll() is None
        if timed_out:
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        report.write(json.dumps({"end": {"exit_code": code, "timed_out": timed_out}}) + "\n")
        report.flush()
        os.fsync(report.fileno())


def account(user):
    """Number, group and home of a user by name or number (of one that has no entry: none)."""
    try:
        entry = pwd.getpwuid(int(user)) if str(user).isdigit() else pwd.getpwnam(user)
    except KeyError:
        number = int(user) if str(user).isdigit() else 65534
        return number, number, "/tmp"
    return entry.pw_uid, entry.pw_gid, entry.pw_dir if os.path.isdir(entry.pw_dir) else "/tmp"


def give(top, uid, gid):
    """The workspace to the user: nobody could write there otherwise."""
    os.lchown(top, uid, gid)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            os.lchown(os.path.join(folder, name), uid, gid)


def records(out, child, deadline, key):
    """What the tests say, until their process has ended and the pipe is empty, or time is up."""
    os.set_blocking(out, False)
    rest, size = b"", 0
    while time.monotonic() < deadline:
        ended = child.poll() is not None
        if ended:
            deadline = min(deadline, time.monotonic() + DRAIN_S)
        ready, _, _ = select.select([out], [], [], 0 if ended else min(0.2, deadline - time.monotonic()))
        if not ready:
            if ended:
                return
            continue
        piece = os.read(out, 1 << 16)
        if not piece:
            child_left(child, deadline)
            return
        size += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        if size > MAX_BYTES or len(rest) > MAX_LINE:
            return
        for line in lines:
            try:
                said = json.loads(line)
                if said.pop("key") != key:
                    continue
                yield {
                    name: said[name]
                    for name in ("test", "outcome", "message", "collect", "finished")
                    if name in said
                }
            except (ValueError, KeyError, AttributeError):
                continue


def child_left(child, deadline):
    """The pipe is closed: its process ends now, or is stopped at the deadline."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, deadline - time.monotonic()))


main()
