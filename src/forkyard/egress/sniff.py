"""What a connection says it is for: a TLS greeting's server name, every HTTP request's host.

Both take bytes as they come, however they are cut, and let none through before it is known to
be right. Pure.
"""

from __future__ import annotations

import re

from forkyard.egress.policy import canonical, parse_address

MAX_HELLO = 32 << 10
MAX_HEAD = 64 << 10
# A fatal alert, unrecognized_name: what a TLS client shows its user instead of a mere reset.
TLS_ALERT = bytes([21, 3, 3, 0, 2, 2, 112])
HTTP_REFUSAL = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
)


class RefusedError(Exception):
    """The connection says something else than what it was opened for; the text says what.

    ``answer`` is for the one who spoke.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class Check:
    """:meth:`feed` returns the bytes that may go on, and raises RefusedError; while it ``waits``,
    :meth:`answered` has to hear what comes back."""

    waits = False

    def feed(self, data: bytes) -> bytes:
        return data

    def answered(self, data: bytes) -> bytes:
        """Take note of what came back from the other side; the bytes that may go on after it."""
        return b""


class TlsCheck(Check):
    """The greeting must name ``name``; what follows is ciphertext and goes through."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = bytearray()
        self._done = False

    def feed(self, data: bytes) -> bytes:
        if self._done:
            return data
        self._held += data
        try:
            said = server_name(bytes(self._held))
        except ValueError as error:
            raise RefusedError(str(error), TLS_ALERT) from None
        if said is None:
            if len(self._held) > MAX_HELLO:
                raise RefusedError("a TLS greeting that does not end", TLS_ALERT)
            return b""
        if canonical(said) != self._name:
            why = f"TLS is for {said[:100]!r}" if said else "TLS without a server name"
            raise RefusedError(why, TLS_ALERT)
        self._done = True
        out, self._held = bytes(self._held), bytearray()
        return out


def server_name(data: bytes) -> str | None:
    """The name in a TLS ClientHello, "" if it has none, None if there is more to come.

    Raises:
        ValueError: this is no ClientHello.
    """
    hello = bytearray()
    at = 0
    while True:
        if len(data) - at < 5:
            if len(data) > at and data[at] != 22:
                raise ValueError("no TLS")
            return None
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != 22 or major != 3 or not 0 < size <= 16640:
            raise ValueError("no TLS")
        part = data[at + 5 : at + 5 + size]
        hello += part
        if len(hello) >= 4:
            if hello[0] != 1:
                raise ValueError("TLS does not begin with a greeting")
            want = 4 + int.from_bytes(hello[1:4], "big")
            if len(hello) >= want:
                return _name_in(bytes(hello[4:want]))
        if len(part) < size:
            return None
        at += 5 + size


def _name_in(body: bytes) -> str:
    def take(at: int, width: int) -> tuple[int, int]:
        size = int.from_bytes(body[at : at + width], "big")
        end = at + width + size
        if end > len(body):
            raise ValueError("a malformed TLS greeting")
        return at + width, end

    at = 34  # version and random
    for width in (1, 2, 1):  # session id, cipher suites, compression methods
        _, at = take(at, width)
    if at == len(body):
        return ""
    at, end = take(at, 2)
    names: list[str] = []
    while at < end:
        kind = int.from_bytes(body[at : at + 2], "big")
        start, at = take(at + 2, 2)
        if kind != 0:
            continue
        start, stop = take(start, 2)
        while start < stop:
            which = body[start]
            start, after = take(start + 1, 2)
            if which == 0:
                names.append(body[start:after].decode("ascii", "replace"))
            start = after
    if len(names) > 1:
        raise ValueError("a TLS greeting with several server names")
    return names[0] if names else ""


_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rb"(%b) (\S+) HTTP/1\.[01]" % _TOKEN)
_FIELD = re.compile(rb"(%b):[ \t]*(.*?)[ \t]*" % _TOKEN, re.S)


class HttpCheck(Check):
    """Every request must be for ``name``. Only what is certainly understood goes through, since
    a request that two readers cut differently could hide another one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = bytearray()
        self._left = 0  # bytes of a body still to come
        self._chunked = False
        self._trailer = False
        self._first = True
        self._upgrade = False  # held until the answer says whether this is HTTP any longer
        self._answer = bytearray()
        self._opaque = False

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self._upgrade

    def feed(self, data: bytes) -> bytes:
        self._held += data
        if self._opaque:
            return self._take(len(self._held))
        out = bytearray()
        while self._held and not self._upgrade:
            before = len(self._held)
            if self._left:
                out += self._take(min(self._left, before))
                self._left -= before - len(self._held)
            elif self._chunked:
                out += self._chunk()
            else:
                out += self._request()
            if len(self._held) == before:
                break
        if len(self._held) > MAX_HEAD:
            raise self._refuse("a request whose head does not end")
        return bytes(out)

    def answered(self, data: bytes) -> bytes:
        if not self._upgrade or self._opaque:
            return b""
        self._answer += data[: 64 - len(self._answer)]
        status = re.match(rb"HTTP/1\.[01] (\d{3})", self._answer)
        if status is None:
            return b""
        self._upgrade = False
        self._opaque = status[1] == b"101"
        return self.feed(b"")

    def _refuse(self, why: str) -> RefusedError:
        text = f"forkyard: {why}; this connection is for {self._name}\n".encode()
        return RefusedError(why, HTTP_REFUSAL % (len(text), text))

    def _take(self, n: int) -> bytes:
        out = bytes(self._held[:n])
        del self._held[:n]
        return out

    def _line(self) -> bytes | None:
        at = self._held.find(b"\r\n")
        if at < 0 and b"\n" in self._held:
            raise self._refuse("a line without a carriage return")
        return bytes(self._held[:at]) if at >= 0 else None

    def _chunk(self) -> bytes:
        line = self._line()
        if line is None:
            return b""
        if self._trailer:
            self._trailer = self._chunked = bool(line)
            return self._take(len(line) + 2)
        size = re.fullmatch(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[^\r\n]*)?", line)
        if size is None:
            raise self._refuse("a malformed chunk")
        n = int(size[1], 16)
        self._trailer = not n
        # The chunk's own line end is part of what has to come.
        self._left = n + 2 if n else 0
        return self._take(len(line) + 2)

    def _request(self) -> bytes:
        while self._held.startswith(b"\r\n"):
            del self._held[:2]
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if self._held and not re.match(rb"%b( |$)" % _TOKEN, self._held):
                raise self._refuse("no HTTP")
            return b""
        head = bytes(self._held[: end + 4])
        lines = head[:-4].split(b"\r\n")
        request = _REQUEST.fullmatch(lines[0])
        if request is None or request[1] in (b"CONNECT", b"PRI"):
            raise self._refuse("no HTTP/1 request")
        fields: dict[bytes, list[bytes]] = {}
        for line in lines[1:]:
            found = _FIELD.fullmatch(line)
            if found is None or b"\n" in line or b"\r" in line or b"\0" in line:
                raise self._refuse("a malformed header")
            fields.setdefault(found[1].lower(), []).append(found[2])
        hosts = fields.get(b"host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            said = hosts[0].decode("latin-1")[:100] if hosts else ""
            raise self._refuse(f"the request is for {said!r}" if said else "a request without one Host")
        target = re.match(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)", request[2])
        if target is not None and not self._is_ours(target[1]):
            raise self._refuse(f"the request is for {target[1].decode('latin-1')[:100]!r}")
        self._body(fields)
        if self._first and b"upgrade" in fields:
            self._upgrade = not self._left and not self._chunked
        self._first = False
        return self._take(end + 4)

    def _is_ours(self, authority: bytes) -> bool:
        host, _, port = authority.decode("latin-1").partition(":")
        return canonical(host) == self._name and port in ("", "80")

    def _body(self, fields: dict[bytes, list[bytes]]) -> None:
        encodings, lengths = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if encodings is not None:
            if lengths is not None or [e.lower() for e in encodings] != [b"chunked"]:
                raise self._refuse("a body of uncertain length")
            self._chunked, self._trailer = True, False
        elif lengths is not None:
            if len(lengths) != 1 or not re.fullmatch(rb"[0-9]{1,18}", lengths[0]):
                raise self._refuse("a body of uncertain length")
            self._left = int(lengths[0])


def check_for(name: str, port: int) -> Check:
    """The check for a connection to ``name`` on a port that rules open by default."""
    if parse_address(name) is not None:
        return Check()
    return TlsCheck(name) if port == 443 else HttpCheck(name) if port == 80 else Check()
