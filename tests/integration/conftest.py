"""Fixtures for tests against the real host. Their teardown asserts that it is as clean as before."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.host import mounts

_HOMES: list[Path] = []
_CGROUPS = Path("/sys/fs/cgroup")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


def _loops_below(path: Path) -> list[str]:
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if backing.read_text().strip().startswith(str(path)):
                found.append(f"{backing.parent.parent.name}: {backing.read_text().strip()}")
        except OSError:
            continue
    return found


def _cgroups_like(tag: str) -> list[str]:
    return [str(path) for pattern in (f"{tag}*", f"*/{tag}*") for path in _CGROUPS.glob(pattern)]


@pytest.fixture
def tmp_home() -> Iterator[Path]:
    """A new FORKYARD_HOME with a short path. Afterwards nothing may be mounted, looped or running in it."""
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="fyt-", dir="/var/tmp")))
    _HOMES.append(home)
    try:
        yield home
        assert mounts.mounts_below(home) == []
        end = time.monotonic() + 5  # the kernel clears a loop device a moment after its last user
        while _loops_below(home) and time.monotonic() < end:
            time.sleep(0.01)
        assert _loops_below(home) == []
        assert _processes_below(home) == []
    finally:
        for target in mounts.mounts_below(home):
            mounts.unmount(target)
        shutil.rmtree(home, ignore_errors=True)


def _processes_below(path: Path) -> list[int]:
    """Processes with a working directory, root or open file below ``path``, ourselves included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        links = [process / "cwd", process / "root"]
        try:
            links += list((process / "fd").iterdir())
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith(f"{path}/"):
                found.append(int(process.name))
                break
    return found


@pytest.fixture
def clean_host() -> Iterator[None]:
    """Asserts that no test leaves a mount or a cgroup behind (other programs' may come and go)."""
    groups = set(_cgroups_like("forkyard-test"))
    yield
    assert [target for home in _HOMES for target in mounts.mounts_below(home)] == []
    assert set(_cgroups_like("forkyard-test")) - groups == set()
