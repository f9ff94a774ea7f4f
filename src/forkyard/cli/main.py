"""The entry point: a group that imports a verb's module only when that verb is used.

``forkyard exec`` has to start fast, so nothing here imports rich, asyncio, the client or
another verb; the table below holds the one-line help that ``forkyard --help`` shows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from forkyard import errors
from forkyard.cli.app import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    App,
    exit_code,
    report,
)

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Sandboxes": {
        "new": ("sandboxes", "Make a sandbox from a template, an image or a snapshot."),
        "ls": ("sandboxes", "List sandboxes."),
        "info": ("sandboxes", "Show everything about one sandbox."),
        "rename": ("sandboxes", "Give a sandbox another name."),
        "stop": ("sandboxes", "Stop a sandbox, keeping its memory and disk."),
        "start": ("sandboxes", "Start a stopped sandbox where it stopped."),
        "delete": ("sandboxes", "Delete sandboxes."),
    },
    "Work in them": {
        "exec": ("running", "Run a command in a sandbox."),
        "shell": ("terminal", "Open an interactive shell in a sandbox."),
        "run": ("coding", "Run code in a session that goes on between calls."),
        "cp": ("copying", "Copy files or trees into or out of a sandbox."),
        "expose": ("network", "Print a URL that leads to a port of a sandbox."),
    },
    "Fork and rewind": {
        "fork": ("forking", "Make running copies of a sandbox, memory included."),
        "explore": ("exploring", "Try several commands, each in its own copy, and keep the best."),
        "tree": ("forking", "Draw who was forked from what."),
        "diff": ("comparing", "Show what changed on a sandbox's disk."),
        "checkpoint": ("snapshots", "Remember the state of a sandbox, to rewind to."),
        "rewind": ("snapshots", "Take a sandbox back to a checkpoint."),
        "checkpoints": ("snapshots", "List or delete checkpoints."),
        "snapshot": ("snapshots", "Save a sandbox under a name, to start others from."),
        "snapshots": ("snapshots", "List or delete snapshots."),
        "export": ("moving", "Write a snapshot to a file or a URL."),
        "import": ("moving", "Make a snapshot of what export wrote."),
        "template": ("templates", "Build, pull, list or delete templates."),
    },
    "Rollouts": {
        "eval": ("evaluating", "Run a policy over a suite of tasks, or show a run's report."),
        "rollout": ("evaluating", "Run a policy once on one task."),
    },
    "Watch": {
        "top": ("watching", "Show what each sandbox uses."),
        "audit": ("auditing", "Read, verify or copy the audit log."),
    },
    "This machine": {
        "setup": ("machine", "Make this machine ready: engine, store, base template."),
        "doctor": ("machine", "Check this machine and say how to mend it."),
        "daemon": ("daemon", "Start, stop or look at the daemon; have it listen for other machines."),
        "token": ("tokens", "Make, list or revoke tokens for clients on other machines."),
        "config": ("machine", "Show each setting and where it came from."),
        "completion": ("machine", "Print the completion script for a shell."),
        "version": ("machine", "Print the version."),
    },
}

VERBS = {verb: entry for section in SECTIONS.values() for verb, entry in section.items()}


class Verbs(click.Group):
    """Loads ``forkyard.cli.<module>.<verb>`` (or ``<verb>_``) for the verb that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        from importlib import import_module

        module = import_module(f"forkyard.cli.{VERBS[name][0]}")
        command = getattr(module, f"{name}_verb")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], VERBS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"there is no verb {args[0]!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(verb, text) for verb, (_, text) in verbs.items()])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from forkyard import __version__

        click.echo(f"forkyard {__version__}")
        ctx.exit()


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
A sandbox, a command in it, four copies of it:
  forkyard new --name work
  forkyard exec work 'echo hello > note'
  forkyard fork work -n 4 --prefix try-
  forkyard tree""",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Sandboxes that fork, checkpoint and rewind with their memory.

    `forkyard VERB --help` explains a verb and shows examples.
    """
    app = ctx.ensure_object(App)
    app.debug = app.debug or debug


def run(args: Sequence[str], app: App | None = None, *, program: str = "forkyard") -> int:
    """Run one command line and return its exit code; errors go to stderr as plain lines."""
    app = app or App()
    try:
        result = cli.main(args=list(args), prog_name=program, standalone_mode=False, obj=app)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        report(_lower(error.format_message()), f"{path} --help")
        return EXIT_USAGE
    except click.ClickException as error:
        report(_lower(error.format_message()))
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except errors.ForkyardError as error:
        report(error.message, error.hint)
        return exit_code(error)
    except SystemExit as done:
        # Click itself ends so after completing a word, and when nobody reads its output.
        return done.code if isinstance(done.code, int) else EXIT_FAILED
    except BrokenPipeError:
        # Who read our output has gone: nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if app.debug:
            raise
        if isinstance(error, OSError) and error.strerror:
            where = f"{error.filename}: " if error.filename else ""
            report(f"{where}{error.strerror}")
        else:
            report(f"unexpected {type(error).__name__}: {error}", "forkyard --debug ... shows where")
        return EXIT_FAILED
    finally:
        app.close()


def _lower(message: str) -> str:
    """Click's sentences as the middle of a line: ``forkyard: missing argument 'SANDBOX'``."""
    message = message.rstrip(".")
    return message[:1].lower() + message[1:]


def main() -> None:
    """The ``forkyard`` and ``fy`` programs."""
    program = os.path.basename(sys.argv[0]) or "forkyard"
    sys.exit(run(sys.argv[1:], program=program if program in ("forkyard", "fy") else "forkyard"))
