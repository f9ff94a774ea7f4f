"""One home per engine and worker, and the lives of its daemons: for every suite that runs on each engine.

Import ``kind``, ``home`` and, where daemons die, ``lives`` into a conftest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lives import Life, bury
from yards import Home, Kind, kinds, new_home

from forkyard.yard import machines

Lives = Callable[[], Life]


@pytest.fixture(scope="session", params=kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="session")
def home(kind: Kind) -> Iterator[Home]:
    """One for all tests of an engine in a worker: they clean up behind themselves."""
    with new_home(kind, store_gb=4) as home:
        yield home


@pytest.fixture
def lives(home: Home, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    """Begins the next life of one home; the last one has to leave a clean host."""
    if not kind.real:  # it answers in a millisecond, or is paused
        monkeypatch.setattr(machines, "PAUSED_S", 0.2)
    lived: list[Life] = []

    def begin() -> Life:
        lived.append(Life(home))
        return lived[-1]

    try:
        yield begin
        if lived:
            lived[-1].run(_tidy(lived[-1]))
            lived[-1].close()
    finally:
        bury()


async def _tidy(life: Life) -> None:
    """A template is not what a yard without sandboxes has."""
    if life.yard.yard.templates.find("pulled") is not None:
        await life.yard.yard.making.delete("pulled", life.yard.caller)
