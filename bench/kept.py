"""Kept runs: their raw samples, report and page, each compared with the run before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.cases import Row
from bench.page import page
from bench.report import Figure, figures, markdown


def last_kept(directory: Path) -> tuple[str, dict[str, dict[str, Figure]]]:
    """The newest kept run's name and figures; nothing of either if there is none."""
    names = sorted(path.stem for path in directory.glob("20*.json"))
    if not names:
        return "", {}
    raw = json.loads((directory / f"{names[-1]}.json").read_text())
    return names[-1], figures(Row(*row) for row in raw["rows"])


def write(directory: Path, name: str, about: dict[str, Any], rows: list[Row], failures: list[str]) -> Path:
    """Keep the raw samples, the report and the page, as ``name.json``, ``.md`` and ``.html``, compared
    with the last kept run; returns the report's path."""
    directory.mkdir(parents=True, exist_ok=True)
    before_name, before = last_kept(directory)
    raw = {
        "about": about,
        "failures": failures,
        "columns": ["metric", "contender", "round", "value", "unit"],
        "rows": [[row.metric, row.contender, row.round, row.value, row.unit] for row in rows],
    }
    if before:
        about = {**about, "compared with": before_name}
    (directory / f"{name}.json").write_text(json.dumps(raw, separators=(",", ":")) + "\n")
    (directory / f"{name}.html").write_text(page(about, figures(rows), failures, before, before_name))
    path = directory / f"{name}.md"
    path.write_text(markdown(about, rows, failures, before))
    return path
