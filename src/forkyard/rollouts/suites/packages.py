"""Files from the package index that this machine's pip is configured for, kept in a private cache."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from forkyard.errors import UnavailableError

FETCH_S = 600


def cache() -> Path:
    """``$XDG_CACHE_HOME/forkyard/suites``, made for this user alone."""
    top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkyard" / "suites"
    top.mkdir(parents=True, exist_ok=True, mode=0o700)
    return top


def distribution(requirement: str, *, source: bool = False) -> Path:
    """A package's wheel, or its source distribution, downloaded once; dependencies are not.

    Args:
        requirement: ``name`` or ``name==version``.

    Raises:
        UnavailableError: pip cannot get it; with what pip said.
    """
    name = requirement.partition("==")[0]
    folder = cache() / f"{requirement}{'-source' if source else ''}"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := _files(folder):
            return found[0]
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fresh]
            words += ["--no-binary", name] if source else ["--only-binary", name]
            done = subprocess.run(
                [*words, requirement], capture_output=True, text=True, timeout=FETCH_S, check=False
            )
            if done.returncode:
                raise UnavailableError(
                    f"pip cannot download {requirement}: {done.stderr.strip()[-500:]}",
                    hint="configure pip for an index that has it (pip config list)",
                )
            for path in _files(Path(fresh)):
                path.replace(folder / path.name)
        return _files(folder)[0]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".zip")))
