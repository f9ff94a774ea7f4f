"""The verbs that make, list, change and delete sandboxes."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from forkyard import errors
from forkyard.cli.app import App, exit_code, note, pass_app, report
from forkyard.cli.output import age, ms, on_terminal, print_fields, print_json, print_table, record, span
from forkyard.cli.params import (
    complete_snapshot,
    env_option,
    given,
    json_option,
    label_option,
    life_options,
    limit_options,
    minutes,
    sandbox_argument,
)
from forkyard.types import CPU_WEIGHT


def _event(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")
    sys.stdout.flush()


@click.command("new", epilog="""\b
Examples:
  forkyard new --name work
  forkyard new --from prepared --ttl 10m --json
  forkyard new --template base --type medium --allow @pip
  id=$(forkyard new)""")
@click.option("--name", help="Its name; made up if not given.")
@limit_options
@click.option("--from", "snapshot", metavar="SNAPSHOT", shell_complete=complete_snapshot,
              help="Start from a snapshot, memory included.")
@click.option("--template", metavar="T", help="Start from a template (default: base).")
@click.option("--image", metavar="I", help="Start from a container image.")
@click.option("--no-memory", is_flag=True, help="With --from: boot afresh on the snapshot's disk.")
@click.option("--engine", type=click.Choice(["auto", "gvisor", "qemu"]), help="What runs it.")
@click.option("--user", metavar="U", help="Who runs its commands.")
@env_option
@label_option("Mark it. Repeatable.")
@life_options
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@json_option("Print one event a line; the last is ready or failed.")
@pass_app
def new_verb(
    app: App, name: str | None, type_: str | None, cpus: float | None, cpu_weight: int | None,
    mem_mb: int | None, disk_mb: int | None, snapshot: str | None, template: str | None,
    image: str | None, no_memory: bool, engine: str | None,
    user: str | None, env: tuple[tuple[str, str], ...], labels: tuple[tuple[str, str], ...],
    wait_s: float, ttl_s: float | None, auto_stop_s: float | None, egress: str | None,
    allow: tuple[str, ...], quiet: bool, as_json: bool,
) -> int:
    """Make a sandbox and print its id.

    Only the id goes to stdout; progress goes to stderr.
    """
    if sum(origin is not None for origin in (snapshot, template, image)) > 1:
        raise click.UsageError("--from, --template and --image exclude each other")
    if no_memory and snapshot is None:
        raise click.UsageError("--no-memory needs --from")
    arguments = given(
        name=name, type=type_, cpus=cpus, cpu_weight=cpu_weight, mem_mb=mem_mb, disk_mb=disk_mb,
        snapshot=snapshot, template=template, image=image, engine=engine, user=user, env=dict(env),
        labels=dict(labels),
        wait_s=wait_s or None, ttl_min=minutes(ttl_s), auto_stop_min=minutes(auto_stop_s),
        egress=egress, egress_allow=list(allow) or None, memory=False if no_memory else None,
    )
    origin = snapshot or image or template or "base"
    if as_json:
        _event("creating", name=name, source=origin)
    elif not quiet and sys.stderr.isatty():
        note(f"creating from {origin} ...")
    try:
        box = app.client.create_sandbox(**arguments)
    except errors.ForkyardError as error:
        if as_json:
            _event("failed", code=error.code, message=error.message)
        raise
    if as_json:
        _event("ready", id=box.id, name=box.name, start_ms=round(box.start_ms, 1))
        return 0
    print(box.id, flush=True)
    if not quiet:
        note(f"{box.name} is ready after {ms(box.start_ms)}")
    return 0


@click.command("ls", epilog="""\b
Examples:
  forkyard ls
  forkyard ls --label run=7 --state running
  forkyard ls --json | jq -r '.sandboxes[].name'""")
@label_option("Only those with this label. Repeatable: all must match.")
@click.option("--state", type=click.Choice(["creating", "running", "stopped", "failed"]),
              help="Only those in this state.")
@click.option("--quiet", "-q", is_flag=True, help="Only the ids.")
@json_option()
@pass_app
def ls_verb(
    app: App, labels: tuple[tuple[str, str], ...], state: str | None, quiet: bool, as_json: bool
) -> None:
    """List sandboxes."""
    boxes = app.client.list_sandboxes(**given(labels=dict(labels), state=state))
    if as_json:
        print_json({"sandboxes": [record(box) for box in boxes]})
    elif quiet:
        sys.stdout.writelines(f"{box.id}\n" for box in boxes)
    else:
        now = time.time()
        print_table(
            ("name", "id", "state", "type", "from", "egress", "age", "ends in"),
            [(box.name, box.id, box.state, box.type, box.parent or box.snapshot or box.template or "-",
              box.egress, age(box.created_at, now=now),
              span(box.expires_at - now) if box.expires_at else "-") for box in boxes],
            empty="No sandboxes. Make one: forkyard new",
        )


@click.command("info", epilog="""\b
Examples:
  forkyard info work
  forkyard info work --json | jq .sandbox.memoryRestored""")
@sandbox_argument()
@json_option("Print JSON, as always when stdout is no terminal.")
@pass_app
def info_verb(app: App, sandbox: str, as_json: bool) -> None:
    """Show everything about one sandbox."""
    box = app.client.get_sandbox(sandbox)
    if as_json or not on_terminal():
        print_json({"sandbox": record(box)})
        return
    now = time.time()
    origin = box.parent or box.snapshot or box.template or "-"
    fields = [
        ("name", box.name), ("id", box.id), ("state", box.state),
        ("from", f"{origin}, memory restored" if box.memory_restored else origin),
        ("size", f"{box.type}: {box.cpus:g} CPU, {box.mem_mb} MiB memory, {box.disk_mb} MiB disk"),
        *([("weight", str(box.cpu_weight))] if box.cpu_weight != CPU_WEIGHT else []),
        ("user", f"{box.user} in {box.workdir}" + (" (root was used)" if box.tainted else "")),
        ("network", ", ".join(box.egress_allow) if box.egress == "allow" else box.egress),
        ("made", f"{age(box.created_at, now=now)} ago, ready after {ms(box.start_ms)}"),
        ("used", f"{age(box.last_active_at, now=now)} ago"),
        ("ends in", span(box.expires_at - now) if box.expires_at else "never"),
        ("labels", ", ".join(f"{key}={value}" for key, value in box.labels.items()) or "-"),
        ("engine", box.engine),
    ]
    if box.checkpoint:
        fields.append(("checkpoint", box.checkpoint))
    if box.failure:
        fields.append(("failed", f"{box.failure.message} (on account of the {box.failure.cause})"))
    print_fields(fields)


@click.command("rename", epilog="""\b
Example:
  forkyard rename sb_4k2j9x1m7q --name work""")
@sandbox_argument()
@click.option("--name", required=True, help="The new name.")
@json_option()
@pass_app
def rename_verb(app: App, sandbox: str, name: str, as_json: bool) -> None:
    """Give a sandbox another name."""
    box = app.client.rename_sandbox(sandbox, name)
    if as_json:
        print_json({"sandbox": record(box)})
    else:
        print(box.id)


@click.command("stop", epilog="""\b
Example:
  forkyard stop work && forkyard start work""")
@sandbox_argument()
@json_option()
@pass_app
def stop_verb(app: App, sandbox: str, as_json: bool) -> None:
    """Stop a sandbox. Its memory and disk are kept, and no process is left."""
    box = app.client.stop_sandbox(sandbox)
    if as_json:
        print_json({"sandbox": record(box)})
    else:
        print(box.id)


@click.command("start", epilog="""\b
Example:
  forkyard start work""")
@sandbox_argument()
@click.option("--no-memory", is_flag=True, help="Boot its disk afresh.")
@json_option()
@pass_app
def start_verb(app: App, sandbox: str, no_memory: bool, as_json: bool) -> None:
    """Start a stopped sandbox: its programs go on where they stopped."""
    box = app.client.start_sandbox(sandbox, memory=not no_memory)
    if as_json:
        print_json({"sandbox": record(box)})
    else:
        print(box.id)
        note(f"{box.name} goes on after {ms(box.start_ms)}")


@click.command("delete", epilog="""\b
Examples:
  forkyard delete work
  forkyard delete try-1 try-2 try-3 --yes
  forkyard delete --label run=7""")
@click.argument("sandboxes", metavar="[SANDBOX]...", nargs=-1)
@label_option("Delete those with this label instead. Repeatable: all must match.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@pass_app
def delete_verb(
    app: App, sandboxes: tuple[str, ...], labels: tuple[tuple[str, str], ...], yes: bool
) -> int:
    """Delete sandboxes. Asks first on a terminal, never without one."""
    if bool(sandboxes) == bool(labels):
        raise click.UsageError("name the sandboxes to delete, or a --label they have")
    if labels:
        chosen = [box.name for box in app.client.list_sandboxes(labels=dict(labels))]
    else:
        chosen = list(dict.fromkeys(sandboxes))
    if chosen and not yes and sys.stdin.isatty():
        more = f" and {len(chosen) - 8} more" if len(chosen) > 8 else ""
        what = ", ".join(chosen[:8]) + more
        if not click.confirm(f"Delete {what}?", err=True):
            return 1
    if labels:
        app.client.delete_sandboxes(labels=dict(labels))
        sys.stdout.writelines(f"{name}\n" for name in chosen)
        return 0
    code = 0
    for name in chosen:
        try:
            if app.client.delete_sandbox(name) is None:
                raise errors.NotFoundError(f"no sandbox {name!r}", hint="forkyard ls shows them")
            print(name, flush=True)
        except errors.ForkyardError as error:
            report(error.message, error.hint)
            code = code or exit_code(error)
            if isinstance(error, errors.UnavailableError):
                break
    return code
