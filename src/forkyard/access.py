"""Who may do what from another machine: roles and rights, and what is asked about tokens and the listener.

A token has rights: the names of verbs. A role stands for a set of them. Tokens and the listener itself are
managed on the daemon's own machine only, so that no token can make another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from forkyard.requests import Change, Line, Request, Word
from forkyard.types import Record

Role = Literal["read", "run", "admin"]

DEFAULT_PORT = 8470

LOCAL = frozenset({"listen", "new_token", "list_tokens", "revoke_token", "expose"})
"""For nobody but the socket of the machine itself. (What is exposed is on that machine's loopback.)"""

NEAR = "private_network"
"""No verb: the right to name addresses, and this machine itself, in egress rules and as registries. The
daemon's machine is in networks that who sits elsewhere is not in."""

READ = frozenset({
    *("version", "health", "capacity", "get_sandbox", "list_sandboxes", "wait_sandbox", "usage"),
    *("processes", "read_files", "list_files", "stat", "read_file", "download", "diff"),
    *("list_snapshots", "get_snapshot", "list_checkpoints", "tree", "list_templates"),
    *("audit", "verify_audit", "events"),
})  # fmt: skip
"""Questions. They read sandboxes' files and the audit too."""

RUN = READ | {
    *("create_sandbox", "rename_sandbox", "set_ttl", "set_egress", "adopt", "release_lease"),
    *("stop_sandbox", "start_sandbox", "delete_sandbox", "delete_sandboxes", "hold_lease"),
    *("exec", "exec_many", "run_code", "git", "write", "resize", "signal", "wait_process", "spawn", "attach"),
    *("write_files", "make_dir", "move", "remove", "write_file", "upload", "apply"),
    *("snapshot", "export_snapshot", "delete_snapshot", "fork", "checkpoint", "delete_checkpoint", "rewind"),
    *("explore", "explore_choose", "pull_template", "prepare", "deposit"),
}
"""All that is done with sandboxes. Not here, and so for ``admin`` only: what runs on the host itself (a
Dockerfile's instructions) or is believed there (a snapshot that somebody else wrote), what takes things
from everybody (a template), what stops the daemon. A verb that no role names is for ``admin`` too."""

ALWAYS = frozenset({"version"})
LEASING = frozenset({"create_sandbox", "start_sandbox", "fork", "adopt", "explore"})
"""Whoever may use one of these may hold the lease of what it made."""


class Listen(Change, kw_only=True):
    """Listen at ``address`` (``ADDR:PORT``) from now on, or with ``off`` no more; with neither, only say
    how it is.

    ``cert`` and ``key`` are PEM files on the daemon's machine; without them it uses a certificate of
    its own making.
    """

    address: Line | None = None
    off: bool = False
    cert: Line | None = None
    key: Line | None = None


class NewToken(Change, kw_only=True):
    """A token called ``name`` with the rights of ``role`` and those in ``allow``."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._@+-]{1,64}$")]
    role: Role | None = None
    allow: list[str] = []
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


class RevokeToken(Change, kw_only=True):
    """``token`` is its name or its id."""

    token: Word


class HoldLease(Request, kw_only=True):
    """While this stream is open, what carries the lease ``lease`` lives; ``grace_s`` after the end of the
    last such stream it does not."""

    lease: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 60.0


@dataclass(frozen=True, slots=True)
class Listening(Record):
    """``url`` is what a client on another machine is given; its end pins the certificate by its
    fingerprint."""

    address: str | None = None
    url: str | None = None
    fingerprint: str | None = None
    cert: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TokenInfo(Record):
    id: str
    name: str
    role: str | None
    allow: list[str]
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class MadeToken(Record):
    """``token`` is shown this once; only its hash is kept."""

    token: str
    info: TokenInfo


def rights(role: str | None, allow: list[str], verbs: frozenset[str]) -> frozenset[str]:
    """What a token may do, of all ``verbs``."""
    named = {"read": READ, "run": RUN, "admin": verbs | {NEAR}}.get(role or "", frozenset[str]())
    held = frozenset(named | set(allow) | ALWAYS) - LOCAL
    return held | {"hold_lease"} if held & LEASING else held
