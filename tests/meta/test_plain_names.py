"""What fails in a run of two workers is found again, alone, by a run without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pytest
pytestmark = pytest.mark.xdist_group("some")
@pytest.mark.parametrize("name", ["x@y"])
def test_fails(name): assert "SECOND" in os.environ
def test_passes(): pass
"""


def test_the_second_try_is_of_what_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from plain_names import pytest_configure")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group(name): its group")
    first = _pytest(tmp_path, "-n", "1", "--dist", "loadgroup")
    assert "1 failed, 1 passed" in first, first
    second = _pytest(tmp_path, "--last-failed", SECOND="1")
    assert " 1 passed in" in second, second  # and nothing else


def _pytest(where: Path, *args: str, **env: str) -> str:
    ours = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *args]
    return subprocess.run(
        command, cwd=where, env={**os.environ, **ours, **env}, capture_output=True, text=True, check=False
    ).stdout
