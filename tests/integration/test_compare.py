"""Comparing stacks of layers, against what a walk over the mounted views finds."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
import pytest_asyncio

from forkyard.store.disks import DiskStore
from forkyard.store.overlay import Unreadable

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean_host")]

STEPS = [
    "rm gone; rm -rf opq; mkdir opq; echo 2 > opq/new; mkdir -p own/deep; echo a > own/deep/f; echo > own/g",
    "rm own/g; rm -rf own/deep; echo x > etc/hostname; ln etc/hostname etc/alias; ln -s nowhere sym",
    "echo back > gone; rm -rf etc; echo 'a file' > etc; mkdir own/deep; mkfifo own/pipe; chmod 600 own/pipe",
    "rm etc; mkdir etc; echo again > etc/hostname; rm -rf opq; chown 5:6 own; rm gone; ln -sf / sym",
    "touch -d yesterday etc/hostname; cp -a own same; mv own moved; head -c 200000 /dev/zero > zeros",
    "rm -rf moved; touch opq; rm opq; mkdir -p opq/sub; echo 3 > opq/sub/f; chmod 700 zeros; rm -rf same; "
    "ln -s /etc/passwd same; printf x | dd of=zeros bs=1 seek=199999 conv=notrunc status=none",
]


@dataclasses.dataclass
class _Settings:
    store_gb: int = 2


@pytest_asyncio.fixture(params=["btrfs", "plain"])
async def store(request, tmp_home):
    disks = DiskStore(tmp_home, _Settings(), plain=request.param == "plain")
    await disks.open()
    yield disks
    for stray in disks.stray([], []):
        await disks.reap([stray])
    await disks.close()


def _sh(script: str, cwd: Path) -> None:
    subprocess.run(["bash", "-ec", script], cwd=cwd, check=True)


async def _base(store: DiskStore) -> str:
    async def fill(directory: Path) -> None:
        (directory / "etc").mkdir()
        (directory / "etc" / "hostname").write_text("base")
        (directory / "gone").write_text("x")
        (directory / "opq").mkdir()
        (directory / "opq" / "old").write_text("1")

    await store.import_layer("base", fill)
    return "base"


def _shown(root: Path) -> dict[str, str]:
    """Every path below ``root``, and all about it that counts as a difference."""
    shown = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = Path(directory) / name
            info = path.lstat()
            content = path.read_text() if stat.S_ISREG(info.st_mode) else ""
            content += os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
            shown[str(path.relative_to(root))] = f"{info.st_mode:o} {info.st_uid} {info.st_gid} {content}"
    return shown


def _expected(old: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    kinds = {path: "added" for path in new.keys() - old.keys()}
    kinds |= {path: "deleted" for path in old.keys() - new.keys()}
    return kinds | {path: "modified" for path in new.keys() & old.keys() if new[path] != old[path]}


async def _found(store: DiskStore, new: list[str], old: list[str], box: str | None = None) -> dict[str, str]:
    def take(differences):
        found = {}
        for one in differences:
            assert one.path not in found
            found[one.path] = "deleted" if one.new is None else "added" if one.old is None else "modified"
        return found

    return await store.compare(new, old, take, box=box)


async def test_stacks_differ_as_their_views_do(store):
    """Boxes that go on with a copy of a small layer, and their ancestors, each with each."""
    await _base(store)
    stacks, views = [["base"]], [None]
    chain = ["base"]
    for n, step in enumerate(STEPS):
        box = await store.create_box(f"bx{n}", chain, 100)
        views[0] = views[0] or _shown(box.rootfs)
        _sh(step, box.rootfs)
        await store.seal(f"bx{n}", f"l{n}")
        chain = [f"l{n}", *box.layers]
        stacks.append(chain)
        views.append(_shown(box.rootfs))
        if n % 2:  # a seal more, of the same box: a snapshot's younger sibling
            _sh(f"echo {n} > sibling; rm -f zeros", box.rootfs)
            await store.seal(f"bx{n}", f"m{n}")
            stacks.append([f"m{n}", *box.layers])
            views.append(_shown(box.rootfs))
            assert await _found(store, stacks[-1], stacks[-2], f"bx{n}") == _expected(views[-2], views[-1])
        else:
            assert await _found(store, stacks[-1], stacks[-2], f"bx{n}") == _expected(views[-2], views[-1])
        await store.remove_box(f"bx{n}")
    for old, before in zip(stacks, views, strict=True):
        for new, now in zip(stacks, views, strict=True):
            assert await _found(store, new, old) == _expected(before, now), (old, new)


async def test_large_layers_are_stood_on(store):
    await _base(store)
    box = await store.create_box("bx0", ["base"], 200)
    (box.rootfs / "etc/large").write_bytes(os.urandom(20 << 20))
    await store.seal("bx0", "l0")
    await store.create_box("bx1", ["l0", *box.layers], 200)
    again = store.rootfs("bx1")
    (again / "etc/large").chmod(0o600)  # copied up whole
    (again / "etc/hostname").unlink()
    await store.seal("bx1", "l1")
    assert await _found(store, ["l1", "l0", "base"], ["l0", "base"]) == {
        "etc/large": "modified", "etc/hostname": "deleted"}  # fmt: skip
    assert await _found(store, ["l0", "base"], ["l1", "l0", "base"]) == {
        "etc/large": "modified", "etc/hostname": "added"}  # fmt: skip


async def test_links_do_not_lead_out(store, tmp_path):
    """A directory that became a link to one of the host's is a link, and nothing of the host's is seen."""
    await _base(store)
    (tmp_path / "secret").write_text("the host's")
    box = await store.create_box("bx", ["base"], 100)
    for name in ("etc", "opq"):
        _sh(f"rm -rf {name}", box.rootfs)
        (box.rootfs / name).symlink_to(tmp_path)
    await store.seal("bx", "top")

    def take(differences):
        return {one.path: one.new and one.new.is_link and one.new.target() for one in differences}

    assert await store.compare(["top", "base"], ["base"], take) == {
        "etc": str(tmp_path), "etc/hostname": None, "opq": str(tmp_path), "opq/old": None}  # fmt: skip


async def test_paths_longer_than_the_kernel_takes(store):
    if store.kind == "plain":
        pytest.skip("a plain store's own copies stop at such paths")
    await _base(store)
    box = await store.create_box("bx", ["base"], 100)
    _sh("for i in $(seq 30); do mkdir $(printf %200s | tr ' ' x); cd x*; done; touch end", box.rootfs)
    await store.seal("bx", "top")
    unreadable = Unreadable()
    found = await store.compare(["top", "base"], ["base"], list, unreadable=unreadable)
    assert 19 <= len(found) <= 30 and len(unreadable.paths) == 1


async def test_a_comparison_can_be_stopped(store):
    await _base(store)
    with pytest.raises(InterruptedError):
        await store.compare(["base"], [], list, stop=lambda: True)


@pytest.mark.slow
async def test_few_changes_among_many_files_are_quick(tmp_home):
    """100,000 files on the disk, 50 changed since the last snapshot: what is unchanged is not looked at,
    whether it lies in a layer below or in the one that the box itself wrote."""
    store = DiskStore(tmp_home, _Settings())
    await store.open()

    async def best(new: list[str], old: list[str], box: str) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            assert len(await _found(store, new, old, box)) == 50
            times.append((time.perf_counter() - begun) * 1e3)
        return min(times)

    def change(root: Path, mark: str) -> None:
        for n in range(40):
            (root / f"d{n * 2}" / f"f{n * 25}").write_text(mark)
        for n in range(10):
            (root / f"d{n * 3 + 1}" / f"f{n * 7}").unlink()

    try:
        await _base(store)
        box = await store.create_box("bx0", ["base"], 2000)
        for d in range(100):
            (box.rootfs / f"d{d}").mkdir()
            for f in range(1000):
                (box.rootfs / f"d{d}" / f"f{f}").write_text(f"{d} {f}")
        await store.seal("bx0", "before")
        change(box.rootfs, "own")
        await store.seal("bx0", "after")
        own_ms = await best(["after", *box.layers], ["before", *box.layers], "bx0")
        fork = await store.create_box("bx1", ["before", *box.layers], 2000)
        change(fork.rootfs, "fork")
        await store.seal("bx1", "forked")
        fork_ms = await best(["forked", *fork.layers], ["before", *box.layers], "bx1")
        print(f"50 of 100,000: {own_ms:.1f} ms in the box's own layer, {fork_ms:.1f} ms on a fork")
        assert own_ms <= 100 and fork_ms <= 100
    finally:
        await store.sweep([], [])
        await store.close()
