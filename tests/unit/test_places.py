"""Where archives are written to and read from."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from forkyard.client.places import Target, is_repeatable, pieces
from forkyard.errors import (
    AccessDeniedError,
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)


def write(url: str | Path, data: bytes) -> list[int]:
    told: list[int] = []
    target = Target(url, told.append)
    target.open()
    for at in range(0, len(data), 100_000):
        target.gather(data[at : at + 100_000])
        if target.is_due:
            target.flush()
    target.commit()
    return told


def read(url: str | Path) -> bytes:
    return b"".join(pieces(url))


SECRET = "broken://key:secret@host/x?token=secret"


class Broken(fsspec.AbstractFileSystem):
    """Has errors of its own, as those of clouds do."""

    protocol = "broken"

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        raise RuntimeError(f"no answer for {SECRET}")


DATA = os.urandom(3_000_000)


@pytest.mark.parametrize("kind", ["path", "file", "memory", "fsspec's own file", "chain"])
def test_it_appears_whole_and_comes_back(tmp_path: Path, kind: str) -> None:
    url = {
        "path": tmp_path / "snap",
        "file": f"file://{tmp_path}/a%20snap",
        "memory": f"memory://{tmp_path.name}/snap",
        "fsspec's own file": f"local://{tmp_path}/snap",
        "chain": f"simplecache::memory://{tmp_path.name}/chained",
    }[kind]
    if kind == "chain":
        write(f"memory://{tmp_path.name}/chained", DATA)
    else:
        told = write(url, DATA)
        assert told == sorted(told) and told[-1] == len(DATA)
    assert read(url) == DATA
    if kind == "file":
        assert os.listdir(tmp_path) == ["a snap"]


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_what_is_given_up_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "snap") if kind == "path" else f"memory://{tmp_path.name}/snap"
    target = Target(url)
    target.open()
    target.gather(DATA)
    target.flush()
    target.discard()
    with pytest.raises(NotFoundError):
        read(url)
    write(url, b"old")
    target = Target(url)
    target.open()
    target.gather(DATA)
    target.flush()
    target.discard()
    assert read(url) == b"old"
    assert os.listdir(tmp_path) == (["snap"] if kind == "path" else [])


def test_a_pipe_is_written_as_it_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write(tmp_path / "pipe", DATA)
    reader.join()
    assert got == [DATA]
    assert not is_repeatable(tmp_path / "pipe") and not is_repeatable("/dev/stdin")
    assert is_repeatable(tmp_path / "file") and is_repeatable("memory://x/y")


def test_without_fsspec_paths_work_and_urls_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    write(tmp_path / "snap", b"x")
    assert read(f"file://{tmp_path}/snap") == b"x"
    for call in (lambda: write("s3://bucket/x", b"x"), lambda: read("s3://bucket/x")):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert "forkyard[fsspec]" in caught.value.hint


def test_what_goes_wrong_is_told_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        write(tmp_path / "nowhere/snap", b"x")
    with pytest.raises(NotFoundError):
        read(tmp_path / "snap")
    with pytest.raises(InvalidRequestError):
        read(tmp_path)
    with pytest.raises(InvalidRequestError):
        read("")
    with pytest.raises(UnsupportedError, match="nosuch"):
        read("nosuch://key:secret@host/x")
    with pytest.raises(CapacityError):
        write("/dev/full", b"x")
    fsspec.register_implementation("broken", Broken, clobber=True)
    for call in (lambda: read(SECRET), lambda: write(SECRET, b"x")):
        with pytest.raises(UnavailableError, match=r"broken://host/x: .*no answer") as caught:
            call()
        assert "secret" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessDeniedError):
        write(tmp_path / "snap", b"x")
