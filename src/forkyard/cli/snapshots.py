"""Snapshots and checkpoints: states of a sandbox that are kept."""

from __future__ import annotations

import sys

import click

from forkyard import errors
from forkyard.cli.app import App, exit_code, note, pass_app, report
from forkyard.cli.output import age, ms, print_json, print_table, record, size
from forkyard.cli.params import given, json_option, label_option, sandbox_argument

PREPARED = "forkyard.rollouts"
"""The label of a state that evaluations prepared for themselves."""


@click.command("snapshot", epilog="""\b
Examples:
  forkyard snapshot work prepared
  forkyard new --from prepared""")
@sandbox_argument()
@click.argument("name")
@label_option("Mark it. Repeatable.")
@click.option("--no-memory", is_flag=True, help="Save the disk only.")
@pass_app
def snapshot_verb(
    app: App, sandbox: str, name: str, labels: tuple[tuple[str, str], ...], no_memory: bool
) -> None:
    """Save a sandbox's memory and disk under NAME. It runs on. Prints JSON."""
    box = app.client.get_sandbox(sandbox)
    snap = app.client.snapshot(
        box.id, name, **given(labels=dict(labels), memory=False if no_memory else None))
    print_json({
        "ok": True,
        "type": "snapshot.named.info",
        "snapshot": {
            "name": snap.name,
            "snapshotId": snap.id,
            "sourceSandboxId": box.id,
            "sizeBytes": snap.size_bytes,
            "status": "ready",
            "type": box.type,
            "memory": snap.memory,
            "pausedMs": round(snap.paused_ms, 1),
            "createdAt": snap.created_at,
        },
    })


@click.group("snapshots")
def snapshots_verb() -> None:
    """List or delete snapshots."""


@snapshots_verb.command("ls", epilog="""\b
Example:
  forkyard snapshots ls --json | jq -r '.snapshots[].name'""")
@label_option("Only those with this label. Repeatable: all must match.")
@click.option("--all", "everything", is_flag=True, help="Also the prepared states that evaluations keep.")
@json_option()
@pass_app
def snapshots_ls(app: App, labels: tuple[tuple[str, str], ...], everything: bool, as_json: bool) -> None:
    """List snapshots."""
    found = app.client.list_snapshots(**given(labels=dict(labels)))
    snaps = [snap for snap in found if everything or PREPARED not in snap.labels]
    if as_json:
        print_json({"snapshots": [{"snapshotId": snap.id, **record(snap)} for snap in snaps]})
        return
    print_table(
        ("name", "id", "from", "memory", "size", "own", "age"),
        [(snap.name or "-", snap.id, snap.source, "yes" if snap.memory else "no", size(snap.size_bytes),
          size(snap.exclusive_bytes), age(snap.created_at)) for snap in snaps],
        empty="No snapshots. Take one: forkyard snapshot SANDBOX NAME",
    )
    if len(snaps) < len(found):
        note(f"{len(found) - len(snaps)} prepared for evaluations are not shown: --all")


@snapshots_verb.command("delete", epilog="""\b
Example:
  forkyard snapshots delete prepared""")
@click.argument("snapshots", metavar="SNAPSHOT...", nargs=-1, required=True)
@pass_app
def snapshots_delete(app: App, snapshots: tuple[str, ...]) -> int:
    """Delete snapshots. One that something still needs is refused, and what needs it is named."""
    code = 0
    for name in snapshots:
        try:
            app.client.delete_snapshot(name)
            print(name, flush=True)
        except errors.ForkyardError as error:
            report(error.message, error.hint)
            code = code or exit_code(error)
    return code


@click.command("checkpoint", epilog="""\b
Examples:
  forkyard checkpoint work --label 'before migration'
  forkyard checkpoint work --keep-last 5""")
@sandbox_argument()
@click.option("--label", help="A word for people.")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N",
              help="Delete the oldest beyond so many.")
@json_option()
@pass_app
def checkpoint_verb(app: App, sandbox: str, label: str | None, keep_last: int | None, as_json: bool) -> None:
    """Remember the memory and disk of a sandbox, to rewind to. It runs on."""
    point = app.client.checkpoint(sandbox, **given(label=label, keep_last=keep_last))
    if as_json:
        print_json({"checkpoint": record(point)})
    else:
        print(point.id, flush=True)
        note(f"it stood still for {ms(point.paused_ms)}")


@click.group("checkpoints")
def checkpoints_verb() -> None:
    """List or delete checkpoints."""


@checkpoints_verb.command("ls", epilog="""\b
Example:
  forkyard checkpoints ls work""")
@sandbox_argument()
@json_option()
@pass_app
def checkpoints_ls(app: App, sandbox: str, as_json: bool) -> None:
    """List the checkpoints of a sandbox; a star marks the one its present state came from."""
    box = app.client.get_sandbox(sandbox)
    points = app.client.list_checkpoints(box.id)
    if as_json:
        print_json({"checkpoints": [{**record(point), "current": point.id == box.checkpoint}
                                    for point in points]})
        return
    print_table(
        ("", "id", "label", "from", "memory", "size", "age"),
        [("*" if point.id == box.checkpoint else "", point.id, point.label or "-", point.parent or "-",
          "yes" if point.memory else "no", size(point.size_bytes), age(point.created_at))
         for point in points],
        empty=f"No checkpoints. Take one: forkyard checkpoint {sandbox}",
    )


@checkpoints_verb.command("delete", epilog="""\b
Example:
  forkyard checkpoints delete work ck_8d2k1m4x7q""")
@sandbox_argument()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@pass_app
def checkpoints_delete(app: App, sandbox: str, checkpoints: tuple[str, ...]) -> int:
    """Delete checkpoints of a sandbox."""
    code = 0
    for point in checkpoints:
        try:
            app.client.delete_checkpoint(sandbox, point)
            print(point, flush=True)
        except errors.ForkyardError as error:
            report(error.message, error.hint)
            code = code or exit_code(error)
    return code


@click.command("rewind", epilog="""\b
Examples:
  forkyard rewind work
  forkyard rewind work --to ck_8d2k1m4x7q""")
@sandbox_argument()
@click.option("--to", metavar="CHECKPOINT", help="A checkpoint's id or label (default: the newest one back).")
@click.option("--no-memory", is_flag=True, help="Boot its disk afresh.")
@json_option()
@pass_app
def rewind_verb(app: App, sandbox: str, to: str | None, no_memory: bool, as_json: bool) -> None:
    """Take a sandbox back to a checkpoint: disk, memory and running programs. Its id stays."""
    box = app.client.rewind(sandbox, memory=not no_memory, **given(to=to))
    if as_json:
        print_json({"sandbox": record(box)})
    else:
        print(box.id, flush=True)
        at = f" at {box.checkpoint}" if box.checkpoint else ""
        sys.stderr.write(f"{box.name} is back{at} after {ms(box.start_ms)}\n")
