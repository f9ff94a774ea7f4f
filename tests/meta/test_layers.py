"""Imports go down only, and no file grows too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "forkyard"
LONGEST = 600

GROUND = {"", "errors", "types", "requests", "access", "verbs", "wire", "config", "version"}
HOST = GROUND | {"host"}
PARTS = {"store", "engines", "guest", "egress", "audit", "oci"}
YARD = HOST | PARTS | {"yard"}
ABOVE = {"cli", "web", "rollouts", "integrations", "fleet"}

# What each part of the package may import, besides itself. ``setup`` prepares a host, down to
# warm templates, and is driven from the command line.
MAY: dict[str, set[str]] = {
    **{part: GROUND for part in GROUND},
    "host": GROUND,
    **{part: HOST for part in PARTS},
    "yard": HOST | PARTS,
    "setup": YARD,
    "daemon": YARD | {"setup"},
    "client": GROUND,
    **{part: GROUND | {"client"} for part in ABOVE},
    "cli": GROUND | {"client", "rollouts", "setup", "host", "audit"},
}
# The package itself offers the client's names (loaded when first used).
MAY[""] = GROUND | {"client"}


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _part(path: Path) -> str:
    words = path.relative_to(SOURCE).with_suffix("").parts
    return "" if words == ("__init__",) else words[0]


def _imports(tree: ast.AST) -> Iterator[str]:
    """The modules of forkyard that are imported when the code runs (not for type checking only)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _imports(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (
                f"{node.module}.{alias.name}" if node.module == "forkyard" else node.module or ""
                for alias in node.names
            )
        else:
            yield from _imports(node)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    part = _part(path)
    assert part in MAY, f"{part} has no place among the layers: give it one in this test"
    for module in _imports(ast.parse(path.read_text())):
        if module != "forkyard" and not module.startswith("forkyard."):
            continue
        target = module.split(".")[1] if "." in module else ""
        if target.startswith("__") or (target and target[0].isupper()):
            target = ""
        assert target == part or target in MAY[part], f"{part or 'the package'} imports {module}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST, f"split {path.name}"


def test_the_client_needs_two_packages_only() -> None:
    known = {"forkyard", "httpx", "msgspec"}
    # An extra, imported where an archive's URL asks for it: tests/unit/test_places.py does without.
    extras = {("places.py", "fsspec")}
    import sys

    for path in (SOURCE / "client").glob("*.py"):
        for module in _imports(ast.parse(path.read_text())):
            top = module.split(".")[0]
            if (path.name, top) not in extras:
                assert top in known or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_no_two_test_modules_have_one_name() -> None:
    """They are imported by their bare names: of two, one is not run."""
    names = [path.name for path in (SOURCE.parents[1] / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}
