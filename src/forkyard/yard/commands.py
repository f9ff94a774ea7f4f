"""From a request to what the guest is to start, and how a command's end is told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from forkyard.errors import InvalidRequestError
from forkyard.guest import ExitStatus, SpawnSpec
from forkyard.requests import Exec, ExecOptions, Spawn
from forkyard.types import ExecResult
from forkyard.yard.capture import Capture
from forkyard.yard.model import Sandbox
from forkyard.yard.plans import check_env
from forkyard.yard.secrets import hide, hide_argv

MAX_OUTPUT = 1 << 30
MAX_WORDS, MAX_ARGV = 65_536, 2 << 20
"""Of a command; Linux takes no longer one."""
AUDITED = 16 << 10
"""So many characters of a command are in the audit."""
CODE_TAG = b"code1:"
"""Begins the tag of a session that runs code; no command's own (see tag_of) begins so."""


def argv_of(request: ExecOptions) -> list[str]:
    """The program to run: ``argv`` itself, or a shell with ``command``.

    Raises:
        InvalidRequestError: neither or both are given, or the argv is empty.
    """
    if (request.argv is None) == (request.command is None):
        raise InvalidRequestError("give a command or an argv, and not both")
    if request.argv is not None:
        if not request.argv or not request.argv[0]:
            raise InvalidRequestError("the argv names no program")
        argv = request.argv
    else:
        argv = ["/bin/sh", *(["-l"] if request.login else []), "-c", request.command or ""]
    if len(argv) > MAX_WORDS or sum(map(len, argv)) > MAX_ARGV:
        raise InvalidRequestError(
            f"a command of {len(argv)} words and {sum(map(len, argv))} characters is longer than Linux takes",
            hint="give long input as stdin, or write it to a file",
        )
    return argv


def resolve(path: str, workdir: str) -> str:
    """A guest path: relative ones start at the sandbox's working directory."""
    if "\0" in path:
        raise InvalidRequestError("a path with a NUL byte")
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def tag_of(request: ExecOptions, uid: int) -> bytes:
    """What the agent keeps beside the command, so that a new daemon knows whose it is."""
    return hashlib.sha256(f"{uid}:{request.request_id}".encode()).hexdigest()[:32].encode()


def spec_of(request: Exec | Spawn, sandbox: Sandbox, tag: bytes, *, stdin: bool) -> SpawnSpec:
    """What the agent is asked to start.

    Raises:
        InvalidRequestError: the request cannot be.
    """
    check_env(request.env)
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise InvalidRequestError(f"timeout_s={request.timeout_s} is not above 0")
    doc = sandbox.doc
    return SpawnSpec(
        argv=argv_of(request),
        env={**sandbox.net_env, **doc.env, **request.env},
        cwd=resolve(request.cwd, doc.workdir) if request.cwd else doc.workdir,
        user=request.user or doc.user,
        pty=isinstance(request, Spawn) and request.pty,
        rows=request.rows if isinstance(request, Spawn) else 24,
        cols=request.cols if isinstance(request, Spawn) else 80,
        stdin="pipe" if stdin else "none",
        merge=request.merge,
        tag=tag,
        detached=isinstance(request, Spawn) and request.detach,
    )


def is_root(user: str) -> bool:
    """Whether a user of a guest is, or may be, its root."""
    return user.partition(":")[0].strip() in ("root", "0", "")


def check_output(request: Exec) -> None:
    """Raises InvalidRequestError for a ``max_output`` that cannot be."""
    if not 0 <= request.max_output <= MAX_OUTPUT:
        raise InvalidRequestError(f"max_output={request.max_output} is not between 0 and {MAX_OUTPUT} bytes")


def result_of(
    status: ExitStatus,
    out: Capture,
    err: Capture,
    *,
    merge: bool,
    timed_out: bool,
    disk_full: bool,
    duration_ms: float,
    audit_seq: int,
) -> ExecResult:
    """The result of a command that ended."""
    stdout, stderr = out.data(), err.data()
    omitted = out.omitted + err.omitted
    return ExecResult(
        ok=status.code == 0 and not timed_out,
        exit_code=status.code,
        signal=status.signal,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        merged=stdout.decode("utf-8", "replace") if merge else None,
        timed_out=timed_out,
        oom=status.oom,
        disk_full=disk_full,
        process_limit=status.crowded,
        truncated=omitted > 0,
        omitted_bytes=omitted,
        duration_ms=round(duration_ms, 3),
        cpu_ms=round(status.cpu_ms, 3),
        max_rss_mb=round(status.max_rss_mb, 2),
        audit_seq=audit_seq,
    )


def audit_of(request: ExecOptions, sandbox: Sandbox, digest: Callable[[str], str]) -> dict[str, Any]:
    """What the audit says of a command before it ran. Values of variables may be secrets: only their
    names are kept; what looks like one among the arguments is kept as a digest. Of very long ones
    the beginning is kept, and a digest of the whole."""
    said: dict[str, Any] = {"user": request.user or sandbox.doc.user}
    secrets = list(request.env.values())
    whole = request.command or "" if request.argv is None else "\0".join(request.argv)
    if len(whole) > AUDITED:
        said["command"] = hide(whole[:AUDITED].replace("\0", " "), digest, secrets)
        said["command_sha256"] = hashlib.sha256(whole.encode(errors="surrogateescape")).hexdigest()
    elif request.argv is not None:
        said["argv"] = hide_argv(request.argv, digest, secrets)
    else:
        said["command"] = hide(whole, digest, secrets)
    if request.cwd:
        said["cwd"] = request.cwd
    if request.env:
        said["env"] = sorted(request.env)
    return said
