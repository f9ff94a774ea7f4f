"""The client's verbs about who else may use the daemon: they work on its own machine only."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forkyard import access
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client.aio_transport import AsyncTransport


class AsyncAccess:
    _transport: AsyncTransport

    async def listen(
        self,
        address: str | None = None,
        *,
        off: bool = False,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
    ) -> access.Listening:
        """Have the daemon listen over HTTPS at ``address`` (``ADDR:PORT``) from now on, over restarts too;
        with ``off`` no more. With neither: how it is.

        Args:
            cert, key: PEM files on the daemon's machine; by default it makes a certificate, which clients
                pin by the fingerprint at the end of the URL.

        Raises:
            UnavailableError: the address cannot be had. InvalidRequestError: the certificate cannot.
            AccessDeniedError: this client is on another machine.
        """
        request = protocol.made(
            access.Listen,
            address=address,
            off=off,
            cert=None if cert is None else os.path.abspath(cert),
            key=None if key is None else os.path.abspath(key),
            request_id=protocol.new_request_id(),
        )
        listening: access.Listening = await self._transport.call("listen", request)
        return listening

    async def new_token(
        self,
        name: str,
        *,
        role: access.Role | None = None,
        allow: Sequence[str] = (),
        ttl_s: float | None = None,
    ) -> access.MadeToken:
        """A token for a client on another machine; it is shown this once.

        Args:
            role: ``read`` (questions), ``run`` (all that is done with sandboxes) or ``admin``.
            allow: Verbs beside those of the role.
            ttl_s: Good for so long; None: until it is revoked.

        Raises:
            ConflictError: there is one of that name. InvalidRequestError: no such verb.
        """
        request = protocol.made(
            access.NewToken,
            name=name,
            role=role,
            allow=list(allow),
            ttl_s=ttl_s,
            request_id=protocol.new_request_id(),
        )
        made: access.MadeToken = await self._transport.call("new_token", request)
        return made

    async def list_tokens(self) -> list[access.TokenInfo]:
        """Those that are good, without what they are."""
        tokens: list[access.TokenInfo] = await self._transport.call("list_tokens", rq.Empty())
        return tokens

    async def revoke_token(self, token: str) -> access.TokenInfo:
        """Refuse it (by name or id) from now on, and end what its clients have open. Raises NotFoundError."""
        request = access.RevokeToken(token=token, request_id=protocol.new_request_id())
        info: access.TokenInfo = await self._transport.call("revoke_token", request)
        return info
