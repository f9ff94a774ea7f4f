"""What every verb shares: the client, made when first needed, and how errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from forkyard import errors

if TYPE_CHECKING:
    from forkyard import Client

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMED_OUT = 124
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EXIT_BY_CODE = {
    "invalid_request": EXIT_USAGE,
    "not_found": 3,
    "conflict": 4,
    "capacity": 5,
    "unavailable": 6,
}


class App:
    """The object behind click's context.

    Args:
        client: A client to use instead of one made from the configuration.
        debug: Whether an unexpected error shows its traceback.
    """

    def __init__(self, client: Any = None, *, debug: bool = False) -> None:
        self._client = client
        self.debug = debug

    @property
    def client(self) -> Client:
        """The client; making it may start the daemon."""
        if self._client is None:
            from forkyard import Client

            self._client = Client()
        return self._client

    @contextmanager
    def running_client(self) -> Iterator[Client]:
        """A client that starts no daemon."""
        if self._client is not None:
            yield self._client
            return
        from forkyard import Client

        with Client(start=False) as client:
            yield client

    @property
    def has_client(self) -> bool:
        """Whether there is a client already."""
        return self._client is not None

    def close(self) -> None:
        """Close the client if one was made."""
        if self._client is not None:
            self._client.close()
            self._client = None


pass_app = click.make_pass_decorator(App)


def exit_code(error: errors.ForkyardError) -> int:
    """The exit code that stands for ``error``."""
    return EXIT_BY_CODE.get(error.code, EXIT_FAILED)


# Hints are written for the SDK: {its words: the CLI's}.
_SPOKEN = {
    "memory=False": "--no-memory",
    "with template=True": "without --no-template",
    "new=True": "--new",
    "egress='deny'": "--egress deny",
    "checkpoint()": "forkyard checkpoint",
    "dockerfile=": "--dockerfile",
    "ready_timeout_s=": "--ready-timeout",
    "ready=": "--ready",
}


def report(message: str, hint: str = "") -> None:
    """One line on stderr that says what failed, one that says what to do.

    Of a traceback, which a daemon's log may have ended with, only the last line is shown.
    """
    before, found, trace = message.partition("Traceback (most recent call last)")
    if found:
        lines = [line.strip(" |+-") for line in trace.replace("\\n", "\n").splitlines()]
        message = f"{before.rstrip(' |+')} {next(filter(None, reversed(lines)), '')}"
    text = f"forkyard: {' '.join(message.split())}\n"
    for ours, theirs in _SPOKEN.items():
        hint = hint.replace(ours, theirs)
    if hint:
        text += f"hint: {' '.join(hint.split())}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def note(message: str) -> None:
    """Progress: a line on stderr."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
