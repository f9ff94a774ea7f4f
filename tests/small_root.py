"""A root directory of a few megabytes, made of this host's own programs: quick, and no download."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = [
    *("chmod", "cp", "dd", "grep", "ln", "mkfifo", "stat"),
    *("sh", "cat", "echo", "env", "false", "head", "hostname", "id", "kill", "ls", "mkdir", "printenv"),
    *(
        "printf",
        "pwd",
        "rm",
        "setsid",
        "sleep",
        "stty",
        "sync",
        "test",
        "touch",
        "tr",
        "true",
        "wc",
        "whoami",
        "date",
        "mount",
        "umount",
    ),
]
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
# Counts in memory, and tells the file how far it is.
COUNTER = """#!/bin/sh
i=0
while :; do
    i=$((i+1))
    echo $i > $1.new
    mv $1.new $1
    sleep 0.01
done
"""


def write_root(root: Path, *, programs: bool) -> None:
    """The tree. Without ``programs``, for machines that have their own."""
    for name in ("etc", "proc", "dev", "sys", "run", "root", "home/user", "tmp", "var/tmp", ".forkyard",
                 "usr/bin", "usr/local/bin"):  # fmt: skip
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "workspace").symlink_to("home/user")
    (root / "usr/local/bin/counter").write_text(COUNTER)
    (root / "usr/local/bin/counter").chmod(0o755)
    (root / "usr/local/bin/plain.txt").write_text("no program\n")
    if not programs:
        return
    os.chown(root / "home/user", 1000, 1000)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    found = [path for name in [*PROGRAMS, "mv"] if (path := shutil.which(name, path="/usr/bin:/bin"))]
    libraries = _libraries(found)
    for path in found:
        shutil.copy(path, root / "usr/bin" / Path(path).name)
    for path in libraries:
        target = root / path.removeprefix("/").replace("lib", "usr/lib", 1) if not path.startswith("/usr") \
            else root / path[1:]  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _libraries(programs: list[str]) -> set[str]:
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    return set(re.findall(r"(?:=> |\t)(/\S+) \(0x", done.stdout))
