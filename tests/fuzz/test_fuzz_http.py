"""The description of the HTTP interface is true, and no request, whether it fits it or not, breaks the
daemon: over HTTPS, to the real yard on toy machines."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from yards import Home, Kind, new_home, opened

from forkyard import access, verbs
from forkyard.access import Listen, NewToken
from forkyard.daemon import openapi
from forkyard.daemon.access import Access
from forkyard.daemon.app import App
from forkyard.requests import Caller

DOCUMENT = openapi.description()
EXAMPLES = int(os.environ.get("FORKYARD_TEST_EXAMPLES", "20"))


def _harmless() -> dict[str, Any]:
    """The description without what would speak to the world, or wait for what never comes."""
    document = copy.deepcopy(DOCUMENT)
    for kind, name in (("CreateSandbox", "image"), ("CreateSandbox", "wait_s"), ("Fork", "wait_s")):
        del document["components"]["schemas"][kind]["properties"][name]
    # Others are unsupported, which is an answer and has a number above 500.
    document["components"]["schemas"]["CreateSandbox"]["properties"]["engine"] = {"enum": ["auto", None]}
    # (A toy's disk has no layers to compare.)
    for verb in ("git", "build_template", "pull_template", "prepare", "shutdown", "diff", "explore"):
        del document["paths"][f"/v1/{verb}"]
    for verb in ("wait_sandbox", "wait_process", "events", "hold_lease"):
        del document["paths"][f"/v1/{verb}"]
    # What follows their heads no schema says: test_no_bytes_are_the_daemons_fault has them.
    for verb in (name for name, one in verbs.FILES.items() if one.changes):
        del document["paths"][f"/v1/{verb}"]
    return document


HARMLESS = _harmless()
SCHEMAS = HARMLESS["components"]["schemas"]
ASKED = [path.removeprefix("/v1/") for path in HARMLESS["paths"]]


class ServedYard:
    """A yard of toy machines that listens, in a thread with a loop of its own."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._up.wait(30)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        local = Caller(uid=0)
        async with opened(self._home) as yard, asyncio.TaskGroup() as tasks:
            access = Access(self._home.path, tasks, yard.yard.record)
            app = App(yard.yard, tasks, self._stop.set, access)
            async with access.serving(app):
                self.url = ((await access.listen(Listen(address="127.0.0.1:0"), local)).url or "").partition(
                    "#"
                )[0]
                self.token = (await access.new_token(NewToken(name="fuzz", role="admin"), local)).token
                access._listener.gate.requests.burst = 1e9
                self._up.set()
                await self._stop.wait()
                app.drain()
            await yard.empty()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with new_home(Kind("fake")) as home:
        yard = ServedYard(home)
        try:
            headers = {"authorization": f"Bearer {yard.token}"}
            with httpx.Client(base_url=yard.url, verify=False, headers=headers, timeout=60) as http:
                http.post("/v1/create_sandbox", json={"name": "box"}).raise_for_status()
                yield http
        finally:
            yard.close()


def test_it_is_given_to_who_has_a_token(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))
    assert http.get("/openapi.json", headers={"authorization": ""}).status_code == 401
    assert http.post("/openapi.json").status_code == 405


def test_every_verb_that_a_token_can_have_is_in_it() -> None:
    every = {*verbs.VERBS, *verbs.STREAMS, *verbs.FILES} - access.LOCAL
    assert {path.removeprefix("/v1/") for path in DOCUMENT["paths"]} == every
    text = json.dumps(DOCUMENT)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in DOCUMENT["components"]["schemas"]
    # The rights that a verb needs are told.
    assert DOCUMENT["paths"]["/v1/exec"]["post"]["tags"] == ["run"]
    assert DOCUMENT["paths"]["/v1/shutdown"]["post"]["tags"] == ["admin"]
    statuses = {str(status) for status in verbs.STATUS.values()}
    assert statuses | {"200", "401"} == {*DOCUMENT["paths"]["/v1/exec"]["post"]["responses"]}


# What values a schema allows, as far as msgspec's schemas go.

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.sampled_from(
    ["a", "box", "box", "box", "sb_1", "../x", "/etc/passwd", "", "\x00", "ä", "base", "x" * 300]
)


def fitting(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return st.deferred(lambda: fitting(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth + 1))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        options = [one for one in schema["anyOf"] if depth < 4 or "$ref" not in one]
        return st.one_of(*(fitting(one, depth) for one in options))
    kind = schema.get("type")
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"])
        if schema.get("contentEncoding") == "base64":
            return st.sampled_from(["", "AAEC", "eA=="])
        return WORDS | st.text(max_size=30)
    if kind == "integer":
        return st.integers(
            schema.get("minimum"), schema.get("exclusiveMaximum", schema.get("maximum", 1 << 70)) - 1
        )
    if kind == "number":
        return st.floats(schema.get("minimum", -1e9), schema.get("maximum", 1e9)) | st.integers(0, 9)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array":
        if "prefixItems" in schema:
            return st.tuples(*(fitting(one, depth) for one in schema["prefixItems"])).map(list)
        return st.lists(fitting(schema.get("items", {}), depth + 1), max_size=3 if depth < 3 else 0)
    if kind == "object":
        fields = schema.get("properties", {})
        required = {name: fitting(fields[name], depth) for name in schema.get("required", [])}
        optional = {name: fitting(value, depth) for name, value in fields.items() if name not in required}
        if not fields:
            return st.dictionaries(
                WORDS, fitting(schema.get("additionalProperties") or {}, depth + 1), max_size=2
            )
        return st.fixed_dictionaries(required, optional=optional)
    return ANYTHING


def body_of(verb: str) -> dict[str, Any]:
    content = HARMLESS["paths"][f"/v1/{verb}"]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content[verbs.JSON]["schema"]
    return schema


@pytest.mark.parametrize("verb", ASKED)
def test_no_request_is_the_daemons_fault(http: httpx.Client, verb: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(fitting(body_of(verb)) | ANYTHING)
    def ask(body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = http.post(f"/v1/{verb}", content=data, headers={"content-type": verbs.JSON})
        assert reply.status_code < 500 or reply.status_code in (501, 503, 504), (reply.text, body)
        assert reply.headers[verbs.VERSION_HEADER] == str(verbs.API_VERSION)
        if reply.status_code != 200:
            assert set(reply.json()) >= {"code", "message", "hint", "retryable"}

    http.post("/v1/create_sandbox", json={"name": "box"})
    ask()


HTTP_BYTES = st.binary(max_size=200) | st.sampled_from(
    [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x80", b"[" * 5000]
)


@pytest.mark.parametrize("kind", [verbs.JSON, verbs.MSGPACK, verbs.EXEC_STREAM, "text/plain", ""])
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    data=HTTP_BYTES, verb=st.sampled_from([*ASKED, *(n for n in verbs.FILES), "none", "../v1/exec", "%00"])
)
def test_no_bytes_are_the_daemons_fault(http: httpx.Client, kind: str, data: bytes, verb: str) -> None:
    with contextlib.suppress(httpx.RemoteProtocolError):
        reply = http.post(f"/v1/{verb}", content=data, headers={"content-type": kind})
        assert reply.status_code < 500 or reply.status_code in (501, 503, 504), reply.text


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(http: httpx.Client, tmp_path: Any) -> None:
    document = copy.deepcopy(HARMLESS)
    # It asks about what is there, and that stays there.
    for schema in document["components"]["schemas"].values():
        for name in {"sandbox", "source"} & schema.get("properties", {}).keys():
            schema["properties"][name] = {"type": "string", "enum": ["box", "no-box"]}
    # A toy has no Python, which 501 says truly.
    for verb in ("delete_sandbox", "delete_sandboxes", "rename_sandbox", "run_code"):
        del document["paths"][f"/v1/{verb}"]
    http.post("/v1/create_sandbox", json={"name": "box"})
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    run = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", str(http.base_url)]
    run += ["--tls-verify=false", "-H", f"Authorization: {http.headers['authorization']}", "--no-color"]
    run += ["--checks", "not_a_server_error", "--phases", "fuzzing"]
    run += ["--max-examples", str(max(EXAMPLES // 2, 1))]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
