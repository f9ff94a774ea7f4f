"""The audit log: who did what to which sandbox, in a chain that shows any later change.

One file per day (UTC), one JSON record per line, keys sorted, its ``hash`` last. The hash is
SHA-256 over the previous record's hash and the line without ``,"hash":"..."``, so that it can be
checked with a dozen lines in any language. The chain runs on from file to file. What a crash
left of a last line stays where it is, and a ``recovered`` record after it says how much and what
it was. That the end is missing shows only against a head (:meth:`AuditLog.head`) kept elsewhere.

What is appended is written. Secrets are the caller's business; :meth:`AuditLog.digest` makes of one
what may be kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from forkyard.errors import CapacityError, InternalError
from forkyard.host.files import fsync_dir, write_atomic
from forkyard.types import AuditRecord

__all__ = ["GENESIS", "AuditLog"]

GENESIS = "0" * 64
_SYNC_S = 0.2
_RETRY_S = 1.0
_MAX_BACKLOG = 100_000
_CHUNK = 1 << 18
HASH_TAIL = len(',"hash":"') + 64 + len('"}')

_encode = msgspec.json.Encoder(order="sorted", enc_hook=str).encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class _Line:
    day: str
    data: bytes
    durable: bool


@dataclass(slots=True)
class _Flush:
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class AuditLog:
    """The one writer of the log in ``directory``; :meth:`read` needs no :meth:`open`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seq = 0
        self._head = GENESIS
        self._queue: queue.SimpleQueue[_Line | _Flush | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fd = -1
        self._day = ""
        self._newest_day = ""
        self._good = 0  # how much of the day's file is whole lines
        self._backlog: list[_Line] = []
        self._key = b""

    async def open(self) -> None:
        """Find the end of the chain, seal what a crash left after it, start the writer."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        torn = await asyncio.to_thread(self._find_end)
        self._thread = threading.Thread(target=self._work, name="audit")
        self._thread.start()
        if torn:
            self.append("recovered", None, "audit", torn, durable=True)
            await self.flush()

    async def close(self) -> None:
        """Write everything and end the writer. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(thread.join)

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the newest record: keep it elsewhere to prove that nothing was cut off."""
        return self._seq, self._head

    def append(
        self, kind: str, sandbox: str | None, actor: str, data: dict[str, Any], *, durable: bool = False
    ) -> int:
        """Append a record; returns its number at once. It is on disk within 200 ms, or as soon as
        possible if ``durable``; :meth:`flush` waits for that.

        Raises:
            CapacityError: the disk has been full for so long that too many records wait.
        """
        if self._thread is None:
            raise InternalError("the audit log is closed")
        if len(self._backlog) > _MAX_BACKLOG:
            raise CapacityError(
                f"the audit log in {self.directory} cannot be written", hint="free some space"
            )
        now = time.time()
        body = _encode(
            {
                "seq": self._seq + 1,
                "time": round(now, 6),
                "kind": kind,
                "sandbox": sandbox,
                "actor": actor,
                "data": data,
                "prev": self._head,
            }
        )
        self._head = chain_hash(self._head, body)
        self._seq += 1
        line = b'%b,"hash":"%b"}\n' % (body[:-1], self._head.encode())
        # never back to an older file, whatever the clock does: files and chain have one order
        self._newest_day = max(self._newest_day, _day(now))
        self._queue.put(_Line(self._newest_day, line, durable))
        return self._seq

    async def flush(self) -> None:
        """Wait until everything appended before is on disk.

        Raises:
            CapacityError: it cannot be written now; it will be tried again.
        """
        if self._thread is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Flush(future, loop))
        await future

    # -- the writer's thread

    def _work(self) -> None:
        sync_at: float | None = None
        closing = False
        while not closing:
            flushes: list[_Flush] = []
            durable = False
            wait = _RETRY_S if self._backlog else None
            if sync_at is not None:
                wait = max(0.0, sync_at - time.monotonic())
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=wait)
                while True:
                    if item is None:
                        closing = True
                        break
                    if isinstance(item, _Flush):
                        flushes.append(item)
                    else:
                        self._backlog.append(item)
                        durable = durable or item.durable
                    item = self._queue.get_nowait()
            failure: OSError | None = None
            try:
                if self._write():
                    sync_at = sync_at or time.monotonic() + _SYNC_S
                if sync_at is not None and (durable or flushes or closing or time.monotonic() >= sync_at):
                    os.fdatasync(self._fd)
                    sync_at = None
            except OSError as error:
                failure = error
            for flush in flushes:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    flush.loop.call_soon_threadsafe(_settle, flush.future, failure, self.directory)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> bool:
        """Write the backlog; True if there was any. A line that failed half-way is taken back."""
        wrote = False
        while self._backlog:
            day = self._backlog[0].day
            if day != self._day:
                self._roll(day)
            count = 0
            while count < len(self._backlog) and self._backlog[count].day == day and count < 512:
                count += 1
            data = b"".join(line.data for line in self._backlog[:count])
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                os.ftruncate(self._fd, self._good)
                raise
            self._good += len(data)
            del self._backlog[:count]
            wrote = True
        return wrote

    def _roll(self, day: str) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._day = ""
        path = self.directory / f"{day}.jsonl"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._day = day
        self._good = os.fstat(self._fd).st_size
        fsync_dir(self.directory)

    def _find_end(self) -> dict[str, Any] | None:
        """Set the head from the files; what is torn after it, if anything."""
        torn: dict[str, Any] | None = None
        for path in reversed(day_files(self.directory)):
            self._newest_day = max(self._newest_day, path.stem)
            end = 0
            for offset, line in _lines_backwards(path):
                record = _whole(line)
                if record is not None:
                    self._seq, self._head = record["seq"], record["hash"]
                    end = offset + len(line) + 1
                    break
            size = path.stat().st_size
            if size > end:
                torn = _seal(path, end, size)
            if end:
                break
        return torn

    # -- secrets

    def digest(self, secret: str) -> str:
        """What stands for a secret in a record: the same for the same one, and no way back without the
        key beside the log (``<directory>.key``), which short secrets would otherwise have."""
        if not self._key:
            path = self.directory.with_name(f"{self.directory.name}.key")
            with contextlib.suppress(FileNotFoundError):
                self._key = path.read_bytes()
            if len(self._key) != 32:
                self._key = os.urandom(32)
                write_atomic(path, self._key)
        return f"hmac-sha256:{hmac.digest(self._key, secret.encode(), 'sha256').hex()}"

    # -- reading

    def get(self, seq: int) -> AuditRecord | None:
        """The record of that number, or None. Blocks: call it in a thread."""
        for path in reversed(day_files(self.directory)):
            for _, line in _lines_backwards(path):
                record = parse(line)
                if record is None or record["seq"] > seq:
                    continue
                return AuditRecord(**record) if record["seq"] == seq else None
        return None

    def read(
        self, sandbox: str | None = None, since: float | None = None, limit: int = 10_000
    ) -> list[AuditRecord]:
        """The newest ``limit`` records that match, the oldest of them first. Blocks: call it in a thread."""
        found: list[AuditRecord] = []
        mark = b'"sandbox":' + _encode(sandbox) if sandbox is not None else b""
        first_day = _day(since) if since is not None else ""
        for path in reversed(day_files(self.directory)):
            if path.stem < first_day:
                break
            for _, line in _lines_backwards(path):
                if mark and mark not in line:
                    continue
                record = parse(line)
                if record is None or (sandbox is not None and record["sandbox"] != sandbox):
                    continue
                if since is not None and record["time"] < since:
                    return found[::-1]
                found.append(AuditRecord(**record))
                if len(found) >= limit:
                    return found[::-1]
        return found[::-1]


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


def chain_hash(prev: str, body: bytes) -> str:
    return hashlib.sha256(prev.encode() + body).hexdigest()


def _settle(future: asyncio.Future[None], failure: OSError | None, directory: Path) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
        return
    error = CapacityError(
        f"the audit log in {directory} cannot be written: {failure.strerror}",
        hint="free some space",
        retryable=True,
    )
    future.set_exception(error)


def day_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*-[0-9]*-[0-9]*.jsonl"))


def parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line, or None if it is none."""
    try:
        record = _decode(line)
    except msgspec.DecodeError:
        return None
    types = {
        "seq": int,
        "time": float | int,
        "kind": str,
        "actor": str,
        "data": dict,
        "prev": str,
        "hash": str,
    }
    if set(record) != {*types, "sandbox"}:
        return None
    if not all(isinstance(record[name], kind) for name, kind in types.items()):
        return None
    return record


def _whole(line: bytes) -> dict[str, Any] | None:
    """The record in a line if its hash fits what it says itself."""
    record = parse(line)
    if record is None or record["hash"] != chain_hash(record["prev"], line[:-HASH_TAIL] + b"}"):
        return None
    return record


def _seal(path: Path, start: int, size: int) -> dict[str, Any]:
    """End a torn line, and say what it was."""
    with open(path, "r+b") as file:
        file.seek(start)
        left = file.read(size - start)
        if not left.endswith(b"\n"):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    left = left.removesuffix(b"\n")
    return {"torn_bytes": len(left), "sha256": hashlib.sha256(left).hexdigest(), "file": path.name}


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and line, newlines kept."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and line, without newlines, from the last whole line to the first."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        rest = b""  # begins at ``end``: the part of a line whose beginning is further up
        first = True
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            parts = (file.read(end - start) + rest).split(b"\n")
            offset = start + sum(len(part) + 1 for part in parts)
            for index in range(len(parts) - 1, 0, -1):
                offset -= len(parts[index]) + 1
                # what follows the last newline is no whole line, and mostly nothing
                if not first:
                    yield offset, parts[index]
                first = False
            rest, end = parts[0], start
        if not first:
            yield 0, rest
