"""The blocking client on a daemon whose yard is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


@pytest.fixture
def url(client: Client) -> str:
    """The daemon listens there."""
    return client.listen("127.0.0.1:0").url or ""


@pytest.fixture
def join(client: Client, url: str) -> Iterator[Callable[..., Client]]:
    """A client with a token of its own: ``join(role="run", allow=...)``."""
    made: list[Client] = []

    def join(**rights: object) -> Client:
        token = client.new_token(f"t{len(made)}", **(rights or {"role": "run"})).token
        made.append(Client(url, token=token))
        return made[-1]

    yield join
    for one in made:
        one.close()
