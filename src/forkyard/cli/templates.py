"""The verbs about templates."""

from __future__ import annotations

import sys
from typing import Any

import click

from forkyard import errors
from forkyard.cli.app import App, exit_code, note, pass_app, report
from forkyard.cli.output import age, print_json, print_table, record, size
from forkyard.cli.params import DURATION, PAIR, given, json_option


@click.group("template")
def template_verb() -> None:
    """Build, pull, list or delete templates."""


def _warm_options(function: Any) -> Any:
    """How a template's sandboxes start with something running."""
    for option in (
        click.option("--ready-timeout", "ready_timeout_s", type=DURATION, metavar="SECONDS",
                     help="How long that may take (default 120)."),
        click.option("--ready", metavar="WHEN",
                     help="What says that it is ready: port:N, log:TEXT, or a command that exits with 0. "
                          "Without it: it has ended with 0, or is idle."),
        click.option("--warm-image", is_flag=True, help="Run the image's own ENTRYPOINT and CMD so."),
        click.option("--warm", metavar="CMD",
                     help="Run this in the template, so that every sandbox starts with it."),
    ):
        function = option(function)
    return function


def _warm_arguments(
    warm: str | None, warm_image: bool, ready: str | None, ready_timeout_s: float | None
) -> dict[str, Any]:
    if warm is not None and warm_image:
        raise click.UsageError("--warm and --warm-image exclude each other")
    return given(warm=True if warm_image else warm, ready=ready, ready_timeout_s=ready_timeout_s)


def _engine_option(function: Any) -> Any:
    return click.option("--engine", type=click.Choice(["auto", "gvisor", "qemu"]),
                        help="What its sandboxes run on unless they say.")(function)


def _credentials_option(function: Any) -> Any:
    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return sys.stdin.readline().rstrip("\n") if value == "-" else value

    return click.option("--creds", "credentials", metavar="USER:PASSWORD", callback=read,
                        help="How to log in at the registry; - reads a line of stdin. Default: the auth "
                             "file of skopeo login.")(function)


def _progress(quiet: bool) -> Any:
    """Steps on stderr, and what they print."""
    if quiet:
        return None

    def show(progress: Any) -> None:
        if progress.kind == "output":
            note(f"  {progress.text}")
        else:
            note(click.style(progress.text, bold=progress.kind == "step") if sys.stderr.isatty()
                 else progress.text)

    return show


def _made(template: Any, as_json: bool) -> None:
    if as_json:
        print_json({"template": record(template)})
    else:
        print(template.name, flush=True)


@template_verb.command("build", epilog="""\b
Examples:
  forkyard template build app .
  forkyard template build app . -f deploy/Dockerfile --build-arg VERSION=3
  forkyard template build app . --warm 'python -m http.server 8000' --ready port:8000""")
@click.argument("name")
@click.argument("context", type=click.Path(exists=True, file_okay=False))
@click.option("--file", "-f", "dockerfile", default="Dockerfile", metavar="PATH",
              help="The Dockerfile, relative to CONTEXT.")
@click.option("--build-arg", "build_args", type=PAIR, multiple=True, metavar="K=V",
              help="A value for an ARG. Repeatable.")
@click.option("--pull", is_flag=True, help="Ask registries for newer images.")
@_warm_options
@_engine_option
@_credentials_option
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@json_option()
@pass_app
def template_build(
    app: App, name: str, context: str, dockerfile: str, build_args: tuple[tuple[str, str], ...], pull: bool,
    warm: str | None, warm_image: bool, ready: str | None, ready_timeout_s: float | None,
    engine: str | None, credentials: str | None, quiet: bool, as_json: bool,
) -> None:
    """Build template NAME from the Dockerfile in the directory CONTEXT.

    FROM forkyard/base, or any forkyard/TEMPLATE, starts from a template of this machine. The same
    input is built once.
    """
    _made(app.client.build_template(
        name, context, dockerfile, dict(build_args), on_progress=_progress(quiet), pull=pull,
        **given(credentials=credentials, engine=engine),
        **_warm_arguments(warm, warm_image, ready, ready_timeout_s),
    ), as_json)


@template_verb.command("pull", epilog="""\b
Examples:
  forkyard template pull app localhost:5000/team/app:3
  forkyard template pull app oci:build/layout
  forkyard template pull app docker-archive:app.tar
  forkyard template pull debian ./rootfs.tar.gz""")
@click.argument("name")
@click.argument("image")
@_warm_options
@_engine_option
@_credentials_option
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@json_option()
@pass_app
def template_pull(
    app: App, name: str, image: str, warm: str | None, warm_image: bool, ready: str | None,
    ready_timeout_s: float | None, engine: str | None, credentials: str | None, quiet: bool, as_json: bool,
) -> None:
    """Make template NAME of IMAGE: a registry's reference, oci:DIRECTORY, docker-archive:FILE, or
    the path of a root directory's tar.
    """
    _made(app.client.pull_template(
        name, image, on_progress=_progress(quiet),
        **given(credentials=credentials, engine=engine),
        **_warm_arguments(warm, warm_image, ready, ready_timeout_s),
    ), as_json)


@template_verb.command("prepare", epilog="""\b
Examples:
  forkyard template prepare localhost:5000/a:1 localhost:5000/b:1
  xargs forkyard template prepare --parallel 8 --budget 50000 < images.txt""")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--parallel", type=click.IntRange(min=1), metavar="N", help="So many at a time.")
@click.option("--budget", "disk_budget_mb", type=click.IntRange(min=0), metavar="MB",
              help="Then delete templates that nothing uses, least recently used first, until the rest fits.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@json_option()
@pass_app
def template_prepare(
    app: App, images: tuple[str, ...], parallel: int | None, disk_budget_mb: int | None, quiet: bool,
    as_json: bool,
) -> int:
    """Fetch many images, or templates by name; those that are here are left alone."""
    found: list[Any] = app.client.prepare(images, check=False, on_progress=_progress(quiet),
                               **given(parallel=parallel, disk_budget_mb=disk_budget_mb))
    failed = [item for item in found if isinstance(item, errors.ForkyardError)]
    if as_json:
        print_json({"templates": [errors.to_wire(item) if isinstance(item, errors.ForkyardError)
                                  else record(item) for item in found]})
    for item in found:
        if isinstance(item, errors.ForkyardError):
            report(item.message, item.hint)
        elif not as_json:
            print(item.name, flush=True)
    return exit_code(failed[0]) if failed else 0


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
        ("name", "kind", "user", "directory", "size", "warm", "used", "age"),
        [(template.name, template.kind, template.user, template.workdir, size(template.size_bytes),
          "yes" if template.warm else "no", age(template.last_used_at), age(template.created_at))
         for template in templates],
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
