"""Another machine's daemon: where it is, what it is shown, and how its certificate is checked.

What blocks here is called off the loop by whoever has one.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from forkyard import errors
from forkyard.access import DEFAULT_PORT

CONNECT_S = 10.0
RETRY_S = 0.2
# A machine that vanished without a word is noticed after about half a minute.
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
]
_PIN = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(eq=False)
class Remote:
    """One daemon on another machine.

    Attributes:
        url: ``https://host:port``.
        trust: ``sha256:<fingerprint>`` of its certificate, the path of a PEM file with those who may vouch
            for it, or None for the authorities that this machine trusts.
        token: What it is shown.
    """

    url: str
    host: str
    port: int
    trust: str | None
    token: str | None = field(repr=False)
    _context: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, token: str | None, ca: str | os.PathLike[str] | None) -> Remote:
        """From what a user says. Raises InvalidRequestError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as error:
            raise errors.InvalidRequestError(f"{url!r} is no URL: {error}") from None
        if parts.scheme == "http":
            raise errors.InvalidRequestError(
                f"{url!r} would show the token to everybody on the way", hint="use https://"
            )
        if parts.scheme != "https" or not host or parts.path.strip("/") or parts.query or "@" in parts.netloc:
            raise errors.InvalidRequestError(
                f"{url!r} is no daemon's URL",
                hint="it looks like https://host:8470, perhaps with #sha256:...",
            )
        trust = os.fspath(ca) if ca is not None else parts.fragment or None
        if trust is not None and (ca is None or trust.startswith("sha256:")) and not _PIN.fullmatch(trust):
            raise errors.InvalidRequestError(
                f"{trust!r} is no fingerprint",
                hint="sha256: and 64 hexadecimal digits, as forkyard daemon listen says",
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", host, port, trust, token and token.strip())

    @property
    def ready(self) -> bool:
        """Whether :meth:`context` would wait for nothing."""
        return self._context is not None

    def context(self) -> ssl.SSLContext:
        """How it is to prove who it is.

        Raises:
            UnavailableError: it does not answer. AccessDeniedError: its certificate is not the one that is
            trusted. InvalidRequestError: the file of those who may vouch cannot be read.
        """
        if self._context is None:
            if self.trust is None or not _PIN.fullmatch(self.trust):
                self._context = self._authorities()
            else:
                self._context = self._pinned(self.trust)
        return self._context

    def _authorities(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.trust)
        except (OSError, ssl.SSLError) as error:
            raise errors.InvalidRequestError(f"{self.trust} cannot be read: {error}") from None

    def _pinned(self, pin: str) -> ssl.SSLContext:
        """It trusts one certificate and nothing else, whoever made that and whatever names are in it. The
        certificate itself is fetched from the daemon and believed for its fingerprint."""
        cert = self._fetched()
        found = "sha256:" + hashlib.sha256(cert).hexdigest()
        if found != pin:
            raise errors.AccessDeniedError(
                f"{self.url} has another certificate than the one that is pinned: {found}",
                hint="on its machine, forkyard daemon listen says which is right; nothing was sent to it",
            )
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname = False
        # Enough that this very certificate is among those that are trusted.
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        made.load_verify_locations(cadata=cert)
        return made

    def _fetched(self) -> bytes:
        """The certificate that it shows."""
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE
        patience = time.monotonic() + CONNECT_S
        while True:
            try:
                with (
                    socket.create_connection((self.host, self.port), timeout=CONNECT_S) as sock,
                    asking.wrap_socket(sock, server_hostname=self.host) as tls,
                ):
                    return tls.getpeercert(binary_form=True) or b""
            except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError) as error:
                # It has only so many connections at a time that have shown no token yet.
                if time.monotonic() >= patience:
                    raise self.failure(error) from None
            except OSError as error:
                raise self.failure(error) from None
            time.sleep(RETRY_S)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Raises AccessDeniedError where there is no token."""
        if not self.token:
            raise errors.AccessDeniedError(
                f"there is no token for {self.url}",
                hint="forkyard token new on its machine makes one; here it is FORKYARD_TOKEN, or token=",
            )
        try:
            host = self.url.removeprefix("https://").encode("ascii" if self.url.isascii() else "idna")
            return [(b"host", host), (b"authorization", b"Bearer " + self.token.encode("ascii"))]
        except UnicodeError:
            raise errors.AccessDeniedError("what is given as the token is none") from None

    def reach(self, wait_s: float = 0) -> None:
        """Return when somebody listens there, at the latest after ``wait_s``. Raises UnavailableError."""
        patience = time.monotonic() + wait_s
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=CONNECT_S).close()
                return
            except OSError as error:
                if time.monotonic() >= patience:
                    raise self.failure(error) from None
            time.sleep(RETRY_S)

    def failure(self, error: BaseException) -> errors.ForkyardError:
        """What is wrong when it cannot be connected to."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return errors.AccessDeniedError(
                    f"the certificate of {self.url} is not trusted: {cause.verify_message}",
                    hint="use the URL with #sha256:... that forkyard daemon listen prints there, or ca=",
                )
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
                return errors.UnavailableError(
                    f"{self.url} speaks no TLS that is understood here: {cause.reason or cause}",
                    hint="forkyard daemon listen on its machine says where it listens",
                )
            cause = cause.__cause__ or cause.__context__
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return errors.UnavailableError(
            f"{self.url} does not answer: {said}",
            hint="is that its address, and does it listen? On its machine: forkyard daemon listen",
            retryable=True,
        )


def ca_of(given: str | os.PathLike[str] | None) -> str | None:
    """``ca=`` as text: a fingerprint, or a path that holds from every directory."""
    if given is None:
        return None
    text = os.fspath(given)
    return text if text.startswith("sha256:") else str(Path(text).expanduser().absolute())
