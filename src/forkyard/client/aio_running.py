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
from forkyard.types import CodeResult, ExecResult, ProcessInfo

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
        pairs = protocol.pairs(commands)
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

    async def run_code(
        self,
        sandbox: str,
        code: str,
        *,
        language: str = "python",
        session: str = "default",
        timeout_s: float | None = None,
        user: str | None = None,
        cwd: str | None = None,
        request_id: str | None = None,
    ) -> CodeResult:
        """Run code in a session, an interpreter that goes on between calls with all its variables.

        Forks and rewinds carry sessions with everything in them. An error of the code, a timeout
        and an OOM kill are results. The end of a session (``exit()``, a kill, a crash) is told once:
        by the call during which it was killed, else by the next one, whose code is then not run
        and whose ``error.name`` is ``SessionEnded``; the call after begins a new session.

        Args:
            language: ``python`` (IPython where the image has it), ``bash`` or ``javascript``.
            session: Which of several, each with variables of its own; one call at a time in each.
            timeout_s: After so long the code is interrupted (SIGINT), and killed with its session if
                it goes on. Waiting for an earlier call does not count.
            user: Who runs it; part of what a session is.
            cwd: Where a new session starts.

        Raises:
            UnsupportedError: the image has no interpreter for the language.
            InvalidRequestError: an unknown language.
        """
        request = protocol.made(
            rq.RunCode,
            sandbox=sandbox,
            code=code,
            language=language,
            session=session,
            timeout_s=timeout_s,
            user=user,
            cwd=None if cwd is None else protocol.path_of(cwd),
            request_id=request_id or protocol.new_request_id(),
        )
        return await self._transport.call("run_code", request)

    async def git(
        self,
        sandbox: str,
        operation: str,
        *,
        url: str | None = None,
        path: str | None = None,
        branch: str | None = None,
        depth: int | None = None,
        ref: str | None = None,
        create: bool = False,
        staged: bool = False,
        paths: Sequence[str] = (),
        patch: bytes | str | None = None,
        message: str | None = None,
        author: str | None = None,
        all: bool = False,
        limit: int | None = None,
        username: str | None = None,
        password: str | None = None,
        token: str | None = None,
        grant: bool = True,
        timeout_s: float | None = None,
        user: str | None = None,
        max_output: int = DEFAULT_MAX_OUTPUT,
        check: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run git in the sandbox: clone, fetch, checkout, status, diff, apply, add, commit or log.

        What git refuses is a result.

        Args:
            url: What ``clone`` and ``fetch`` take from: a URL, or a bundle or a repository inside.
            path: The repository; for ``clone`` the directory to make. Default: where commands start.
            branch, depth: Of ``clone`` and ``fetch``; ``checkout`` makes the branch with ``create``.
            ref: A commit, tag or branch, for ``checkout``, ``diff`` and ``log``.
            staged: ``diff`` shows, and ``apply`` changes, the index as well.
            paths: Files; ``add`` without takes everything.
            patch: What ``apply`` applies, as text or bytes.
            message, author, all: Of ``commit``; an author is ``Name <mail>``.
            limit: How many commits ``log`` shows.
            username, password, token: For the host of ``url`` alone. They reach git by a pipe: no file,
                argument or variable in the sandbox has them, and the audit keeps a digest.
            grant: Open the URL's host for this one operation.
            check: Raise CommandFailedError unless git exits with 0.

        Raises:
            InvalidRequestError: an option that the operation does not take.
            UnsupportedError: the sandbox was saved by a version without a network.
        """
        if token is not None and password is not None:
            raise errors.InvalidRequestError("give a password or a token, not both")
        request = protocol.made(
            rq.Git,
            sandbox=sandbox,
            operation=operation,
            url=url,
            path=None if path is None else protocol.path_of(path),
            branch=branch,
            depth=depth,
            ref=ref,
            create=create,
            staged=staged,
            paths=[protocol.path_of(one) for one in paths],
            patch=protocol.as_bytes(patch),
            message=message,
            author=author,
            all=all,
            limit=limit,
            username=username,
            password=token if password is None else password,
            grant=grant,
            timeout_s=timeout_s,
            user=user,
            max_output=max_output,
            request_id=request_id or protocol.new_request_id(),
        )
        result: ExecResult = await self._transport.call("git", request)
        return protocol.checked(result, f"git {operation}", sandbox) if check else result

    async def processes(self, sandbox: str) -> list[ProcessInfo]:
        """The processes inside, as the guest tells; those with a ``handle`` can be attached to."""
        return await self._transport.call("processes", rq.SandboxRequest(sandbox=sandbox))

    async def attach(self, sandbox: str, pid: int) -> AsyncProcess:
        """A handle on a command that runs already: a detached one, or one that a fork or a
        rewind brought along. Its output goes on from the oldest that is still kept."""
        return await AsyncProcess(self._transport, sandbox, rq.Attach(sandbox=sandbox, pid=pid))._begin()
