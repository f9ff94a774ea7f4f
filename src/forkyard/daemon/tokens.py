"""Tokens: who from another machine may speak, and what they may ask for.

A token is ``fy_<id>_<secret>``. The secret is 256 random bits, so that its SHA-256 says nothing about it and
cannot be guessed from it: a slow hash protects words that people choose, and would only make each
request slow here. The file holds hashes alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from forkyard import access, errors, verbs
from forkyard.host.files import write_atomic
from forkyard.requests import Caller

FORMAT = 1
MAX_TOKENS = 1000
NOT_KNOWN = "the token is not known to this daemon: it is wrong, was revoked, or has expired"
_ALL = frozenset({*verbs.VERBS, *verbs.STREAMS, *verbs.FILES})
_NONE = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Token:
    """``number`` is never used again, so that nothing kept for one token's requests is another's."""

    number: int
    info: access.TokenInfo
    sha256: str
    caller: Caller

    @property
    def expired(self) -> bool:
        return self.info.expires_at is not None and time.time() >= self.info.expires_at


class Tokens:
    """The tokens of one home. The daemon alone writes the file; what it holds is in memory too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_id: dict[str, Token] = {}
        self._last = 0
        self._damage: errors.UnavailableError | None = None

    def load(self) -> None:
        """Raises UnavailableError for a file that cannot be read; then nobody is let in, and it is let be."""
        try:
            data = json.loads(self._path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}")
            self._last = int(data["last"])
            for one in data["tokens"]:
                self._add(int(one["number"]), access.TokenInfo(**one["info"]), str(one["sha256"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._by_id.clear()
            self._damage = errors.UnavailableError(
                f"{self._path} cannot be read: {error}",
                hint="move it away, forkyard daemon restart, and make new tokens",
            )
            raise self._damage from None

    def _add(self, number: int, info: access.TokenInfo, sha256: str) -> Token:
        caller = Caller(
            uid=-1 - number,
            name=info.name,
            token=info.id,
            rights=access.rights(info.role, info.allow, _ALL),
        )
        token = self._by_id[info.id] = Token(number, info, sha256, caller)
        return token

    def _save(self) -> None:
        kept = [
            {"number": one.number, "info": one.info.to_dict(), "sha256": one.sha256}
            for one in self._by_id.values()
        ]
        write_atomic(self._path, json.dumps({"format": FORMAT, "last": self._last, "tokens": kept}, indent=1))

    def new(self, request: access.NewToken) -> access.MadeToken:
        """Raises InvalidRequestError (no rights, or unknown ones), ConflictError (the name)."""
        if request.role is None and not request.allow:
            raise errors.InvalidRequestError(
                "a token without rights is good for nothing",
                hint="give --role read|run|admin, or --allow VERB,...",
            )
        if unknown := sorted(set(request.allow) - _ALL - {access.NEAR}):
            raise errors.InvalidRequestError(f"there is no verb {unknown[0]!r}")
        if local := sorted(set(request.allow) & access.LOCAL):
            raise errors.InvalidRequestError(f"no token can have {local[0]!r}: it is for this machine only")
        self._whole()
        self.drop_expired()
        if any(one.info.name == request.name for one in self._by_id.values()):
            raise errors.ConflictError(
                f"there is a token called {request.name!r}", hint=f"forkyard token revoke {request.name}"
            )
        if len(self._by_id) >= MAX_TOKENS:
            raise errors.CapacityError(f"there are {MAX_TOKENS} tokens", hint="revoke some")
        ident, secret = os.urandom(5).hex(), os.urandom(32).hex()
        now = time.time()
        info = access.TokenInfo(
            id=ident,
            name=request.name,
            role=request.role,
            allow=sorted(set(request.allow)),
            created_at=now,
            expires_at=None if request.ttl_s is None else now + request.ttl_s,
        )
        self._last += 1
        self._add(self._last, info, _hash(secret))
        try:
            self._save()
        except BaseException:
            del self._by_id[ident]
            raise
        return access.MadeToken(token=f"fy_{ident}_{secret}", info=info)

    def good(self) -> list[access.TokenInfo]:
        """Those that are good."""
        self._whole()
        self.drop_expired()
        return [one.info for one in self._by_id.values()]

    def find(self, ref: str) -> access.TokenInfo:
        """By name or id. Raises NotFoundError."""
        self._whole()
        for one in self._by_id.values():
            if ref in (one.info.id, one.info.name):
                return one.info
        raise errors.NotFoundError(f"no token {ref[:100]!r}", hint="forkyard token ls")

    def revoke(self, ident: str) -> None:
        """From now on it lets nobody in: even when the file could not be written, which is then raised."""
        del self._by_id[ident]
        self._save()

    def _whole(self) -> None:
        if self._damage is not None:
            raise self._damage

    def drop_expired(self) -> list[str]:
        """Forget those whose time is over; gives their ids."""
        gone = [ident for ident, one in self._by_id.items() if one.expired]
        for ident in gone:
            del self._by_id[ident]
        return gone

    def check(self, text: str) -> Token | None:
        """The token that ``text`` is, in a time that does not depend on how much of it is right."""
        kind, _, rest = text.partition("_")
        ident, _, secret = rest.partition("_")
        found = self._by_id.get(ident)
        same = hmac.compare_digest(_hash(secret), found.sha256 if found else _NONE)
        if found is None or not same or kind != "fy" or found.expired:
            return None
        return found


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
