"""What the disk store tells of boxes, and of what nobody owns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["BoxDisk", "Stray"]


@dataclass(frozen=True, slots=True)
class BoxDisk:
    """A box's disk: mounted on ``rootfs``; ``volume`` is what a seal seals."""

    box: str
    rootfs: Path
    volume: Path
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that nothing owns: a ``box``, a ``layer``, layers' ``image``, an image's ``tree``, by id."""

    kind: Literal["box", "layer", "image", "tree"]
    name: str
