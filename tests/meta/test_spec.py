"""Every promise in SPEC.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_spec_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SPEC.md").read_text()))
    there: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.M))
    assert len(named) > 40
    assert named <= there, f"not there: {sorted(named - there)}"


def test_every_promise_has_a_test() -> None:
    rows = [line for line in (ROOT / "SPEC.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| Promise", "| ---"))]
    assert len(promises) > 25
    assert [row for row in promises if "`test_" not in row] == []
