"""How much one peer may ask for: requests by the second, and connections that have shown no token yet."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable

MAX_KEYS = 4096


class Rate:
    """A bucket of ``burst`` for each key, filled at ``per_s``.

    Only so many keys are remembered: the one that was quiet longest is forgotten first, which
    favours it by at most one full bucket.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> float:
        """0 if one more is allowed now, else the seconds until one is."""
        now = time.monotonic()
        left, at = self._left.pop(key, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        wait = 0.0
        if left >= 1:
            left -= 1
        else:
            wait = (1 - left) / self.per_s
        self._left[key] = left, now
        if len(self._left) > MAX_KEYS:
            self._left.popitem(last=False)
        return wait


class Door:
    """Counts connections, above all those of strangers: who has shown a token is none any more.

    Args:
        strangers: At most so many from one place.
        all_strangers: At most so many in all, from places that nobody known has come from.
        friends: At most so many strangers from a place with a connection that is known.
        connections: At most so many in all.
    """

    def __init__(
        self, strangers: int = 128, all_strangers: int = 512, friends: int = 1024, connections: int = 8192
    ) -> None:
        self.strangers = strangers
        self.all_strangers = all_strangers
        self.friends = friends
        self.connections = connections
        self._waiting: Counter[str] = Counter()
        self._known: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Connections that have shown no token."""
        return self._waiting.total()

    def enter(self, place: str) -> bool:
        """Whether one more may come in from there."""
        if place in self._known:
            full = self._waiting[place] >= self.friends
        else:
            full = self._waiting[place] >= self.strangers or self.waiting >= self.all_strangers
        if full or self.waiting + self._known.total() >= self.connections:
            return False
        self._waiting[place] += 1
        return True

    def known(self, place: str) -> None:
        """A stranger from there has shown a token."""
        self._known[place] += 1
        self.leave(place, known=False)

    def leave(self, place: str, *, known: bool) -> None:
        counted = self._known if known else self._waiting
        counted[place] -= 1
        if not counted[place]:
            del counted[place]


def place_of(address: str) -> str:
    """Who shares a limit: an IPv4 address, or an IPv6 network of 64 bits, which one host may have whole."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 6:
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False).network_address)
    return str(ip)
