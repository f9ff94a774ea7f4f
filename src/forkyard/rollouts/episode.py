"""What a policy gets: the episode, and a handle on its copy whose calls are timed."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from forkyard.client.aio import AsyncClient
from forkyard.client.aio_process import AsyncProcess
from forkyard.client.aio_sandbox import AsyncSandbox
from forkyard.client.sync import Client
from forkyard.client.sync_process import Process
from forkyard.client.sync_sandbox import Sandbox
from forkyard.errors import ForkyardError, InvalidRequestError
from forkyard.rollouts.types import Task

# Verbs that run or touch something as a user.
AS_USER = frozenset(
    {
        *("shell", "exec", "exec_many", "spawn", "run_code", "git", "write_file", "write_files"),
        *("read_file", "read_text", "read_files", "list_files", "stat", "make_dir", "move", "remove"),
        *("upload", "download", "apply"),
    }
)


class Meter:
    """How long calls to the sandbox were open, and which errors the daemon gave. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._total_s = 0.0
        self.errors: list[ForkyardError] = []
        self.oom = False

    @property
    def sandbox_s(self) -> float:
        """The time in which at least one call was open."""
        with self._lock:
            return self._total_s + (time.monotonic() - self._since if self._open else 0.0)

    @contextmanager
    def call(self) -> Iterator[None]:
        with self._lock:
            if self._open == 0:
                self._since = time.monotonic()
            self._open += 1
        try:
            yield
        except ForkyardError as error:
            self.errors.append(error)
            raise
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    self._total_s += time.monotonic() - self._since

    def saw(self, result: Any) -> None:
        """A command's result: was it killed for memory?"""
        if getattr(result, "oom", False) is True:
            self.oom = True

    def gave(self, error: BaseException | None) -> bool:
        """Whether ``error``, or what it was raised from, came from the daemon by this meter."""
        while error is not None:
            if any(error is seen for seen in self.errors):
                return True
            error = error.__cause__ or error.__context__
        return False


class MeteredClient:
    """A client whose verbs are timed and run as the task's user unless told otherwise."""

    def __init__(self, client: AsyncClient | Client, meter: Meter, user: str | None) -> None:
        self._client = client
        self._meter = meter
        self._user = user

    def sandbox(self, sandbox: str) -> Any:
        """A handle on another sandbox (a fork of the episode's, say), timed as well."""
        kind: Any = AsyncSandbox if isinstance(self._client, AsyncClient) else Sandbox
        return kind(self, sandbox)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name.startswith("_") or not callable(method):
            return method
        if inspect.iscoroutinefunction(method):
            return self._later(name, method)
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            return method
        return self._now(name, method)

    def _fill(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self._user is None or name not in AS_USER:
            return kwargs
        shape = inspect.signature(getattr(self._client, name))
        if shape.bind_partial(*args, **kwargs).arguments.get("user") is None:
            kwargs["user"] = self._user
        return kwargs

    def _later(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            with self._meter.call():
                result = await method(*args, **self._fill(name, args, kwargs))
            self._meter.saw(result)
            if isinstance(result, AsyncProcess):
                # Only the waiting: what a policy does between two pieces of output is its own time.
                waits: Any = result
                waits.wait = self._later("wait", result.wait)
            return result

        return call

    def _now(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._meter.call():
                result = method(*args, **self._fill(name, args, kwargs))
            self._meter.saw(result)
            if isinstance(result, Process):
                waits: Any = result
                waits.wait = self._now("wait", result.wait)
            return result

        return call


class Episode:
    """One attempt at one task.

    Attributes:
        sandbox: A handle on the copy: sync for a policy that is a plain function, else async.
        task: What is to be done.
        sample: Which of the task's samples, from 0.
        seed: Its own random seed, also ``FORKYARD_SEED`` in every command. Forks of a warm program
            share its generator's state, so a policy that wants different samples seeds with it.
        deadline: When it ends, in seconds since the epoch.
    """

    def __init__(
        self, sandbox: Any, task: Task, sample: int, seed: int, deadline: float, meter: Meter
    ) -> None:
        self.sandbox = sandbox
        self.task = task
        self.sample = sample
        self.seed = seed
        self.deadline = deadline
        self.meter = meter
        self.lines: list[dict[str, Any]] = []
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether the rollout no longer wants a result: its time is over, or the run is. A sync
        policy should look now and then, since nothing can end its thread."""
        return self._cancelled.is_set()

    @property
    def remaining_s(self) -> float:
        """How long until the deadline, at least 0."""
        return max(0.0, self.deadline - time.time())

    def cancel(self) -> None:
        """The rollout wants no result any more."""
        self._cancelled.set()

    def log(self, **fields: Any) -> None:
        """Add a line to the episode's log.

        Raises:
            InvalidRequestError: a field is not plain data.
        """
        try:
            msgspec.json.encode(fields)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"a log's fields are plain data: {error}") from None
        self.lines.append({"at": time.time(), **fields})


def handle(client: AsyncClient | Client, sandbox: str, user: str | None, meter: Meter) -> Any:
    """A handle on ``sandbox`` of the kind that ``client`` is, timed by ``meter``."""
    return MeteredClient(client, meter, user).sandbox(sandbox)


def wants_episode(policy: Callable[..., Any]) -> bool:
    """Whether it takes ``(episode)``; False: ``(sandbox, task)``.

    Raises:
        InvalidRequestError: it can be called in neither way.
    """
    try:
        shape = inspect.signature(policy)
    except (TypeError, ValueError):
        return True
    for args, answer in (((None,), True), ((None, None), False)):
        try:
            shape.bind(*args)
        except TypeError:
            continue
        return answer
    raise InvalidRequestError(
        f"the policy {policy!r} takes {shape}", hint="a policy takes (episode) or (sandbox, task)"
    )


def is_async(policy: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: then it runs on the loop, with an async handle."""
    return inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(
        getattr(policy, "__call__", None)  # noqa: B004
    )
