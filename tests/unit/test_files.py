from __future__ import annotations

import hashlib
import os
import stat

import pytest

from forkyard.host import files


def test_write_atomic(tmp_path):
    path = tmp_path / "f"
    files.write_atomic(path, "one")
    files.write_atomic(path, b"two", mode=0o644, durable=False)
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["f"]


def test_a_failed_write_leaves_the_old_content(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("kept")
    with pytest.raises(OSError):
        files.write_atomic(tmp_path / "d", "a file over a directory")
    assert os.listdir(tmp_path) == ["d"] and (tmp_path / "d" / "x").read_text() == "kept"


def test_sha256_and_cancel(tmp_path):
    data = os.urandom(100_000)
    (tmp_path / "f").write_bytes(data)
    assert files.sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()
    with pytest.raises(InterruptedError):
        files.sha256_file(tmp_path / "f", cancelled=lambda: True)


def test_rmtree_of_any_depth(tmp_path):
    """What a guest made in its sandbox, or put into an archive: deeper than a stack or a path goes."""
    tree = tmp_path / "tree"
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY)
    for level in range(5000):
        os.mkdir("d", dir_fd=fd)
        if not level % 100:
            os.close(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    files.rmtree(tree)
    assert os.listdir(tmp_path) == []


def test_rmtree(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("stays")
    tree = tmp_path / "t"
    (tree / "closed" / "deep").mkdir(parents=True)
    (tree / "closed" / "deep" / "f").write_text("x")
    (tree / "link").symlink_to(outside)
    (tree / "closed" / "deep").chmod(0o500)
    (tree / "closed").chmod(0o000)
    files.rmtree(tree)
    files.rmtree(tree)
    assert not tree.exists() and outside.read_text() == "stays"
    outside.symlink_to("/nonexistent") if not outside.exists() else None
    files.rmtree(outside)
    assert not outside.exists()


def test_tree_bytes_counts_an_inode_once(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    once = files.tree_bytes(tmp_path)
    os.link(tmp_path / "f", tmp_path / "g")
    assert files.tree_bytes(tmp_path) == once >= 100_000
    assert files.tree_bytes(tmp_path / "absent") == 0
    assert files.free_mb(tmp_path) > 0
