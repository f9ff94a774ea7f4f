"""Which names, addresses and ports a sandbox may reach. Pure: no look-ups, no I/O.

A rule is a name (``host``), all names below one (``*.host``), an address or a range of them, each
with ``:port`` or without. Without one a name stands for ports 443 and 80, and an address for
every port. ``@`` names a preset, which has to be put in place of it first (see ``presets``).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from forkyard.errors import InvalidRequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Mode = Literal["deny", "any", "allow"]

DEFAULT_PORTS = frozenset({80, 443})
PRESETS = ("@pip", "@npm", "@apt")
MAX_RULES = 256
MAX_NAME = 253
# Wider than any private range: whoever means everything says so.
WIDEST = {4: 8, 6: 7}
# Second levels under which strangers register names, in domains of countries.
_SHARED = frozenset(
    ["ac", "co", "com", "edu", "gen", "go", "gob", "gov", "mil", "ne", "net", "nom", "or", "org"]
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``ports`` is None for every port; ``below`` is for the names below ``name``."""

    text: str
    name: str | None = None
    below: bool = False
    network: Network | None = None
    ports: frozenset[int] | None = DEFAULT_PORTS

    def matches_name(self, name: str) -> bool:
        if self.name is None:
            return False
        return name.endswith("." + self.name) if self.below else name == self.name

    def matches_address(self, address: Address, port: int) -> bool:
        if self.network is None or address not in self.network:
            return False
        return self.ports is None or port in self.ports


def canonical(name: str) -> str | None:
    """A host's name as rules have it (lower case, no dot at the end), or None if it is none."""
    name = name.lower().removesuffix(".")
    if not name or len(name) > MAX_NAME:
        return None
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        return None
    return name


def parse_address(text: str) -> Address | None:
    """An address in its usual form, or None. One in the form of the other family is taken as that."""
    try:
        found = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return plain(found)


def plain(address: Address) -> Address:
    """IPv4 addresses come in several IPv6 forms: the address that packets would go to."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.sixtofour is not None:
            return address.sixtofour
    return address


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_CLOSED: tuple[tuple[Network, str], ...] = tuple(
    (ipaddress.ip_network(text), why)
    for text, why in (
        ("0.0.0.0/8", "unspecified"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("10.0.0.0/8", "private"),
        ("172.16.0.0/12", "private"),
        ("192.168.0.0/16", "private"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("fc00::/7", "private"),
        ("ff00::/8", "multicast"),
    )
)


def closed(address: Address) -> str | None:
    """Why an address is refused unless a rule names it, or None. What else is special is open:
    some machines reach their mirrors through such ranges."""
    return next((why for network, why in _CLOSED if address in network), None)


def parse_rule(text: str) -> Rule:
    """One rule, not a preset.

    Raises:
        InvalidRequestError: it is malformed or too wide; says what to write instead.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > 300:
        raise InvalidRequestError(f"the egress rule {str(text)[:80]!r} is empty or too long")
    given, text = text, text.strip()
    if "://" in text or ("/" in text and not _looks_like_network(text)):
        raise InvalidRequestError(f"the egress rule {given!r} is no host", hint="write the host alone")
    body, port = _split_port(text, given)
    ports = frozenset({port}) if port is not None else None
    network = _parse_network(body, given)
    if network is not None:
        return Rule(given, network=network, ports=ports)
    below = body.startswith("*.")
    bare = body[2:] if below else body
    if "*" in bare:
        raise InvalidRequestError(
            f"the egress rule {given!r} is too wide or malformed",
            hint="* may only stand before the first dot: *.example.org; for everything say egress='any'",
        )
    name = _encode(bare, given)
    if below and _too_wide(name):
        raise InvalidRequestError(
            f"the egress rule {given!r} is too wide",
            hint="at least two labels have to follow *., and they must be somebody's own",
        )
    if name == "localhost" or name.endswith(".localhost"):
        raise InvalidRequestError(
            f"the egress rule {given!r} would be the sandbox's own loopback",
            hint="for the host's loopback write its address, 127.0.0.1:PORT",
        )
    return Rule(given, name=name, below=below, ports=ports or DEFAULT_PORTS)


def _looks_like_network(text: str) -> bool:
    return re.fullmatch(r"\[?[0-9A-Fa-f:.]+/[0-9]{1,3}\]?(:[0-9]+)?", text) is not None


def _split_port(text: str, given: str) -> tuple[str, int | None]:
    if text.startswith("["):
        body, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise InvalidRequestError(f"the egress rule {given!r} is malformed")
        port = rest[1:] if rest else None
    elif text.count(":") == 1:
        body, _, port = text.partition(":")
    else:
        return text, None
    if port is None:
        return body, None
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InvalidRequestError(f"the egress rule {given!r} has no port from 1 to 65535 after the colon")
    return body, int(port)


def _parse_network(body: str, given: str) -> Network | None:
    try:
        network = ipaddress.ip_network(body, strict=True)
    except ValueError:
        try:
            loose = ipaddress.ip_network(body, strict=False)
        except ValueError:
            return None
        raise InvalidRequestError(
            f"the egress rule {given!r} has bits set behind its prefix", hint=f"write {loose}"
        ) from None
    single = network.num_addresses == 1
    if single and (address := plain(network.network_address)) != network.network_address:
        network = ipaddress.ip_network(address)
    if network.prefixlen < WIDEST[network.version]:
        raise InvalidRequestError(
            f"the egress rule {given!r} is too wide", hint="for everything say egress='any'"
        )
    return network


def _encode(name: str, given: str) -> str:
    try:
        encoded = name.encode("idna").decode() if name else ""
    except UnicodeError:
        encoded = ""
    found = canonical(encoded)
    if found is None:
        raise InvalidRequestError(
            f"the egress rule {given!r} is no host name, address or range",
            hint="host, *.host, host:port, an address or range, @pip, @npm or @apt",
        )
    return found


def _too_wide(name: str) -> bool:
    labels = name.split(".")
    return len(labels) < 2 or (len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _SHARED)


def check_rules(texts: Iterable[str]) -> list[str]:
    """The rules, each valid, none twice. Presets only have to be known.

    Raises:
        InvalidRequestError: one is malformed, too wide or an unknown preset.
    """
    kept = list(dict.fromkeys(text.strip() if isinstance(text, str) else text for text in texts))
    if len(kept) > MAX_RULES:
        raise InvalidRequestError(f"{len(kept)} egress rules, {MAX_RULES} are possible")
    for text in kept:
        if isinstance(text, str) and text.startswith("@"):
            if text not in PRESETS:
                raise InvalidRequestError(
                    f"the egress preset {text!r} is not known", hint=f"use one of {', '.join(PRESETS)}"
                )
        else:
            parse_rule(text)
    return kept


@dataclass(frozen=True, slots=True)
class Policy:
    """What one sandbox may reach. Names that it is asked about are those of :func:`canonical`."""

    mode: Mode = "deny"
    rules: tuple[Rule, ...] = ()
    granted: tuple[Rule, ...] = field(default=())

    @classmethod
    def of(cls, mode: Mode, texts: Iterable[str] = ()) -> Policy:
        """From rules without presets.

        Raises:
            InvalidRequestError: a rule is malformed or too wide.
        """
        return cls(mode, tuple(parse_rule(text) for text in texts))

    @property
    def open(self) -> bool:
        """Whether it lets anything through."""
        return self.mode != "deny" or bool(self.granted)

    @property
    def needs_proxy(self) -> bool:
        """Whether it allows what cannot be reached by a name alone: addresses, or every port."""
        return self.mode == "any" or any(rule.network is not None for rule in self._all())

    def _all(self) -> tuple[Rule, ...]:
        return (self.rules if self.mode == "allow" else ()) + self.granted

    def ports(self, name: str) -> frozenset[int]:
        """The ports that a name's address is to have; none: the name is not allowed."""
        found: set[int] = set(DEFAULT_PORTS) if self.mode == "any" else set()
        for rule in self._all():
            if rule.matches_name(name):
                found |= rule.ports or DEFAULT_PORTS
        return frozenset(found)

    def allows_name(self, name: str, port: int, *, by_proxy: bool = False) -> bool:
        if self.mode == "any" and (by_proxy or port in DEFAULT_PORTS):
            return True
        return port in self.ports(name)

    def names_address(self, address: Address, port: int) -> bool:
        """Whether a rule names this very address: then even a private one is open."""
        return any(rule.matches_address(address, port) for rule in self._all())

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether it may be connected to by number (through the proxy)."""
        if self.names_address(address, port):
            return True
        return self.mode == "any" and closed(address) is None

    def checks_content(self, name: str, port: int) -> bool:
        """Whether the connection has to say the name it was opened for."""
        return self.mode != "any" and port in DEFAULT_PORTS


DENY = Policy()
