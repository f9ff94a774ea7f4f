"""Fixtures for every kind of test. Their teardown asserts that the host is as clean as before."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

ON_THE_HOST = [Path(__file__).parent / name for name in ("integration", "security")]
# Of the suites that run on each engine, what microVMs run too: without KVM a start takes seconds.
# FORKYARD_TEST_ALL_MICROVMS=1 has them run everything.
ON_MICROVMS = {
    *("test_boot_and_run", "test_two_machines_from_one_image", "test_reattach", "test_fork_of_a_fork"),
    *("test_kill_is_idempotent_and_leaves_no_process", "test_checkpoint_and_rewind"),
    *("test_all_forks_or_none", "test_stop_keeps_memory_and_disk", "test_results", "test_files"),
    *("test_a_dead_machine_fails_its_sandbox", "test_a_cancelled_creation_leaves_nothing"),
}

pytest.register_assert_rewrite("yards")
# A background job of a shell ignores it, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from plain_names import pytest_configure  # noqa: E402, F401
from yards import Home, Kind, TestYard, new_home, opened  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    meant, others = [], []
    for item in items:
        (meant if _is_meant(item) else others).append(item)
        if item.path.parent in ON_THE_HOST and not item.get_closest_marker("xdist_group"):
            # A module's yard is made once, by the worker that runs all of it.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = meant
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


def _is_meant(item: pytest.Item) -> bool:
    """Whether the marks ``only(condition)`` of a test hold for its parameters."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    kind = params.get("kind")
    if isinstance(kind, Kind) and kind.name == "qemu" and not os.environ.get("FORKYARD_TEST_ALL_MICROVMS"):
        chosen = getattr(item, "originalname", "") in ON_MICROVMS and item.path.parent.name == "conformance"
        if not chosen:
            return False
    return all(mark.args[0](**params) for mark in item.iter_markers("only"))


@pytest.fixture
def fake_home() -> Iterator[Home]:
    """A home for a yard of toy machines: no root, no disk image, made in milliseconds."""
    with new_home(Kind("fake")) as home:
        yield home


@pytest.fixture
async def fake_yard(fake_home: Home) -> AsyncIterator[TestYard]:
    """A yard of toy machines; what the test leaves in it is deleted, and nothing may be left then."""
    async with opened(fake_home) as yard:
        yield yard
        await yard.empty()
        await yard.assert_clean()
