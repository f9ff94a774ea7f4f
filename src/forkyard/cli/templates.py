"""The verbs about templates."""

from __future__ import annotations

import click

from forkyard import errors
from forkyard.cli.app import App, exit_code, pass_app, report
from forkyard.cli.output import age, print_json, print_table, record, size
from forkyard.cli.params import json_option


@click.group("template")
def template_verb() -> None:
    """List or delete templates."""


@template_verb.command("ls", epilog="""\b
Example:
  forkyard template ls""")
@json_option()
@pass_app
def template_ls(app: App, as_json: bool) -> None:
    """List templates."""
    templates = app.client.list_templates()
    if as_json:
        print_json({"templates": [record(template) for template in templates]})
        return
    print_table(
        ("name", "user", "directory", "size", "warm", "age"),
        [(template.name, template.user, template.workdir, size(template.size_bytes),
          "yes" if template.warm else "no", age(template.created_at)) for template in templates],
        empty="No templates. Make the base one: forkyard setup",
    )


@template_verb.command("delete", epilog="""\b
Example:
  forkyard template delete old-env""")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@pass_app
def template_delete(app: App, names: tuple[str, ...]) -> int:
    """Delete templates. Sandboxes made from one live on."""
    code = 0
    for name in names:
        try:
            app.client.delete_template(name)
            print(name, flush=True)
        except errors.ForkyardError as error:
            report(error.message, error.hint)
            code = code or exit_code(error)
    return code
