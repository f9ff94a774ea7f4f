"""Comparing stacks of layers by what they are: trees under an overlay, or images of disks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from forkyard.store import overlay
from forkyard.store.changed import Changed, changed_since
from forkyard.store.layers import Layers
from forkyard.store.overlay import Difference, Layer, Unreadable

__all__ = ["compare_trees"]

T = TypeVar("T")


def compare_trees(
    layers: Layers,
    new: Sequence[str],
    old: Sequence[str],
    take: Callable[[Iterator[Difference]], T],
    *,
    box: Path | None,
    leave_out: Callable[[str], bool],
    unreadable: Unreadable | None,
    stop: Callable[[], bool],
) -> T:
    """See :meth:`forkyard.store.disks.DiskStore.compare`; ``box`` is the volume of the box."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Layer] = {}
        for name in (*new, *old):
            if name not in opened:
                local = layers.volume(name) is not None
                opened[name] = Layer(layers.path(name), local=local)
                stack.callback(opened[name].close)
        return take(
            overlay.compare(
                [opened[name] for name in new],
                [opened[name] for name in old],
                changed=_changed(layers, new, old, box),
                leave_out=leave_out,
                unreadable=unreadable,
                stop=stop,
            )
        )


def _changed(layers: Layers, new: Sequence[str], old: Sequence[str], box: Path | None) -> Changed | None:
    """What btrfs knows of the difference, where only the top layers differ."""
    if layers.backend.kind != "btrfs" or not new or not old or list(new[1:]) != list(old[1:]):
        return None
    tops = layers.volume(new[0]), layers.volume(old[0])
    if tops[0] is None or tops[1] is None or tops[0] == tops[1]:
        return None
    try:
        return changed_since(tops[0], tops[1], () if box is None else (box,))
    except OSError:
        return None  # the comparison then looks at everything
