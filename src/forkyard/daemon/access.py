"""The verbs about tokens and the listener, which are for the machine's own socket only.

Whether it listens, and where, is remembered in ``<home>/listen.json``, so that the next daemon does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from forkyard import access, errors
from forkyard import requests as rq
from forkyard.daemon import tls
from forkyard.daemon.exchange import log
from forkyard.daemon.gate import App
from forkyard.daemon.listener import Listener, bind, split
from forkyard.daemon.tokens import Tokens
from forkyard.host.files import write_atomic
from forkyard.requests import Caller

FORMAT = 1
CLOSE_S = 1.0
"""So long running requests have to end when it listens no more, or elsewhere."""
Record = Callable[..., Awaitable[Any]]


class Access:
    """Args:
    home: Where it is all kept.
    tasks: Owns what the listener does.
    record: Audits a change: ``record(kind, caller, **data)``.
    """

    def __init__(self, home: Path, tasks: asyncio.TaskGroup, record: Record) -> None:
        self._home = home
        self._tasks = tasks
        self._record = record
        self._tokens = Tokens(home / "tokens.json")
        self._app: App
        self._listener: Listener | None = None
        self._wanted: access.Listen | None = None
        self._state = access.Listening()
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def serving(self, app: App) -> AsyncIterator[None]:
        """``app`` is served inside the block, if it was to listen. What is wrong with that is told by
        :meth:`listen`, and stops no daemon."""
        self._app = app
        await self._resume()
        try:
            yield
        finally:
            await self._close()

    def drain(self) -> None:
        """No new connections: who comes now is to find the next daemon."""
        if self._listener is not None:
            self._listener.refuse()

    async def _resume(self) -> None:
        wanted = access.Listen()
        try:
            self._tokens.load()
            path = self._home / "listen.json"
            if path.exists():
                data = json.loads(path.read_text())
                if data.pop("format") != FORMAT:
                    raise ValueError(f"{path} is of another version")
                wanted = access.Listen(**data)
                await self._open(wanted)
        except (errors.ForkyardError, OSError, ValueError, KeyError, TypeError) as error:
            log.error("not listening: %s", error)
            self._state = access.Listening(address=wanted.address, problem=str(error))

    async def listen(self, request: access.Listen, caller: Caller) -> access.Listening:
        if request.address is None and not request.off:
            if request.cert or request.key:
                raise errors.InvalidRequestError("a certificate without an address", hint="say ADDR:PORT too")
            return self._state
        if request.off and request.address is not None:
            raise errors.InvalidRequestError(f"{request.address!r}, and off", hint="say one of them")
        if (request.cert is None) != (request.key is None):
            raise errors.InvalidRequestError("a certificate needs its key, and a key its certificate")
        async with self._changing:
            if request.off:
                (self._home / "listen.json").unlink(missing_ok=True)
                await self._close()
            else:
                await self._move(request)
                kept = {"address": self._state.address, "cert": request.cert, "key": request.key}
                write_atomic(self._home / "listen.json", json.dumps({"format": FORMAT, **kept}))
            about = {"address": self._state.address, "fingerprint": self._state.fingerprint}
            await self._record("access.listen", caller, **about)
        return self._state

    async def _move(self, wanted: access.Listen) -> None:
        """Listen as ``wanted``, or go on as before."""
        # What is wrong with the certificate shows while the old one still listens.
        await asyncio.to_thread(_identity, self._home, wanted)
        before = self._wanted
        await self._close()
        try:
            await self._open(wanted)
        except Exception:
            if before is not None:
                await self._open(before)
            raise

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        self._wanted, self._state = None, access.Listening()
        if listener is not None:
            await listener.close(grace_s=CLOSE_S)

    async def _open(self, wanted: access.Listen) -> None:
        host, port = split(wanted.address or "", access.DEFAULT_PORT)
        cert, context, mark = await asyncio.to_thread(_identity, self._home, wanted)
        sockets = await asyncio.to_thread(bind, host, port)
        listener = Listener(self._app, self._tokens, self._tasks)
        listener.listen(sockets, context)
        port = sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        named = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        self._listener = listener
        # The port too: where it was left to the kernel, the next daemon is to have the same.
        self._wanted = msgspec.structs.replace(wanted, address=f"{shown}:{port}")
        self._state = access.Listening(
            address=f"{shown}:{port}",
            url=f"https://{named}:{port}#sha256:{mark}",
            fingerprint=f"sha256:{mark}",
            cert=str(cert),
        )
        log.info("listening at %s, certificate sha256:%s", self._state.address, mark)

    async def new_token(self, request: access.NewToken, caller: Caller) -> access.MadeToken:
        made = self._tokens.new(request)
        await self._record("access.token", caller, **_about(made.info))
        return made

    async def list_tokens(self, _: rq.Empty, __: Caller) -> list[access.TokenInfo]:
        return self._tokens.good()

    async def revoke_token(self, request: access.RevokeToken, caller: Caller) -> access.TokenInfo:
        info = self._tokens.find(request.token)
        try:
            self._tokens.revoke(info.id)
        finally:
            if self._listener is not None:
                self._listener.hang_up(info.id)
        await self._record("access.revoked", caller, token=info.id, name=info.name)
        return info


def _identity(home: Path, wanted: access.Listen) -> tuple[Path, ssl.SSLContext, str]:
    """The certificate to serve with, and its fingerprint. It blocks."""
    if wanted.cert and wanted.key:
        cert, key = Path(wanted.cert), Path(wanted.key)
    else:
        cert, key = tls.own(home / "tls", split(wanted.address or "", access.DEFAULT_PORT)[0])
    return cert, tls.context(cert, key), tls.fingerprint(cert)


def _about(info: access.TokenInfo) -> dict[str, Any]:
    return {"token": info.id, **{key: value for key, value in info.to_dict().items() if key != "id"}}
