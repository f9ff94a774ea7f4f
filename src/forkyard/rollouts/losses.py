"""Whose doing it was that a sandbox was lost, by what the daemon says and has written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkyard.errors import (
    CapacityError,
    CommandFailedError,
    ForkyardError,
    SandboxLostError,
    UnavailableError,
)
from forkyard.rollouts.types import Outcome
from forkyard.types import AuditRecord

HOST = (CapacityError, UnavailableError)


@dataclass(frozen=True, slots=True)
class Loss:
    """``host`` says that the daemon proves it to be the host's doing."""

    outcome: Outcome
    message: str
    host: bool


def loss(records: Sequence[AuditRecord]) -> Loss:
    """Whose doing it was that a sandbox is gone, by the daemon's records of it."""
    for record in reversed(records):
        if record.kind == "sandbox.failed":
            message = f"the sandbox was lost: {record.data.get('message', '')}"
            if record.data.get("cause") == "host":
                return Loss("infra", message, True)
            return Loss("oom" if record.data.get("oom") else "sandbox_broken", message, False)
    for record in reversed(records):
        if record.kind == "sandbox.deleted":
            if record.actor == "yard":
                return Loss("infra", "the daemon deleted the sandbox", True)
            return Loss("sandbox_broken", f"{record.actor} deleted the sandbox", False)
    return Loss("sandbox_broken", "the sandbox is gone, and nothing says that the host lost it", False)


def is_hosts(error: ForkyardError) -> bool:
    """Whether an error that the daemon gave is the host's doing."""
    return isinstance(error, HOST) or (isinstance(error, SandboxLostError) and error.cause == "host")


def killed_for_memory(error: CommandFailedError) -> bool:
    return bool(error.result is not None and error.result.oom)


def ended_by_oom(records: Sequence[AuditRecord]) -> bool:
    """Whether the last command that the policy ran was killed for memory."""
    ran = [record for record in records if record.kind in ("exec", "code")]
    return bool(ran and ran[-1].data.get("oom"))
