"""The HTTP interface as an OpenAPI 3.1 document, made from the verbs' own types."""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec

from forkyard import __version__, access, verbs

_STATUSES = {
    400: "the request is wrong",
    401: "no token, or none that is known",
    403: "the token has no right to this",
    404: "no such thing",
    409: "a conflict with what is there",
    410: "the sandbox is gone",
    422: "a snapshot's files are damaged",
    429: "no room, or too many requests; with `retry-after`, ask again",
    500: "a defect, or a fork that was undone",
    501: "this version, engine or host cannot do it",
    503: "the daemon is going; ask again",
    504: "it took longer than allowed",
}
_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "enum": sorted(verbs.STATUS)},
        "message": {"type": "string"},
        "hint": {"type": "string"},
        "retryable": {"type": "boolean"},
        "sandbox": {"type": ["string", "null"]},
    },
}


@functools.cache
def description_json() -> bytes:
    return json.dumps(description(), separators=(",", ":")).encode()


def description() -> dict[str, Any]:
    """The document. JSON and msgpack hold the same fields; bytes are base64 in JSON."""
    tables = ((verbs.VERBS, _plain), (verbs.STREAMS, _stream), (verbs.FILES, _file))
    served = [
        (name, verb, reply)
        for table, reply in tables
        for name, verb in table.items()
        if name not in access.LOCAL
    ]
    kinds: list[Any] = [verb.request for _, verb, _ in served]
    kinds += [verb.reply for _, verb, _ in served if verb.reply is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    requests = dict(zip((name for name, _, _ in served), schemas, strict=False))
    replying = [name for name, verb, _ in served if verb.reply is not None]
    replies = dict(zip(replying, schemas[len(served) :], strict=True))
    components["Error"] = _ERROR
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "forkyard",
            "version": __version__,
            "description": "Sandboxes that fork, checkpoint, rewind. One POST for each verb; a change "
            "that is asked for again with the same `request_id` is not done twice. Each reply has the header "
            f"`{verbs.VERSION_HEADER}: {verbs.API_VERSION}`.",
        },
        "security": [{"token": []}],
        "paths": {
            f"/v1/{name}": {
                "post": {
                    "operationId": name,
                    "summary": " ".join((verb.request.__doc__ or "").split("\n\n")[0].split()) or name,
                    "tags": [_tag(name)],
                    **reply(requests[name], replies.get(name, {"type": "null"}), verb),
                }
            }
            for name, verb, reply in served
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _tag(name: str) -> str:
    return "read" if name in access.READ else "run" if name in access.RUN else "admin"


def _plain(request: Any, reply: Any, _: verbs.Verb) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {verbs.JSON: {"schema": request}, verbs.MSGPACK: {}}},
        "responses": {"200": _answer({verbs.JSON: {"schema": reply}, verbs.MSGPACK: {}}), **_failures()},
    }


def _stream(request: Any, reply: Any, _: verbs.Verb) -> dict[str, Any]:
    line = {"description": "One JSON document a line", "x-line-schema": reply}
    return {
        "requestBody": {"required": True, "content": {verbs.JSON: {"schema": request}, verbs.MSGPACK: {}}},
        "responses": {"200": _answer({verbs.JSON: {"schema": line}, verbs.MSGPACK: {}}), **_failures()},
    }


def _file(request: Any, reply: Any, verb: verbs.Verb) -> dict[str, Any]:
    raw = {
        "schema": {"description": "Frames of raw bytes: 4 bytes of length, big end first, each; 0 ends them"}
    }
    if not verb.changes:
        body: dict[str, Any] = {verbs.JSON: {"schema": request}, verbs.MSGPACK: {}}
        answer = _answer(
            {verbs.MSGPACK: raw, verbs.JSON: {"schema": {"description": "Pieces in base64, one a line"}}}
        )
    else:
        text = "One frame with the request in msgpack, then raw bytes to the end"
        body = {"application/octet-stream": {"schema": {"description": text}, "x-head-schema": request}}
        answer = _answer({verbs.MSGPACK: {}, verbs.JSON: {"schema": reply}})
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {"200": answer, **_failures()},
    }


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "done", "content": content}


def _failures() -> dict[str, Any]:
    error = {verbs.JSON: {"schema": {"$ref": "#/components/schemas/Error"}}, verbs.MSGPACK: {}}
    return {str(status): {"description": text, "content": error} for status, text in _STATUSES.items()}
