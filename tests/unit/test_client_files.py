"""Files and trees through the client."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_thread import ThreadedDaemon

from forkyard import Client, ConflictError, InvalidRequestError, NotFoundError, Sandbox, UnavailableError
from forkyard.client.trees import Packer, Unpacker


@pytest.fixture
def box(client: Client) -> Sandbox:
    client.create_sandbox("box")
    return client.sandbox("box")


NAMES = ["emoji \N{SNAKE}\nb'\".txt", "-rf", "x" * 255, "deep/er/file", " "]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 10, (1 << 20) + 1, 20 << 20])
def test_what_is_written_is_read(box: Sandbox, name: str, size: int) -> None:
    data = os.urandom(4096) * (size // 4096 + 1)
    box.write_file(name, data[:size])
    assert box.read_file(name) == data[:size]
    if size <= 10:
        return
    box.write_file(name, io.BytesIO(data[:size]), mode=0o750)
    assert box.read_file(name) == data[:size]
    assert box.stat(name).mode == 0o750


def test_many_files(box: Sandbox) -> None:
    files = {f"d/{i}": os.urandom(i * 1000) for i in range(50)} | {"big": os.urandom(9 << 20), "t": "text"}
    box.write_files(files)
    read = box.read_files(list(files))
    assert read == files | {"t": b"text"}
    assert [info.name for info in box.list_files("d")][:2] == ["0", "1"]
    with pytest.raises(NotFoundError):
        box.read_files(["t", "none"])


def test_names_that_are_no_text(box: Sandbox) -> None:
    box.shell("printf x > \"$(printf 'raw\\377')\"")
    assert [info.name for info in box.list_files()] == [r"raw\udcff"]
    with pytest.raises(InvalidRequestError):
        box.read_file("raw\udcff")


def test_moving_and_removing(box: Sandbox) -> None:
    box.make_dir("a/b")
    box.write_file("a/b/c", "x")
    box.move("a", "z")
    assert box.read_text("z/b/c") == "x"
    box.remove("z")
    with pytest.raises(NotFoundError):
        box.stat("z")


def test_an_upload_that_breaks_off_leaves_nothing(box: Sandbox) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * (2 << 20)
        raise RuntimeError("the disk here broke")

    with pytest.raises(RuntimeError, match="disk here"):
        box.write_file("half", pieces())
    with pytest.raises(NotFoundError):
        box.read_file("half")
    # And the client goes on.
    box.write_file("half", "whole")
    assert box.list_files()[0].name == "half"


def tree_at(root: Path) -> dict[str, tuple]:
    found = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = 0 if path.is_symlink() else info.st_mode & 0o7777
        found[str(path.relative_to(root))] = (mode, what)
    return found


def test_trees_there_and_back(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "script").write_text("#!/bin/sh\n")
    (source / "script").chmod(0o755)
    (source / "sub" / "data").write_bytes(os.urandom(3 << 20))
    (source / "sub" / "readonly").mkdir(mode=0o555)
    (source / "link").symlink_to("sub/data")
    (source / "sub" / "up").symlink_to("../script")
    for name in ("emoji \N{SNAKE}\nb'\".txt", "-rf", "x" * 255, os.fsdecode(b"raw\xff")):
        (source / name).write_text(name, errors="surrogateescape")
    os.mkfifo(source / "fifo")
    sent = box.upload(source, "env")
    assert sent.skipped == ["fifo"]
    got = box.download("env", tmp_path / "target")
    (source / "fifo").unlink()
    assert tree_at(tmp_path / "target") == tree_at(source)
    assert (got.files, got.skipped) == (sent.files, [])
    # Again, over what is there.
    box.download("env", tmp_path / "target")
    assert tree_at(tmp_path / "target") == tree_at(source)


def test_single_files_and_where_they_go(box: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo hi")
    script.chmod(0o755)
    box.upload(script, "there/renamed")
    box.upload(str(script), "there/")
    box.make_dir("dir")
    box.upload(script, "dir")
    assert box.stat("there/renamed").mode == 0o755
    assert box.read_text("there/run.sh") == box.read_text("dir/run.sh") == "echo hi"
    box.download("dir/run.sh", tmp_path / "new" / "name")
    box.download("dir/run.sh", str(tmp_path / "into") + "/")
    assert (tmp_path / "new" / "name").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "into" / "run.sh").read_text() == "echo hi"
    with pytest.raises(NotFoundError):
        box.upload(tmp_path / "none", "x")
    with pytest.raises(NotFoundError):
        box.download("none", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_link_to_a_tree_is_followed(daemon: ThreadedDaemon, box: Sandbox, tmp_path: Path) -> None:
    box.write_file("home/a", "1")
    box.shell("ln -s home workspace")
    box.download("workspace", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "1"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.uid, info.gid = os.geteuid(), os.getegid()
    return info


def archive(*members: tarfile.TarInfo, data: bytes = b"evil") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info in members:
            if info.isreg():
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            else:
                tar.addfile(info)
    return buffer.getvalue()


HOSTILE = {
    "absolute": [member("/tmp/forkyard-evil")],
    "up": [member("../evil"), member("a/../../evil"), member("a/..")],
    "the root": [member("."), member("")],
    "link to /etc": [member("etc", tarfile.SYMTYPE, "/etc")],
    "link up": [member("up", tarfile.SYMTYPE, "../"), member("a/up", tarfile.SYMTYPE, "../../x")],
    "up from a link": [
        member("a/b/c", tarfile.SYMTYPE, "../b"),
        member("out", tarfile.SYMTYPE, "a/b/c/../../../.."),
    ],
    "device": [
        member("null", tarfile.CHRTYPE),
        member("disk", tarfile.BLKTYPE),
        member("f", tarfile.FIFOTYPE),
    ],
    "hard link out": [member("passwd", tarfile.LNKTYPE, "/etc/passwd"), member("p", tarfile.LNKTYPE, "../x")],
    "hard link to what was there": [member("h", tarfile.LNKTYPE, "mine")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_outside_the_target(
    daemon: ThreadedDaemon, box: Sandbox, tmp_path: Path, case: str
) -> None:
    target = tmp_path / "outer" / "target"
    target.mkdir(parents=True)
    (target / "mine").write_text("mine")
    (tmp_path / "outer" / "x").write_text("outside")
    daemon.yard.hostile_tar = archive(*HOSTILE[case], member("good"))
    box.make_dir("t")
    got = box.download("t", target)
    names = {m.name.rstrip("/") for m in HOSTILE[case]} - {"a/b/c"}
    assert {name.rstrip("/") for name in got.skipped} == names
    assert (target / "good").read_bytes() == b"evil"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name in ("evil", "forkyard-evil")) == []
    assert not os.path.lexists("/tmp/forkyard-evil")
    assert [p.name for p in (tmp_path / "outer").iterdir() if p.name != "target"] == ["x"]


def test_no_file_is_written_through_a_link(daemon: ThreadedDaemon, box: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    # A link of this archive, and one that was there before.
    (target / "old").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    box.make_dir("t")
    daemon.yard.hostile_tar = archive(member("file"))
    box.download("t", target)
    assert list(outside.iterdir()) == []
    assert (target / "file").read_bytes() == b"evil"
    for members in (
        [member("old/evil")],
        [member("new", tarfile.SYMTYPE, "sub"), member("new/evil")],
        [member("dir", tarfile.DIRTYPE), member("dir")],
    ):
        daemon.yard.hostile_tar = archive(*members)
        with pytest.raises(ConflictError):
            box.download("t", target)
    assert list(outside.iterdir()) == []


def test_privileges_are_dropped(daemon: ThreadedDaemon, box: Sandbox, tmp_path: Path) -> None:
    box.make_dir("t")
    daemon.yard.hostile_tar = archive(member("s", mode=0o6755))
    box.download("t", tmp_path / "x")
    assert (tmp_path / "x" / "s").stat().st_mode & 0o7777 == 0o755


def test_a_torn_archive_is_an_error(daemon: ThreadedDaemon, box: Sandbox, tmp_path: Path) -> None:
    box.make_dir("t")
    daemon.yard.hostile_tar = archive(member("a"), data=b"x" * 100_000)[:60_000]
    with pytest.raises(UnavailableError, match="tar"):
        box.download("t", tmp_path / "x")


def test_a_feeder_is_not_left_waiting(tmp_path: Path) -> None:
    unpacker = Unpacker(tmp_path / "x")
    with pytest.raises(UnavailableError):
        for _ in range(1000):
            unpacker.feed(b"not a tar archive" * 1000)
        unpacker.finish()
    unpacker.abort()


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (3 << 20))
    pieces = iter(Packer(tmp_path))
    next(pieces)
    next(pieces)
    os.truncate(tmp_path / "f", 10)
    with pytest.raises(Exception, match="shorter"):
        list(pieces)
