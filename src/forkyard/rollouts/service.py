"""Ports of one sandbox on the loopback of another, through this process.

A small program in the grading copy listens; its connections come out of its stdout, many over one
stream, and are opened here to the same port of the other sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

from forkyard import errors
from forkyard.client.aio import AsyncClient
from forkyard.client.aio_process import AsyncProcess
from forkyard.rollouts.copies import own_copy
from forkyard.rollouts.graders import GraderError, inside

# kind, connection, length: "o" opens (data: the port), "d" is data, "e" the end of one direction.
HEADER = struct.Struct(">cII")
PIECE = 64 << 10
READY_S = 20.0


@contextlib.asynccontextmanager
async def served(
    client: AsyncClient, final: str, grading: str, ports: Sequence[int], keep: Sequence[str]
) -> AsyncIterator[dict[int, str]]:
    """127.0.0.1:PORT in ``grading`` is that port of a fork of ``final``, in which only the
    processes in ``keep`` (all, if it is empty) go on. Gives each port's URL on this machine.

    Raises:
        GraderError: no ports, or the grading copy has no Python to listen with.
    """
    if not ports:
        raise GraderError("a grader in service mode has to name its ports")
    async with own_copy(client, final, keep, kill_others=bool(keep)) as copy:
        urls = {port: await client.expose(copy.id, port) for port in ports}
        words = ["python3", "-I", "-c", inside("relay.py").decode(), *map(str, ports)]
        process = await client.spawn(grading, words, user="root")
        try:
            async with asyncio.TaskGroup() as group:
                relay = _Relay(process, urls, group)
                pump = group.create_task(relay.run())
                try:
                    async with asyncio.timeout(READY_S):
                        await relay.ready.wait()
                except TimeoutError:
                    raise GraderError("nothing listens in the grading copy: it needs python3") from None
                yield urls
                pump.cancel()
                relay.stop()
        except BaseExceptionGroup as group_error:
            # One error is what the caller raised, or why the relay ended: it is told as it is.
            raise group_error.exceptions[0] from None
        finally:
            await process.close()


class _Relay:
    def __init__(self, process: AsyncProcess, urls: dict[int, str], group: asyncio.TaskGroup) -> None:
        self._process = process
        self._urls = urls
        self._group = group
        self._queues: dict[int, asyncio.Queue[bytes | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self.ready = asyncio.Event()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def run(self) -> None:
        """Take frames until the listener ends."""
        rest = b""
        said = b""
        async for chunk in self._process.stream():
            if chunk.kind == "stderr":
                said = (said + chunk.data)[-500:]
                continue
            rest += chunk.data
            while len(rest) >= HEADER.size:
                kind, number, size = HEADER.unpack_from(rest)
                if len(rest) < HEADER.size + size:
                    break
                data, rest = rest[HEADER.size : HEADER.size + size], rest[HEADER.size + size :]
                await self._frame(kind, number, data)
        raise GraderError(f"the listener in the grading copy has ended: {said.decode(errors='replace')}")

    async def _frame(self, kind: bytes, number: int, data: bytes) -> None:
        if kind == b"r":
            self.ready.set()
        elif kind == b"o":
            self._queues[number] = asyncio.Queue(64)
            task = self._group.create_task(self._connection(number, int(data)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number in self._queues:
            await self._queues[number].put(data if kind == b"d" else None)

    async def _say(self, kind: bytes, number: int, data: bytes = b"") -> None:
        async with self._lock:
            await self._process.write(HEADER.pack(kind, number, len(data)) + data)

    async def _connection(self, number: int, port: int) -> None:
        at = urlsplit(self._urls[port])
        try:
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._inward(number, reader))
                    both.create_task(self._outward(number, writer))
            finally:
                writer.close()
        except (OSError, ExceptionGroup, errors.ForkyardError):
            # The service's doing: the grader sees its connection end.
            with contextlib.suppress(errors.ForkyardError):
                await self._say(b"e", number)
        finally:
            queue = self._queues.pop(number)
            while not queue.empty():
                queue.get_nowait()

    async def _inward(self, number: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(PIECE):
            await self._say(b"d", number, data)
        await self._say(b"e", number)

    async def _outward(self, number: int, writer: asyncio.StreamWriter) -> None:
        queue = self._queues[number]
        while (data := await queue.get()) is not None:
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
