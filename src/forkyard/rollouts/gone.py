"""Whether an error means that a sandbox is gone, and on whose account."""

from __future__ import annotations

import asyncio
import time

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import ForkyardError, NotFoundError, SandboxLostError
from forkyard.rollouts.losses import Loss, loss

# The error that says so comes before the daemon has written down why.
SETTLE_S = 10.0
POLL_S = 0.05


async def afind_loss(client: AsyncClient, sandbox: str, error: ForkyardError) -> Loss | None:
    """How ``sandbox`` was lost; None if it runs, so that ``error`` is about something else."""
    deadline = _deadline(error)
    while True:
        try:
            if (await client.get_sandbox(sandbox)).state != "running":
                return loss(await client.audit(sandbox))
        except NotFoundError:
            return loss(await client.audit(sandbox))
        if time.monotonic() >= deadline:
            return None
        await asyncio.sleep(POLL_S)


def find_loss(client: Client, sandbox: str, error: ForkyardError) -> Loss | None:
    """As :func:`afind_loss`."""
    deadline = _deadline(error)
    while True:
        try:
            if client.get_sandbox(sandbox).state != "running":
                return loss(client.audit(sandbox))
        except NotFoundError:
            return loss(client.audit(sandbox))
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)


def _deadline(error: ForkyardError) -> float:
    return time.monotonic() + (SETTLE_S if isinstance(error, SandboxLostError) else 0.0)
