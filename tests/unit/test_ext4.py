"""Disk images read without a kernel: what they show, their journal, and what is no file system."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.errors import CorruptSnapshotError
from forkyard.store import imagediff, trees
from forkyard.store.diskimages import _EXTENDED, _OPTIONS
from forkyard.store.ext4 import ROOT, Ext4, Malformed
from forkyard.store.overlay import Difference

pytestmark = pytest.mark.skipif(not shutil.which("mke2fs"), reason="needs e2fsprogs")


def made(source: Path, image: Path, *more: str) -> Path:
    argv = ["mke2fs", *_OPTIONS, "-E", _EXTENDED, *more, "-d", str(source), str(image), "32M"]
    subprocess.run(argv, check=True, capture_output=True)
    return image


def debugfs(image: Path, *requests: str) -> str:
    script = "\n".join(requests) + "\n"
    argv = ["debugfs", "-w", "-f", "-", str(image)]
    return subprocess.run(argv, input=script, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "dir/deep").mkdir(parents=True)
    (root / "dir/file").write_bytes(b"one\n")
    (root / "dir/file").chmod(0o750)
    os.link(root / "dir/file", root / "dir/again")
    os.symlink("../short", root / "dir/link")
    os.symlink("/" + "long/" * 50, root / "dir/long")
    os.mkfifo(root / "fifo")
    (root / "binary").write_bytes(random.Random(1).randbytes(3_000_001))
    with open(root / "sparse", "wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    for number in range(400):
        (root / f"dir/deep/{'x' * 100}{number}").touch()
    return root


@pytest.fixture(params=["1024", "4096"])
def image(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return made(source, tmp_path / "image", "-b", request.param)


@pytest.fixture
def fs(image: Path) -> Iterator[Ext4]:
    fd = os.open(image, os.O_RDONLY)
    yield Ext4(fd)
    os.close(fd)


def shown(root: Path) -> dict[str, tuple[object, ...]]:
    """What a tree holds."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content: object = None
        if stat.S_ISREG(info.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        times = () if stat.S_ISLNK(info.st_mode) else (int(info.st_mtime),)
        found[str(path.relative_to(root))] = (info.st_mode, info.st_uid, info.st_nlink, content, *times)
    return found


def test_a_tree_is_what_the_image_was_made_of(source: Path, fs: Ext4, tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.mkdir()
    trees.make_tree(fs, up)
    assert shown(up) == shown(source)
    assert (up / "dir/file").stat().st_ino == (up / "dir/again").stat().st_ino
    assert (up / "sparse").stat().st_blocks * 512 < 1_000_000
    assert sorted(os.listdir(tmp_path)) == ["image", "source", "up"]


def differences(new: Path, old: Path) -> dict[str, Difference]:
    def take(found: Iterator[Difference]) -> dict[str, Difference]:
        listed = {one.path: one for one in found}
        for one in listed.values():
            for side in (one.old, one.new):
                if side is not None and side.is_file:
                    side.read(100)
        return listed

    return trees.compare(("new", new), ("old", old), take, leave_out={"tmp"}.__contains__, stop=lambda: False)


def test_differences(source: Path, image: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copy(image, same)
    assert differences(same, image) == {}
    shutil.rmtree(source / "dir/deep")
    (source / "dir/deep").write_bytes(b"a file now")
    (source / "dir/file").chmod(0o755)
    (source / "dir/link").unlink()
    os.symlink("../other", source / "dir/link")
    with open(source / "binary", "r+b") as file:
        file.seek(2_000_000)
        file.write(b"changed")
    (source / "fifo").unlink()
    (source / "new/dir").mkdir(parents=True)
    (source / "new/dir/file").write_bytes(b"new")
    (source / "tmp").mkdir()
    (source / "sparse").write_bytes(bytes(5_000_000) + b"end")
    found = differences(made(source, tmp_path / "other"), image)
    names = {path for path in found if not path.startswith("dir/deep/")}
    assert names == {
        *("dir/deep", "dir/file", "dir/again", "dir/link", "binary", "fifo", "new", "new/dir", "new/dir/file")
    }
    assert len(found) == len(names) + 400
    assert {path for path, one in found.items() if not one.content} == {"dir/file", "dir/again"}
    kept = found["dir/deep"]
    assert kept.old is not None and kept.new is not None and kept.old.is_dir and kept.new.is_file
    assert found["fifo"].new is None and found["new/dir/file"].old is None


def test_a_file_that_only_lies_elsewhere_is_the_same(source: Path, image: Path, tmp_path: Path) -> None:
    (source / "a-first-one").write_bytes(bytes(100_000))
    assert set(differences(made(source, tmp_path / "other"), image)) == {"a-first-one"}


def test_content_is_read_in_parts(source: Path, fs: Ext4) -> None:
    inode = fs.inode(fs.names(fs.inode(ROOT))[b"binary"])
    assert fs.read(inode, 1 << 40) == (source / "binary").read_bytes()
    assert fs.read(inode, 10) == (source / "binary").read_bytes()[:10]
    hole = fs.inode(fs.names(fs.inode(ROOT))[b"sparse"])
    assert fs.read(hole, 6_000_000) == (source / "sparse").read_bytes()


def content(image: Path, name: bytes, limit: int = 1 << 30) -> bytes:
    fd = os.open(image, os.O_RDONLY)
    try:
        fs = Ext4(fd)
        return fs.read(fs.inode(fs.names(fs.inode(ROOT))[name]), limit)
    finally:
        os.close(fd)


@pytest.mark.parametrize("sums", [False, True])
def test_what_is_in_the_journal_counts(image: Path, tmp_path: Path, sums: bool) -> None:
    block = int(debugfs(image, "blocks binary").split()[-1])
    before = content(image, b"binary")
    with open(image, "rb") as file:
        size = 1024 << struct.unpack_from("<I", file.read(2048), 1048)[0]
    # What begins like the journal's own blocks is kept there in another form.
    changed = struct.pack(">I", 0xC03B3998) + b"J" * (size - 4)
    (tmp_path / "block").write_bytes(changed)
    (tmp_path / "ends").write_bytes(b"K" * size)
    opening = "jo" + " -c" * sums
    last = block - 1
    debugfs(image, opening, f"jw -b {last} {tmp_path}/block", "jc")
    at = (len(before) - 1) // size * size
    now = content(image, b"binary")
    assert now[at - size : at] == changed and now[: at - size] == before[: at - size]
    # A later transaction takes the first back, or replaces it.
    debugfs(image, opening, f"jw -r {last}", f"jw -b {block} {tmp_path}/ends", "jc")
    now = content(image, b"binary")
    assert now[:at] == before[:at] and now[at:] == b"K" * (len(before) - at)
    # As those see it who write the journal out first.
    subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False)
    assert content(image, b"binary") == now


def test_attributes(tmp_path: Path) -> None:
    root = tmp_path / "source"
    root.mkdir()
    (root / "file").touch()
    image = made(root, tmp_path / "image")
    long = "y" * 900
    debugfs(image, "ea_set file user.short x", f"ea_set file user.long {long}", "ea_set file trusted.t x")
    fd = os.open(image, os.O_RDONLY)
    try:
        fs = Ext4(fd)
        inode = fs.inode(fs.names(fs.inode(ROOT))[b"file"])
        assert dict(fs.attributes(inode)) == {
            "user.short": b"x",
            "user.long": long.encode(),
            "trusted.t": b"x",
        }
    finally:
        os.close(fd)


@pytest.mark.parametrize("feature", ["inline_data", "encrypt"])
def test_what_is_not_read_is_refused_by_name(source: Path, tmp_path: Path, feature: str) -> None:
    image = made(source, tmp_path / "image", "-O", feature)
    with pytest.raises(CorruptSnapshotError, match=f"feature {feature}"):
        differences(image, image)


def test_damage_is_an_error_and_no_more(image: Path, tmp_path: Path) -> None:
    """A guest may write whatever it likes: no exception but ours, and an end."""
    data = image.read_bytes()
    used = [at for at in range(0, len(data), 4096) if data[at : at + 4096].strip(b"\0")]
    rng = random.Random(7)
    bad, up = tmp_path / "bad", tmp_path / "up"
    shutil.copy(image, bad)
    errors = 0
    for _ in range(25):
        places = [rng.choice(used[:100]) + rng.randrange(4096) for _ in range(rng.choice((1, 20, 2000)))]
        with open(bad, "r+b") as file:
            for at in places:
                file.seek(at)
                file.write(bytes([rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))]))
        up.mkdir()
        try:
            differences(bad, image)
            with trees.opened(bad, "bad") as fs:
                trees.make_tree(fs, up)
        except (CorruptSnapshotError, OSError):
            errors += 1
        shutil.rmtree(up)
        with open(bad, "r+b") as file:
            for at in places:
                file.seek(at)
                file.write(data[at : at + 1])
    assert errors


def test_what_is_no_image(tmp_path: Path) -> None:
    for size in (0, 100, 1 << 20):
        path = tmp_path / "nothing"
        path.write_bytes(bytes(size))
        with pytest.raises(CorruptSnapshotError, match="cannot be read"):
            differences(path, path)


def test_a_directory_in_two_places_makes_no_end(image: Path, tmp_path: Path) -> None:
    debugfs(image, "ln dir dir/deep/loop")
    with pytest.raises(CorruptSnapshotError, match="in two places"):
        differences(image, made(tmp_path / "source/dir", tmp_path / "other"))
    with trees.opened(image, "image") as fs, pytest.raises(Malformed, match="in two places"):
        (tmp_path / "up").mkdir()
        trees.make_tree(fs, tmp_path / "up")


def test_where_two_files_share_blocks(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_bytes(os.urandom(1 << 20))
    os.sync()
    fd = os.open(one, os.O_RDONLY)
    try:
        found = list(imagediff._common(fd, fd))
    finally:
        os.close(fd)
    assert found in ([(0, 1 << 20)], [])  # nothing where the file system does not tell
