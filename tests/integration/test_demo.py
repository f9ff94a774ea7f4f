"""The demo runs to its end in a pipe, and leaves nothing behind when it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

DEMO = Path(__file__).resolve().parents[2] / "demo" / "run.py"

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]


def left(own: OwnYard) -> list[str]:
    """Sandboxes and snapshots that are still there."""
    return own.names() + [line.split()[0] for line in own.out("snapshots", "ls").splitlines()[1:]]


def test_to_its_end(own_yard: OwnYard) -> None:  # noqa: F811
    done = subprocess.run([sys.executable, str(DEMO)], env=own_yard.env, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "\x1b" not in done.stdout
    for words in ("3 of 6 pass, reward 0.50", "6/6      1.00", "fork it 8 times", "rewind it", "fork point"):
        assert words in done.stdout, done.stdout
    assert left(own_yard) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(own_yard: OwnYard, number: int, code: int) -> None:  # noqa: F811
    with subprocess.Popen([sys.executable, "-u", str(DEMO)], env=own_yard.env, stdout=subprocess.PIPE,
                          stdin=subprocess.DEVNULL, text=True) as demo:
        assert demo.stdout is not None
        # Episodes are under way: there is a source, a snapshot of it, and perhaps a copy.
        assert any("episode 1" in line for line in demo.stdout)
        demo.send_signal(number)
        assert "everything deleted" in demo.stdout.read()
        assert demo.wait(60) == code
    assert left(own_yard) == []
