"""The daemon does not take over the small limits of the shell that starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAIN = f"{sys.executable} -m forkyard.daemon.main --foreground --home"


def test_too_few_files_are_refused_by_name(tmp_path: Path) -> None:
    script = f"ulimit -n 40; exec {MAIN} {tmp_path}/home"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "40 open files" in done.stderr and "ulimit -n" in done.stderr
    assert not (tmp_path / "home").exists()


def test_what_may_be_raised_is() -> None:
    code = (
        "import resource; from forkyard.daemon.rlimits import raise_limits; raise_limits();"
        "print([resource.getrlimit(n)[0] == resource.RLIM_INFINITY"
        " for n in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)])"
    )
    script = f'ulimit -Sf 100; ulimit -St 1000; exec {sys.executable} -c "{code}"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True]\n", done
