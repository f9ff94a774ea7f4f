"""A running command and its streams."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import msgspec

from forkyard import errors
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client._protocol import Chunk
from forkyard.client.aio_transport import PATIENCE_S, AsyncStream, AsyncTransport
from forkyard.types import ExecResult


class AsyncProcess:
    """A command that was started by ``spawn`` or found by ``attach``.

    The open handle is what keeps it: closing it, or dropping it, ends the command unless it was
    spawned with ``detach=True``. One reader at a time takes its output; writing, signals and
    ``wait`` may come from elsewhere at the same time.

    Attributes:
        sandbox: Id or name, as it was given.
        pid: Its number inside the sandbox.
    """

    def __init__(self, transport: AsyncTransport, sandbox: str, request: rq.Spawn | rq.Attach) -> None:
        self.sandbox = sandbox
        self.pid = 0
        self._transport = transport
        self._request = request
        self._stream: AsyncStream | None = None
        self._events: collections.deque[rq.StreamEvent] = collections.deque()
        self._offsets = {"stdout": 0, "stderr": 0}
        self._reading = False
        self._closed = False
        self._result: ExecResult | None = None
        self._failed: errors.ForkyardError | None = None

    async def _begin(self) -> Self:
        verb = "spawn" if isinstance(self._request, rq.Spawn) else "attach"
        self._stream = await self._transport.open(verb, self._request)
        try:
            first = await self._next()
            if first is None or first.kind != "started":
                raise errors.UnavailableError("the daemon's stream does not begin with the process's number")
        except BaseException:
            await self.close()
            raise
        self.pid = first.pid
        return self

    async def stream(self) -> AsyncIterator[Chunk]:
        """The output as it comes, ``(kind, data)`` with kind ``stdout`` or ``stderr``, until the
        command has ended; ``gap`` where output was no longer kept.

        Raises:
            SandboxLostError: the sandbox died.
            ConflictError: somebody else reads it already, or the handle is closed.
        """
        self._take()
        try:
            while (event := await self._next()) is not None:
                if event.kind in ("stdout", "stderr", "gap"):
                    yield Chunk(event.kind, event.data)
        finally:
            self._reading = False

    def _take(self) -> None:
        if self._reading:
            raise errors.ConflictError(f"the output of process {self.pid} is being read already")
        if self._closed and self._result is None:
            raise errors.ConflictError(f"the handle of process {self.pid} is closed")
        self._reading = True

    async def _next(self) -> rq.StreamEvent | None:
        """The next event but the last, which is kept; None after it."""
        while self._result is None:
            if self._failed is not None:
                raise self._failed
            if not self._events:
                await self._fill()
                continue
            event = self._events.popleft()
            if event.kind == "exit":
                self._result = msgspec.convert(event.result or {}, ExecResult)
                await self.close()
            elif event.kind == "error":
                self._failed = errors.from_wire(event.error or {})
                await self.close()
            else:
                if event.kind in self._offsets:
                    self._offsets[event.kind] = event.offset + len(event.data)
                return event
        return None

    async def _fill(self) -> None:
        assert self._stream is not None
        try:
            frames = await self._stream.read()
            if not frames:
                raise errors.UnavailableError("the daemon ended the stream without a result")
            self._events.extend(protocol.decode("spawn", frame) for frame in frames)
        except errors.ForkyardError as error:
            lost = isinstance(error, errors.UnavailableError) and error.retryable
            if not lost or not self.pid or self._closed:
                self._failed = error
                await self.close()
                return
            await self._resume()

    async def _resume(self) -> None:
        """The daemon went: the next one has the command and its output from here on."""
        assert self._stream is not None
        await self._stream.close()
        try:
            await self._transport.reach(PATIENCE_S)
            self._stream = await self._transport.open(
                "attach",
                rq.Attach(
                    sandbox=self.sandbox,
                    pid=self.pid,
                    stdout_offset=self._offsets["stdout"],
                    stderr_offset=self._offsets["stderr"],
                    tied=isinstance(self._request, rq.Spawn) and not self._request.detach,
                ),
            )
        except errors.ForkyardError as error:
            self._failed = error
            await self.close()

    async def write(self, data: bytes | str) -> None:
        """Write to its stdin; returns when the sandbox has taken it."""
        raw = protocol.utf8(data) if isinstance(data, str) else data
        for piece in protocol.slices(raw):
            await self._transport.call(
                "write",
                rq.Write(
                    sandbox=self.sandbox,
                    pid=self.pid,
                    data=bytes(piece),
                    request_id=protocol.new_request_id(),
                ),
            )

    async def close_stdin(self) -> None:
        """Its stdin ends here."""
        await self._transport.call(
            "write",
            rq.Write(sandbox=self.sandbox, pid=self.pid, eof=True, request_id=protocol.new_request_id()),
        )

    async def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size (``pty=True``)."""
        await self._transport.call(
            "resize",
            rq.Resize(
                sandbox=self.sandbox, pid=self.pid, rows=rows, cols=cols, request_id=protocol.new_request_id()
            ),
        )

    async def signal(self, number: int) -> None:
        """Send a signal to it and its group."""
        await self._transport.call(
            "signal",
            rq.Signal(
                sandbox=self.sandbox, pid=self.pid, signal=int(number), request_id=protocol.new_request_id()
            ),
        )

    async def wait(self) -> ExecResult:
        """Wait for its end. Output that nobody read is in the result (the first 10 MiB of each).

        Raises:
            SandboxLostError: the sandbox died.
        """
        if self._result is not None:
            return self._result
        if self._reading or self._closed:
            return await self._transport.call(
                "wait_process",
                rq.WaitProcess(sandbox=self.sandbox, pid=self.pid, request_id=protocol.new_request_id()),
            )
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        omitted = 0
        self._take()
        try:
            while (event := await self._next()) is not None:
                if event.kind in kept:
                    room = protocol.DEFAULT_MAX_OUTPUT - len(kept[event.kind])
                    kept[event.kind] += event.data[:room]
                    omitted += max(0, len(event.data) - room)
        finally:
            self._reading = False
        assert self._result is not None
        if any(kept.values()):
            self._result = dataclasses.replace(
                self._result,
                stdout_bytes=bytes(kept["stdout"]),
                stderr_bytes=bytes(kept["stderr"]),
                truncated=self._result.truncated or omitted > 0,
                omitted_bytes=self._result.omitted_bytes + omitted,
            )
        return self._result

    async def close(self) -> None:
        """Let go of it: ends the command unless it has ended or is detached."""
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(errors.ForkyardError):
                await stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
