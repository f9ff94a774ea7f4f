"""``forkyard cp``: files and trees between here and a sandbox."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from forkyard import errors
from forkyard.cli.app import App, pass_app
from forkyard.cli.params import given
from forkyard.cli.running import write_all


@dataclass(frozen=True)
class Place:
    """One end of a copy: ``sandbox`` is None for a path here."""

    sandbox: str | None
    path: str


def parse(text: str) -> Place:
    """``SANDBOX:PATH`` or a path here.

    What begins with ``/`` or ``.`` is here, as is ``-``. A sandbox's name may hold colons:
    it ends at the first ``:/`` or ``:~``, else at the first colon.
    """
    if text == "-" or text[:1] in ("/", ".") or ":" not in text:
        return Place(None, text)
    ends = [at for at in (text.find(":/"), text.find(":~")) if at > 0]
    at = min(ends) if ends else text.index(":")
    path = text[at + 1:]
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return Place(text[:at], path or ".") if at else Place(None, text)


@click.command("cp", epilog="""\b
Examples:
  forkyard cp project work:project
  forkyard cp work:/workspace/result.json .
  forkyard cp work:~/logs/ ./logs
  echo data | forkyard cp - work:input.txt
  forkyard cp work:/etc/os-release -""")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--user", "-u", metavar="U", help="Who owns what is written, and who reads.")
@pass_app
def cp_verb(app: App, source: str, target: str, user: str | None) -> None:
    """Copy a file or a tree; one of FROM and TO is SANDBOX:PATH.

    A TO that is a directory, or ends in a slash, receives the copy under its own name.
    Relative paths inside start at the sandbox's working directory. `-` is stdin or stdout.
    """
    here, there = parse(source), parse(target)
    if (here.sandbox is None) == (there.sandbox is None):
        both = here.sandbox is not None
        raise click.UsageError(
            "both are in sandboxes; pipe from one cp to the other" if both
            else "one of FROM and TO must be SANDBOX:PATH (a path here that holds a colon: ./a:b)")
    if there.sandbox is not None:
        _upload(app, here.path, there.sandbox, there.path, user)
    else:
        assert here.sandbox is not None
        _download(app, here.sandbox, here.path, there.path, user)


def _upload(app: App, local: str, sandbox: str, remote: str, user: str | None) -> None:
    client = app.client
    options = given(user=user)
    if local == "-":
        client.write_file(sandbox, remote, sys.stdin.buffer.read(), **options)
        return
    if not os.path.lexists(local):
        raise errors.NotFoundError(f"{local}: no such file here")
    name = Path(local).name or Path(local).resolve().name
    if remote.endswith("/") or _is_dir_inside(app, sandbox, remote):
        remote = remote.rstrip("/") + "/" + name
    client.upload(sandbox, local, remote, **options)


def _download(app: App, sandbox: str, remote: str, local: str, user: str | None) -> None:
    client = app.client
    options = given(user=user)
    if local == "-":
        write_all(1, client.read_file(sandbox, remote, **options))
        return
    if local.endswith("/") or os.path.isdir(local):
        name = Path(remote.rstrip("/")).name
        if name in ("", ".", ".."):
            name = Path(client.stat(sandbox, remote).path).name or "root"
        os.makedirs(local, exist_ok=True)
        local = os.path.join(local, name)
    client.download(sandbox, remote, local, **options)


def _is_dir_inside(app: App, sandbox: str, path: str) -> bool:
    try:
        kind = app.client.stat(sandbox, path).type
        if kind == "link":
            kind = app.client.stat(sandbox, f"{path}/.").type
    except (errors.NotFoundError, errors.ConflictError, errors.InvalidRequestError):
        # The copy itself will say what is wrong with the path, if anything is.
        return False
    return kind == "dir"
