"""Wheels for a sandbox without network: fetched once, by this machine's own pip, into a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def pytest_wheels(python: str) -> list[Path]:
    """The wheels of pytest and what it needs, for the Python version ``python`` (such as ``3.13``)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkyard" / f"demo-{python}"
    if not list(cache.glob("pytest-*.whl")):
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
             "--only-binary=:all:", "--python-version", python, "--dest", str(cache), "pytest==8.3.5"],
            capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the demo needs pytest's wheels once, and pip did not get them:\n{done.stderr}")
    return sorted(cache.glob("*.whl"))
