"""A task as an environment of tools, in the form that trainers of language models take.

Trainers in the manner of TRL make environments by a factory, call ``reset(**row)`` with a row of the
data set, offer the public methods to the model as tools (types and docstrings are their
description), and a reward function calls ``get_reward()``. None of them is needed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkyard.client.sync import Client
from forkyard.errors import ForkyardError, InvalidRequestError, NotFoundError, SandboxLostError
from forkyard.rollouts.clients import both, run_sync
from forkyard.rollouts.gone import afind_loss, find_loss
from forkyard.rollouts.grading import UnfitError, grade
from forkyard.rollouts.prepare import Prepared, Preparer, limit_fields
from forkyard.rollouts.types import Limits, Task, Verdict

LONGEST_OUTPUT = 8000
Tasks = Mapping[str, Task] | Sequence[Task] | Callable[[dict[str, Any]], Task]


class ToolEnvironment:
    """One episode after the other, each of a task in a sandbox of its own.

    Subclass it for other tools: every public method without a leading underscore is one, but for
    ``reset`` and ``get_reward``.

    Args:
        client: Of the daemon to use.
        tasks: By id, or a list of them, where a row names one as ``task``; or a function that makes
            a task of a row.
        command_timeout_s: For one command of the model's.
    """

    def __init__(self, client: Client, tasks: Tasks, *, command_timeout_s: float = 60) -> None:
        self._client = client
        self._tasks = tasks if callable(tasks) or isinstance(tasks, Mapping) else {t.id: t for t in tasks}
        self._command_timeout_s = command_timeout_s
        self._task: Task | None = None
        self._prepared: Prepared | None = None
        self._sandbox: str | None = None
        self._checkpoint: str | None = None
        self._verdict: Verdict | None = None
        self._lost = ""

    def reset(self, **row: Any) -> str:
        """Begin the episode of a row of the data set; what the task says is returned.

        The next episode of the same task is a rewind, any other a fork of its prepared state.

        Raises:
            InvalidRequestError: the row names no task.
        """
        task = self._task_of(row)
        self._verdict, self._lost = None, ""
        if task is self._task and self._rewound():
            return task.instruction
        self._close()
        self._task = task
        self._prepared = _prepared(self._client, task)
        allow = list(task.egress)
        forks = self._client.fork(
            self._prepared.snapshot,
            1,
            **({} if task.limits == Limits() else limit_fields(task.limits)),
            env=dict(task.env),
            egress=None if allow else "deny",
            egress_allow=allow or None,
            ephemeral=True,
        ).forks
        self._sandbox = forks[0].id
        self._checkpoint = self._client.checkpoint(self._sandbox).id
        return task.instruction

    def shell(self, command: str) -> str:
        """Run a command in the sandbox's shell.

        Args:
            command: The command line, for sh.

        Returns:
            What it printed, then a line with its exit code.
        """
        return self._try(self._shell, command)

    def read_file(self, path: str) -> str:
        """Read a text file.

        Args:
            path: Its path; relative ones start at the working directory.

        Returns:
            The file's content.
        """
        return self._try(self._read, path)

    def write_file(self, path: str, content: str) -> str:
        """Write a text file, and the directories above it.

        Args:
            path: Its path; relative ones start at the working directory.
            content: The file's whole new content.

        Returns:
            What was written.
        """
        return self._try(self._write, path, content)

    def get_reward(self) -> float:
        """Grade what the episode left, once. It ends the episode: the tools refuse from then on, so
        that nobody corrects an answer after having seen its reward.

        Raises:
            InvalidRequestError: there was no reset. GraderError: the grader itself failed.
        """
        if self._verdict is None:
            task, prepared = self._task, self._prepared
            if task is None or prepared is None:
                raise InvalidRequestError("there is no episode to grade", hint="call reset(task=...) first")
            sandbox = self._sandbox
            if self._lost or sandbox is None:
                self._verdict = Verdict(False, 0.0, self._lost or "the sandbox is gone")
            else:
                self._verdict = _graded(self._client, task, prepared, sandbox)
        return float(self._verdict.reward)

    def _task_of(self, row: dict[str, Any]) -> Task:
        if callable(self._tasks):
            return self._tasks(row)
        name = row.get("task")
        found = name if isinstance(name, Task) else self._tasks.get(str(name))
        if found is None:
            raise InvalidRequestError(
                f"the row names the task {name!r}, which is not there",
                hint="give each row of the data set the id of a task as its column `task`",
            )
        return found

    def _rewound(self) -> bool:
        if self._sandbox is None or self._checkpoint is None:
            return False
        try:
            self._client.rewind(self._sandbox, to=self._checkpoint)
        except (NotFoundError, SandboxLostError):
            return False
        return True

    def _try(self, tool: Callable[..., str], *args: str) -> str:
        if self._sandbox is None or self._verdict is not None:
            return "error: the episode has ended"
        if self._lost:
            return f"error: {self._lost}"
        try:
            return tool(*args)
        except ForkyardError as error:
            if isinstance(error, SandboxLostError | NotFoundError):
                lost = find_loss(self._client, self._sandbox, error)
                if lost is not None and lost.host:
                    raise
                self._lost = lost.message if lost is not None else ""
            return f"error: {self._lost or error.message}"

    def _user(self) -> str | None:
        return self._task.user if self._task is not None else None

    def _shell(self, command: str) -> str:
        assert self._sandbox is not None
        done = self._client.shell(
            self._sandbox, command, user=self._user(), timeout_s=self._command_timeout_s, merge=True
        )
        text = done.merged or ""
        if len(text) > LONGEST_OUTPUT:
            left_out = len(text) - LONGEST_OUTPUT
            half = LONGEST_OUTPUT // 2
            text = f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
        return f"{text.rstrip()}\n[exit code {done.exit_code}{', timed out' if done.timed_out else ''}]"

    def _read(self, path: str) -> str:
        assert self._sandbox is not None
        return self._client.read_text(self._sandbox, path, self._user(), errors="replace")

    def _write(self, path: str, content: str) -> str:
        assert self._sandbox is not None
        self._client.write_file(self._sandbox, path, content, user=self._user())
        return f"{len(content)} characters written to {path}"

    def _close(self) -> None:
        """Delete the episode's sandbox."""
        if self._sandbox is not None:
            with contextlib.suppress(NotFoundError):
                self._client.delete_sandbox(self._sandbox)
        self._sandbox = self._checkpoint = self._task = None


def _prepared(client: Client, task: Task) -> Prepared:
    async def prepare() -> Prepared:
        aio = both(client).aio
        try:
            return await Preparer(aio).get(task)
        finally:
            await aio.close()

    made: Prepared = run_sync(prepare)
    return made


def _graded(client: Client, task: Task, prepared: Prepared, sandbox: str) -> Verdict:
    async def judge() -> Verdict:
        aio = both(client).aio
        try:
            return (await grade(aio, task, prepared=prepared.snapshot, final=sandbox)).verdict
        except UnfitError as error:
            return Verdict(False, 0.0, str(error))
        except (SandboxLostError, NotFoundError) as error:
            lost = await afind_loss(aio, sandbox, error)
            if lost is None or lost.host:
                raise
            return Verdict(False, 0.0, lost.message)
        finally:
            await aio.close()

    verdict: Verdict = run_sync(judge)
    return verdict
