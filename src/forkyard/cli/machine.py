"""The verbs about this machine: set-up, checks, the daemon, settings, completion."""

from __future__ import annotations

import click

from forkyard.cli.output import print_json, print_table
from forkyard.cli.params import json_option


@click.command("version")
@json_option()
def version_verb(as_json: bool) -> None:
    """Print the version."""
    from forkyard import __version__

    if as_json:
        print_json({"version": __version__})
    else:
        print(f"forkyard {__version__}")


@click.command("config", epilog="""\b
Examples:
  forkyard config
  FORKYARD_STORE_GB=100 forkyard config""")
@json_option()
def config_verb(as_json: bool) -> None:
    """Show each setting, its value and where it came from."""
    from forkyard import config

    rows = config.explain()
    if as_json:
        print_json({"settings": {
            name: {"value": value if isinstance(value, str | int | float | list | None) else str(value),
                   "from": where}
            for name, value, where in rows}})
        return
    print_table(
        ("setting", "value", "from"),
        [(name, _shown(value), str(where)) for name, value, where in rows],
        empty="",
    )


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


@click.command("completion", epilog="""\b
Examples:
  eval "$(forkyard completion bash)"
  forkyard completion zsh > ~/.zfunc/_forkyard
  forkyard completion fish > ~/.config/fish/completions/forkyard.fish""")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_verb(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell."""
    from click.shell_completion import get_completion_class

    made_by = get_completion_class(shell)
    assert made_by is not None
    for program in ("forkyard", "fy"):
        completer = made_by(ctx.find_root().command, {}, program, f"_{program.upper()}_COMPLETE")
        # Not .source(): for bash that starts one to ask its version, and warns on stderr.
        click.echo(completer.source_template % completer.source_vars())
