"""Egress through the real agent and real sockets on the loopback, whose address a rule names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_agent import Net, ask, echo, networked, parse, question, server
from plain_agent import build
from test_egress_policy import hello

from forkyard.egress import reach as reaching
from forkyard.egress.account import AGAIN_S, BURST, Account
from forkyard.egress.broker import Wire
from forkyard.egress.policy import Policy
from forkyard.egress.reach import Reach, UnreachableError
from forkyard.guest import SpawnSpec, channel
from forkyard.guest.channel import MAX_OPENED
from forkyard.guest.network import MUCH
from forkyard.host.failpoint import armed
from forkyard.wire import Op, Packer, Type, encode

# Their agents listen on the same addresses of this host's loopback.
pytestmark = pytest.mark.xdist_group("names")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield build(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name service of the test's own, in place of the host's."""
    table: dict[str, list[str]] = {}

    def look_up(name: str) -> list[tuple]:
        if name not in table:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in table[name]]

    monkeypatch.setattr(reaching, "_getaddrinfo", look_up)
    return table


async def proxied(net: Net, target: str) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", net.http)
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes | str:
    """All that comes, or "reset"."""
    async with asyncio.timeout(30):
        try:
            return await reader.read(-1)
        except ConnectionResetError:
            return "reset"


# -- names ------------------------------------------------------------------------------------


async def test_names(agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked, the host's own resolver hears nothing of it."""
    monkeypatch.setattr(reaching, "_getaddrinfo", lambda name: pytest.fail(f"{name} was looked up"))
    async with networked(agent, tmp_path, Policy.of("allow", ["a.example", "*.b.example:8080"])) as net:
        first = await ask(net, "A.ExAmple")
        assert first.rcode == 0 and first.address is not None and first.address.startswith("127.6")
        assert (await ask(net, "a.example", edns=True)).address == first.address
        assert (await ask(net, "a.example")).address == first.address
        other = await ask(net, "x.b.example")
        assert other.address not in (None, first.address)
        for kind in (28, 16, 15, 65, 33):
            nodata = await ask(net, "a.example", kind, edns=kind == 28)
            assert (nodata.rcode, nodata.address) == (0, None)
        for name in ("b.example", "xa.example", "secret.data.example", "a.example.evil", "a" * 63 + ".x"):
            assert (await ask(net, name)).rcode == 3
            assert (await ask(net, name, 28)).rcode == 3
        assert (await ask(net, "localhost")).address == "127.0.0.1"
        assert (await ask(net, "localhost", 28)).address == "::1"
        assert (await ask(net, "4.3.2.1.in-addr.arpa", 12)).rcode == 3
        assert (await ask(net, "a.example", 252)).rcode == 5
        denied = {data["name"] for data in net.told("egress.denied")}
        assert {"b.example", "secret.data.example"} <= denied and "a.example" not in denied


async def test_names_over_tcp_and_what_is_malformed(agent: Path, tmp_path: Path) -> None:
    async with networked(agent, tmp_path, Policy.of("allow", ["a.example"])) as net:
        reader, writer = await asyncio.open_connection("127.0.0.1", net.dns)
        asked = [question(name, id_=at) for at, name in enumerate(("a.example", "no.example", "a.example"))]
        for sent in asked:
            writer.write(struct.pack(">H", len(sent)) + sent)
        got = []
        async with asyncio.timeout(20):
            for sent in asked:
                size = struct.unpack(">H", await reader.readexactly(2))[0]
                got.append(parse(await reader.readexactly(size), sent).rcode)
        assert got == [0, 3, 0]
        writer.close()
        loop = asyncio.get_running_loop()
        good = question("a.example")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(("127.0.0.1", net.dns))
            for bad in (b"", b"\0", good[:11], b"\xff" * 3000, b"\0\1\x80" + good[3:]):
                await loop.sock_sendall(sock, bad)  # no answer is due
            for bad, rcode in (
                (good[:-3], 1),
                (good[:4] + b"\0\2" + good[6:], 1),
                (good[:12] + b"\x7f" + good[13:], 1),
                (good[:12] + b"\xc0\x0c\0\1\0\1", 1),
                (good[:2] + b"\x29\0" + good[4:], 4),
                (good[:-1] + b"\3", 5),
                (good[:10] + b"\0\1" + good[12:], 1),
            ):
                await loop.sock_sendall(sock, bad)
                async with asyncio.timeout(20):
                    assert (await loop.sock_recv(sock, 4096))[3] & 15 == rcode, bad
        version = bytearray(question("a.example", edns=True))
        version[-5] = 1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(("127.0.0.1", net.dns))
            await loop.sock_sendall(sock, bytes(version))
            async with asyncio.timeout(20):
                assert (await loop.sock_recv(sock, 4096))[-6] == 1  # BADVERS
        assert (await ask(net, "a.example")).rcode == 0


async def test_a_question_outlives_an_epoch(agent: Path, tmp_path: Path) -> None:
    async with networked(agent, tmp_path, Policy.of("allow", ["a.example"])) as net:
        address = (await ask(net, "a.example")).address
        await net.guest.quiesce(5)
        asking = asyncio.ensure_future(ask(net, "a.example"))
        await asyncio.sleep(0.05)
        await net.guest.attach(timeout_s=20)
        assert (await asking).address == address


# -- connections ------------------------------------------------------------------------------


async def test_by_name_with_half_closes(agent: Path, tmp_path: Path, names: dict[str, list[str]]) -> None:
    names["echo.example"] = ["127.0.0.1"]
    async with server(echo) as port:
        policy = Policy.of("allow", [f"echo.example:{port}", f"127.0.0.1:{port}"])
        async with networked(agent, tmp_path, policy) as net:
            address = (await ask(net, "echo.example")).address
            reader, writer = await asyncio.open_connection(address, port)
            data = os.urandom(5 << 20)
            async with asyncio.TaskGroup() as tg:

                async def send() -> None:
                    writer.write(data)
                    await writer.drain()
                    writer.write_eof()

                tg.create_task(send())
                assert await rest(reader) == data
            writer.close()
            closed = (await net.until_told("egress.closed"))[0]
            assert (closed["sent"], closed["received"], closed["end"]) == (len(data), len(data), "done")
            assert closed["name"] == "echo.example" and closed["duration_ms"] > 0
            assert net.told("egress.allowed")[0]["address"] == "127.0.0.1"
            assert net.gate.connections == 0


async def test_the_proxies(agent: Path, tmp_path: Path) -> None:
    async with server(echo) as port, networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net:
        status, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        assert status == "200"
        writer.write(b"abc")
        writer.write_eof()
        assert await rest(reader) == b"abc"
        reader, writer = await asyncio.open_connection("127.0.0.1", net.socks)
        writer.write(b"\5\2\0\1" + b"\5\1\0\1\x7f\0\0\1" + struct.pack(">H", port) + b"early")
        writer.write_eof()
        assert await rest(reader) == b"\5\0" + b"\5\0\0\1" + bytes(6) + b"early"
        reader, writer = await asyncio.open_connection("127.0.0.1", net.http)
        url = f"http://127.0.0.1:{port}"
        writer.write(
            f"POST {url}/a?b HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\nConnection: close, X\r\n"
            "Content-Length: 2\r\n\r\nhi".encode()
        )
        writer.write_eof()
        assert await rest(reader) == (
            b"POST /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
        )


@pytest.mark.parametrize("action", ["full", "readonly", "delay:0.05"])
async def test_opening_fails_half_way(agent: Path, tmp_path: Path, action: str) -> None:
    """One connection is lost, and its socket closed; the next one works."""
    async with server(echo) as port, networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net:
        with armed(f"egress.connected={action}") as points:
            try:
                status, _, writer = await proxied(net, f"127.0.0.1:{port}")
                writer.close()
            except (ConnectionResetError, asyncio.IncompleteReadError):
                status = "reset"
        assert "egress.connected" in points.reached
        assert (status == "200") == action.startswith("delay")
        status, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        writer.write(b"abc")
        writer.write_eof()
        assert (status, await rest(reader)) == ("200", b"abc")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("10.1.2.3:80", "403"), ("169.254.169.254:80", "403"), ("[::1]:80", "403"), ("evil.test:443", "403"),
        ("[::ffff:10.0.0.1]:80", "403"), ("0.0.0.0:80", "403"), ("localhost:80", "403"),
        ("2130706433:80", "403"),
        ("127.0.0.1:1", "502"), ("", "400"), ("a.example", "400"), ("a.example:99999", "400"),
        ("[::1:5", "400"),
    ],
)  # fmt: skip
async def test_what_the_proxy_refuses(agent: Path, tmp_path: Path, target: str, status: str) -> None:
    async with networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1", "192.0.2.0/24"])) as net:
        got, _, writer = await proxied(net, target)
        assert got == status
        writer.close()


async def test_socks_refuses(agent: Path, tmp_path: Path) -> None:
    async with networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net:
        for request, code in (
            (b"\5\1\0\1\x0a\0\0\1\0\x50", 2),
            (b"\5\1\0\1\x7f\0\0\1\0\1", 5),
            (b"\5\2\0\1\x7f\0\0\1\0\x50", 7),
            (b"\5\1\0\3\x09evil.test\1\xbb", 2),
            (b"\5\1\0\x09\0\0\0\0\0\0", 8),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", net.socks)
            writer.write(b"\5\1\0" + request)
            answer = await rest(reader)
            assert isinstance(answer, bytes) and answer[:4] == bytes([5, 0, 5, code]), request
            writer.close()


@pytest.mark.parametrize("own", [False, True])
async def test_a_name_that_leads_inside_is_refused(
    agent: Path, tmp_path: Path, names: dict[str, list[str]], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["inside.example"] = ["192.0.2.9"] if own else ["10.0.0.5", "127.0.0.1", "169.254.169.254"]
    monkeypatch.setattr(reaching, "is_own", lambda address: own)
    async with networked(agent, tmp_path, Policy.of("allow", ["inside.example:8080"])) as net:
        address = (await ask(net, "inside.example")).address
        reader, writer = await asyncio.open_connection(address, 8080)
        assert await rest(reader) == "reset"
        assert "no rule names" in (await net.until_told("egress.denied"))[0]["why"]
        writer.close()


async def test_names_have_to_be_said(agent: Path, tmp_path: Path, names: dict[str, list[str]]) -> None:
    """On 443 the greeting's, here over the proxy, since those ports are taken on a host."""
    got: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read(-1))
        writer.close()

    async with server(note) as port:
        policy = Policy.of("allow", ["files.example", "127.0.0.1"])
        async with networked(agent, tmp_path, policy) as net:

            async def connect(policy: Policy, host: str, to: int) -> tuple[socket.socket, str]:
                sock = socket.socket()
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                return sock, "192.0.2.1"

            net.gate._reach.connect = connect  # type: ignore[method-assign]
            for said in ("evil.test", None):
                status, reader, writer = await proxied(net, "files.example:443")
                writer.write(hello(said))
                answer = await rest(reader)
                assert status == "200" and isinstance(answer, bytes) and answer[:1] == b"\x15"
                writer.close()
            status, reader, writer = await proxied(net, "files.example:80")
            writer.write(b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            answer = await rest(reader)
            assert isinstance(answer, bytes) and answer.startswith(b"HTTP/1.1 403")
            writer.close()
            assert all("for" in data["why"] or "without" in data["why"] for data in net.told("egress.denied"))
            status, reader, writer = await proxied(net, "files.example:443")
            good = hello("files.example")
            writer.write(good)
            writer.write_eof()
            assert await rest(reader) == b""
            await net.until_told("egress.closed", 4)
            assert [data for data in got if data] == [good]


async def test_what_a_policy_no_longer_allows_is_cut(agent: Path, tmp_path: Path) -> None:
    async with server(echo) as one, server(echo) as two:
        both = Policy.of("allow", [f"127.0.0.1:{one}", f"127.0.0.1:{two}"])
        async with networked(agent, tmp_path, both) as net:
            _, first, writer = await proxied(net, f"127.0.0.1:{one}")
            _, second, other = await proxied(net, f"127.0.0.1:{two}")
            net.gate.set_policy(Policy.of("allow", [f"127.0.0.1:{two}"]))
            assert await rest(first) == "reset"
            other.write(b"still")
            async with asyncio.timeout(20):
                assert await second.readexactly(5) == b"still"
            assert (await proxied(net, f"127.0.0.1:{one}"))[0] == "403"
            writer.close()
            other.close()


async def test_resets_cross_both_ways(agent: Path, tmp_path: Path) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        word = await reader.readexactly(1)
        if word == b"r":
            writer.transport.abort()
            return
        try:
            await reader.read(-1)
            await ended.put("end")
        except ConnectionResetError:
            await ended.put("reset")

    async with server(serve) as port, networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net:
        _, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        writer.write(b"r")
        assert await rest(reader) in ("reset", b"")
        _, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        writer.write(b"x")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        async with asyncio.timeout(20):
            assert await ended.get() == "reset"


async def test_a_new_epoch_resets_connections(agent: Path, tmp_path: Path) -> None:
    async with server(echo) as port, networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net:
        _, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        await net.guest.attach(timeout_s=20)
        assert await rest(reader) == "reset"
        await net.until_told("egress.closed")
        assert (await proxied(net, f"127.0.0.1:{port}"))[0] == "200"
        writer.close()


async def test_a_stalled_download_holds_nobody_up(agent: Path, tmp_path: Path) -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        except ConnectionError:
            writer.close()

    async with (
        server(pour) as fast,
        server(echo) as port,
        networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net,
    ):
        stalled = [await proxied(net, f"127.0.0.1:{fast}") for _ in range(8)]
        for _, reader, _ in stalled:
            await reader.readexactly(100_000)
        _, reader, writer = await proxied(net, f"127.0.0.1:{port}")
        writer.write(b"quick")
        async with asyncio.timeout(20):
            assert await reader.readexactly(5) == b"quick"
        assert await net.guest.ping(20) < 20
        for _, _, other in stalled:
            other.transport.abort()
        writer.close()


async def test_a_command_goes_before_what_carries_much(
    agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one runs, a large download stands still, a small one does not; and not for ever."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        writer.close()

    async def sent_in_five_turns(net: Net, connection: Wire) -> int:
        await net.guest.ping(20)
        before = connection.sent
        for _ in range(5):
            await net.guest.ping(20)
        return connection.sent - before

    async def moves(connection: Wire) -> None:
        before = connection.sent
        async with asyncio.timeout(20):
            while connection.sent < before + (1 << 20):
                await large.readexactly(65536)

    me = pwd.getpwuid(os.getuid()).pw_name
    cat = SpawnSpec(["/bin/cat"], {}, user=me, stdin="pipe")
    monkeypatch.setattr(channel, "HOLD_S", 60)
    async with (
        server(pour) as fast,
        server(echo) as port,
        networked(agent, tmp_path, Policy.of("allow", ["127.0.0.1"])) as net,
        asyncio.TaskGroup() as group,
    ):
        _, large, writer = await proxied(net, f"127.0.0.1:{fast}")
        await large.readexactly(2 * MUCH)
        (connection,) = net.gate._carried
        command = await net.guest.spawn(cat)
        drained = group.create_task(large.readexactly(64 << 20))
        assert await sent_in_five_turns(net, connection) == 0
        _, small, other = await proxied(net, f"127.0.0.1:{port}")
        other.write(b"quick")
        async with asyncio.timeout(20):
            assert await small.readexactly(5) == b"quick"
        command.close_stdin()
        await command.wait()
        async with asyncio.timeout(20):
            await drained
        # A second one right after it has no right to that.
        again = await net.guest.spawn(cat)
        await moves(connection)
        again.close_stdin()
        await again.wait()
        writer.transport.abort()
        other.close()


async def test_ports_inside(agent: Path, tmp_path: Path) -> None:
    async with server(echo) as port, networked(agent, tmp_path, Policy()) as net:
        connection = await net.guest.connect(port)
        data = os.urandom(1 << 20)
        got = bytearray()
        async with asyncio.TaskGroup() as tg:
            tg.create_task(connection.write(data))
            while len(got) < len(data):
                got += await connection.read()
        connection.write_eof()
        assert await connection.read() == b"" and got == data
        with pytest.raises(ConnectionError):
            await net.guest.connect(1)
        six = socket.create_server(("::1", 0), family=socket.AF_INET6)
        with six:
            connection = await net.guest.connect(six.getsockname()[1])
            connection.abort()


# -- hostile guests ---------------------------------------------------------------------------


def _open(epoch: int, stream: int, op: int = Op.CONNECT, payload: bytes | None = None) -> bytes:
    body = Packer().str(b"a.example").u16(443).u8(0).done() if payload is None else payload
    return encode(Type.OPEN, stream, epoch, body, chan=op)


@pytest.mark.parametrize(
    "make",
    [
        lambda e: [_open(e, 3)],
        lambda e: [_open(e, 0)],
        lambda e: [_open(e, 4), _open(e, 2)],
        lambda e: [_open(e, 2), _open(e, 2)],
        lambda e: [_open(e, 2, 77)],
        lambda e: [_open(e, 2, payload=Packer().str(b"a").u16(0).u8(0).done())],
        lambda e: [_open(e, 2, payload=Packer().str(b"a").u16(1).u8(9).done())],
        lambda e: [_open(e, 2, payload=Packer().str(b"x" * 300).u16(1).u8(0).done())],
        lambda e: [_open(e, 2), encode(Type.DATA, 2, e, (9).to_bytes(8, "little") + b"x", chan=1)],
        lambda e: [_open(e, 2), encode(Type.DATA, 2, e, bytes(8) + b"x", chan=0)],
        lambda e: [_open(e, 2), encode(Type.EOF, 2, e, chan=1), encode(Type.EOF, 2, e, chan=1)],
        lambda e: [_open(e, 2), encode(Type.ACK, 2, e, Packer().u64(5).u64(9).done(), chan=0)],
        lambda e: [_open(e, 2), encode(Type.ACK, 2, e, Packer().u64(0).u64(1 << 60).done(), chan=0)],
        lambda e: (
            [_open(e, 2)]
            + [
                encode(Type.DATA, 2, e, (i << 16).to_bytes(8, "little") + bytes(65536), chan=1)
                for i in range(5)
            ]
        ),
        lambda e: [encode(Type.DATA, 8, e, bytes(9), chan=1)],
        lambda e: [_open(e, 2 * i) for i in range(1, MAX_OPENED + 2)],
    ],
)
async def test_what_a_guest_is_lost_for(
    agent: Path, tmp_path: Path, make, names: dict[str, list[str]]
) -> None:
    async with networked(agent, tmp_path, Policy.of("any")) as net:
        channel = net.guest._channel
        with pytest.raises(ValueError):
            for data in make(channel.epoch):
                for frame in list(channel._decoder.feed(data)):
                    channel._dispatch(frame)


# -- the host's side --------------------------------------------------------------------------


def test_own_addresses_are_known() -> None:
    from ipaddress import ip_address

    assert reaching.is_own(ip_address("127.0.0.1"))
    assert not reaching.is_own(ip_address("192.0.2.1"))
    assert "127.0.0.1" in reaching._listed()


@pytest.mark.parametrize(
    ("environ", "host", "port", "expected"),
    [
        ({}, "a.example", 443, None),
        ({"HTTPS_PROXY": "http://p.example:3128"}, "a.example", 443, ("p.example", 3128)),
        ({"HTTPS_PROXY": "http://p.example:3128"}, "a.example", 80, None),
        ({"http_proxy": "p.example:8080"}, "a.example", 80, ("p.example", 8080)),
        ({"all_proxy": "http://p.example"}, "a.example", 22, ("p.example", 80)),
        ({"HTTPS_PROXY": "http://p.example", "NO_PROXY": ".a.example,b.example"}, "x.a.example", 443, None),
        ({"HTTPS_PROXY": "http://p.example", "NO_PROXY": "a.example"}, "xa.example", 443, ("p.example", 80)),
        (
            {"HTTPS_PROXY": "http://p.example", "NO_PROXY": "a.example:80"},
            "a.example",
            443,
            ("p.example", 80),
        ),
        ({"HTTPS_PROXY": "http://p.example", "NO_PROXY": "10.0.0.0/8"}, "10.1.1.1", 443, None),
        ({"HTTPS_PROXY": "http://p.example", "no_proxy": "*"}, "a.example", 443, None),
    ],
)
def test_the_hosts_proxy(environ: dict[str, str], host: str, port: int, expected: tuple | None) -> None:
    found = Reach(environ).proxy_for(host, port)
    assert (found and (found.host, found.port)) == expected


def test_a_proxy_that_cannot_be_used() -> None:
    with pytest.raises(UnreachableError):
        Reach({"HTTPS_PROXY": "socks5://p.example"}).proxy_for("a.example", 443)


async def test_through_the_hosts_proxy(agent: Path, tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        refuse = b"bad.example" in asked[-1]
        writer.write(b"HTTP/1.1 503 No\r\n\r\n" if refuse else b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nbanner:")
        if not refuse:
            await echo(reader, writer)
        writer.close()

    async with server(proxy) as port:
        environ = {"ALL_PROXY": f"http://me:p%40ss@127.0.0.1:{port}"}
        policy = Policy.of("allow", ["a.example:9999", "bad.example:9999"])
        async with networked(agent, tmp_path, policy, environ) as net:
            status, reader, writer = await proxied(net, "a.example:9999")
            writer.write(b"hi")
            writer.write_eof()
            assert (status, await rest(reader)) == ("200", b"banner:hi")
            assert asked[0].startswith(b"CONNECT a.example:9999 HTTP/1.1\r\nHost: a.example:9999\r\n")
            assert b"Proxy-Authorization: Basic bWU6cEBzcw==" in asked[0]
            assert (await proxied(net, "bad.example:9999"))[0] == "502"


def test_a_flood_becomes_a_number() -> None:
    now, told = [0.0], []
    account = Account(lambda kind, data: told.append((kind, data)), lambda: now[0])
    for _ in range(5):
        account.fact("egress.denied", "x.test", None, "no")
    assert told == [("egress.denied", {"name": "x.test", "why": "no"})]
    now[0] += AGAIN_S + 1
    account.fact("egress.denied", "x.test", None, "no")
    assert told[-1][1]["times_before"] == 4
    for number in range(5000):
        account.fact("egress.denied", f"n{number}.test", None, "no")
    assert len(told) <= BURST + 3
    now[0] += 10
    account.event("egress.closed", {})
    assert [kind for kind, _ in told[-2:]] == ["egress.unrecorded", "egress.closed"]
