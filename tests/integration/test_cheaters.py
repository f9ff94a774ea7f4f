"""The example of cheats and honest controls: ours is right about each of them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from yard_home import YardHome, yard  # noqa: F401

from forkyard.client.aio import AsyncClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "cheaters.py"

# One of each kind. All nineteen agents take three minutes of two CPUs: FORKYARD_TEST_ALL=1.
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

    cells = [
        (cell.get("fill"), float(said.text or "nan"))
        for cell, said in pairwise(ElementTree.fromstring(example.as_svg(rows)))
        if cell.tag.endswith("rect")
    ]
    right, wrong = "#2da44e", "#cf222e"
    drawn = [cell for row in rows for cell in ((right if row.honest else wrong, 1.0), (right, row.ours))]
    assert cells == drawn
