"""Reaching into a sandbox: ``expose``."""

from __future__ import annotations

import click

from forkyard.cli.app import App, pass_app
from forkyard.cli.output import print_json
from forkyard.cli.params import json_option, sandbox_argument


@click.command("expose", epilog="""\b
Examples:
  forkyard expose work 8000
  curl "$(forkyard expose work 8000)/health\"""")
@sandbox_argument()
@click.argument("port", type=click.IntRange(1, 65535), metavar="PORT")
@json_option()
@pass_app
def expose_verb(app: App, sandbox: str, port: int, as_json: bool) -> None:
    """Print a URL on the daemon's host that leads to PORT inside, until the sandbox is deleted."""
    url = app.client.expose(sandbox, port)
    if as_json:
        print_json({"url": url, "port": port})
    else:
        click.echo(url)
