"""Snapshots to and from files and URLs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from forkyard import errors
from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import print_json, record, size
from forkyard.cli.params import given, json_option

_EVERY_S = 0.2


@contextmanager
def _progress(word: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """How much has gone over, on one line of a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    next_at = 0.0

    def show(count: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _EVERY_S
            of = f" of {size(total)}" if total else ""
            sys.stderr.write(f"\r\x1b[K{word} {size(count)}{of}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if next_at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@click.command("export", epilog="""\b
Examples:
  forkyard export prepared prepared.fy
  forkyard export prepared s3://bucket/prepared.fy
  forkyard export prepared - | ssh other forkyard import -""")
@click.argument("snapshot")
@click.argument("url")
@click.option("--no-memory", is_flag=True, help="The disk only.")
@click.option("--no-template", is_flag=True,
              help="Leave out what its template holds; the importing machine must have the very same one.")
@json_option()
@pass_app
def export_verb(
    app: App, snapshot: str, url: str, no_memory: bool, no_template: bool, as_json: bool
) -> None:
    """Write a snapshot to URL: a path, - for stdout, or anything that fsspec knows."""
    if any(part.startswith("memory://") for part in url.split("::")):
        raise errors.InvalidRequestError(
            f"{url} is this process's own memory: the archive would be gone with it",
            hint="use a path, s3://, gs://, ...; memory:// is for programs that import it themselves",
        )
    begun = time.perf_counter()
    with _progress("exported") as show:
        snap = app.client.export_snapshot(
            snapshot, "/dev/stdout" if url == "-" else url,
            memory=not no_memory, template=not no_template, **given(on_progress=show))
    if url == "-":
        return
    took = time.perf_counter() - begun
    written = os.stat(url).st_size if os.path.isfile(url) else None
    if as_json:
        print_json({"snapshot": {"snapshotId": snap.id, **record(snap)}, "url": url, "bytes": written,
                    "seconds": round(took, 2)})
    else:
        print(url, flush=True)
        if show is not None:
            note(f"{f'{size(written)} ' if written is not None else ''}in {took:.1f} s")


@click.command("import", epilog="""\b
Examples:
  forkyard import prepared.fy
  forkyard import s3://bucket/prepared.fy --name prepared-2
  forkyard new --from prepared""")
@click.argument("url")
@click.option("--name", metavar="N", help="Its name here. Default: the one that it had, if that is free.")
@json_option()
@pass_app
def import_verb(app: App, url: str, name: str | None, as_json: bool) -> None:
    """Make a snapshot of what export wrote to URL (a path, - for stdin, or what fsspec knows). Prints its id.

    Import what you trust: who wrote it decides what runs in its sandboxes.
    """
    total = os.stat(url).st_size if os.path.isfile(url) else None
    with _progress("imported", total) as show:
        snap = app.client.import_snapshot(
            "/dev/stdin" if url == "-" else url, **given(name=name, on_progress=show))
    if as_json:
        print_json({"snapshot": {"snapshotId": snap.id, **record(snap)}})
    else:
        print(snap.id, flush=True)
        if show is not None and snap.name:
            note(f"forkyard new --from {snap.name}")
