"""Files through the real agent, running here as an ordinary process."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import plain_agent
import pytest
from plain_agent import ME, Wire, sh

from forkyard.errors import (
    AccessDeniedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from forkyard.guest import Guest

NAMES = ["emoji \U0001f600\nb'\".txt", "-rf", "n" * 255, " lead", "back\\slash", "\udcff\udcfe"]
root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_agent.build(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def wire(agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with plain_agent.running(agent, tmp_path_factory.mktemp("wire")) as w:
        yield w


@pytest.fixture
async def guest(wire: Wire) -> AsyncIterator[Guest]:
    async with plain_agent.attached(wire) as g:
        yield g


@pytest.mark.parametrize("name", NAMES)
async def test_names_are_bytes(guest: Guest, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    await guest.write_file(path, b"content", user=ME)
    assert await guest.read_bytes(path, user=ME) == b"content"
    (entry,) = await guest.list_dir(str(tmp_path), user=ME)
    assert (entry.name, entry.path, entry.type, entry.size) == (name, path, "file", 7)
    await guest.remove(path, user=ME)
    assert await guest.list_dir(str(tmp_path), user=ME) == []


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 5_000_001])
async def test_content_is_exact(guest: Guest, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    info = await guest.write_file(str(tmp_path / "f"), data, user=ME)
    assert info.size == size and (tmp_path / "f").read_bytes() == data
    assert await guest.read_bytes(str(tmp_path / "f"), user=ME) == data


async def test_parts_of_a_file(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 1000)
    parts = [c async for c in guest.read_file(str(tmp_path / "f"), user=ME, offset=1000, length=100_000)]
    assert b"".join(parts) == (bytes(range(256)) * 1000)[1000:101_000]
    with pytest.raises(InvalidRequestError):
        await guest.read_bytes(str(tmp_path / "f"), user=ME, max_bytes=1000)


async def test_proc_files_have_no_size_and_content(guest: Guest) -> None:
    assert (await guest.read_bytes("/proc/self/status", user=ME)).startswith(b"Name:")


async def test_writing_makes_parents_and_keeps_the_mode(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "a/b/c"
    await guest.write_file(str(path), b"1", user=ME, mode=0o750)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    await guest.write_file(str(path), b"2", user=ME)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o750, b"2")
    with pytest.raises(NotFoundError):
        await guest.write_file(str(tmp_path / "x/y"), b"", user=ME, parents=False)


async def test_writing_follows_a_link_and_leaves_no_temporary(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    await guest.write_file(str(tmp_path / "link"), b"new", user=ME)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


async def test_writing_through_a_link_that_leads_nowhere(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/second").symlink_to("new")
    (tmp_path / "first").symlink_to("dir/second")
    await guest.write_file(str(tmp_path / "first"), b"new", user=ME)
    assert (tmp_path / "first").is_symlink() and (tmp_path / "dir/second").is_symlink()
    assert (tmp_path / "dir/new").read_bytes() == b"new"
    (tmp_path / "gone").symlink_to("no/such/directory")
    with pytest.raises(NotFoundError):
        await guest.write_file(str(tmp_path / "gone"), b"", user=ME)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(InvalidRequestError):
        await guest.write_file(str(tmp_path / "round"), b"", user=ME)
    assert sorted(os.listdir(tmp_path)) == ["dir", "first", "gone", "round"]


async def test_an_upload_that_stops_changes_nothing(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(100_000)
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        await guest.write_file(str(tmp_path / "f"), broken(), user=ME)
    await guest.ping()
    assert (tmp_path / "f").read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


async def test_uploads_side_by_side_are_exact(guest: Guest, tmp_path: Path) -> None:
    """Small ones end while large ones have data in the agent's buffer."""
    content = {f"{i}": os.urandom(700_000 if i % 2 else 3000) for i in range(8)}

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1 << 16):
            yield data[at : at + (1 << 16)]
            await asyncio.sleep(0)

    async def upload(name: str) -> None:
        for _ in range(6 if len(content[name]) < 1 << 16 else 2):
            await guest.write_file(str(tmp_path / name), pieces(content[name]), user=ME)

    for _ in range(3):
        async with asyncio.TaskGroup() as tg:
            for name in content:
                tg.create_task(upload(name))
        for name, data in content.items():
            assert (tmp_path / name).read_bytes() == data, f"{name} is not what was sent"


async def test_a_stalled_download_holds_nobody_up(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 << 20))
    download = guest.read_file(str(tmp_path / "f"), user=ME)
    first = await anext(download)
    assert (await sh(guest, "echo ok"))[0] == b"ok\n"
    assert await guest.read_bytes(str(tmp_path / "f"), user=ME) == bytes(3 << 20)
    rest = [c async for c in download]
    assert len(first) + sum(map(len, rest)) == 3 << 20


async def test_what_is_no_file(guest: Guest, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        await guest.read_bytes(str(tmp_path), user=ME)
    with pytest.raises(InvalidRequestError):
        await guest.read_bytes("/dev/zero", user=ME)
    with pytest.raises(InvalidRequestError):
        await guest.write_file(str(tmp_path), b"", user=ME)
    with pytest.raises(NotFoundError, match="nothing-here"):
        await guest.read_bytes(str(tmp_path / "nothing-here"), user=ME)
    os.mkfifo(tmp_path / "fifo")
    async with asyncio.timeout(5):
        with pytest.raises(InvalidRequestError):
            await guest.read_bytes(str(tmp_path / "fifo"), user=ME)
    for path in ("", "a\0b", "x" * 5000):
        with pytest.raises(InvalidRequestError):
            await guest.stat(path, user=ME)


async def test_stat_and_links(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    await guest.symlink(str(tmp_path / "l"), "f", user=ME)
    assert await guest.readlink(str(tmp_path / "l"), user=ME) == "f"
    assert (await guest.stat(str(tmp_path / "l"), user=ME)).type == "file"
    link = await guest.stat(str(tmp_path / "l"), user=ME, follow=False)
    assert (link.type, link.target) == ("link", "f")
    await guest.chmod(str(tmp_path / "f"), 0o611, user=ME)
    await guest.utime(str(tmp_path / "f"), atime=1000, mtime=2000.5, user=ME)
    info = await guest.stat(str(tmp_path / "f"), user=ME)
    assert (info.mode, info.mtime, info.size, info.uid) == (0o611, 2000.5, 5, os.getuid())
    with pytest.raises(ConflictError):
        await guest.symlink(str(tmp_path / "l"), "f", user=ME)


async def test_directories(guest: Guest, tmp_path: Path) -> None:
    await guest.mkdir(str(tmp_path / "a/b"), user=ME)
    await guest.mkdir(str(tmp_path / "a/b"), user=ME)
    with pytest.raises(ConflictError):
        await guest.mkdir(str(tmp_path / "a"), user=ME, parents=False)
    await guest.rename(str(tmp_path / "a/b"), str(tmp_path / "c/d"), user=ME, parents=True)
    assert (tmp_path / "c/d").is_dir()
    with pytest.raises(ConflictError):
        await guest.remove(str(tmp_path / "c"), user=ME)
    await guest.remove(str(tmp_path / "c"), user=ME, recursive=True)
    assert not (tmp_path / "c").exists()


async def test_a_large_tree_is_removed_and_its_link_targets_are_not(guest: Guest, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    tree = tmp_path / "tree"
    for i in range(40):
        (tree / f"d{i}/e").mkdir(parents=True)
        for k in range(30):
            (tree / f"d{i}/e/f{k}").write_text("")
        (tree / f"d{i}/link").symlink_to(outside)
    assert len(await guest.list_dir(str(tree), user=ME)) == 40
    await guest.remove(str(tree), recursive=True, user=ME)
    assert not tree.exists() and (outside / "kept").exists()


async def test_many_entries_are_listed(guest: Guest, tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"file-with-a-rather-long-name-{i:05}").write_text("")
    entries = await guest.list_dir(str(tmp_path), user=ME)
    assert [e.name for e in entries] == [f"file-with-a-rather-long-name-{i:05}" for i in range(3000)]


@root
async def test_another_users_rights(guest: Guest, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = Path("/var/tmp") / f"fyt-rights-{os.getpid()}"
    base.mkdir(mode=0o755)
    try:
        (base / "secret").write_text("x")
        (base / "secret").chmod(0o600)
        (base / "shared").write_text("old")
        os.chown(base / "shared", 65534, 65534)
        with pytest.raises(AccessDeniedError):
            await guest.read_bytes(str(base / "secret"), user="65534")
        with pytest.raises(AccessDeniedError):
            await guest.write_file(str(base / "new"), b"", user="65534")
        await guest.write_file(str(base / "shared"), b"new", user="65534")
        assert (base / "shared").read_text() == "new" and (base / "shared").stat().st_uid == 65534
        await guest.write_file(str(base / "shared"), b"root", user="0")
        assert (base / "shared").stat().st_uid == 65534
        await guest.write_file(str(base / "roots"), b"", user="0")
        assert (base / "roots").stat().st_uid == 0
        assert (await sh(guest, "id -u", user="65534"))[0] == b"65534\n"
    finally:
        await guest.remove(str(base), recursive=True, user="0")
