"""``forkyard shell``: an interactive terminal in a sandbox."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

import click

from forkyard import errors
from forkyard.cli.app import App, pass_app
from forkyard.cli.params import env_option, given, sandbox_argument
from forkyard.cli.running import outcome, write_all

LOGIN = 'if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi'


@click.command("shell", epilog="""\b
Examples:
  forkyard shell work
  forkyard shell work --user root
  forkyard shell work -- python3""",
    context_settings={"allow_interspersed_args": True})
@sandbox_argument()
@click.argument("command", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--user", "-u", metavar="U", help="Who the shell runs as.")
@click.option("--cwd", "-w", metavar="D", help="Where it starts.")
@env_option
@pass_app
def shell_verb(
    app: App, sandbox: str, command: tuple[str, ...], user: str | None, cwd: str | None,
    env: tuple[tuple[str, str], ...],
) -> int:
    """Open a shell (or COMMAND) on a terminal in the sandbox. Needs a terminal here, too."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise errors.InvalidRequestError(
            "shell needs a terminal", hint=f"without one: forkyard exec {sandbox} COMMAND")
    rows, columns = terminal_size()
    variables = {"TERM": os.environ.get("TERM", "xterm-256color"), **dict(env)}
    if "COLORTERM" in os.environ:
        variables.setdefault("COLORTERM", os.environ["COLORTERM"])
    what: str | list[str] = LOGIN if not command else command[0] if len(command) == 1 else list(command)
    process = app.client.spawn(
        sandbox, what, pty=True, rows=rows, cols=columns, env=variables,
        **given(user=user, cwd=cwd))
    with RawTerminal(), Resizes(process):
        threading.Thread(target=_type, args=(process,), name="keys", daemon=True).start()
        for event in process.stream():
            if event.kind in ("stdout", "stderr"):
                write_all(1, event.data)
        result = process.wait()
    return outcome(result)


def terminal_size() -> tuple[int, int]:
    """Rows and columns of this terminal; one that does not know its size (a serial line) is 24 by 80."""
    size = os.get_terminal_size(0)
    return size.lines or 24, size.columns or 80


def _type(process: Any) -> None:
    """Send what is typed. Ctrl-C and the like are bytes here: the terminal inside makes signals of them."""
    try:
        while data := os.read(0, 4096):
            process.write(data)
        process.close_stdin()
    except (errors.ForkyardError, OSError, RuntimeError):
        return


class RawTerminal:
    """Puts this terminal into raw mode and back, however the block is left."""

    def __enter__(self) -> None:
        import termios
        import tty

        self._before = termios.tcgetattr(0)
        # Not the default TCSAFLUSH: what was typed ahead is for the shell.
        tty.setraw(0, termios.TCSADRAIN)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        import termios

        termios.tcsetattr(0, termios.TCSADRAIN, self._before)
        if error is not None:
            # The program inside may have left colours, a hidden cursor or another screen behind.
            write_all(1, b"\x1b[0m\x1b[?25h\x1b[?1049l\r\n")


class Resizes:
    """While it is open, each new size of this terminal is passed on."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._changed = threading.Event()
        self._open = True

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGWINCH, lambda *_: self._changed.set())
        threading.Thread(target=self._follow, name="resizes", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGWINCH, self._before)
        self._open = False
        self._changed.set()

    def _follow(self) -> None:
        while self._changed.wait() and self._open:
            self._changed.clear()
            try:
                self._process.resize(*terminal_size())
            except (errors.ForkyardError, OSError, RuntimeError):
                return
