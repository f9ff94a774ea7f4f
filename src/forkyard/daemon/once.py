"""Doing what is asked once, however often it is asked.

A change is known by its request id, its verb and the caller's user. Who asks again while it
runs waits for the same run; who asks again later gets the stored reply. The run belongs to
the daemon, not to a connection: whether it outlives its last client is the verb's choice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from forkyard import errors
from forkyard.daemon.exchange import RESTARTING, ClientGoneError, Done, done_with, encode, log
from forkyard.daemon.ports import Replies

Key = tuple[str, str, int]
"""Request id, verb, uid."""

WINDOW_S = 60.0
WINDOW_COUNT = 4096
WINDOW_BYTES = 16 << 20


class Stored(msgspec.Struct, array_like=True):
    digest: bytes
    status: int
    body: bytes


_decode_stored = msgspec.msgpack.Decoder(Stored).decode


@dataclass(slots=True, eq=False)
class Run:
    """One run and who waits for it."""

    digest: bytes
    cancel: bool
    task: asyncio.Task[None] | None = None
    waiting: set[asyncio.Future[Done]] = field(default_factory=set)

    def finish(self, done: Done) -> None:
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(done)
        self.waiting.clear()


class Once:
    """Args:
    tasks: Owns the runs.
    replies: Finished replies that outlive the daemon.
    """

    def __init__(self, tasks: asyncio.TaskGroup, replies: Replies) -> None:
        self._tasks = tasks
        self._replies = replies
        self._live: dict[Key, Run] = {}
        self._recent: OrderedDict[Key, tuple[float, bytes, Done]] = OrderedDict()
        self._recent_bytes = 0
        self.draining = False

    async def run(
        self,
        key: Key,
        digest: bytes,
        work: Callable[[], Awaitable[bytes]],
        *,
        keep: bool,
        cancel: bool,
        gone: Callable[[], Awaitable[None]] | None = None,
    ) -> Done:
        """The reply of ``work``, run for this caller or an earlier one.

        Args:
            work: Gives the encoded result, or raises.
            keep: Store the reply for good, not only for a minute in memory.
            cancel: Cancel the run when the last client that waits has gone.
            gone: Returns when this client has gone; only looked at with ``cancel``.

        Raises:
            ConflictError: the request id was used for something else.
            ClientGoneError: this client has gone.
        """
        live = self._live.get(key)
        if live is None:
            if recent := self._look(key):
                return self._same(recent[1], digest, recent[2])
            if self.draining:
                return RESTARTING
            live = self._live[key] = Run(digest, cancel)
            live.task = self._tasks.create_task(self._perform(key, live, work, keep))
        elif live.digest != digest:
            raise self._conflict()
        waiter: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        live.waiting.add(waiter)
        watcher = None
        if cancel and gone is not None:
            watcher = self._tasks.create_task(self._watch(gone, waiter))
        try:
            return await waiter
        except BaseException:
            live.waiting.discard(waiter)
            if cancel and not live.waiting and live.task is not None:
                live.task.cancel()
                # A retry from now on is a new run, not a share of one that is being undone.
                if self._live.get(key) is live:
                    del self._live[key]
            raise
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _watch(self, gone: Callable[[], Awaitable[None]], waiter: asyncio.Future[Done]) -> None:
        try:
            await gone()
        finally:
            if not waiter.done():
                waiter.set_exception(ClientGoneError())

    async def _perform(self, key: Key, live: Run, work: Callable[[], Awaitable[bytes]], keep: bool) -> None:
        done = RESTARTING
        try:
            done = await self._recall_or_do(key, live.digest, work, keep)
        except Exception as error:
            done = done_with(error)
        finally:
            if self._live.get(key) is live:
                del self._live[key]
            live.finish(done)

    async def _recall_or_do(
        self, key: Key, digest: bytes, work: Callable[[], Awaitable[bytes]], keep: bool
    ) -> Done:
        if keep and (body := await self._replies.get(*key)) is not None:
            stored = _decode_stored(body)
            return self._same(stored.digest, digest, Done(stored.status, stored.body))
        try:
            done = Done(200, await work())
        except Exception as error:
            done = done_with(error)
        if not done.retryable:
            if keep:
                try:
                    await self._replies.put(*key, encode(Stored(digest, done.status, done.body)))
                except Exception:
                    # It is done, so say so: only a repetition after a restart would not know.
                    log.exception("the reply of %s could not be stored", key[1])
            self._remember(key, digest, done)
        return done

    def _same(self, before: bytes, now: bytes, done: Done) -> Done:
        if before != now:
            raise self._conflict()
        return done

    @staticmethod
    def _conflict() -> errors.ConflictError:
        return errors.ConflictError(
            "this request id was used for another request", hint="leave request_id out, or use a new one"
        )

    def _look(self, key: Key) -> tuple[float, bytes, Done] | None:
        found = self._recent.get(key)
        return found if found and found[0] > time.monotonic() else None

    def _remember(self, key: Key, digest: bytes, done: Done) -> None:
        if len(done.body) > WINDOW_BYTES // 4:
            return
        now = time.monotonic()
        if old := self._recent.pop(key, None):
            self._recent_bytes -= len(old[2].body)
        self._recent[key] = (now + WINDOW_S, digest, done)
        self._recent_bytes += len(done.body)
        while self._recent:
            first = next(iter(self._recent.values()))
            if first[0] > now and len(self._recent) <= WINDOW_COUNT and self._recent_bytes <= WINDOW_BYTES:
                break
            self._recent.popitem(last=False)
            self._recent_bytes -= len(first[2].body)

    async def settled(self, but: str, timeout_s: float) -> None:
        """Return when no run is under way except of the verb ``but``, or after ``timeout_s``."""
        tasks = [live.task for (_, verb, _), live in self._live.items() if verb != but]
        if tasks:
            await asyncio.wait([task for task in tasks if task is not None], timeout=timeout_s)

    def drain(self) -> None:
        """From now on nothing new begins; what a client's going would cancel is cancelled now
        (their clients are told to ask the next daemon), the rest finishes."""
        self.draining = True
        for live in list(self._live.values()):
            if live.cancel and live.task is not None:
                live.task.cancel()
                live.finish(RESTARTING)  # what is undone for it may take longer than its client should wait
