"""Each program in examples/ runs, in a small setting, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.root, pytest.mark.slow]


def run(own_yard: OwnYard, name: str, *args: str) -> str:  # noqa: F811
    """What it prints; it has to succeed and to leave no sandbox."""
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *args], env=own_yard.env, text=True,
                          capture_output=True, timeout=400, check=False)  # fmt: skip
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    assert own_yard.names() == [], f"{name} leaves sandboxes behind"
    print(done.stdout)
    return done.stdout


def test_search_beats_sampling(own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    picture = tmp_path / "tree.svg"
    small = ["--bugs", "2", "--nodes", "14", "--tries", "1", "--timed", "3", "--svg"]
    said = run(own_yard, "search_vs_sampling.py", *small, str(picture))
    rows = {match[1]: (int(match[2]), int(match[3]))
            for match in re.finditer(r"^(best of n|beam|UCT) +(\d) of 1 +(\d) of 1", said, re.M)}  # fmt: skip
    assert rows["beam"] == (1, 1), "12 nodes are all that a beam of two needs"
    assert set(rows) == {"best of n", "beam", "UCT"}
    assert re.search(r"^rewind +3 +\d+ +\d+$", said, re.M) and re.search(r"^fork +3 ", said, re.M)
    assert "<title>A search tree of" in picture.read_text()


def test_agent_rollouts(own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("agents")
    picture = tmp_path / "rewards.svg"
    said = run(own_yard, "agent_rollouts.py", "--svg", str(picture))
    rows = re.findall(r"^rollout (\d)  visible test passes  reward (\d\.\d\d)", said, re.M)
    # All satisfy the test that they see; of four scripts one satisfies the hidden ones.
    assert rows == [(str(n), ("1.00" if n % 4 == 0 else "0.50")) for n in range(8)]
    assert "8 samples of 1 tasks" in said and "pass@4" in said
    assert picture.read_text().count("<rect") == 8


def test_learning(own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    picture = tmp_path / "curve.svg"
    said = run(own_yard, "learning.py", "--steps", "2", "--group", "4", "--svg", str(picture))
    rewards = [float(word) for word in re.findall(r"^step +\d+ +reward (\d\.\d+)", said, re.M)]
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    assert "<polyline" in picture.read_text()


def test_rollout_tax(own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    picture = tmp_path / "tax.svg"
    said = run(own_yard, "rollout_tax.py", "--actions", "1", "7", "--rollouts", "1", "--svg", str(picture))
    rows = re.findall(
        r"^(fresh sandbox|fork of a warm one|rewind) +([\d.]+) +([\d.]+) +(\d+) +(\d+)$", said, re.M
    )
    assert len(rows) == 3
    for _, few, many, *hours in rows:
        for each, hour in zip((few, many), hours, strict=True):
            assert float(each) > 0 and int(hour) == pytest.approx(float(each) * 1e6 / 3600, abs=3)
    assert picture.read_text().count("<rect") == 6


@pytest.mark.net
def test_egress_table(own_yard: OwnYard) -> None:  # noqa: F811
    said = run(own_yard, "egress_table.py")
    assert "19 attempts, 0 of them not as they should be" in said
    table = [line.split("|")[1:-1] for line in said.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in table[2:]]
    assert {row[0]: row[1] for row in cells}["the allowed name: HTTPS"].startswith("HTTP/1.1 ")
    # What is refused is refused at once: nothing waits for its time to run out.
    assert all(float(row[2]) < 3000 for row in cells) and not any("timed out" in row[1] for row in cells)
