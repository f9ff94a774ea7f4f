"""Every example in the README and the guides is run, in the order in which a reader would.

Blocks of ``sh`` go to one bash, blocks of ``python`` to one interpreter for each page. A block
after ``<!-- not run: reason -->`` is left out; there are few, and they are counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401
from yards import kinds

from forkyard.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
GUIDES = (
    *("quickstart", "cli", "sdk", "remote", "run_code", "agents"),
    *("forking", "moving-snapshots", "diff", "explore", "templates", "egress", "grading", "design"),
    *("rollouts", "search", "rl", "engines"),
)
PAGES = ["README.md", *(f"docs/{name}.md" for name in GUIDES)]
NOT_RUN = 2
MICROVMS = kinds()[-1].values[0]

# The quickstart fetches a wheel, as its reader would.
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]


@dataclass
class Block:
    language: str
    text: str
    line: int
    left_out: bool


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"(<!-- not run: [^>]+ -->\n)?^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(match[2], match[3], line, match[1] is not None))
    return found


def stretches(page: str) -> list[tuple[str, str]]:
    """Neighbouring blocks of one language as one program; lines are numbered as in the page."""
    found: list[tuple[str, str]] = []
    for block in blocks(page):
        if block.left_out or block.language not in ("sh", "python"):
            continue
        if not found or found[-1][0] != block.language:
            found.append((block.language, ""))
        language, text = found[-1]
        text += "\n" * (block.line - 1 - text.count("\n")) + block.text
        found[-1] = (language, text)
    return found


def _marked(page: str) -> Any:
    missing = MICROVMS.missing if page == "docs/engines.md" else ""
    marks = [pytest.mark.skip(reason=missing)] if missing else []
    return pytest.param(page, marks=[*marks, *([pytest.mark.qemu] if "engines" in page else [])])


@pytest.mark.parametrize("page", [_marked(page) for page in PAGES])
def test_examples(page: str, own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    for language, text in stretches(page):
        name = tmp_path / f"{Path(page).name}.{language}"
        name.write_text(text)
        # -x: where it stopped is then the last line.
        runner = [sys.executable] if language == "python" else ["bash", "-xeuo", "pipefail"]
        said = name.with_suffix(".log")
        with said.open("wb") as log:
            code = subprocess.run(["timeout", "--kill-after=5", "120", *runner, str(name)], cwd=tmp_path,
                                  env=own_yard.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                  check=False).returncode
        assert code == 0, f"{page} (exit code {code}):\n{said.read_text()}"
    assert own_yard.names() == [], f"{page} leaves sandboxes behind"


def test_few_examples_are_left_out() -> None:
    left_out = [block for page in PAGES for block in blocks(page) if block.left_out]
    assert len(left_out) == NOT_RUN
    assert all(block.language in ("sh", "python", "json", "text") for page in PAGES for block in blocks(page))


def test_every_verb_is_described() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    for verb in VERBS:
        assert re.search(rf"`{verb}\b|forkyard {verb}\b", text), f"docs/cli.md says nothing of {verb}"


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, "SCOPE.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
