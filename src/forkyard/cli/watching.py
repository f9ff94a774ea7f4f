"""The verbs that look on: ``audit`` and ``top``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from forkyard import errors
from forkyard.cli.app import App, pass_app
from forkyard.cli.output import age, aligned, on_terminal
from forkyard.cli.params import DURATION

if TYPE_CHECKING:
    from forkyard.types import SandboxInfo, Usage


COLUMNS = ("name", "state", "cpu %", "memory", "disk", "processes", "age")


class Meter:
    """Turns what each sandbox has used so far into what it uses now."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._before: dict[str, tuple[float, float]] = {}

    def read(self) -> list[tuple[str, ...]]:
        """One row for each sandbox, the busiest first."""
        rows: list[tuple[float, tuple[str, ...]]] = []
        before, self._before = self._before, {}
        for box in self._app.client.list_sandboxes():
            usage = self._usage(box)
            now = time.monotonic()
            busy = -1.0
            if usage is not None:
                self._before[box.id] = (now, usage.cpu_ms)
                if box.id in before and now > before[box.id][0]:
                    at, spent = before[box.id]
                    busy = max(0.0, (usage.cpu_ms - spent) / (now - at) / 10)
            rows.append((busy, (
                box.name, box.state, f"{busy:.1f}" if busy >= 0 else "-",
                f"{usage.mem_mb:.0f} of {box.mem_mb} MiB" if usage else "-",
                f"{usage.disk_mb:.0f} of {box.disk_mb} MiB" if usage else "-",
                str(usage.processes) if usage else "-", age(box.created_at))))
        rows.sort(key=lambda row: (-row[0], row[1]))
        return [row for _, row in rows]

    def _usage(self, box: SandboxInfo) -> Usage | None:
        if box.state != "running":
            return None
        try:
            return self._app.client.usage(box.id)
        except (errors.NotFoundError, errors.ConflictError, errors.SandboxLostError):
            # It ended since it was listed.
            return None


@click.command("top", epilog="""\b
Examples:
  forkyard top
  forkyard top --once""")
@click.option("--every", type=DURATION, default=1.0, metavar="SECONDS", help="How often (default: 1).")
@click.option("--once", is_flag=True, help="Measure once and end, as always when stdout is no terminal.")
@pass_app
def top_verb(app: App, every: float, once: bool) -> None:
    """Show what each sandbox uses, the busiest first. Ctrl-C ends it."""
    meter = Meter(app)
    meter.read()
    time.sleep(min(every, 0.3))
    if once or not on_terminal():
        print("\n".join(aligned(COLUMNS, meter.read())))
        return
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def view() -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0),
                      caption=time.strftime("%T"), caption_justify="left")
        for at, column in enumerate(COLUMNS):
            table.add_column(column.upper(), justify="left" if at < 2 else "right")
        for row in meter.read():
            table.add_row(*(Text(cell) for cell in row))
        return table

    try:
        with Live(view(), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(view(), refresh=True)
    except KeyboardInterrupt:
        return
