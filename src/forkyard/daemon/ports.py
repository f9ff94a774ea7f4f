"""What the daemon asks of a yard. The yard implements it; tests implement it in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from forkyard import requests as rq
from forkyard import types as ty
from forkyard.requests import Caller


class Execs(Protocol):
    """Commands. A cancelled ``run`` ends its command, unless the yard was told that the
    daemon goes (:meth:`Yard.prepare_shutdown`); the same goes for a closed ``spawn`` iterator
    of a command that is not detached, and for a closed ``attach`` iterator of one that is tied
    to its handle."""

    async def run(
        self, request: rq.Exec, caller: Caller, stdin: AsyncIterator[bytes] | None = None
    ) -> ty.ExecResult:
        """A request id that is already running (after a restart of the daemon: within 30 s)
        is joined. ``stdin`` is used instead of ``request.stdin`` where it is given."""
        ...

    def spawn(self, request: rq.Spawn, caller: Caller) -> AsyncIterator[rq.StreamEvent]: ...

    def attach(self, request: rq.Attach, caller: Caller) -> AsyncIterator[rq.StreamEvent]: ...

    async def processes(self, request: rq.SandboxRequest, caller: Caller) -> list[ty.ProcessInfo]: ...

    async def write(self, request: rq.Write, caller: Caller) -> None: ...

    async def resize(self, request: rq.Resize, caller: Caller) -> None: ...

    async def signal(self, request: rq.Signal, caller: Caller) -> None: ...

    async def wait(self, request: rq.WaitProcess, caller: Caller) -> ty.ExecResult:
        """Raises DeadlineError after ``timeout_s``; takes no output away from the handle."""
        ...


class Files(Protocol):
    async def write_files(self, request: rq.WriteFiles, caller: Caller) -> None: ...

    async def read_files(self, request: rq.ReadFiles, caller: Caller) -> dict[str, bytes]: ...

    async def list_files(self, request: rq.PathRequest, caller: Caller) -> list[ty.FileInfo]: ...

    async def stat(self, request: rq.PathRequest, caller: Caller) -> ty.FileInfo: ...

    async def make_dir(self, request: rq.MakeDir, caller: Caller) -> None: ...

    async def move(self, request: rq.MoveFile, caller: Caller) -> None: ...

    async def remove(self, request: rq.RemoveFile, caller: Caller) -> None: ...

    def read_stream(self, request: rq.PathRequest, caller: Caller) -> AsyncIterator[bytes]: ...

    async def write_stream(self, request: rq.WriteFile, chunks: AsyncIterator[bytes], caller: Caller) -> None:
        """``chunks`` raises when the client goes away: nothing of the file is then seen."""
        ...

    def download_tar(self, request: rq.PathRequest, caller: Caller) -> AsyncIterator[bytes]: ...

    async def upload_tar(
        self, request: rq.PathChange, chunks: AsyncIterator[bytes], caller: Caller
    ) -> None: ...


class Replies(Protocol):
    """Finished replies by request id, kept across restarts."""

    async def get(self, request_id: str, verb: str, uid: int) -> bytes | None: ...

    async def put(self, request_id: str, verb: str, uid: int, body: bytes) -> None: ...


class Yard(Protocol):
    """Every verb of ``verbs.VERBS`` with ``at="yard"`` is a method ``(request, caller)`` too."""

    @property
    def execs(self) -> Execs: ...

    @property
    def files(self) -> Files: ...

    @property
    def replies(self) -> Replies: ...

    def events(self, request: rq.Events, caller: Caller) -> AsyncIterator[ty.Event]: ...

    async def record(self, kind: str, caller: Caller, **data: Any) -> None:
        """Audit what the daemon itself did."""
        ...

    async def prepare_shutdown(self, sandboxes: str) -> None:
        """Before connections are dropped. ``keep``: from now on a cancelled command runs on,
        for the next daemon's clients to resume; ``stop`` and ``delete`` do that to all sandboxes."""
        ...


Handler = Callable[..., Awaitable[Any]]
