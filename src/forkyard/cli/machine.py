"""The verbs about this machine: set-up, checks, settings, completion."""

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


@click.command("setup", epilog="""\b
Examples:
  forkyard setup
  forkyard setup --store-gb 200
  FORKYARD_HOME=/data/forkyard forkyard setup""")
@click.option("--newest", is_flag=True, help="Build the newest engine from source and use it (needs Go).")
@click.option("--tune/--no-tune", default=None,
              help="Make the kernel's grace periods short, for quicker starts of all; or take that back.")
@click.option("--store-gb", type=click.IntRange(min=1), metavar="N",
              help="Size of the store, where it is a file.")
@click.option("--user", "as_user", is_flag=True,
              help="For this user alone, in a user namespace (what happens without root anyway).")
@click.option("--images", is_flag=True,
              help="Also install what building and pulling images needs (buildah and skopeo).")
@click.option("--engine", type=click.Choice(["gvisor", "qemu"]), default="gvisor", show_default=True,
              help="qemu: also what microVMs need, QEMU and a kernel.")
def setup_verb(newest: bool, tune: bool | None, store_gb: int | None, as_user: bool,
               images: bool, engine: str) -> None:
    """Make this machine ready: engine, store, base template.

    What is there already is left alone, so it can be run again at any time. It says what it does.
    """
    import asyncio
    import os

    from forkyard import config
    from forkyard.host import userns
    from forkyard.setup import run_setup

    if as_user and os.geteuid() == 0 and not userns.inside():
        raise click.UsageError("--user is for the user who is to have it, and this is root")
    settings = config.load({"store_gb": store_gb})
    userns.enter(settings.home, settings.socket)
    report = asyncio.run(
        run_setup(settings, newest=newest, tune=tune, images=images, microvms=engine == "qemu")
    )
    print(f"{report.home} is ready ({report.ms / 1000:.1f} s)")


@click.command("doctor", epilog="""\b
Examples:
  forkyard doctor
  forkyard doctor --json | jq '.checks[] | select(.ok | not)'
  forkyard doctor --store
  forkyard daemon stop && forkyard doctor --store --repair""")
@click.option("--store", "of_store", is_flag=True,
              help="Instead, read all of the store: images, layers, catalog.")
@click.option("--repair", is_flag=True,
              help="With --store: take what cannot be used out of the records, so that the rest works.")
@json_option()
def doctor_verb(of_store: bool, repair: bool, as_json: bool) -> int:
    """Check this machine by trying each thing that sandboxes need, and say how to mend it.

    Nothing is changed, and a running daemon is not disturbed. Exit code 1 if something is wrong.
    With --store, what is damaged is named, with what depends on it; --repair wants no daemon to run.
    """
    import asyncio

    if repair and not of_store:
        raise click.UsageError("--repair goes with --store")
    if of_store:
        return _doctor_store(repair, as_json)

    from forkyard import config
    from forkyard.host import userns
    from forkyard.setup import doctor

    settings = config.load()
    userns.enter(settings.home, settings.socket)

    def show(check: doctor.Check) -> None:
        if as_json:
            return
        mark = click.style("✓", "green") if check.ok else click.style("✗", "red")
        click.echo(f"{mark} {check.name}: {check.detail} {click.style(f'({check.ms:.0f} ms)', dim=True)}")
        if check.remedy:
            click.echo(f"    {check.remedy}")

    checks = asyncio.run(doctor.run(settings, on_check=show))
    well = all(check.ok for check in checks)
    if as_json:
        print_json({"ok": well, "checks": [
            {"name": check.name, "ok": check.ok, "detail": check.detail, "remedy": check.remedy,
             "ms": round(check.ms, 1)} for check in checks]})
    elif not well:
        click.echo(f"\n{sum(not check.ok for check in checks)} of {len(checks)} checks failed")
    return 0 if well else 1


def _doctor_store(repair: bool, as_json: bool) -> int:
    import asyncio

    from forkyard import config
    from forkyard.setup import doctor

    damages = asyncio.run(doctor.check_store(config.load(), repair=repair))
    mended = repair and all(damage.repair for damage in damages)
    if as_json:
        print_json({"ok": not damages, "repaired": mended and bool(damages), "damages": [
            {"kind": one.kind, "name": one.name, "why": one.why, "neededBy": list(one.needed_by),
             "repair": one.repair} for one in damages]})
        return 0 if not damages or mended else 1
    for one in damages:
        click.echo(f"{click.style('✗', 'red')} {one.kind} {one.name}: {one.why}")
        if one.needed_by:
            click.echo(f"    needed by: {', '.join(one.needed_by)}")
        if one.repair:
            click.echo(f"    {'done' if repair else '--repair'}: {one.repair}")
    if not damages:
        click.echo("the store is whole")
    return 0 if not damages or mended else 1


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
