"""``forkyard explore``: several ways at once, and the best of them kept."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli.app import EXIT_FAILED, App, note, pass_app
from forkyard.cli.comparing import plain
from forkyard.cli.output import ms, print_json, record
from forkyard.cli.params import DURATION, complete_sandbox, env_option, given, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from forkyard.requests import ExploreEvent
    from forkyard.types import ExploreResult, VariantResult

STYLES = {"passed": "green", "failed": "red", "timed_out": "red", "error": "red", "running": "cyan",
          "waiting": "dim", "cancelled": "dim"}


@click.command("explore", epilog="""\b
Examples:
  forkyard explore work -c 'git apply a.diff && pytest -q' -c 'git apply b.diff && pytest -q'
  forkyard explore work -c ./slow.sh -c ./quick.sh --keep first --json | jq -r .winner.id""")
@click.argument("source", metavar="SOURCE", shell_complete=complete_sandbox)
@click.option("-c", "--command", "commands", multiple=True, required=True, metavar="CMD",
              help="A way to try, for sh -c. Repeatable.")
@click.option("--keep", type=click.Choice(["fastest", "first"]), default="fastest", show_default=True,
              help="Which of those that exit with 0.")
@click.option("--timeout", "timeout_s", type=DURATION, metavar="SECONDS", help="For each command.")
@click.option("-j", "--parallel", type=click.IntRange(min=1), metavar="N", help="Copies at a time.")
@env_option
@json_option()
@pass_app
def explore_verb(
    app: App, source: str, commands: tuple[str, ...], keep: str, timeout_s: float | None,
    parallel: int | None, env: tuple[tuple[str, str], ...], as_json: bool,
) -> int:
    """Try each CMD in its own copy of SOURCE, keep the best copy and print its id.

    SOURCE is a sandbox (which runs on), a snapshot, a checkpoint, a template or an image. A copy is the best
    if its CMD exits with 0 in the shortest time; the others are deleted. The exit code is 1 if none passes.
    """
    variants = [{"name": str(number), "command": command, "env": dict(env)}
                for number, command in enumerate(commands, 1)]
    board = Board(list(commands))
    with board.shown() if sys.stderr.isatty() and not as_json else nullcontext():
        # A copy of an ephemeral sandbox would end with this very process.
        done = app.client.explore(source, variants, keep=keep, ephemeral=False, on_progress=board.on_event,
                                  **given(timeout_s=timeout_s, parallel=parallel))
    if as_json:
        print_json(document(done))
    else:
        _tell(done, board)
    return 0 if done.winner is not None else EXIT_FAILED


def document(done: ExploreResult) -> dict[str, Any]:
    """The outcome as the CLI's JSON shows it: diffs without the content of files."""
    def one(result: VariantResult) -> dict[str, Any]:
        return record(result) | {"diff": plain(result.diff) if result.diff is not None else None}

    return {"winner": one(done.winner) if done.winner is not None else None,
            "results": [one(result) for result in done.results],
            "pausedMs": round(done.paused_ms, 1), "totalMs": round(done.total_ms, 1)}


def _tell(done: ExploreResult, board: Board) -> None:
    if not sys.stderr.isatty():
        for result in done.results:
            note("  ".join(board.row(result.name)))
    for result in done.results:
        if result.state in ("failed", "timed_out", "error"):
            tail = (result.error or result.output).strip().splitlines()
            for line in tail[-3 if done.winner is None else -1:]:
                note(f"{result.name}: {line}")
    if done.winner is None:
        note(f"none of {len(done.results)} passed; every copy is deleted ({ms(done.total_ms)})")
        return
    print(done.winner.id, flush=True)
    note(f"kept {done.winner.name} in {ms(done.total_ms)}; the source stood still for {ms(done.paused_ms)}")


class Board:
    """What is known of each variant so far, as rows of a table."""

    def __init__(self, commands: list[str]) -> None:
        self._commands = commands
        self._lock = threading.Lock()
        self._begun: dict[str, float] = {}
        self._results: dict[str, VariantResult] = {}

    def on_event(self, event: ExploreEvent) -> None:
        with self._lock:
            if event.kind == "started":
                self._begun[event.name] = time.monotonic()
            elif event.kind == "result" and event.result is not None:
                self._results[event.name] = event.result

    def row(self, name: str) -> tuple[str, str, str, str, str]:
        """Number, state, time, exit code and command."""
        command = " ".join(self._commands[int(name) - 1].split())
        command = command if len(command) <= 60 else command[:57] + "..."
        with self._lock:
            result, begun = self._results.get(name), self._begun.get(name)
        if result is not None:
            code = "-" if result.exit_code is None else str(result.exit_code)
            return name, result.state, ms(result.duration_ms), code, command
        if begun is not None:
            return name, "running", ms((time.monotonic() - begun) * 1e3), "-", command
        return name, "waiting", "-", "-", command

    def shown(self) -> AbstractContextManager[object]:
        """The table on stderr, drawn again and again while the block runs."""
        from rich.console import Console
        from rich.live import Live

        return Live(console=Console(stderr=True), get_renderable=self.table, refresh_per_second=8)

    def table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("#", "STATE", "TIME", "EXIT", "COMMAND"):
            table.add_column(column, justify="right" if column in ("TIME", "EXIT") else "left")
        for number in range(1, len(self._commands) + 1):
            cells = self.row(str(number))
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in cells))
        return table
