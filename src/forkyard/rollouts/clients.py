"""Clients of both kinds for one run, and coroutines from code that is not async."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client


def run_sync(make: Any) -> Any:
    """The result of a coroutine, on a loop of its own; in a thread where this one has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(asyncio.run(make()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="forkyard-evaluate")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


@dataclass(frozen=True, slots=True)
class Both:
    """A client for the run itself, and one for the handles of sync policies."""

    aio: AsyncClient
    sync: Client

    async def close(self, given: AsyncClient | Client | None) -> None:
        """Close those that were made here, not the one that was ``given``."""
        if given is not self.aio:
            await self.aio.close()
        if given is not self.sync:
            self.sync.close()


def both(client: AsyncClient | Client | None) -> Both:
    """Clients of both kinds for the daemon that ``client`` is of."""
    if client is None:
        return Both(AsyncClient(), Client())
    other: Any = Client if isinstance(client, AsyncClient) else AsyncClient
    twin = other.__new__(other)
    twin.__setstate__(client.__getstate__())
    return Both(client, twin) if isinstance(client, AsyncClient) else Both(twin, client)
