"""What both clients share and neither's input or output touches: how requests are made and
replies are read. Nothing here opens, waits or sends."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from forkyard import config, errors, verbs
from forkyard import requests as rq
from forkyard import types as ty

T = TypeVar("T")

CONNECT_HINT = "see daemon.log in FORKYARD_HOME, or run: forkyard doctor"
INLINE_STDIN = 4 << 20
"""Input up to here goes in the request itself; more is streamed."""
INLINE_FILE = 1 << 20
BATCH_BYTES = 8 << 20
CHUNK = 1 << 20
DEFAULT_MAX_OUTPUT = 10 << 20

Stdin = bytes | bytearray | memoryview | str | IO[bytes] | Iterable[bytes] | None
Command = str | list[str] | tuple[str, ...]

_encode = msgspec.msgpack.Encoder().encode

_ROUTES = {**verbs.VERBS, **verbs.STREAMS, **verbs.FILES}
_DECODERS = {name: msgspec.msgpack.Decoder(verb.reply) for name, verb in _ROUTES.items()}
_BASE = [(b"host", b"forkyard"), (b"accept", verbs.MSGPACK.encode())]
_HEADERS = [*_BASE, (b"content-type", verbs.MSGPACK.encode())]
_STREAM_HEADERS = [*_BASE, (b"transfer-encoding", b"chunked")]
_EXEC_STREAM_HEADERS = [*_STREAM_HEADERS, (b"content-type", verbs.EXEC_STREAM.encode())]


class Chunk(NamedTuple):
    """A piece of a process's output. ``kind`` is ``stdout``, ``stderr`` or ``gap`` (output that
    was no longer kept; ``data`` is then empty)."""

    kind: str
    data: bytes


class RestartingError(Exception):
    """The daemon goes: the same request may be made of the next one."""


class BusyError(Exception):
    """Nothing was begun: the same request may be made after ``after_s``, or ``failure`` be raised."""

    def __init__(self, after_s: float, failure: errors.ForkyardError) -> None:
        super().__init__(failure.message)
        self.after_s = after_s
        self.failure = failure


def encode(request: Any) -> bytes:
    """Raises InvalidRequestError for text that has no UTF-8, and for what no message can hold."""
    try:
        return _encode(request)
    except UnicodeEncodeError as error:
        raise _unsendable(error) from None
    except (OverflowError, TypeError) as error:
        raise errors.InvalidRequestError(f"{type(request).__name__}: {error}") from None


def utf8(text: str) -> bytes:
    """Raises InvalidRequestError for text that has no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _unsendable(error) from None


def _unsendable(error: UnicodeEncodeError) -> errors.InvalidRequestError:
    return errors.InvalidRequestError(
        f"{error.object[:100]!r} is not text that can be sent", hint="give bytes"
    )


def new_request_id() -> str:
    return os.urandom(16).hex()


def headers(verb: str, *, body: bytes | None) -> list[tuple[bytes, bytes]]:
    """The headers of a request; ``body`` is None for one that is streamed."""
    if body is not None:
        return [*_HEADERS, (b"content-length", b"%d" % len(body))]
    return _EXEC_STREAM_HEADERS if verb == "exec" else _STREAM_HEADERS


def check(verb: str, status: int, reply_headers: Mapping[str, str], body: bytes = b"") -> None:
    """Look at a reply's head. ``body`` is that of an error.

    Raises:
        RestartingError: ask the next daemon.
        BusyError: ask again later.
        UnavailableError: the daemon speaks another version.
    """
    version = reply_headers.get(verbs.VERSION_HEADER)
    if version != str(verbs.API_VERSION):
        raise errors.UnavailableError(
            f"the daemon's contract is version {version or 'unknown'}, this client's {verbs.API_VERSION}",
            hint="install the same forkyard for both, then: forkyard daemon restart",
        )
    if status == 503 and verbs.RESTARTING_HEADER in reply_headers:
        raise RestartingError
    if status == 429 and (after := reply_headers.get(verbs.RETRY_AFTER_HEADER, "")).isdecimal():
        raise BusyError(float(after), failure(body))


def failure(body: bytes) -> errors.ForkyardError:
    """The error that a reply's or a stream's body describes."""
    try:
        data = msgspec.msgpack.decode(body)
        return errors.from_wire(data)
    except (msgspec.DecodeError, AttributeError, TypeError):
        return errors.InternalError(f"the daemon's error cannot be read: {bytes(body[:80])!r}")


def result(verb: str, status: int, body: bytes) -> Any:
    """The reply's value. Raises what the daemon said went wrong."""
    if status != 200:
        raise failure(body)
    return decode(verb, body)


def decode(verb: str, body: bytes | memoryview) -> Any:
    try:
        return _DECODERS[verb].decode(body)
    except msgspec.DecodeError as error:
        raise errors.UnavailableError(
            f"the daemon's reply to {verb} is of another version: {error}",
            hint="install the same forkyard for both, then: forkyard daemon restart",
        ) from None


def stream_failure(reader: verbs.FrameReader) -> errors.ForkyardError:
    """Why a stream ended early."""
    if reader.error is not None:
        return failure(reader.error)
    return errors.UnavailableError("the daemon's connection ended in the middle of a reply", retryable=True)


def command_fields(command: Command) -> dict[str, Any]:
    """A string is for ``/bin/sh -c``, a list is an argv."""
    if isinstance(command, str):
        return {"command": command}
    argv = [os.fspath(word) if isinstance(word, os.PathLike) else word
            for word in (command if isinstance(command, Iterable) else ())]
    if not argv or not all(isinstance(word, str) for word in argv):
        raise errors.InvalidRequestError(f"a command is a string or a list of strings, not {command!r}")
    return {"argv": argv}


def exec_request(
    sandbox: str,
    command: Command,
    *,
    timeout_s: float | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    login: bool,
    merge: bool,
    max_output: int,
    keep: str,
    request_id: str | None,
    stdin: bytes | None = None,
) -> rq.Exec:
    return made(
        rq.Exec,
        sandbox=sandbox,
        **command_fields(command),
        timeout_s=timeout_s,
        cwd=None if cwd is None else path_of(cwd),
        env=dict(env or {}),
        user=user,
        login=login,
        merge=merge,
        max_output=max_output,
        keep=keep,
        stdin=stdin,
        request_id=request_id or new_request_id(),
    )


def made(kind: type[T], **fields: Any) -> T:
    """A request of ``kind``, its fields checked here as the daemon would.

    Raises:
        InvalidRequestError: a field of the wrong kind.
    """
    try:
        return msgspec.convert(fields, kind)
    except UnicodeEncodeError as error:
        raise _unsendable(error) from None
    except (msgspec.ValidationError, OverflowError) as error:
        raise errors.InvalidRequestError(f"{kind.__name__}: {rq.complaint(error)}") from None


def path_of(given: str | os.PathLike[str]) -> str:
    """A path as text. Raises InvalidRequestError for what is none."""
    try:
        return os.fspath(given)
    except TypeError:
        raise errors.InvalidRequestError(f"{given!r} is no path") from None


def rules(given: Iterable[str] | None) -> list[str] | None:
    """Egress rules as a list. A text would be taken for a list of its letters."""
    if isinstance(given, str):
        raise errors.InvalidRequestError(
            f"egress_allow={given!r} is no list", hint=f"egress_allow=[{given!r}]"
        )
    return None if given is None else list(given)


def variant(given: Any, number: int) -> rq.Variant:
    """One of ``explore``'s variants: a command, or a mapping with one."""
    if not isinstance(given, Mapping):
        return made(rq.Variant, name=f"variant-{number}", **command_fields(given))
    extra = given.keys() - {"name", "command", "files", "env"}
    if extra or "command" not in given:
        what = f"has an unknown {min(extra)!r}" if extra else "has no command"
        raise errors.InvalidRequestError(
            f"variant {number} {what}", hint="give a command, or {name, command, files, env}"
        )
    files = {}
    for path, data in (given.get("files") or {}).items():
        raw = as_bytes(data)
        if raw is None:
            raise errors.InvalidRequestError(f"{path}: data is bytes or text, not {type(data).__name__}")
        files[path_of(path)] = raw
    return made(
        rq.Variant,
        name=given.get("name") or f"variant-{number}",
        files=files,
        env=dict(given.get("env") or {}),
        **command_fields(given["command"]),
    )


def stdin_parts(stdin: Stdin) -> tuple[bytes | None, Iterator[bytes] | None, bool]:
    """``(inline, stream, repeatable)`` of what the caller gave as standard input."""
    if stdin is None:
        return None, None, True
    if isinstance(stdin, str):
        stdin = utf8(stdin)
    if isinstance(stdin, bytes | bytearray | memoryview):
        if len(stdin) <= INLINE_STDIN:
            return bytes(stdin), None, True
        return None, slices(stdin), False
    return None, chunks_of(stdin), False


def slices(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """``data`` in pieces that are views of it."""
    view = memoryview(data).cast("B")
    for at in range(0, len(view), CHUNK):
        yield view[at : at + CHUNK]  # type: ignore[misc]


def chunks_of(source: IO[bytes] | Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a file object or an iterable; text is encoded."""
    pieces: Iterable[Any] = source
    if hasattr(source, "read"):
        pieces = iter(lambda: source.read(CHUNK), None)
    elif not isinstance(source, Iterable):
        raise errors.InvalidRequestError(f"data is bytes, text, a file or an iterable, not {source!r}")
    for piece in pieces:
        if not piece:
            if hasattr(source, "read"):
                return
            continue
        data = as_bytes(piece)
        if data is None:
            raise errors.InvalidRequestError(f"a piece of data is bytes or text, not {type(piece).__name__}")
        yield data


def with_head(request: Any, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A streamed body: the request in a frame, then the bytes."""
    return itertools.chain((verbs.frame(encode(request)),), chunks)


def batches(files: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """``files`` in groups that each fit into one request."""
    group: dict[str, bytes] = {}
    size = 0
    for path, data in files.items():
        if group and size + len(data) > BATCH_BYTES:
            yield group
            group, size = {}, 0
        group[path] = data
        size += len(data)
    if group:
        yield group


def as_bytes(data: Any) -> bytes | None:
    """``data`` where it is bytes or text, else None."""
    if isinstance(data, str):
        return utf8(data)
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    return None


def checked(outcome: ty.ExecResult, command: Command, sandbox: str) -> ty.ExecResult:
    """Raises CommandFailedError unless the command exited with 0."""
    if outcome.ok:
        return outcome
    shown = command if isinstance(command, str) else " ".join(command)
    why = "timed out" if outcome.timed_out else "ran out of memory" if outcome.oom else ""
    why = why or ("filled the sandbox with its processes" if outcome.process_limit else "")
    tail = outcome.stderr_bytes[-400:].decode("utf-8", "replace").strip()
    raise errors.CommandFailedError(
        f"{shown[:200]!r} {why or f'exited with {outcome.exit_code}'}" + (f": {tail}" if tail else ""),
        result=outcome,
        sandbox=sandbox,
    )


def pairs(given: Iterable[tuple[str, Command]]) -> list[tuple[str, Command]]:
    """``exec_many``'s commands: each a sandbox and what to run in it."""
    listed = list(given)
    for one in listed:
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise errors.InvalidRequestError(f"{one!r} is no (sandbox, command)")
    return listed


def outcomes(replies: list[rq.ExecOutcome], commands: list[tuple[str, Command]], check: bool) -> list[Any]:
    """Results in order, with an error object where there is none."""
    out: list[Any] = []
    for reply, (sandbox, command) in zip(replies, commands, strict=True):
        if reply.result is None:
            out.append(errors.from_wire(reply.error or {}))
        elif check:
            out.append(checked(reply.result, command, sandbox))
        else:
            out.append(reply.result)
    return out


def env_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with what ``FORKYARD_DEFAULT_*`` in *this* process's environment says.

    The daemon has its own configuration, but a variable set for one program is meant for it.
    """
    named = {
        key.name.partition(".")[2]
        for key in config.KEYS.values()
        if key.name.startswith("defaults.") and key.env in os.environ
    }
    if not named:
        return given
    filled = config.load().defaults.for_create(given)
    return {name: value if name in named else given.get(name) for name, value in filled.items()}


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot: with the pid it names a process for ever."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return int(file.read(4096).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


_own: tuple[int, int | None] = (0, None)


def own_lease() -> rq.Lease:
    """The lease of this very process, not of the one it was forked from."""
    global _own
    pid = os.getpid()
    if _own[0] != pid:
        _own = (pid, start_time(pid))
    return rq.Lease(pid=pid, start_time=_own[1])


def lease_of(lease: str | None) -> rq.Lease:
    """``None`` is this process, ``"run:ID"`` a run."""
    if lease is None:
        return own_lease()
    if not lease.startswith("run:") or len(lease) == 4:
        raise errors.InvalidRequestError(f"a lease is 'run:<id>', not {lease!r}")
    return rq.Lease(run=lease[4:])


async def to_thread(call: Callable[..., T], *args: Any) -> T:
    """Run what blocks, off the loop."""
    return await asyncio.to_thread(call, *args)


def call_here(call: Callable[..., T], *args: Any) -> T:
    """The same for a client that may block."""
    return call(*args)


def loop_key() -> int:
    """Names the running event loop: connections belong to one."""
    return id(asyncio.get_running_loop())


def no_loop() -> int:
    return 0


async def aslices(chunks: Iterable[bytes]) -> Any:
    """An iterable as an asynchronous one; what it waits for, it waits for in a thread."""
    iterator = iter(chunks)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


def here_slices(chunks: Iterable[bytes]) -> Iterable[bytes]:
    return chunks
