"""The blocking client on a daemon whose yard is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_thread import ThreadedDaemon

from forkyard import Client


@pytest.fixture
def daemon() -> Iterator[ThreadedDaemon]:
    it = ThreadedDaemon()
    yield it
    it.close()


@pytest.fixture
def client(daemon: ThreadedDaemon) -> Iterator[Client]:
    with Client(socket=daemon.socket, start=False) as client:
        yield client
