"""Templates on disk: their records, their layers, and building one from a recipe."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from forkyard.host.files import rmtree, write_atomic
from forkyard.setup import debian
from forkyard.setup.recipes import Recipe
from forkyard.store.disks import DiskStore

__all__ = ["build_template", "in_place", "layer_paths", "read_template", "write_template"]


def read_template(home: Path, name: str) -> dict[str, Any] | None:
    """A template's record, or None."""
    try:
        record = json.loads((home / "templates" / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_template(home: Path, record: dict[str, Any]) -> None:
    directory = home / "templates"
    directory.mkdir(mode=0o700, exist_ok=True)
    write_atomic(directory / f"{record['name']}.json", json.dumps(record, indent=1) + "\n")


def in_place(home: Path, layer: str) -> bool:
    return (home / "store" / "layers" / layer / "up").is_dir()


async def build_template(home: Path, disks: DiskStore, recipe: Recipe) -> dict[str, Any]:
    """Build a recipe's template, and its parent first if that is not there; returns its record.

    A recipe with a parent becomes one layer on top of the parent's, made in the merged root.

    Raises:
        UnsupportedError: the host has no package source to build from.
        InternalError: a package or a command of the recipe failed; the message has its output.
    """
    key = recipe.key(system=debian.system())
    below: list[str] = []
    size = 0
    if recipe.parent is not None:
        parent = read_template(home, recipe.parent.name)
        if parent is None or parent["key"] != recipe.parent.key(system=debian.system()):
            parent = await build_template(home, disks, recipe.parent)
        below, size = parent["layers"], parent["size_bytes"]
    layer = f"t-{recipe.name}-{key[:12]}"
    await disks.drop_layer(layer)

    async def fill(up: Path) -> None:
        if not below:
            # mmdebstrap wants to make its target's content itself, and takes an empty directory.
            await debian.build_root(recipe, up)
            return
        scratch = up.with_name("root")
        work = up.with_name("work")
        for path in (scratch, work):
            path.mkdir(mode=0o700)
        lowers = [disks.layer_path(name) for name in below]
        try:
            await debian.build_upper(recipe, lowers, up, work, scratch)
        finally:
            scratch.rmdir()
            rmtree(work)

    size += await disks.import_layer(layer, fill)
    record = {
        "name": recipe.name,
        "key": key,
        "layers": [layer, *below],
        "user": recipe.user,
        "workdir": recipe.workdir,
        "env": dict(recipe.env),
        "created_at": time.time(),
        "size_bytes": size,
    }
    write_template(home, record)
    return record


def layer_paths(home: Path, layers: list[str]) -> list[Path]:
    """Where a home's layers lie, without opening its store."""
    paths = []
    for layer in layers:
        reference = None
        with contextlib.suppress(OSError, ValueError):
            reference = json.loads((home / "store" / "layers" / f"{layer}.json").read_text()).get("ref")
        paths.append(Path(reference) if reference else home / "store" / "layers" / layer / "up")
    return paths
