"""The catalog: what exists, in one SQLite file that one thread owns.

Documents are the yard's (msgspec structs, kept as JSON); what is asked for is a column of its
own beside them. What other tasks submit while one commit is on its way is committed together,
so that many creations share one flush. A durable transaction is on disk when its call returns;
any other one is whole or absent after a crash, and on disk soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from forkyard.errors import CapacityError, ConflictError, InternalError, UnavailableError
from forkyard.host.failpoint import failpoint
from forkyard.host.threads import waited_out
from forkyard.store.schema import MIGRATIONS, SANDBOX_COLUMNS, SNAPSHOT_COLUMNS

__all__ = ["Catalog"]

REPAIR_HINT = "forkyard doctor --store says what is damaged, and --repair keeps the rest"
S = TypeVar("S")
T = TypeVar("T")
_BUSY_MS = 5000
_KEEP_REPLIES_S = 24 * 3600
_KEEP_DELETED_S = 30 * 24 * 3600
# pages of WAL after which SQLite folds it into the file; a checkpoint costs one flush of each
_WAL_PAGES = 2000


class Document(Protocol):
    """Anything with an id that msgspec can encode; columns are read off it where it has them."""

    @property
    def id(self) -> str: ...


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    writes: bool
    durable: bool


class Catalog:
    """See the module. Make one with :meth:`open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection

    @classmethod
    async def open(cls, path: Path, *, check: bool = True) -> Catalog:
        """Open or make the catalog in ``path``.

        Args:
            check: Read it whole before it is used.

        Raises:
            UnavailableError: a newer version of forkyard wrote it; it is as it was.
            InternalError: it is damaged.
        """
        catalog = cls(path)
        catalog._connection = await asyncio.to_thread(catalog._connect, check)
        catalog._thread = threading.Thread(target=catalog._work, name="catalog")
        catalog._thread.start()
        return catalog

    async def close(self) -> None:
        """Finish what was submitted, and fold the log into the file. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)

    def _connect(self, check: bool) -> sqlite3.Connection:
        fresh = not self.path.exists()
        if not fresh:
            self._refuse_newer()
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            if fresh:
                self.path.chmod(0o600)
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            said = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if check else "ok"
            if said != "ok":
                raise self._damaged(said)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            for number in range(version, len(MIGRATIONS)):
                script = f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
                connection.executescript(script)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._damaged(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_newer(self) -> None:
        """Before anything is changed: a connection that may write folds the log in when it is closed."""
        log = self.path.with_name(f"{self.path.name}-wal")
        # Without a log the lock file that reading makes beside it is spared, too.
        options = "mode=ro" if log.exists() else "mode=ro&immutable=1"
        try:
            with contextlib.closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?{options}", uri=True)
            ) as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        if version > len(MIGRATIONS):
            raise UnavailableError(
                f"a newer forkyard wrote {self.path} (schema {version}, this knows {len(MIGRATIONS)})",
                hint="upgrade forkyard, or use another home",
            )

    def _damaged(self, why: object) -> InternalError:
        return InternalError(f"the catalog {self.path} cannot be read: {why}", hint=REPAIR_HINT)

    # -- the thread

    def _work(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while jobs[-1] is not None and len(jobs) < 256:
                    jobs.append(self._jobs.get_nowait())
            last = jobs[-1] is None
            self._batch([job for job in jobs if job is not None])
            if last:
                break
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def _batch(self, jobs: Sequence[_Job]) -> None:
        """Run jobs in order; those that write in one transaction, each in a savepoint of its own."""
        connection = self._connection
        results: list[tuple[_Job, Any, BaseException | None]] = []
        writes = any(job.writes for job in jobs)
        try:
            if writes:
                durable = any(job.durable for job in jobs)
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                results.append((job, *self._one(job)))
            if writes:
                connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            results = [(job, None, error) for job in jobs]
        for job, value, failure in results:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                job.loop.call_soon_threadsafe(_settle, job.future, value, failure)

    def _one(self, job: _Job) -> tuple[Any, BaseException | None]:
        connection = self._connection
        if not job.writes:
            try:
                return job.work(connection), None
            except Exception as error:
                return None, error
        connection.execute("SAVEPOINT job")
        try:
            value = job.work(connection)
        except Exception as error:
            if not connection.in_transaction:  # SQLite gave up the whole of it (disk full)
                raise
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            return None, error
        connection.execute("RELEASE job")
        return value, None

    async def _submit(self, work: Callable[[sqlite3.Connection], T], *, writes: bool, durable: bool) -> T:
        if self._thread is None:
            raise InternalError("the catalog is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, future, loop, writes, durable))
        try:
            # it is committed, or not, before the caller goes on: nobody undoes a write still to come
            return await waited_out(future)
        except sqlite3.IntegrityError as error:
            raise ConflictError(f"the catalog refuses it: {error}") from error
        except sqlite3.DatabaseError as error:
            if "full" in str(error):
                raise CapacityError(
                    f"the disk of {self.path.parent} is full", hint="free some space", retryable=True
                ) from error
            raise InternalError(f"the catalog {self.path} failed: {error}") from error

    async def tx(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = True) -> T:
        """Run ``work`` in one transaction: all of what it does, or nothing.

        Raises:
            ConflictError: a name is taken (or another constraint). CapacityError: the disk is full.
            Whatever ``work`` raises.
        """
        return await self._submit(work, writes=True, durable=durable)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work``, which only reads."""
        return await self._submit(work, writes=False, durable=False)

    # -- documents

    async def save(
        self,
        *,
        sandboxes: Iterable[Document] = (),
        snapshots: Iterable[Document] = (),
        gone: Iterable[str] = (),
        durable: bool = True,
    ) -> None:
        """Write documents and remove the snapshots ``gone``, in one transaction.

        The documents are read now: changing one afterwards does not change what is written.

        Raises:
            ConflictError: a live sandbox or a named snapshot has that name already.
        """
        sandbox_rows = [_row(doc, SANDBOX_COLUMNS) for doc in sandboxes]
        snapshot_rows = [_row(doc, SNAPSHOT_COLUMNS) for doc in snapshots]
        gone_rows = [(id_,) for id_ in gone]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM snapshots WHERE id = ?", gone_rows)
            connection.executemany(_upsert("sandboxes", SANDBOX_COLUMNS), sandbox_rows)
            connection.executemany(_upsert("snapshots", SNAPSHOT_COLUMNS), snapshot_rows)

        await failpoint("catalog.save")
        await self.tx(work, durable=durable)

    async def load(self, sandbox: type[S], snapshot: type[T]) -> tuple[list[S], list[T]]:
        """All sandboxes that are not deleted, and all snapshots."""
        return await self.sandboxes(sandbox), await self.snapshots(snapshot)

    async def sandboxes(self, type: type[T], *, deleted: bool = False) -> list[T]:
        """Sandboxes in order of creation, decoded as ``type``; only those that are not deleted,
        or only those that are."""
        test = "=" if deleted else "<>"
        return await self._documents(f"sandboxes WHERE state {test} 'deleted'", type)

    async def snapshots(self, type: type[T]) -> list[T]:
        """All snapshots in order of creation, decoded as ``type``."""
        return await self._documents("snapshots", type)

    async def _documents(self, of: str, type: type[T]) -> list[T]:
        rows = await self.read(
            lambda c: c.execute(f"SELECT id, doc FROM {of} ORDER BY created_at, id").fetchall()
        )
        decode = msgspec.json.Decoder(type).decode
        found = []
        for id_, doc in rows:
            try:
                found.append(decode(doc))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                # Not left out: whoever asks would take what belongs to it for a leftover.
                raise self._damaged(f"the record of {id_}: {error}") from error
        return found

    # -- replies

    async def put_reply(self, request_id: str, verb: str, uid: int, body: bytes, at: float) -> None:
        """Keep the reply that a user's request for ``verb`` got."""
        row = (request_id, uid, verb, body, at)
        text = "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)"
        await self.tx(lambda c: c.execute(text, row) and None, durable=False)

    async def get_reply(self, request_id: str, verb: str, uid: int, newer_than: float = 0.0) -> bytes | None:
        """The reply that was kept for this request of this user, or None."""
        text = "SELECT body FROM replies WHERE request_id = ? AND verb = ? AND uid = ? AND at > ?"
        row = await self.read(lambda c: c.execute(text, (request_id, verb, uid, newer_than)).fetchone())
        return row[0] if row else None

    async def prune(self, now: float | None = None) -> None:
        """Forget replies older than a day, and sandboxes that were deleted a month ago."""
        now = time.time() if now is None else now

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM replies WHERE at < ?", (now - _KEEP_REPLIES_S,))
            connection.execute(
                "DELETE FROM sandboxes WHERE state = 'deleted' AND saved_at < ?", (now - _KEEP_DELETED_S,)
            )

        await self.tx(work, durable=False)


def _settle(future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(value)


def _column(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.encode(value).decode()


def _row(doc: Document, columns: Sequence[str]) -> tuple[Any, ...]:
    values = (_column(getattr(doc, name, None)) for name in columns)
    return (*values, time.time(), msgspec.json.encode(doc))


def _upsert(table: str, columns: Sequence[str]) -> str:
    names = [*columns, "saved_at", "doc"]
    marks = ", ".join("?" * len(names))
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name != "id")
    # not REPLACE: that would silently remove another row of the same name
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {changes}"
    )
