"""The client's verbs that run things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from forkyard import errors
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client._protocol import DEFAULT_MAX_OUTPUT, Command, Stdin
from forkyard.client.aio_process import AsyncProcess
from forkyard.client.aio_transport import AsyncTransport
from forkyard.types import ExecResult, ProcessInfo

Keep = Literal["head", "tail", "both"]


class AsyncRunning:
    _transport: AsyncTransport

    async def shell(
        self,
        sandbox: str,
        command: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: Stdin = None,
        login: bool = False,
        merge: bool = False,
        max_output: int = DEFAULT_MAX_OUTPUT,
        keep: Keep = "both",
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run ``command`` with ``/bin/sh -c``; otherwise as :meth:`exec`."""
        if not isinstance(command, str):
            raise errors.InvalidRequestError("shell takes one string", hint="exec takes a list of words")
        request = protocol.exec_request(
            sandbox,
            command,
            timeout_s=timeout_s,
            cwd=cwd,
            env=env,
            user=user,
            login=login,
            merge=merge,
            max_output=max_output,
            keep=keep,
            request_id=request_id,
        )
        return await self._run(request, command, stdin, check)

    async def exec(
        self,
        sandbox: str,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: Stdin = None,
        login: bool = False,
        merge: bool = False,
        max_output: int = DEFAULT_MAX_OUTPUT,
        keep: Keep = "both",
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a program and wait for its end.

        A non-zero exit, a timeout and an OOM kill are results, with the output so far.

        Args:
            timeout_s: After so long everything it started is killed; None is no limit.
            cwd: Default: the template's working directory, to which relative paths count too.
            env: Added to the sandbox's variables.
            stdin: Bytes, text, a file object or an iterable of bytes, of any size; else nothing.
            login: Run it in a login shell.
            merge: Also give both streams in order of arrival, as ``merged``.
            max_output: How much of each stream is kept, in bytes.
            keep: Which part of a longer one: ``head``, ``tail`` or ``both`` ends.
            check: Raise CommandFailedError, which has the result, unless it exits with 0.

        Raises:
            NotFoundError, ConflictError: no such sandbox, or it does not run.
            SandboxLostError: it died meanwhile.
            CommandFailedError: see ``check``.
        """
        if isinstance(argv, str):
            raise errors.InvalidRequestError("exec takes a list of words", hint="shell takes a string")
        command = list(argv)
        request = protocol.exec_request(
            sandbox,
            command,
            timeout_s=timeout_s,
            cwd=cwd,
            env=env,
            user=user,
            login=login,
            merge=merge,
            max_output=max_output,
            keep=keep,
            request_id=request_id,
        )
        return await self._run(request, command, stdin, check)

    async def _run(self, request: rq.Exec, command: Command, stdin: Stdin, check: bool) -> ExecResult:
        inline, stream, repeatable = protocol.stdin_parts(stdin)
        request.stdin = inline
        if stream is None:
            result = await self._transport.call("exec", request)
        else:
            result = await self._transport.send("exec", request, lambda: stream, repeatable=repeatable)
        return protocol.checked(result, command, request.sandbox) if check else result

    async def exec_many(
        self,
        commands: Sequence[tuple[str, Command]],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        login: bool = False,
        merge: bool = False,
        max_output: int = DEFAULT_MAX_OUTPUT,
        keep: Keep = "both",
        check: bool = False,
        request_id: str | None = None,
    ) -> list[Any]:
        """Run ``(sandbox, command)`` pairs all at once, in one call.

        Returns:
            An ExecResult for each, in order; where there is none (a lost sandbox, say), the
            error object stands in its place.
        """
        base = request_id or protocol.new_request_id()
        pairs = list(commands)
        inline = protocol.as_bytes(stdin) if stdin is not None else None
        requests = [
            protocol.exec_request(
                sandbox,
                command,
                timeout_s=timeout_s,
                cwd=cwd,
                env=env,
                user=user,
                login=login,
                merge=merge,
                max_output=max_output,
                keep=keep,
                request_id=f"{base}.{index}",
                stdin=inline,
            )
            for index, (sandbox, command) in enumerate(pairs)
        ]
        replies = await self._transport.call("exec_many", rq.ExecMany(commands=requests, request_id=base))
        return protocol.outcomes(replies, pairs, check)

    async def spawn(
        self,
        sandbox: str,
        command: Command,
        *,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        detach: bool = False,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        login: bool = False,
        merge: bool = False,
        request_id: str | None = None,
    ) -> AsyncProcess:
        """Start a command (text for ``/bin/sh -c``, or a list of words) and return at once.

        Its stdin stays open until ``close_stdin``. It ends with its handle, unless ``detach``.
        """
        request = protocol.made(
            rq.Spawn,
            sandbox=sandbox,
            **protocol.command_fields(command),
            pty=pty,
            rows=rows,
            cols=cols,
            detach=detach,
            timeout_s=timeout_s,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            login=login,
            merge=merge,
            request_id=request_id or protocol.new_request_id(),
        )
        return await AsyncProcess(self._transport, sandbox, request)._begin()

    async def processes(self, sandbox: str) -> list[ProcessInfo]:
        """The processes inside, as the guest tells; those with a ``handle`` can be attached to."""
        return await self._transport.call("processes", rq.SandboxRequest(sandbox=sandbox))

    async def attach(self, sandbox: str, pid: int) -> AsyncProcess:
        """A handle on a command that runs already: a detached one, or one that a fork or a
        rewind brought along. Its output goes on from the oldest that is still kept."""
        return await AsyncProcess(self._transport, sandbox, rq.Attach(sandbox=sandbox, pid=pid))._begin()
