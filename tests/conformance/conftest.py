"""One suite, every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from yard_fixtures import home, kind, lives  # noqa: F401
from yards import Home, TestYard, opened


@pytest.fixture
async def yard(home: Home) -> AsyncIterator[TestYard]:  # noqa: F811
    """An open yard without sandboxes; whatever the test leaves in it must go without a trace."""
    async with opened(home) as yard:
        yield yard
        await yard.empty()
        await yard.assert_clean()
