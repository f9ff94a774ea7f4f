"""``forkyard daemon``: the process behind everything."""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

import click

from forkyard import config, errors
from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import print_fields, print_json, record
from forkyard.cli.params import json_option

if TYPE_CHECKING:
    from forkyard.types import Health

PATIENCE_S = 60.0


@click.group("daemon")
def daemon_verb() -> None:
    """Start, stop or look at the daemon; have it listen for other machines."""


@daemon_verb.command("status", epilog="""\b
Example:
  forkyard daemon status --json | jq .pid""")
@json_option()
@pass_app
def daemon_status(app: App, as_json: bool) -> None:
    """Say whether a daemon runs, and which; exit code 6 if none does."""
    with app.running_client() as client:
        _show(client.health(), as_json)


@daemon_verb.command("start", epilog="""\b
Example:
  forkyard daemon start""")
@json_option()
@pass_app
def daemon_start(app: App, as_json: bool) -> None:
    """Start the daemon unless it runs. Other verbs do so by themselves."""
    _here_only()
    _show(app.client.health(), as_json)


@daemon_verb.command("stop", epilog="""\b
Examples:
  forkyard daemon stop
  forkyard daemon stop --sandboxes delete""")
@click.option("--sandboxes", type=click.Choice(["keep", "stop", "delete"]), default="keep",
              help="What becomes of them (default: they run on, for the next daemon to find).")
@pass_app
def daemon_stop(app: App, sandboxes: str) -> None:
    """Stop the daemon."""
    _here_only()
    try:
        pid, left = _stop(app, sandboxes)
    except errors.UnavailableError:
        if sandboxes == "keep" or not (config.load().home / "catalog.db").exists():
            note("no daemon runs")
            return
        # What sandboxes there are, and how to end them, a daemon knows.
        app.client.health()
        app.close()
        pid, left = _stop(app, sandboxes)
    note(f"the daemon (pid {pid}) has stopped")
    if left and sandboxes == "keep":
        note(f"{left} sandboxes are kept, and what of them ran runs on; to end them: "
             "forkyard daemon stop --sandboxes delete")


@daemon_verb.command("restart", epilog="""\b
Example:
  forkyard daemon restart""")
@json_option()
@pass_app
def daemon_restart(app: App, as_json: bool) -> None:
    """Stop the daemon and start it anew, after an upgrade for instance. Sandboxes run on."""
    _here_only()
    with contextlib.suppress(errors.UnavailableError):
        _stop(app, "keep")
    app.close()
    _show(app.client.health(), as_json)


@daemon_verb.command("listen", epilog="""\b
Examples:
  forkyard daemon listen 0.0.0.0:8470          with a certificate of its own making
  forkyard daemon listen 10.0.0.5 --cert chain.pem --key key.pem
  forkyard daemon listen                       say whether and where it listens
  forkyard daemon listen --off""")
@click.argument("address", required=False, metavar="[ADDR[:PORT]]")
@click.option("--off", is_flag=True, help="Listen no more.")
@click.option("--cert", type=click.Path(), metavar="FILE",
              help="A certificate chain in PEM (default: it makes its own).")
@click.option("--key", type=click.Path(), metavar="FILE", help="The certificate's key in PEM.")
@json_option()
@pass_app
def daemon_listen(
    app: App, address: str | None, off: bool, cert: str | None, key: str | None, as_json: bool
) -> None:
    """Have the daemon listen over HTTPS for clients on other machines, now and after restarts.

    They need a token (`forkyard token new`) and the URL that this prints.
    """
    state = app.client.listen(address, off=off, cert=cert, key=key)
    if as_json:
        print_json(record(state))
        return
    if state.problem:
        note(f"it was to listen at {state.address}, and does not: {state.problem}")
    elif state.address is None:
        note("the daemon does not listen for other machines")
    else:
        print_fields([("address", state.address), ("url", state.url or ""),
                      ("fingerprint", state.fingerprint or ""), ("certificate", state.cert or "")])


def _here_only() -> None:
    """Processes are started and ended on their own machine."""
    if url := config.load().url:
        raise errors.UnsupportedError(
            f"FORKYARD_URL is set, and the daemon at {url.partition('#')[0]} is another machine's",
            hint="unset FORKYARD_URL, or run this on that machine",
        )


def _stop(app: App, sandboxes: str) -> tuple[int, int]:
    """Stop the daemon and wait until its process is gone; gives its pid and how many sandboxes it had."""
    with app.running_client() as client:
        health = client.health()
        pid = health.pid
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return pid, health.sandboxes
        try:
            client.shutdown(sandboxes)
            if not select.select([handle], [], [], PATIENCE_S)[0]:
                raise errors.DeadlineError(f"the daemon (pid {pid}) has not ended after {PATIENCE_S:g} s",
                                           hint="see daemon.log in FORKYARD_HOME")
        finally:
            os.close(handle)
    return pid, health.sandboxes


def _show(health: Health, as_json: bool) -> None:
    if as_json:
        print_json({
            "pid": health.pid, "version": health.version, "home": health.home, "socket": health.socket,
            "sandboxes": health.sandboxes, "ok": health.ok, "engines": health.engines,
            "problems": health.problems,
        })
        return
    print_fields([
        ("pid", str(health.pid)), ("version", health.version), ("home", health.home),
        ("socket", health.socket), ("sandboxes", str(health.sandboxes)),
        ("engines", ", ".join(health.engines) or "-"),
        *(("problem", problem) for problem in health.problems),
    ])
