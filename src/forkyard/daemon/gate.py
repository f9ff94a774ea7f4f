"""What stands before the application for everybody who comes over the network.

It asks for a token before it reads a body, holds the token's rights against the verb, and bounds
how much and how slowly one peer may ask. Who has no token costs one look-up and one small reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

from forkyard import access, errors, verbs
from forkyard.daemon import openapi
from forkyard.daemon.exchange import Done, Message, Receive, Reply, Send, done_with, log
from forkyard.daemon.limits import Rate
from forkyard.daemon.tokens import NOT_KNOWN, Token, Tokens
from forkyard.egress.policy import Address, closed, parse_address
from forkyard.egress.reach import is_own
from forkyard.oci.reference import registry_of

STALL_S = 30.0
"""A body that is not a stream may stand still for so long."""
DESCRIPTION = "/openapi.json"
_PREFIX = "/v1/"
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Connection(Protocol):
    """A connection as the gate sees it."""

    place: str

    def admitted(self, token: str) -> None:
        """It has shown the token of that id."""


class Gate:
    """An ASGI application around another.

    Args:
        app: What is asked when all is well.
        tokens: Who is known.
    """

    def __init__(self, app: App, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens
        self.requests = Rate(1000, 2000)
        """By token: well above what a busy yard does."""
        self.wrong = Rate(5, 20)
        """Failed log-ins, by place."""
        self.all_wrong = Rate(100, 200)
        self._said = Rate(1, 20)  # so that strangers do not fill the log

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name: value for name, value in scope["headers"]}
        json = b"application/json" in headers.get(b"content-type", b"") + headers.get(b"accept", b"")
        reply = Reply(send, json=json or scope["path"] == DESCRIPTION)
        connection: Connection = scope["state"]["connection"]
        try:
            token = self._known(headers.get(b"authorization", b""), connection.place)
            connection.admitted(token.info.id)
            if wait := self.requests.take(token.info.id):
                error = errors.CapacityError(
                    f"more than {self.requests.per_s:g} requests a second with the token {token.info.name!r}",
                    retryable=True,
                )
                raise RefusalError(429, error, after_s=wait)
            verb = self._may(token, scope)
        except RefusalError as refusal:
            await refusal.send(reply)
            return
        if verb == DESCRIPTION:
            await reply.bytes(openapi.description_json())
            return
        scope["state"]["caller"] = token.caller
        whole = verb in verbs.VERBS and headers.get(b"content-type", b"") != verbs.EXEC_STREAM.encode()
        await self._app(scope, _unstalled(receive) if whole else receive, send)

    def _known(self, authorization: bytes, place: str) -> Token:
        scheme, _, text = authorization.decode("latin-1").partition(" ")
        token = self._tokens.check(text.strip()) if scheme.lower() == "bearer" else None
        if token is not None:
            # Whatever else comes from there: who knows a token is not kept out by those who do not.
            return token
        if wait := self.wrong.take(place) or self.all_wrong.take(""):
            error = errors.CapacityError(f"too many failed log-ins from {place}", retryable=True)
            raise RefusalError(429, error, after_s=wait)
        if not self._said.take(""):
            log.info("refused %s: %s", place, "an unknown token" if authorization else "no token")
        said = NOT_KNOWN if authorization else "this daemon wants a token"
        hint = "make one on its machine: forkyard token new; and give it as FORKYARD_TOKEN"
        raise RefusalError(401, errors.AccessDeniedError(said, hint=hint))

    def _may(self, token: Token, scope: Message) -> str:
        """The verb that is asked for, which the token has the right to."""
        path, method = scope["path"], scope["method"]
        wanted = "GET" if path == DESCRIPTION else "POST"
        verb = path if path == DESCRIPTION else path.removeprefix(_PREFIX)
        known = verb == DESCRIPTION or (
            path.startswith(_PREFIX) and (verb in verbs.VERBS or verb in verbs.STREAMS or verb in verbs.FILES)
        )
        if not known:
            raise RefusalError(404, errors.NotFoundError(f"there is no {path[:200]}", hint="POST /v1/<verb>"))
        if method != wanted:
            error = errors.InvalidRequestError(f"{path} takes {wanted}, not {method}")
            raise RefusalError(405, error, headers=[(b"allow", wanted.encode())])
        if verb != DESCRIPTION and verb not in token.caller.rights:
            log.info("refused the token %s (%s): %s", token.info.id, token.info.name, verb)
            hint = f"on the daemon's machine: forkyard token new --allow {verb}"
            if verb in access.LOCAL:
                hint = "no token has it: it is done on the daemon's machine"
            said = f"the token {token.info.name!r} has no right to {verb}"
            raise RefusalError(403, errors.AccessDeniedError(said, hint=hint))
        return str(verb)


class RefusalError(Exception):
    """A reply that is given before anything of the body is read; the connection ends with it."""

    def __init__(
        self,
        status: int,
        error: errors.ForkyardError,
        *,
        after_s: float | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(error.message)
        self.done = Done(status, done_with(error).body)
        self.headers = list(headers or [])
        if status == 401:
            self.headers.append((b"www-authenticate", b"Bearer"))
        if after_s is not None:
            self.headers.append((verbs.RETRY_AFTER_HEADER.encode(), b"%d" % max(1, math.ceil(after_s))))

    async def send(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):
            await reply.done(self.done, close=True, headers=self.headers)


def _unstalled(receive: Receive) -> Receive:
    """``receive``, as long as the body comes; afterwards it waits for the client's going, however long."""
    whole = False

    async def receive_soon() -> Message:
        nonlocal whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout(STALL_S):
                message = await receive()
        except TimeoutError:
            raise errors.InvalidRequestError(f"the request's body stood still for {STALL_S:g} s") from None
        whole = not message.get("more_body", False)
        return message

    return receive_soon


def may_ask(caller: Any, request: Any) -> None:
    """Raises AccessDeniedError, or InvalidRequestError, for what a token's verb does not cover."""
    lease = getattr(request, "lease", None)
    if getattr(lease, "pid", None) is not None:
        raise errors.InvalidRequestError(
            "a process on another machine cannot hold a lease", hint="hold a stream open: hold_lease"
        )
    for right, why in _needed(request):
        if right not in caller.rights:
            raise errors.AccessDeniedError(
                f"the token {caller.name!r} has no right to {right}: {why}",
                hint=f"on the daemon's machine: forkyard token new --allow {right}",
            )


def _needed(request: Any) -> Iterator[tuple[str, str]]:
    """The rights that a request takes besides its verb's own, and why."""
    specs = [spec for spec in (*getattr(request, "specs", []), getattr(request, "spec", None)) if spec]
    if any(spec.dockerfile is not None for spec in specs):
        yield "build_template", "a Dockerfile runs on the host"
    if getattr(request, "disk_budget_mb", None) is not None:
        yield "delete_template", "a budget deletes what others made"
    image = getattr(request, "image", None)
    if image is not None:
        yield "pull_template", f"{image[:80]!r} may have to be pulled"
    rules = getattr(request, "egress_allow", None) or []
    if rules or getattr(request, "egress", None) not in (None, "deny"):
        yield "set_egress", "it opens a network"
    pulled = [text for text in _pulled(request) if is_near(registry_of(text))]
    for text in (*filter(is_near, rules), *pulled):
        yield access.NEAR, f"{text[:80]!r} is an address, or this machine"
    url = getattr(request, "url", None)
    if url and is_near(urlsplit(url).hostname or ""):
        yield access.NEAR, f"{url[:80]!r} leads to an address, or to this machine"


def _pulled(request: Any) -> list[str]:
    """What a request may have to get from a registry."""
    specs = [*getattr(request, "specs", []), getattr(request, "spec", None)]
    images = [spec.image for spec in specs if spec is not None and spec.format == "registry"]
    images.append(getattr(request, "source", None))
    if getattr(request, "image_format", "") == "registry":
        images.append(getattr(request, "image", None))
    return [image for image in images if image]


async def may_pull(caller: Any, request: Any) -> None:
    """Raises AccessDeniedError for a registry whose name leads to where the token may not go. One that has
    no address here is left to who asks it, by a proxy perhaps."""
    if access.NEAR in caller.rights:
        return
    for image in _pulled(request):
        host = registry_of(image).partition(":")[0]
        for address in await asyncio.to_thread(look_up, host):
            why = closed(address) or ("this machine's own" if is_own(address) else None)
            if why is not None:
                where = f"{host} leads to {address}, {why}"
                raise errors.AccessDeniedError(
                    f"the token {caller.name!r} has no right to {access.NEAR}: {where}",
                    hint=f"on the daemon's machine: forkyard token new --allow {access.NEAR}",
                )


def look_up(host: str) -> set[Address]:
    """The addresses of a name; none if it has none here."""
    try:
        found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {address for *_, where in found if (address := parse_address(str(where[0]).partition("%")[0]))}


def is_near(where: str) -> bool:
    """Whether a rule, a registry or a host names an address or range, or a machine without a domain."""
    host = where.strip().rpartition("@")[2].partition("/")[0]
    if not host or where.startswith("@"):
        return False
    if host.startswith("[") or host.count(":") > 1:
        return True
    host = host.partition(":")[0]
    # The C library takes 127.1, 0x7f000001 and 2130706433 for addresses, too.
    return "." not in host.rstrip(".") or host.rstrip(".").rpartition(".")[2][:1].isdigit()
