"""One suite, every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from yards import Home, Kind, TestYard, kinds, new_home, opened


@pytest.fixture(scope="session", params=kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="session")
def home(kind: Kind) -> Iterator[Home]:
    """One for all tests of an engine in a worker: they clean up behind themselves."""
    with new_home(kind, store_gb=4) as home:
        yield home


@pytest.fixture
async def yard(home: Home) -> AsyncIterator[TestYard]:
    """An open yard without sandboxes; whatever the test leaves in it must go without a trace."""
    async with opened(home) as yard:
        yield yard
        await yard.empty()
        await yard.assert_clean()
