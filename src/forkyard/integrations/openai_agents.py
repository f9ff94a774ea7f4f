"""A sandbox as function tools for the OpenAI Agents SDK (``pip install forkyard[openai-agents]``).

    agent = Agent(name="solver", instructions=TASK, tools=sandbox_tools(client, sandbox))
    Runner.run_sync(agent, TASK, max_turns=30)

What goes wrong inside a tool is told to the model as text; it never ends a run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from forkyard.errors import ForkyardError, InvalidRequestError
from forkyard.types import CodeResult, ExecResult

try:
    from agents import FunctionTool, function_tool
except ImportError as error:
    raise ImportError(
        "this module needs the OpenAI Agents SDK: pip install 'forkyard[openai-agents]'"
    ) from error

if TYPE_CHECKING:
    from forkyard import AsyncClient, Client

TOOLS = ("shell", "run_code", "read_file", "write_file", "list_files", "git", "diff", "checkpoint", "rewind")
DEFAULT = TOOLS[:-2]
MAX_READ = 8 << 20
# Calls of one agent that run at once, on a client that blocks.
PARALLEL = 16

Operation = Literal["clone", "fetch", "checkout", "status", "diff", "apply", "add", "commit", "log"]


def sandbox_tools(
    client: Client | AsyncClient,
    sandbox: str,
    *,
    timeout_s: float | None = 120,
    user: str | None = None,
    cwd: str | None = None,
    include: Sequence[str] | None = None,
    max_output: int = 30_000,
) -> list[FunctionTool]:
    """Tools with which an agent works in ``sandbox``, and nowhere else.

    Args:
        client: Either client; calls of one that blocks are made in threads.
        sandbox: Id or name.
        timeout_s: For each command and each piece of code.
        user: Who commands, code and files are run and made as; default: the sandbox's user.
        cwd: Where they start and what relative paths count from; default: its working directory.
        include: Names of the tools, in this order. Default: shell, run_code, read_file, write_file,
            list_files, git and diff; ``checkpoint`` and ``rewind`` only where named. git has no
            network but what the sandbox has.
        max_output: Characters of a result; a longer one is cut in the middle, with a note.

    Raises:
        InvalidRequestError: a tool of no such name.
    """
    made = _Tools(client, sandbox, timeout_s, user, cwd, max_output)
    wanted = list(include) if include is not None else [name for name in DEFAULT if made.has(name)]
    for name in wanted:
        if name not in TOOLS or not made.has(name):
            raise InvalidRequestError(f"there is no tool {name!r}", hint=f"there are {', '.join(TOOLS)}")
    return [made.tool(name) for name in wanted]


class _Tools:
    """The tools as methods: their names, arguments and docstrings are what the model is shown."""

    def __init__(
        self,
        client: Any,
        sandbox: str,
        timeout_s: float | None,
        user: str | None,
        cwd: str | None,
        max_output: int,
    ) -> None:
        self._client = client
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._user = user
        self._cwd = cwd
        self._max_output = max(max_output, 200)
        self._waits = inspect.iscoroutinefunction(client.shell)
        self._threads = None if self._waits else ThreadPoolExecutor(PARALLEL, "forkyard-tool")

    def has(self, name: str) -> bool:
        return name in TOOLS and hasattr(self._client, name)

    def tool(self, name: str) -> FunctionTool:
        return function_tool(_as_text(getattr(self, f"_{name}"), self._cut), name_override=name)

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        method = getattr(self._client, name)
        if self._waits:
            return await method(self._sandbox, *args, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: method(self._sandbox, *args, **options))

    def _at(self, path: str) -> str:
        if self._cwd is None or path.startswith(("/", "~")):
            return path
        return f"{self._cwd.rstrip('/')}/{path}"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_output:
            return text
        note = f"\n... [{len(text) - self._max_output} of {len(text)} characters left out] ...\n"
        half = (self._max_output - len(note)) // 2
        return text[:half] + note + text[-half:]

    # -- what the model sees -----------------------------------------------------------

    async def _shell(self, command: str) -> str:
        """Run a command line in the sandbox with /bin/sh and return its output.

        Each call is a shell of its own: a `cd` lasts for that call. Long-running servers belong in
        the background (`server > log 2>&1 &`).

        Args:
            command: The command line; several lines are a script.
        """
        result = await self._call(
            "shell",
            command,
            timeout_s=self._timeout_s,
            user=self._user,
            cwd=self._cwd,
            max_output=self._max_output * 4,
        )
        return _told(result, self._timeout_s)

    async def _run_code(
        self, code: str, language: Literal["python", "bash", "javascript"] = "python"
    ) -> str:
        """Run code in a session that goes on between calls: variables, imports and loaded data stay.

        The value of the last expression is returned, with what was printed. Figures are kept for the
        user without a call of `plt.show()`; so is a file after `artifact("its/path")`.

        Args:
            code: The code.
            language: What it is written in. Python is IPython where it is installed.
        """
        result: CodeResult = await self._call(
            "run_code",
            code,
            language=language,
            timeout_s=self._timeout_s,
            user=self._user,
            cwd=self._cwd,
        )
        return _told_code(result, self._timeout_s)

    async def _read_file(self, path: str) -> str:
        """Read a text file.

        Args:
            path: Its path; a relative one starts at the working directory.
        """
        info = await self._call("stat", self._at(path), user=self._user)
        if info.size > MAX_READ:
            return f"error: {path} has {info.size} bytes; read a part of it with the shell (sed, head, tail)"
        data: bytes = await self._call("read_file", self._at(path), user=self._user)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"error: {path} is no text: {len(data)} bytes that begin with {data[:40]!r}"

    async def _write_file(self, path: str, content: str) -> str:
        """Write a whole file; missing directories are made, an existing file is replaced.

        Args:
            path: Its path; a relative one starts at the working directory.
            content: All of its text.
        """
        await self._call("write_file", self._at(path), content, user=self._user)
        return f"wrote {len(content.encode())} bytes to {path}"

    async def _list_files(self, path: str = ".") -> str:
        """List a directory: type, size and name of each entry.

        Args:
            path: Its path; default: the working directory.
        """
        entries = await self._call("list_files", self._at(path), user=self._user)
        lines = [
            f"{entry.type:5} {entry.size:>10} {entry.name}" + (f" -> {entry.target}" if entry.target else "")
            for entry in entries
        ]
        return "\n".join(lines) or "(empty)"

    async def _git(
        self,
        operation: Operation,
        path: str = ".",
        url: str | None = None,
        branch: str | None = None,
        ref: str | None = None,
        paths: list[str] | None = None,
        patch: str | None = None,
        message: str | None = None,
        limit: int | None = None,
    ) -> str:
        """Run a git operation.

        Args:
            operation: Which one.
            path: The repository; for clone the directory to make.
            url: For clone and fetch: a URL, or a bundle or repository in the sandbox.
            branch: For clone, fetch and checkout.
            ref: A commit, tag or branch, for checkout, diff and log.
            paths: Files, for add, checkout, diff and log; add without takes everything.
            patch: The unified diff that apply applies.
            message: Of a commit.
            limit: How many commits log shows.
        """
        options = {
            "url": url, "branch": branch, "ref": ref, "paths": paths, "patch": patch, "message": message,
            "limit": limit,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        if operation != "clone" or path != ".":
            given["path"] = self._at(path)
        result = await self._call(
            "git", operation, grant=False, timeout_s=self._timeout_s, user=self._user,
            max_output=self._max_output * 4, **given,
        )  # fmt: skip
        return _told(result, self._timeout_s)

    async def _diff(self) -> str:
        """Show what has changed on the sandbox's disk since it was started, as a patch."""
        found = await self._call("diff")
        head = "".join(
            f"{letter} {entry}\n"
            for letter, entries in (("A", found.added), ("M", found.modified), ("D", found.deleted))
            for entry in entries
        )
        return head + found.patch if head else "nothing has changed"

    async def _checkpoint(self, label: str | None = None) -> str:
        """Remember the whole sandbox (memory, processes and disk), to rewind to.

        Args:
            label: A few words about this state.
        """
        kept = await self._call("checkpoint", label)
        return f"checkpoint {kept.id}" + (f" ({kept.label})" if kept.label else "")

    async def _rewind(self, to: str | None = None) -> str:
        """Take the whole sandbox back to a checkpoint; everything since is undone.

        Args:
            to: The checkpoint's id; default: the newest before the present state.
        """
        await self._call("rewind", to)
        return f"rewound to {to or 'the newest checkpoint'}"


def _as_text(method: Callable[..., Awaitable[str]], cut: Callable[[str], str]) -> Callable[..., Any]:
    """``method`` with its failures as text, and its text cut to size."""

    async def call(*args: Any, **options: Any) -> str:
        try:
            return cut(await method(*args, **options))
        except ForkyardError as error:
            return cut(f"error: {error.message}" + (f" (hint: {error.hint})" if error.hint else ""))
        except Exception as error:
            return cut(f"error: {type(error).__name__}: {error}")

    # The SDK makes the tool's schema of these.
    call.__name__ = method.__name__.removeprefix("_")
    call.__doc__ = method.__doc__
    call.__signature__ = inspect.signature(method, eval_str=True)  # type: ignore[attr-defined]
    call.__annotations__ = inspect.get_annotations(method, eval_str=True)
    return call


def _told(result: ExecResult, timeout_s: float | None) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.stderr:
        parts.append(f"[stderr]\n{result.stderr.rstrip()}")
    return _joined(parts, result, timeout_s)


def _told_code(result: CodeResult, timeout_s: float | None) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.stderr:
        parts.append(f"[stderr]\n{result.stderr.rstrip()}")
    if result.result is not None:
        parts.append(result.result)
    if result.error is not None:
        parts.append(result.error.traceback.rstrip() or f"{result.error.name}: {result.error.value}")
    for one in result.artifacts:
        parts.append(f"[{one.mime}, {len(one.data)} bytes{f', {one.name}' if one.name else ''}]")
    return _joined(parts, result, timeout_s)


def _joined(parts: list[str], result: ExecResult | CodeResult, timeout_s: float | None) -> str:
    if result.timed_out:
        parts.append(f"[ended: it ran longer than {timeout_s:g} s]")
    elif result.oom:
        parts.append("[killed: out of memory]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if result.truncated:
        parts.append("[the output was too long to be kept whole]")
    return "\n".join(part for part in parts if part) or "(no output)"
