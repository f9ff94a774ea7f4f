"""Rules, presets and what a connection says it is for. Nothing here connects to anything."""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

import pytest

from forkyard.egress.policy import (
    DENY,
    Policy,
    canonical,
    check_rules,
    closed,
    parse_address,
    parse_rule,
    plain,
)
from forkyard.egress.presets import Presets, apt_uris, npm_settings, pip_settings, without_login
from forkyard.egress.sniff import HttpCheck, RefusedError, TlsCheck, server_name
from forkyard.errors import InvalidRequestError, UnsupportedError

# -- rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "ports"),
    [
        ("files.example", "files.example", {80, 443}),
        ("Files.Example.", "files.example", {80, 443}),
        ("files.example:8443", "files.example", {8443}),
        ("*.files.example", "a.b.files.example", {80, 443}),
        ("*.files.example:22", "a.files.example", {22}),
        ("bücher.example", "xn--bcher-kva.example", {80, 443}),
        ("mirror", "mirror", {80, 443}),
    ],
)
def test_a_name_is_allowed_on_its_ports(rule: str, name: str, ports: set[int]) -> None:
    assert Policy.of("allow", [rule]).ports(name) == ports


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("files.example", "xfiles.example"),
        ("files.example", "a.files.example"),
        ("files.example", "files.example.evil.test"),
        ("*.files.example", "files.example"),
        ("*.files.example", "xfiles.example"),
        ("*.files.example", "files.example.evil.test"),
        ("10.0.0.0/8", "ten.example"),
    ],
)
def test_other_names_are_not(rule: str, name: str) -> None:
    assert not Policy.of("allow", [rule]).ports(name)


@pytest.mark.parametrize(
    "rule",
    [
        "", " ", "*", "*.", "*.com", "*.co.uk", "*.com.au", "a.*.example", "*a.example.org", "**.example.org",
        "https://files.example", "files.example/path", "files.example:", "files.example:0",
        "files.example:65536", "files.example:http", "a..example", "-a.example", "a b.example",
        "a" * 64 + ".example",
        "x." * 127 + "x.y",
        "1.2.3", "300.1.1.1", "0x7f.1", "127.1", "10.0.0.1/8", "0.0.0.0/0",
        "1.0.0.0/7", "::/0", "[::1", "localhost",
        "a.localhost", "@nope", "a@b.example", "[::1]x", "1.2.3.4:99999",
    ],
)  # fmt: skip
def test_malformed_and_too_wide_rules_are_refused(rule: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_rules([rule])


def test_rules_are_kept_as_written_and_once() -> None:
    assert check_rules(["@pip", "Files.Example", " @pip "]) == ["@pip", "Files.Example"]
    with pytest.raises(InvalidRequestError, match="possible"):
        check_rules([f"h{i}.example" for i in range(257)])


@pytest.mark.parametrize(
    ("rule", "address", "port", "ok"),
    [
        ("192.0.2.7", "192.0.2.7", 9999, True),
        ("192.0.2.7:53", "192.0.2.7", 54, False),
        ("10.1.0.0/16", "10.1.2.3", 5432, True),
        ("10.1.0.0/16:5432", "10.1.2.3", 5433, False),
        ("10.1.0.0/16", "10.2.0.1", 5432, False),
        ("[2001:db8::1]:443", "2001:db8::1", 443, True),
        ("2001:db8::/32", "2001:db8:9::1", 1, True),
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("127.0.0.1", "::ffff:127.0.0.1", 1, True),
    ],
)
def test_addresses(rule: str, address: str, port: int, ok: bool) -> None:
    found = parse_address(address)
    assert found is not None
    policy = Policy.of("allow", [rule])
    assert policy.allows_address(found, port) is ok
    assert policy.needs_proxy


def test_any_is_every_name_and_every_public_address() -> None:
    policy = Policy.of("any")
    assert policy.ports("whatever.example") == {80, 443}
    assert policy.allows_name("whatever.example", 22, by_proxy=True)
    assert not policy.allows_name("whatever.example", 22)
    assert policy.allows_address(ip_address("192.0.2.1"), 22)
    assert not policy.allows_address(ip_address("10.0.0.1"), 22)
    assert not policy.checks_content("whatever.example", 443)
    assert policy.needs_proxy and policy.open


def test_deny_is_nothing() -> None:
    assert not DENY.open
    assert not DENY.ports("files.example")
    assert not DENY.allows_address(ip_address("192.0.2.1"), 80)


def test_a_grant_opens_a_closed_policy_and_nothing_else() -> None:
    policy = Policy("deny", (), (parse_rule("files.example:8443"),))
    assert policy.open and policy.allows_name("files.example", 8443)
    assert not policy.allows_name("files.example", 443)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.31.0.1", "192.168.1.1", "169.254.169.254",
        "224.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ],
)  # fmt: skip
def test_addresses_that_only_a_rule_opens(address: str) -> None:
    assert closed(plain(ip_address(address)))


@pytest.mark.parametrize("address", ["192.0.2.1", "198.18.0.1", "100.64.0.1", "2001:db8::1", "240.0.0.1"])
def test_other_special_ranges_are_open(address: str) -> None:
    assert closed(ip_address(address)) is None


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", "a b.c", "-a.b", "1.2.3.4", "a.5", "ü.b", "x" * 254, "a/b.c"]
)
def test_what_is_no_name(name: str) -> None:
    assert canonical(name) is None


# -- presets ----------------------------------------------------------------------------------


def test_what_pip_says_of_itself() -> None:
    listed = """:env:.index-url='https://me:secret@index.example/simple'
global.extra-index-url='https://a.example/s\\nhttps://b.example:8443/s'
global.find-links='/opt/wheels https://links.example/'
global.index-url='https://other.example/simple'
global.trusted-host='b.example'
nonsense"""
    index, extra, trusted = pip_settings(listed)
    assert index == "https://me:secret@index.example/simple"
    assert extra == ["https://a.example/s", "https://b.example:8443/s", "https://links.example/"]
    assert trusted == ["b.example"]
    assert without_login(index) == "https://index.example/simple"


def test_npm_files(tmp_path: Path) -> None:
    (tmp_path / ".npmrc").write_text(
        "registry=https://r.example/\n@x:registry = https://x.example/\n//r.example/:_authToken=1\n"
    )
    found = dict(npm_settings({"HOME": str(tmp_path)}))
    assert found["registry"] == "https://r.example/"
    assert found["@x:registry"] == "https://x.example/"
    found = dict(npm_settings({"HOME": str(tmp_path), "npm_config_registry": "https://e.example/"}))
    assert found["registry"] == "https://e.example/"


async def test_every_apt_source_counts(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "mirrors").write_text(
        "https://m1.example/debian\tpriority:1\n# no\nhttps://m2.example/debian\n"
    )
    (tmp_path / "sources.list").write_text(
        "deb [signed-by=/k arch=amd64] http://one.example/debian x main\n# deb http://no.example/ x main\n"
        "deb-src https://two.example:8443/debian stable main\ndeb file:/srv/debian stable main\n"
    )
    (parts / "a.sources").write_text(
        "# c\nTypes: deb\nURIs: http://three.example/debian\n https://four.example/debian\nSuites: stable\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off.example/debian\n\n"
        f"Types: deb\nURIs: mirror+file:{tmp_path}/mirrors\n"
    )
    hosts = (await Presets({}, tmp_path).get("@apt")).rules
    assert hosts == [
        "one.example", "two.example:8443", "three.example", "four.example", "m1.example", "m2.example"
    ]  # fmt: skip
    assert apt_uris(tmp_path / "nowhere") == []


async def test_a_preset_without_sources_says_so(tmp_path: Path) -> None:
    presets = Presets({"PATH": "/nowhere", "HOME": str(tmp_path)}, tmp_path)
    with pytest.raises(UnsupportedError, match="@apt"):
        await presets.get("@apt")
    with pytest.raises(InvalidRequestError):
        await presets.get("@nope")


async def test_pip_of_this_machine_with_a_configured_index(tmp_path: Path) -> None:
    import os

    env = {**os.environ, "PIP_INDEX_URL": "https://me:pw@index.example:8443/simple", "HOME": str(tmp_path)}
    rules, variables = await Presets(env).expand(["mine.example", "@pip"])
    assert rules[0] == "mine.example" and "index.example:8443" in rules
    assert variables["PIP_INDEX_URL"] == "https://index.example:8443/simple"


async def test_the_default_index_comes_from_pip_itself(tmp_path: Path) -> None:
    import os

    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env |= {"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    preset = await Presets(env).get("@pip")
    assert len(preset.rules) == 2 and "PIP_INDEX_URL" not in preset.env


# -- what a connection says -------------------------------------------------------------------


def hello(name: str | None) -> bytes:
    """A real ClientHello."""
    out = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


def test_the_server_name_is_found_however_the_bytes_come() -> None:
    data = hello("files.example")
    assert server_name(data) == "files.example"
    check, got = TlsCheck("files.example"), b""
    for i in range(len(data)):
        got += check.feed(data[i : i + 1])
    assert got == data
    assert check.feed(b"anything") == b"anything"


def test_a_greeting_in_small_records() -> None:
    data = hello("files.example")
    body, pieces = data[5:], b""
    for at in range(0, len(body), 40):
        part = body[at : at + 40]
        pieces += b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
    assert server_name(pieces) == "files.example"


@pytest.mark.parametrize("name", [None, "evil.test", "xfiles.example", "files.example.evil.test"])
def test_another_server_name_or_none_is_refused(name: str | None) -> None:
    with pytest.raises(RefusedError) as e:
        TlsCheck("files.example").feed(hello(name))
    assert e.value.answer[0] == 21


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", b"\x16\x03\x01\x00\x00", b"SSH-2.0"],
)
def test_no_tls_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError):
        TlsCheck("files.example").feed(data)


def test_a_greeting_cut_short_inside_is_refused() -> None:
    data = bytearray(hello("files.example"))
    data[5 + 4 + 34] = 255  # the session id reaches into what follows it
    with pytest.raises(RefusedError):
        TlsCheck("files.example").feed(bytes(data))


GET = b"GET /x HTTP/1.1\r\nHost: files.example\r\n\r\n"
GOOD = [
    GET,
    GET + GET,
    b"GET / HTTP/1.0\r\nhost:FILES.example.:80 \r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nContent-Length: 5\r\n\r\nGET /" + GET,
    b"POST / HTTP/1.1\r\nHost: files.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\nX: y\r\n\r\n" + GET,
    b"GET http://files.example/ HTTP/1.1\r\nHost: files.example\r\n\r\n",
]
EVIL = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"
BAD = [
    EVIL,
    GET + EVIL,
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: files.example\r\nHost: evil.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: files.example:8080\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : files.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: a\r\n Host: files.example\r\n\r\n",
    b"GET / HTTP/1.1\nHost: files.example\n\n" + bytes(70000),
    b"GET http://evil.test/ HTTP/1.1\r\nHost: files.example\r\n\r\n",
    b"CONNECT evil.test:443 HTTP/1.1\r\nHost: files.example\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x00\xff",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nContent-Length: 3\r\n\r\nabc" + EVIL,
    b"POST / HTTP/1.1\r\nHost: files.example\r\nContent-Length: 3\r\nContent-Length: 9\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nContent-Length: +3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nTransfer-Encoding: xchunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: files.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + EVIL,
    b"POST / HTTP/1.1\r\nHost: files.example\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n",
]


@pytest.mark.parametrize("data", GOOD)
def test_requests_for_the_host_go_on(data: bytes) -> None:
    whole, pieces = HttpCheck("files.example"), HttpCheck("files.example")
    assert whole.feed(data) == data
    assert b"".join(pieces.feed(data[i : i + 1]) for i in range(len(data))) == data


@pytest.mark.parametrize("data", BAD)
def test_any_other_request_is_refused(data: bytes) -> None:
    for size in (1, 7, len(data)):
        check, out = HttpCheck("files.example"), b""
        with pytest.raises(RefusedError) as e:
            for i in range(0, len(data), size):
                out += check.feed(data[i : i + size])
        assert b"evil.test" not in out
        assert e.value.answer.startswith(b"HTTP/1.1 403")


def test_an_upgrade_goes_through_only_when_the_other_side_agrees() -> None:
    ask = b"GET / HTTP/1.1\r\nHost: files.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    agreed = HttpCheck("files.example")
    assert agreed.feed(ask + b"\x81\x00") == ask
    assert agreed.answered(b"HTTP/1.1 101 Switching Protocols\r\n\r\n") == b"\x81\x00"
    assert agreed.feed(b"\x81\x05") == b"\x81\x05"
    refused = HttpCheck("files.example")
    assert refused.feed(ask + EVIL) == ask
    with pytest.raises(RefusedError):
        refused.answered(b"HTTP/1.1 200 OK\r\n")
