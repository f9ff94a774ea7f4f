"""Finished replies by request id, so that a request made twice is done once."""

from __future__ import annotations

import asyncio
import time

from forkyard.store.catalog import Catalog

KEPT_S = 24 * 3600.0


class Replies:
    """Replies in the catalog, kept for a day, across restarts of the daemon."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    async def prune(self) -> None:
        """Forget old replies, every hour until cancelled."""
        while True:
            await self.catalog.prune()
            await asyncio.sleep(3600)

    async def get(self, request_id: str, verb: str, uid: int) -> bytes | None:
        """The reply that was kept for this request of this user, or None."""
        return await self.catalog.get_reply(request_id, verb, uid, newer_than=time.time() - KEPT_S)

    async def put(self, request_id: str, verb: str, uid: int, body: bytes) -> None:
        """Keep a reply."""
        await self.catalog.put_reply(request_id, verb, uid, body, time.time())
