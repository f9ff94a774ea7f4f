"""Some seconds of fuzzing, with another seed each time; a failure names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_no_request_breaks_the_agent() -> None:
    program = Path(__file__).with_name("fuzz_agent.py")
    before = set(os.listdir(tempfile.gettempdir()))
    done = subprocess.run(
        [sys.executable, str(program), "--seconds", "10"],
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) agents took (\d+) frames", done.stdout)
    assert found and int(found[2]) > 1000, done.stdout
    # (Other tests make files of their own there meanwhile.)
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in new if "fuzz" in name], "a changed path led to the host"
    print(done.stdout)
