"""Builds of the guest agent that came with imported memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkyard.yard import agents


@pytest.mark.root
def test_what_came_with_an_import_stays_while_it_is_used(tmp_path: Path) -> None:
    """Nobody removes it for an import that failed: another one may use it by then."""
    agents.add(tmp_path, "a" * 16, b"one")
    agents.add(tmp_path, "a" * 16, b"never looked at again")
    agents.add(tmp_path, "b" * 16, b"two")
    agents.sweep(tmp_path, {"a" * 16})
    assert [path.name for path in (tmp_path / "agents").iterdir()] == ["a" * 16]
    assert (tmp_path / "agents" / ("a" * 16) / "fy-agent").read_bytes() == b"one"
