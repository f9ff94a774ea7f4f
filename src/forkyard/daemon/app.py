"""The daemon's HTTP surface: a lean ASGI application over ``verbs.VERBS``.

It decodes, authorises, sees to it that a change happens once, and hands the rest to the yard.
A request costs one dict look-up and one typed decode; there is no framework in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from forkyard import __version__, errors, verbs
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.daemon.access import Access
from forkyard.daemon.auth import NOBODY, may_speak
from forkyard.daemon.exchange import (
    RESTARTING,
    Body,
    ClientGoneError,
    Done,
    Message,
    Pump,
    Receive,
    Reply,
    Send,
    done_with,
    encode,
    log,
)
from forkyard.daemon.gate import may_ask, may_pull
from forkyard.daemon.once import Once
from forkyard.daemon.ports import Yard
from forkyard.host.trace import span
from forkyard.requests import Caller

UNDER_WAY_S = 20.0
"""So long a shutdown that ends sandboxes waits for the calls that may be making some."""
_PREFIX = "/v1/"


@dataclass(frozen=True, slots=True)
class Route:
    """A verb with everything about it looked up beforehand."""

    name: str
    verb: verbs.Verb
    call: Callable[..., Any]
    decode: Callable[[bytes], Any]
    decode_json: Callable[[bytes], Any]
    handle: Callable[[Route, Any, Body, Reply, Caller], Awaitable[None]]


class App:
    """The ASGI application.

    Args:
        yard: What does the work.
        tasks: Owns what outlives a connection.
        stop: Called once, when ``shutdown`` was asked and ``prepare_shutdown`` is through.
        access: Who manages tokens and the listener.
    """

    def __init__(
        self, yard: Yard, tasks: asyncio.TaskGroup, stop: Callable[[], None], access: Access
    ) -> None:
        self._yard = yard
        self._access = access
        self._stop = stop
        self._once = Once(tasks, yard.replies)
        self._unnamed = itertools.count()
        self._streams: set[asyncio.Task[Any]] = set()
        self._routes: dict[str, Route] = {}
        for table in (verbs.VERBS, verbs.STREAMS, verbs.FILES):
            for name, verb in table.items():
                self._routes[_PREFIX + name] = self._route(name, verb)

    def _route(self, name: str, verb: verbs.Verb) -> Route:
        handle: Callable[..., Awaitable[None]] = self._ask
        if name in verbs.STREAMS:
            handle = self._stream
        elif name in verbs.FILES:
            handle = self._upload if verb.changes else self._stream
        elif name == "exec":
            handle = self._exec
        elif verb.changes:
            handle = self._change
        elif verb.gone == "cancel":
            handle = self._wait
        own = {"yard": self._yard, "daemon": self, "access": self._access}
        at: Any = own.get(verb.at) or getattr(self._yard, verb.at)
        method = verb.method or name
        return Route(
            name,
            verb,
            getattr(at, f"_{method}" if at is self else method),
            msgspec.msgpack.Decoder(verb.request).decode,
            msgspec.json.Decoder(verb.request).decode,
            handle,
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = Body(receive)
        kind = accept = b""
        for name, value in scope["headers"]:
            if name == b"content-type":
                kind = value
            elif name == b"accept":
                accept = value
        json_in = kind.startswith(b"application/json")
        reply = Reply(send, json=json_in or accept.startswith(b"application/json"))
        try:
            caller: Caller = scope.get("state", {}).get("caller", NOBODY)
            if not may_speak(caller):
                raise errors.AccessDeniedError(
                    f"user {caller.name} may not use this daemon", hint="run as root or as the daemon's user"
                )
            route = self._routes.get(scope["path"])
            if route is None:
                raise errors.NotFoundError(f"there is no {scope['path']}", hint="POST /v1/<verb>")
            if kind == verbs.EXEC_STREAM.encode() or (route.name in verbs.FILES and route.verb.changes):
                data = await body.head()
            else:
                data = await body.whole()
            request = self._decode(route, data, json_in)
            if caller.token is not None:
                may_ask(caller, request)
                await may_pull(caller, request)
            log.debug("%s by %s, pid %s", route.name, caller.name, caller.pid)
            with span(route.name):
                await route.handle(route, request, body, reply, caller)
        except ClientGoneError:
            return
        except Exception as error:
            await reply.done(done_with(error), close=not body.complete)

    @staticmethod
    def _decode(route: Route, data: bytes, json: bool) -> Any:
        try:
            if not data:
                return route.decode(b"\x80")
            return route.decode_json(data) if json else route.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.InvalidRequestError(f"{route.name}: {rq.complaint(error)}") from None

    # The kinds of verbs.

    async def _ask(self, route: Route, request: Any, _: Body, reply: Reply, caller: Caller) -> None:
        await reply.value(await route.call(request, caller))

    async def _wait(self, route: Route, request: Any, body: Body, reply: Reply, caller: Caller) -> None:
        """A question that may take long: given up when the client goes."""
        async with self._with_client(body.gone):
            value = await route.call(request, caller)
        await reply.value(value)

    async def _change(
        self,
        route: Route,
        request: Any,
        body: Body,
        reply: Reply,
        caller: Caller,
        call: Callable[[], Awaitable[Any]] | None = None,
        gone: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        async def work() -> bytes:
            return encode(await (call() if call else route.call(request, caller)))

        verb = route.verb
        done = await self._once.run(
            # Without an id nothing can repeat it; a number keeps it apart from the others.
            (request.request_id or f"\0{next(self._unnamed)}", route.name, caller.uid),
            _digest(request),
            work,
            keep=verb.keep and bool(request.request_id),
            cancel=verb.gone == "cancel",
            gone=gone or body.gone,
        )
        await reply.done(done, verb.reply, close=not body.complete)

    async def _exec(self, route: Route, request: rq.Exec, body: Body, reply: Reply, caller: Caller) -> None:
        if not body.headed:
            await self._change(route, request, body, reply, caller)
            return
        pump = Pump(body)
        await self._change(
            route,
            request,
            body,
            reply,
            caller,
            lambda: self._yard.execs.run(request, caller, pump.chunks()),
            pump.run,
        )

    async def _upload(self, route: Route, request: Any, body: Body, reply: Reply, caller: Caller) -> None:
        try:
            value = await route.call(request, body.chunks(), caller)
        except ClientGoneError:
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(ClientGoneError):
                raise ClientGoneError from None
            raise
        await reply.done(Done(200, encode(value)), route.verb.reply, close=not body.complete)

    async def _stream(self, route: Route, request: Any, body: Body, reply: Reply, caller: Caller) -> None:
        if self._once.draining:
            await reply.done(RESTARTING)
            return
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._streams.add(task)
        failed: Done | None = None
        try:
            async with self._with_client(body.gone):
                failed = await self._send_items(route.call(request, caller), reply)
        except asyncio.CancelledError:
            # Only drain() cancels a request: the client is told to look for the next daemon.
            task.uncancel()
            failed = RESTARTING
        finally:
            self._streams.discard(task)
        if reply.started:
            await reply.end(failed)
        elif failed is not None:
            await reply.done(failed)

    @staticmethod
    async def _send_items(items: AsyncIterator[Any], reply: Reply) -> Done | None:
        """Headers go out with the first item, so that an error before it has its status."""
        try:
            async with contextlib.aclosing(cast("Any", items)):
                async for item in items:
                    if not reply.started:
                        await reply.begin()
                    await reply.item(item)
                if not reply.started:
                    await reply.begin()
        except Exception as error:
            return done_with(error)
        return None

    @contextlib.asynccontextmanager
    async def _with_client(self, gone: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """The body is cancelled, and ClientGoneError raised, when the client goes."""

        async def watch() -> None:
            await gone()
            raise ClientGoneError

        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(watch())
                try:
                    yield
                except Exception as error:
                    failure = error
                finally:
                    watcher.cancel()
        except* ClientGoneError:
            failure = ClientGoneError()
        if failure is not None:
            raise failure

    # The daemon's own verbs.

    async def _version(self, _: rq.Empty, __: Caller) -> ty.VersionInfo:
        return ty.VersionInfo(version=__version__, api=verbs.API_VERSION)

    async def _exec_many(self, request: rq.ExecMany, caller: Caller) -> list[rq.ExecOutcome]:
        outcomes: list[rq.ExecOutcome] = [rq.ExecOutcome()] * len(request.commands)

        async def one(index: int, command: rq.Exec) -> None:
            try:
                outcomes[index] = rq.ExecOutcome(result=await self._yard.execs.run(command, caller))
            except errors.ForkyardError as error:
                outcomes[index] = rq.ExecOutcome(error=errors.to_wire(error))

        async with asyncio.TaskGroup() as group:
            for index, command in enumerate(request.commands):
                group.create_task(one(index, command))
        return outcomes

    async def _shutdown(self, request: rq.Shutdown, _: Caller) -> None:
        if request.sandboxes != "keep":
            # None may come to be behind it: nothing new begins, and what is under way ends before
            # they are looked through once more.
            self.drain()
            await self._yard.prepare_shutdown(request.sandboxes)
            await self._once.settled("shutdown", UNDER_WAY_S)
        await self._yard.prepare_shutdown(request.sandboxes)
        self._stop()

    def drain(self) -> None:
        """Nothing new begins; clients of what would go on for long are sent to the next daemon."""
        self._access.drain()
        self._once.drain()
        for task in list(self._streams):
            task.cancel()


def _digest(request: Any) -> bytes:
    """Of what is asked, whoever asks: a retry by another process carries another lease."""
    if getattr(request, "lease", None) is not None and not isinstance(request, rq.Adopt | rq.ReleaseLease):
        request = msgspec.structs.replace(request, lease=None)
    try:
        return hashlib.blake2b(encode(request), digest_size=16).digest()
    except OverflowError as error:
        raise errors.InvalidRequestError(f"a number in it is too large: {error}") from None
