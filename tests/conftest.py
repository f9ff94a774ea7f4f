"""Fixtures for every kind of test. Their teardown asserts that the host is as clean as before."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

pytest.register_assert_rewrite("yards")

from yards import Home, Kind, TestYard, new_home, opened  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


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
