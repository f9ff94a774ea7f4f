"""What the parts of a yard share: the tools below it, and the sandboxes in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.audit import AuditLog
from forkyard.config import Settings
from forkyard.engines.base import Engine
from forkyard.errors import ConflictError, NotFoundError
from forkyard.host.trace import span
from forkyard.requests import Caller
from forkyard.store.catalog import Catalog
from forkyard.store.disks import DiskStore
from forkyard.store.images import Images
from forkyard.types import Event
from forkyard.yard.background import Services
from forkyard.yard.machines import Machines
from forkyard.yard.model import Sandbox, SandboxDoc, SnapshotDoc

EVENT_BACKLOG = 1000


@dataclass(slots=True)
class Context:
    """Everything a part of the yard may use. ``agent`` is the digest of the current agent, ``engines`` are
    by name, the default one first."""

    settings: Settings
    home: Path
    engines: Mapping[str, Engine]
    catalog: Catalog
    disks: DiskStore
    images: Images
    audit: AuditLog
    machines: Machines
    tg: Services
    agent: str
    sandboxes: Sandboxes
    snapshots: dict[str, SnapshotDoc] = field(default_factory=dict)
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.events = Events()

    @property
    def engine(self) -> Engine:
        """The one that is used where none is asked for."""
        return next(iter(self.engines.values()))

    async def save(
        self,
        *,
        sandboxes: Iterable[SandboxDoc] = (),
        snapshots: Iterable[SnapshotDoc] = (),
        gone: Iterable[str] = (),
        durable: bool = True,
    ) -> None:
        """Write documents, and remove the snapshots whose ids are in ``gone``, in one transaction.

        Args:
            durable: False for what a later, durable save completes: it outlives the daemon at once,
                and the machine from that save on.
        """
        with span("catalog"):
            await self.catalog.save(
                sandboxes=list(sandboxes), snapshots=list(snapshots), gone=list(gone), durable=durable
            )

    async def record(
        self,
        kind: str,
        caller: Caller | None,
        sandbox: str | None = None,
        **data: Any,
    ) -> int:
        """Audit a change of state, durably, and tell whoever watches events."""
        seq = self.note(kind, caller, sandbox, **data)
        with span("audit"):
            await self.audit.flush()
        return seq

    def note(self, kind: str, caller: Caller | None, sandbox: str | None = None, **data: Any) -> int:
        """As :meth:`record`, for the first part of something: on disk no later than the next record."""
        seq = self.audit.append(kind, sandbox, actor(caller), data)
        self.events.publish(Event(time.time(), kind, sandbox, data))
        return seq


def actor(caller: Caller | None) -> str:
    """Who did it, for the audit: a user and process of this host, a token, or the yard itself."""
    if caller is None:
        return "yard"
    if caller.token:
        return f"token:{caller.token}/{caller.name}"
    return f"uid:{caller.uid}" + (f"/pid:{caller.pid}" if caller.pid else "")


class Sandboxes:
    """The sandboxes that are not deleted, by id and by name."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sandbox] = {}
        self._by_name: dict[str, str] = {}

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, ref: str) -> Sandbox | None:
        """The sandbox with this id or name, or None."""
        return self._by_id.get(ref) or self._by_id.get(self._by_name.get(ref, ""))

    def get(self, ref: str) -> Sandbox:
        """The sandbox with this id or name.

        Raises:
            NotFoundError: there is none (any more).
        """
        found = self.find(ref)
        if found is None:
            raise NotFoundError(f"no sandbox {ref[:140]!r}", hint="forkyard ls shows those there are")
        return found

    def check_free(self, name: str) -> None:
        """Raises ConflictError if ``name`` is taken."""
        if name in self._by_name:
            raise ConflictError(
                f"the name {name!r} is taken by {self._by_name[name]}",
                hint="choose another, or delete that sandbox first",
                sandbox=self._by_name[name],
            )

    def add(self, sandbox: Sandbox) -> None:
        """Take a sandbox in; raises ConflictError if its name is taken."""
        self.check_free(sandbox.doc.name)
        self._by_id[sandbox.id] = sandbox
        self._by_name[sandbox.doc.name] = sandbox.id

    def rename(self, sandbox: Sandbox, name: str) -> None:
        if name != sandbox.doc.name:
            self.check_free(name)
            del self._by_name[sandbox.doc.name]
            sandbox.doc.name = name
            self._by_name[name] = sandbox.id

    def drop(self, sandbox: Sandbox) -> None:
        if self._by_id.pop(sandbox.id, None) is not None:
            self._by_name.pop(sandbox.doc.name, None)


class Events:
    """What happens, to whoever listens. A listener that does not keep up loses the oldest."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[Event]] = set()

    def publish(self, event: Event) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    async def listen(self, sandbox: str | None = None) -> AsyncIterator[Event]:
        """Events from now on, of one sandbox or of all."""
        queue: asyncio.Queue[Event] = asyncio.Queue(EVENT_BACKLOG)
        self._listeners.add(queue)
        try:
            while True:
                event = await queue.get()
                if sandbox is None or event.sandbox == sandbox:
                    yield event
        finally:
            self._listeners.discard(queue)


@contextlib.asynccontextmanager
async def locked(sandbox: Sandbox) -> AsyncIterator[None]:
    """Hold the sandbox's lock, unless it was deleted while waiting."""
    async with sandbox.lock:
        if sandbox.doc.state == "deleted":
            raise NotFoundError(f"sandbox {sandbox.doc.name!r} was deleted", sandbox=sandbox.id)
        yield
