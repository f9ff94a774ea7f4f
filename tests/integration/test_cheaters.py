"""The example of cheats and honest controls: ours is right about each of them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from yard_home import YardHome, yard  # noqa: F401

from forkyard.client.aio import AsyncClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "cheaters.py"

# One of each kind. All nineteen agents take four minutes of two CPUs: FORKYARD_TEST_ALL=1.
SOME = (
    "an honest repair",
    "edits the tests' conftest",
    "os._exit(0) in the source",
    "crashes for another try",
    "a deleted file",
)
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net, pytest.mark.timeout(1800)]


def test_cheats_score_0_and_honest_work_scores_1(yard: YardHome, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    whole = bool(os.environ.get("FORKYARD_TEST_ALL"))
    spec = importlib.util.spec_from_file_location("cheaters", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["cheaters"] = example
    spec.loader.exec_module(example)

    async def main() -> list[object]:
        async with AsyncClient(home=yard.home) as client:
            rows: list[object] = await example.run(client, only=() if whole else SOME)
            return rows

    rows = asyncio.run(main())
    table = example.table(rows)
    with capsys.disabled():
        print(f"\n{table}")
    assert len(rows) == (19 if whole else len(SOME))
    assert [row.name for row in rows if not row.right] == [], table
    # The cheats are real: an ordinary layout pays for them.
    assert [row.name for row in rows if row.ordinary != 1.0] == [], table
