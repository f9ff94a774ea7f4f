"""From this host to where a sandbox may go: names looked up, addresses judged, proxies of the
host's own used.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from forkyard.egress.policy import Address, Policy, closed, parse_address, plain

LOOKUP_S = 10.0
CONNECT_S = 10.0
FIRST_S = 3.0
LOOKUPS = 8
MAX_ADDRESSES = 8
MAX_ANSWER = 16 << 10


class UnreachableError(Exception):
    """No connection: ``denied`` says that policy forbids it, ``code`` is the errno to show."""

    def __init__(self, why: str, code: int, *, denied: bool = False) -> None:
        super().__init__(why)
        self.code = code
        self.denied = denied


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy of the host's; ``login`` is what its header says, or empty."""

    host: str
    port: int
    login: str = ""


class Reach:
    """Makes connections. ``environ`` is where the host's proxy settings are read."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        # Of its own: a name server that hangs must not hold up the daemon's other threads.
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="lookup")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def connect(self, policy: Policy, host: str, port: int) -> tuple[socket.socket, str]:
        """A connected socket to what ``policy`` has already allowed by its name or number, and
        the address (or proxy) that it leads to.

        Raises:
            UnreachableError: the address is not one that the policy opens, or nobody answers.
        """
        proxy = self.proxy_for(host, port)
        if proxy is not None:
            return await self._through(proxy, host, port), f"proxy {proxy.host}:{proxy.port}"
        found = await self._addresses(policy, host, port)
        last: OSError | None = None
        for at, address in enumerate(found):
            try:
                sock = await _dial(str(address), port, FIRST_S if at + 1 < len(found) else CONNECT_S)
            except OSError as error:
                last = error
            else:
                return sock, str(address)
        assert last is not None
        raise UnreachableError(f"{host}:{port}: {last.strerror or last}", last.errno or errno.ETIMEDOUT)

    async def _addresses(self, policy: Policy, host: str, port: int) -> list[Address]:
        literal = parse_address(host)
        found = [literal] if literal is not None else await self._look_up(host)
        allowed = [address for address in found if not _refusal(policy, address, port)]
        if not allowed:
            whys = sorted({f"{address} is {_refusal(policy, address, port)}" for address in found[:4]})
            raise UnreachableError(
                f"{host} leads to what no rule names: {', '.join(whys)}", errno.EACCES, denied=True
            )
        # Ours are tried in the order of the host's own resolver.
        return allowed[:MAX_ADDRESSES]

    async def _look_up(self, name: str) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOOKUP_S):
                infos = await loop.run_in_executor(self._threads, _getaddrinfo, name)
        except TimeoutError:
            raise UnreachableError(
                f"{name}: the host's name server does not answer", errno.ETIMEDOUT
            ) from None
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"{name}: {error}", errno.EHOSTUNREACH) from None
        found = [plain(ipaddress.ip_address(info[4][0].partition("%")[0])) for info in infos]
        if not found:
            raise UnreachableError(f"{name}: no address", errno.EHOSTUNREACH)
        return list(dict.fromkeys(found))

    # -- the host's proxies

    def proxy_for(self, host: str, port: int) -> Proxy | None:
        """The proxy that this host uses for it, or None.

        Raises:
            UnreachableError: the host's setting cannot be used.
        """
        kinds = ("http_proxy", "all_proxy") if port == 80 else ("https_proxy", "all_proxy")
        # As everywhere: HTTP_PROXY in capitals could be a request's header in a CGI program.
        url = next((value for kind in kinds for value in self._setting(kind) if value), "")
        if not url or self._bypassed(host, port):
            return None
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UnreachableError(
                f"this host's proxy is a {parts.scheme} proxy, and only http proxies can be used",
                errno.EPROTONOSUPPORT,
            )
        login = ""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = base64.b64encode(pair.encode()).decode()
        return Proxy(parts.hostname, parts.port or 80, login)

    def _setting(self, name: str) -> tuple[str, str]:
        return self.environ.get(name, ""), self.environ.get(name.upper(), "")

    def _bypassed(self, host: str, port: int) -> bool:
        listed = next((value for value in self._setting("no_proxy") if value), "")
        address = parse_address(host)
        for word in listed.replace(",", " ").split():
            word = word.lower()
            if word == "*":
                return True
            bare, _, number = word.rpartition(":")
            if bare and number.isdigit() and ":" not in bare:
                if int(number) != port:
                    continue
                word = bare
            if address is not None:
                with contextlib.suppress(ValueError):
                    if address in ipaddress.ip_network(word, strict=False):
                        return True
                continue
            word = word.removeprefix("*").lstrip(".")
            if word and (host == word or host.endswith(f".{word}")):
                return True
        return False

    async def _through(self, proxy: Proxy, host: str, port: int) -> socket.socket:
        try:
            async with asyncio.timeout(CONNECT_S):
                where = parse_address(proxy.host) or (await self._look_up(proxy.host))[0]
                sock = await _dial(str(where), proxy.port, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise UnreachableError(
                f"this host's proxy does not answer: {error}", errno.EHOSTUNREACH
            ) from None
        try:
            async with asyncio.timeout(3 * CONNECT_S):
                return await _ask_proxy(sock, proxy, host, port)
        except (OSError, TimeoutError) as error:
            sock.close()
            raise UnreachableError(f"this host's proxy: {error}", errno.EHOSTUNREACH) from None
        except BaseException:
            sock.close()
            raise


def _getaddrinfo(name: str) -> list[tuple]:
    # The dot keeps search domains of the host's out of it.
    dotted = name if "." not in name else name + "."
    return socket.getaddrinfo(dotted, None, type=socket.SOCK_STREAM)


def _refusal(policy: Policy, address: Address, port: int) -> str | None:
    if policy.names_address(address, port):
        return None
    return closed(address) or ("this host's own" if is_own(address) else None)


def is_own(address: Address) -> bool:
    """Whether the address is one of this host's: only to those can a socket be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    # Where the kernel lets anything be bound, being bound says nothing.
    name = (
        "/proc/sys/net/ipv4/ip_nonlocal_bind"
        if address.version == 4
        else "/proc/sys/net/ipv6/ip_nonlocal_bind"
    )
    with contextlib.suppress(OSError), open(name) as file:
        if file.read().strip() == "1":
            return str(address) in _listed()
    return True


def _listed() -> set[str]:
    """This host's addresses by its routing tables."""
    found: set[str] = set()
    last = ""
    with contextlib.suppress(OSError), open("/proc/net/fib_trie") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["|--"]:
                last = words[1]
            elif words[-1:] == ["LOCAL"]:
                found.add(last)
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    return found


async def _dial(address: str, port: int, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except TimeoutError:
        sock.close()
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _ask_proxy(sock: socket.socket, proxy: Proxy, host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    login = f"Proxy-Authorization: Basic {proxy.login}\r\n" if proxy.login else ""
    await loop.sock_sendall(sock, f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{login}\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        # One byte at a time would be slow and more could be the server's: it speaks first only
        # where the guest has said nothing yet, so a peek tells how much is the proxy's.
        await _readable(loop, sock)
        seen = sock.recv(MAX_ANSWER, socket.MSG_PEEK)
        if not seen or len(answer) > MAX_ANSWER:
            raise OSError(errno.ECONNRESET, "no answer")
        end = (answer + seen).find(b"\r\n\r\n")
        take = len(seen) if end < 0 else end + 4 - len(answer)
        answer += sock.recv(take)
    status = answer.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    if len(status) < 2 or status[1] != "200":
        said = " ".join(status[1:])[:100]
        raise UnreachableError(f"this host's proxy refused: {said}", errno.EHOSTUNREACH)
    return sock


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(sock.fileno(), ready)
    try:
        await future
    finally:
        loop.remove_reader(sock.fileno())
