"""Layers as streams: the same content comes out, and nothing else can be made of one."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import InvalidRequestError
from forkyard.store.layerstream import (
    DIR,
    FIFO,
    FILE,
    LINK,
    SAME,
    UP,
    WHITEOUT,
    Filler,
    Node,
    framed,
    pack,
)

MIB = 1 << 20
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


def stream(root: Path) -> bytes:
    return b"".join(pack(root))


@contextlib.contextmanager
def empty(path: Path) -> Iterator[Path]:
    path.mkdir()
    up = path / "up"
    up.mkdir()
    yield up
    assert os.listdir(path) == ["up"], "something was left beside the layer"


def fill(path: Path, data: bytes, step: int = 70_000) -> Path:
    with empty(path) as up:
        filler = Filler(up)
        try:
            for at in range(0, len(data), step):
                filler.feed(data[at : at + step])
            filler.finish()
        finally:
            filler.close()
    return up


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_bytes(b"content")
    (root / "a/b/file").chmod(0o4750)
    (root / "empty").touch()
    os.link(root / "a/b/file", root / "hard")
    os.symlink("../../etc/passwd", root / "a/link")
    os.mkfifo(root / "fifo", 0o640)
    (root / os.fsdecode(b"no-utf8-\xff")).write_bytes(b"x")
    (root / "closed").mkdir()
    (root / "closed").chmod(0o500)
    for path in (root / "a/b/file", root / "a", root):
        os.utime(path, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    return root


def test_everything_comes_out_as_it_was(tree: Path, tmp_path: Path) -> None:
    data = stream(tree)
    for step in (1 << 20, 7):
        up = fill(tmp_path / f"copy{step}", data, step)
        assert stream(up) == data
    assert (up / "a/b/file").read_bytes() == b"content"
    info = os.stat(up / "a/b/file")
    assert (stat.S_IMODE(info.st_mode), info.st_nlink) == (0o4750, 2)
    assert info.st_mtime_ns == os.stat(up).st_mtime_ns == 1_700_000_000_123_456_789
    assert os.path.samefile(up / "a/b/file", up / "hard")
    assert os.readlink(up / "a/link") == "../../etc/passwd"
    assert stat.S_ISFIFO(os.stat(up / "fifo").st_mode)


def test_the_same_content_has_the_same_stream_wherever_its_holes_are(tmp_path: Path) -> None:
    for name in ("sparse", "full"):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "file", "wb") as file:
            if name == "full":
                file.write(bytes(40 * MIB))
            for at in (0, 3 * MIB + 5, 40 * MIB - 1):
                file.seek(at)
                file.write(b"x")
        for path in (tmp_path / name / "file", tmp_path / name):
            os.utime(path, ns=(1, 1))
    data = stream(tmp_path / "sparse")
    assert data == stream(tmp_path / "full")
    assert len(data) < MIB
    copy = fill(tmp_path / "copy", data) / "file"
    assert copy.read_bytes() == (tmp_path / "full/file").read_bytes()
    assert copy.stat().st_blocks * 512 < MIB


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    try:
        (tmp_path / "deep").mkdir()
        fd = os.open(tmp_path / "deep", os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d" * 20, dir_fd=fd)
            inner = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        os.close(fd)
        data = stream(tmp_path / "deep")
        assert stream(fill(tmp_path / "copy", data)) == data
    finally:
        # pytest's own way to tidy up is a recursion
        subprocess.run(["rm", "-rf", tmp_path / "deep", tmp_path / "copy"], check=True)


@pytest.mark.root
def test_what_the_overlay_reads_survives(tmp_path: Path) -> None:
    root = tmp_path / "layer"
    (root / "opaque").mkdir(parents=True)
    os.setxattr(root / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(root / "opaque", "trusted.overlay.origin", b"another file system's")
    os.mknod(root / "gone", stat.S_IFCHR, 0)
    os.link(root / "gone", root / "gone-too")  # as overlayfs makes them
    os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    (root / "file").write_bytes(b"x")
    os.setxattr(root / "file", "user.note", b"mine")
    os.chown(root / "file", 1234, 4321)
    os.setxattr(root / "file", "security.capability", CAPABILITY)
    up = fill(tmp_path / "copy", stream(root))
    assert os.listxattr(up / "opaque") == ["trusted.overlay.opaque"]
    for name in ("gone", "gone-too"):
        info = os.stat(up / name)
        assert stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
    assert not (up / "disk").exists()
    assert sorted(os.listxattr(up / "file")) == ["security.capability", "user.note"]
    assert os.getxattr(up / "file", "user.note") == b"mine"
    assert (os.stat(up / "file").st_uid, os.stat(up / "file").st_gid) == (1234, 4321)


ROOT = Node(DIR, mode=0o755)
NO_CONTENT = bytes(12)


def bad(*pieces: Node | bytes) -> bytes:
    return b"".join(one if isinstance(one, bytes) else framed(one) for one in (ROOT, *pieces))


def file(name: bytes = b"f", **fields: Any) -> Node:
    return Node(FILE, name, 0o644, **fields)


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no root": framed(Node(DIR, b"etc")),
    "above": bad(file(b"..")),
    "absolute": bad(file(b"/etc/passwd")),
    "a path": bad(file(b"a/b")),
    "no name": bad(file(b"")),
    "a long name": bad(file(b"x" * 256)),
    "a zero in a name": bad(file(b"a\0b")),
    "a name twice": bad(file(), NO_CONTENT, file()),
    "a directory above": bad(Node(DIR, b"..")),
    "through a link": bad(Node(LINK, b"l", target=b"/etc"), Node(DIR, b"l", 0o755)),
    "a file through a link": bad(Node(LINK, b"l", target=b"/etc/passwd"), file(b"l")),
    "up from the root": bad(Node(UP), Node(UP)),
    "another name of nothing": bad(Node(SAME, b"s", link=7)),
    "another name of a directory": bad(Node(DIR, b"d", 0o755, link=1), Node(SAME, b"s", link=1)),
    "a device": bad(Node(99, b"sda")),
    "content outside": bad(file(size=10), (5).to_bytes(8, "big") + (10).to_bytes(4, "big"), b"x" * 10),
    "content twice": bad(file(size=99), *[(0).to_bytes(8, "big") + (9).to_bytes(4, "big") + b"x" * 9] * 2),
    "a huge piece": bad(file(size=1 << 40), bytes(8) + (1 << 30).to_bytes(4, "big")),
    "a huge entry": (1 << 30).to_bytes(4, "big"),
    "a size beyond all": bad(file(size=1 << 63)),
    "a size below zero": bad(file(size=-1)),
    "a mode beyond all": bad(Node(FIFO, b"f", 0o10000)),
    "no owner": bad(Node(FIFO, b"f", 0o644, uid=(1 << 32) - 1)),
    "a time beyond all": bad(Node(FIFO, b"f", 0o644, mtime_ns=1 << 63)),
    "the overlay's own word": bad(Node(DIR, b"d", 0o755, attributes=[("trusted.overlay.redirect", b"/x")])),
    "the store's own word": bad(Node(DIR, b"d", 0o755, attributes=[("user.forkyard.inherited", b"0")])),
    "a security label": bad(file(attributes=[("security.selinux", b"x")])),
    "no entry at all": bad((5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1"),
    "more after its end": bad(Node(UP), b"more"),
    "no end": bad(file(), NO_CONTENT),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_streams_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "outside").mkdir()
    before = os.stat("/etc").st_mtime_ns
    with pytest.raises(InvalidRequestError), empty(tmp_path / "copy") as up:
        filler = Filler(up)
        try:
            filler.feed(HOSTILE[what])
            filler.finish()
        finally:
            filler.close()
            assert os.listdir(tmp_path / "copy") == ["up"]
    assert os.stat("/etc").st_mtime_ns == before
    assert sorted(os.listdir(tmp_path)) == ["copy", "outside"]


def test_a_whiteout_has_no_number(tmp_path: Path) -> None:
    up = fill(tmp_path / "copy", bad(Node(WHITEOUT, b"w", 0o666), Node(UP)))
    assert os.stat(up / "w").st_rdev == 0
