"""The verbs that look on: ``audit`` and ``top``."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forkyard import errors
from forkyard.cli.app import EXIT_FAILED, App, note, pass_app, report
from forkyard.cli.output import age, aligned, on_terminal, print_json, print_table, record
from forkyard.cli.params import DURATION, given, json_option

if TYPE_CHECKING:
    from forkyard.types import AuditVerdict, SandboxInfo, Usage


class Since(click.ParamType):
    """A moment: a length of time ago (``10m``) or a date and time in ISO form; seconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return time.time() - DURATION.convert(value, param, ctx)


@click.group("audit")
def audit_verb() -> None:
    """Read or verify the audit log."""


@audit_verb.command("ls", epilog="""\b
Examples:
  forkyard audit ls --sandbox work
  forkyard audit ls --since 10m --json | jq -r .kind""")
@click.option("--sandbox", metavar="SANDBOX", help="Only what concerns this sandbox.")
@click.option("--since", type=Since(), metavar="TIME", help="From then on: 10m (ago), or 2030-01-31T12:00.")
@json_option("Print one JSON record a line.")
@pass_app
def audit_ls(app: App, sandbox: str | None, since: float | None, as_json: bool) -> None:
    """List audit records, the oldest first."""
    records = app.client.audit(**given(sandbox=sandbox, since=since))
    if as_json:
        for item in records:
            sys.stdout.write(json.dumps(record(item), separators=(",", ":"), ensure_ascii=False) + "\n")
        return
    print_table(
        ("seq", "time", "sandbox", "what", "details"),
        [(str(item.seq), datetime.fromtimestamp(item.time).strftime("%F %T.%f")[:-3], item.sandbox or "-",
          item.kind, " ".join(f"{key}={_short(value)}" for key, value in item.data.items()))
         for item in records],
        empty="No records.",
    )


class Head(click.ParamType):
    """``SEQ:HASH``, as ``audit verify`` prints it."""

    name = "seq:hash"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str]:
        if isinstance(value, tuple):
            return value
        seq, colon, digest = value.partition(":")
        if not (colon and seq.isdigit() and len(digest) == 64):
            self.fail(f"{value!r} is not SEQ:HASH", param, ctx)
        return int(seq), digest


@audit_verb.command("verify", epilog="""\b
Examples:
  forkyard audit verify
  head=$(forkyard audit verify)                 keep this elsewhere
  forkyard audit verify --head "$head"          later: nothing was cut off
  forkyard audit verify --dir ./copy-of-audit   without a daemon""")
@click.option("--head", type=Head(), metavar="SEQ:HASH", help="A record that has to be there.")
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False),
              help="Check the files in this directory, such as a copy, instead of this machine's log.")
@json_option()
@pass_app
def audit_verify(app: App, head: tuple[int, str] | None, directory: str | None, as_json: bool) -> int:
    """Check that no record was changed, removed or put in; print the newest as SEQ:HASH.

    The exit code is 1 if the log is not whole; the first record that is wrong is named. That its
    end was cut off shows only against a HEAD that was kept elsewhere.
    """
    found = app.client.verify_audit(head) if directory is None else _verify_files(Path(directory), head)
    if as_json:
        print_json({"ok": found.ok, "seq": found.seq, "why": found.why,
                    "head": f"{found.head[0]}:{found.head[1]}" if found.head else None})
    elif found.ok:
        print(f"{found.head[0]}:{found.head[1]}" if found.head else "0:")
        note(f"{found.seq} records, all of them whole")
    else:
        report(f"record {found.seq} is the first that is wrong: {found.why}")
    return 0 if found.ok else EXIT_FAILED


def _verify_files(directory: Path, head: tuple[int, str] | None) -> AuditVerdict:
    from forkyard.audit import AuditLog, verify
    from forkyard.types import AuditVerdict

    if not any(directory.glob("*.jsonl")):
        raise errors.NotFoundError(f"{directory} holds no audit log", hint="its files are YYYY-MM-DD.jsonl")
    found = verify(directory, head)
    newest = AuditLog(directory).read(limit=1)
    return AuditVerdict(*found, head=(newest[0].seq, newest[0].hash) if newest else None)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 100 else text[:97] + "..."


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
