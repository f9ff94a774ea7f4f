"""``forkyard exec``: a command in a sandbox with this process's own stdin, stdout, stderr and exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import click

from forkyard import errors
from forkyard.cli.app import EXIT_BROKEN_PIPE, EXIT_TIMED_OUT, App, note, pass_app
from forkyard.cli.params import DURATION, complete_sandbox, env_option, given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CHUNK = 1 << 16


class Passthrough(click.Command):
    """Takes options before or after SANDBOX, up to COMMAND's first word; ``--`` ends them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at, ended = self._after_options(args)
        options, rest = args[:at], args[at:]
        if not rest:
            return super().parse_args(ctx, args)
        sandbox, command = rest[0], rest[1:]
        if ended:
            options = options[:-1]
        else:
            at, ended = self._after_options(command)
            options += command[: at - 1 if ended else at]
            command = command[at:]
        return super().parse_args(ctx, [*options, "--", sandbox, *command])

    def _after_options(self, words: list[str]) -> tuple[int, bool]:
        """Where the options at the head of ``words`` end, and whether ``--`` ended them."""
        valued = {name for param in self.params if isinstance(param, click.Option) and not param.is_flag
                  for name in param.opts}
        at = 0
        while at < len(words):
            word = words[at]
            if word == "--":
                return at + 1, True
            if word == "-" or not word.startswith("-"):
                break
            at += 1
            if word.startswith("--"):
                takes_next = word in valued
            else:
                # Of letters in one word, the first that takes a value takes the rest of it.
                letters = [spot for spot in range(1, len(word)) if f"-{word[spot]}" in valued]
                takes_next = letters[:1] == [len(word) - 1]
            at += takes_next
        return min(at, len(words)), False


@click.command("exec", cls=Passthrough, epilog="""\b
Examples:
  forkyard exec work 'cd project && make test'
  forkyard exec work ls -l
  forkyard exec work --timeout 30 --cwd /tmp -- ./slow --its-own-option
  tar cz src | forkyard exec work 'tar xz'
  while read -r id; do forkyard exec -n "$id" uptime; done < ids""")
@click.argument("sandbox", metavar="SANDBOX", shell_complete=complete_sandbox)
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--timeout", "timeout_s", type=DURATION, metavar="SECONDS",
              help="End it after so long; the exit code is then 124.")
@click.option("--user", "-u", metavar="U", help="Who runs it (default: the sandbox's user).")
@click.option("--cwd", "-w", metavar="D", help="Where it runs (default: the sandbox's working directory).")
@env_option
@click.option("--login", is_flag=True, help="With one COMMAND string: run it in a login shell.")
@click.option("--no-stdin", "-n", is_flag=True, help="Leave this process's stdin alone.")
@pass_app
def exec_verb(
    app: App, sandbox: str, command: tuple[str, ...], timeout_s: float | None, user: str | None,
    cwd: str | None, env: tuple[tuple[str, str], ...], login: bool, no_stdin: bool,
) -> int:
    """Run COMMAND in a sandbox.

    One COMMAND string is for the shell (sh -c); several words are a program and its arguments.
    Stdin, stdout, stderr and the exit code are passed through; a timeout exits with 124.
    """
    what: str | list[str] = command[0] if len(command) == 1 else list(command)
    begun = time.time()
    process = start(
        app, sandbox, what,
        **given(timeout_s=timeout_s, user=user, cwd=cwd, env=dict(env), login=login or None))
    with Signals(process):
        forward = not no_stdin and stdin_is_open()
        threading.Thread(target=feed, args=(process, forward), name="stdin", daemon=True).start()
        for event in process.stream():
            if event.kind == "stdout" or event.kind == "stderr":
                try:
                    write_all(1 if event.kind == "stdout" else 2, event.data)
                except BrokenPipeError:
                    # The reader has enough. What the command does next is as it would be locally.
                    _quietly(process.signal, signal.SIGPIPE)
                    return EXIT_BROKEN_PIPE
            elif event.kind == "gap":
                note("forkyard: some output was lost")
        result = process.wait()
    code = outcome(result)
    if code and sys.stderr.isatty():
        with contextlib.suppress(errors.ForkyardError):  # the command's own failure is what counts
            records = app.client.audit(sandbox, begun)
            if refused := denied((record.kind, record.data) for record in records):
                note(f"forkyard: {sandbox} may not reach {refused}: make or fork it with --allow {refused}, "
                     "or with --allow @pip, @npm or @apt for those programs' own servers")
    return code


def denied(records: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The first name that these records (kind and data) say was refused; empty if none was."""
    return next((str(data.get("name")) for kind, data in records if kind == "egress.denied"), "")


def start(app: App, sandbox: str, command: str | list[str], **options: Any) -> Any:
    """The command, started: straight over the daemon's socket where that works, else by the client."""
    if not app.has_client:
        from forkyard.cli import direct

        options["request_id"] = os.urandom(16).hex()
        if process := direct.spawn(sandbox, command, **options):
            return process
    return app.client.spawn(sandbox, command, **options)


def outcome(result: Any) -> int:
    """The exit code for ``result``; on a terminal also why, where the code alone does not tell."""
    if sys.stderr.isatty():
        if result.timed_out:
            note(f"forkyard: timed out after {result.duration_ms / 1000:.1f} s")
        elif result.oom:
            note("forkyard: killed, since the sandbox was out of memory")
        elif result.process_limit:
            note("forkyard: killed, since its processes filled the sandbox")
        elif result.disk_full:
            note("forkyard: the sandbox's disk is full")
    return EXIT_TIMED_OUT if result.timed_out else int(result.exit_code)


def write_all(fd: int, data: bytes) -> None:
    """All of ``data`` to ``fd``, whole, without a buffer between."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def stdin_is_open() -> bool:
    """Whether there is a stdin to forward: a closed one and /dev/null hold nothing."""
    try:
        mine = os.fstat(0)
    except OSError:
        return False
    try:
        null = os.stat(os.devnull)
    except OSError:
        return True
    return (mine.st_dev, mine.st_ino) != (null.st_dev, null.st_ino)


def feed(process: Any, forward: bool) -> None:
    """Forward stdin until it ends, or end the command's at once.

    Runs in a thread that nobody waits for: the command's end is ours.
    """
    try:
        while forward and (data := read_stdin()):
            process.write(data)
        process.close_stdin()
    except (errors.ForkyardError, OSError, RuntimeError):
        # The command ended or its connection did: the main thread hears of it from the stream.
        return


def read_stdin() -> bytes:
    """Some bytes of stdin, or none at its end. A background job does not reach for the terminal."""
    try:
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return b""
        return os.read(0, CHUNK)
    except OSError:
        return b""


class Signals:
    """While it is open, SIGINT, SIGTERM and SIGHUP go to the command in the sandbox.

    A handler may interrupt the client in the middle of anything, so it only notes the
    signal; a thread passes it on. A second Ctrl-C gives up waiting for the command.
    """

    FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    def __init__(self, process: Any) -> None:
        self._process = process
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._before: dict[int, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.FORWARDED:
                # nohup and background jobs of a plain sh ignore some: that stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            threading.Thread(target=self._forward, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self._queue.put(number)

    def _forward(self) -> None:
        while (number := self._queue.get()) is not None:
            _quietly(self._process.signal, number)


def _quietly(call: Callable[[int], Any], number: int) -> None:
    """Signal a command that may have ended already."""
    try:
        call(number)
    except (errors.ForkyardError, OSError, RuntimeError):
        return
