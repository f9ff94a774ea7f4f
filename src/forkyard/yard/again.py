"""What a request has made already, if it was made before.

A finished request's reply is kept (:mod:`forkyard.yard.replies`), but the daemon may die, or its
disk be full, after what was asked for is made and before its reply is. So what is made carries
the request's mark in its own record, written in the same transaction.
"""

from __future__ import annotations

from forkyard.requests import Caller, Change
from forkyard.yard.context import Context
from forkyard.yard.model import Sandbox, SnapshotDoc

__all__ = ["made_sandboxes", "made_snapshot", "mark_of"]


def mark_of(request: Change, caller: Caller) -> str:
    """What identifies a request: its user and id; empty if it has no id."""
    return f"{caller.uid}:{request.request_id}" if request.request_id else ""


def made_sandboxes(context: Context, request: Change, caller: Caller) -> list[Sandbox]:
    """The sandboxes that this very request has made, in their order."""
    mark = mark_of(request, caller)
    return [one for one in context.sandboxes if mark and one.doc.asked == mark]


def made_snapshot(context: Context, request: Change, caller: Caller, kind: str) -> SnapshotDoc | None:
    """The snapshot or checkpoint that this very request has made, or None."""
    mark = mark_of(request, caller)
    for doc in context.snapshots.values():
        if mark and doc.asked == mark and doc.kind == kind:
            return doc
    return None
