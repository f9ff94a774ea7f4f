"""``forkyard token``: who from another machine may use this one's daemon, and for what."""

from __future__ import annotations

import time

import click

from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import print_json, print_table, record
from forkyard.cli.params import DURATION, json_option


@click.group("token")
def token_verb() -> None:
    """Make, list or revoke tokens for clients on other machines."""


@token_verb.command("new", epilog="""\b
Examples:
  forkyard token new --name trainer --role run
  forkyard token new --name board --role read --ttl 7d
  forkyard token new --name ci --allow create_sandbox,exec,delete_sandbox""")
@click.option("--name", required=True, metavar="NAME", help="What the audit log calls its bearer.")
@click.option("--role", type=click.Choice(["read", "run", "admin"]),
              help="read: questions; run: all that is done with sandboxes; admin: also builds and shutdown.")
@click.option("--allow", multiple=True, metavar="VERB,...", help="Verbs, beside those of the role.")
@click.option("--ttl", type=DURATION, metavar="TIME", help="Good for so long (default: until it is revoked).")
@json_option()
@pass_app
def token_new(
    app: App, name: str, role: str | None, allow: tuple[str, ...], ttl: float | None, as_json: bool
) -> None:
    """Make a token and print it, this once. Only its hash is kept."""
    verbs = [verb.strip() for group in allow for verb in group.split(",") if verb.strip()]
    made = app.client.new_token(name, role=role, allow=verbs, ttl_s=ttl)  # type: ignore[arg-type]
    if as_json:
        print_json(record(made))
        return
    print(made.token)
    note("keep it: it is not shown again. Clients take it as FORKYARD_TOKEN, with the URL that "
         "`forkyard daemon listen` prints as FORKYARD_URL")


@token_verb.command("ls", epilog="""\b
Example:
  forkyard token ls""")
@json_option()
@pass_app
def token_ls(app: App, as_json: bool) -> None:
    """List the tokens that are good, without what they are."""
    tokens = app.client.list_tokens()
    if as_json:
        print_json({"tokens": [record(one) for one in tokens]})
        return
    print_table(
        ("name", "id", "role", "allow", "created", "expires"),
        [(one.name, one.id, one.role or "-", ",".join(one.allow) or "-", _day(one.created_at),
          "never" if one.expires_at is None else _day(one.expires_at)) for one in tokens],
        empty="No tokens.",
    )


@token_verb.command("revoke", epilog="""\b
Example:
  forkyard token revoke trainer""")
@click.argument("tokens", nargs=-1, required=True, metavar="NAME...")
@pass_app
def token_revoke(app: App, tokens: tuple[str, ...]) -> None:
    """Refuse tokens (by name or id) from now on, and end what their bearers have open."""
    for token in tokens:
        app.client.revoke_token(token)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
