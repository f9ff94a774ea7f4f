"""Fixtures for tests against the real host. Their teardown asserts that it is as clean as before."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_state import cgroups_like, eventually, loops_below, processes_below

from forkyard.host import mounts

_HOMES: list[Path] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def tmp_home() -> Iterator[Path]:
    """A new FORKYARD_HOME with a short path. Afterwards nothing may be mounted, looped or running in it."""
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="fyt-", dir="/var/tmp")))
    _HOMES.append(home)
    try:
        yield home
        assert mounts.mounts_below(home) == []
        # What was killed goes a moment later, and so does a loop device after its last user.
        eventually(lambda: processes_below(home), 20)
        eventually(lambda: loops_below(home), 20)
    finally:
        for target in mounts.mounts_below(home):
            mounts.unmount(target)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def clean_host() -> Iterator[None]:
    """Asserts that no test leaves a mount or a cgroup behind (other programs' may come and go)."""
    yield
    assert [target for home in _HOMES for target in mounts.mounts_below(home)] == []
    assert cgroups_like(f"forkyard-test{os.getpid()}v") == []
