"""Reading the audit through the daemon, which has its newest records."""

from __future__ import annotations

import asyncio

from forkyard.audit import verify
from forkyard.errors import NotFoundError
from forkyard.requests import Audit, Caller, VerifyAudit
from forkyard.types import AuditRecord, AuditVerdict
from forkyard.yard.context import Context

VERIFY_TRIES = 5


class Auditing:
    """The verbs of the audit log."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def audit(self, request: Audit, caller: Caller) -> list[AuditRecord]:
        """See API: ``audit``.

        Raises:
            NotFoundError: one record was asked for, and there is none of that number.
        """
        log = self.context.audit
        await log.flush()
        if request.seq is not None:
            one = await asyncio.to_thread(log.get, request.seq)
            if one is None:
                raise NotFoundError(
                    f"no audit record {request.seq}", hint=f"they are numbered from 1 to {log.head[0]}"
                )
            return [one]
        sandbox = self.context.sandboxes.find(request.sandbox) if request.sandbox else None
        wanted = sandbox.id if sandbox is not None else request.sandbox
        return await asyncio.to_thread(log.read, sandbox=wanted, since=request.since, limit=request.limit)

    async def verify_audit(self, request: VerifyAudit, caller: Caller) -> AuditVerdict:
        """See API: ``verify_audit``."""
        log = self.context.audit
        for _ in range(VERIFY_TRIES):
            head = log.head
            await log.flush()
            found = await asyncio.to_thread(verify, log.directory, request.head)
            if found.ok or found.seq <= head[0]:
                break
            # What was wrong is younger than the question: a record that was being written.
        return AuditVerdict(found.ok, found.seq, found.why, head)
