from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forkyard.host import mounts

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean_host")]


def _tree(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def test_overlay_with_upper(tmp_home):
    a, b = _tree(tmp_home / "a", x="top"), _tree(tmp_home / "b", x="below", y="only")
    up, wk, root = (_tree(tmp_home / name) for name in ("up", "wk", "root"))
    mounts.mount_overlay([a, b], up, wk, root)
    try:
        assert (root / "x").read_text() == "top" and (root / "y").read_text() == "only"
        (root / "x").write_text("new")
        os.unlink(root / "y")
        assert (up / "x").read_text() == "new" and (b / "y").exists() and mounts.is_mount(root)
        assert mounts.mounts_below(tmp_home) == [root]
    finally:
        assert mounts.unmount(root)
    assert not mounts.unmount(root) and not mounts.is_mount(root)
    assert not mounts.unmount(tmp_home / "absent")


def test_read_only_of_one_and_of_two(tmp_home):
    a, b, root = _tree(tmp_home / "a", x="a"), _tree(tmp_home / "b", y="b"), _tree(tmp_home / "root")
    for lowers in ([a], [a, b]):
        mounts.mount_overlay(lowers, None, None, root)
        try:
            assert (root / "x").read_text() == "a"
            with pytest.raises(OSError) as caught:
                (root / "z").write_text("no")
            assert caught.value.errno == errno.EROFS
        finally:
            mounts.unmount(root)
    assert mounts.mounts_below(tmp_home) == []


def test_three_hundred_layers_and_the_kernels_words(tmp_home):
    layers = [_tree(tmp_home / f"a-long-name-of-a-layer-{n:03}", **{f"f{n}": str(n)}) for n in range(300)]
    up, wk, root = (_tree(tmp_home / name) for name in ("up", "wk", "root"))
    mounts.mount_overlay(layers, up, wk, root, volatile=True)
    try:
        assert len(os.listdir(root)) == 300 and (root / "f299").read_text() == "299"
    finally:
        mounts.unmount(root)
    with pytest.raises(OSError, match="limit is 500"):
        mounts.mount_overlay(layers * 2, up, _tree(tmp_home / "wk2"), root)
    with pytest.raises(OSError, match="absent"):
        mounts.mount_overlay([tmp_home / "absent"], up, wk, root)


def test_stacked_mounts_and_spaces_in_names(tmp_home):
    a, root = _tree(tmp_home / "a b", x="1"), _tree(tmp_home / "ro ot\\x")
    for _ in range(2):
        mounts.bind_read_only(a, root)
    assert mounts.mounts_below(tmp_home) == [root, root]
    mounts.unmount(root)
    assert mounts.mounts_below(tmp_home) == []
