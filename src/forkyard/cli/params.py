"""The kinds of arguments that several verbs take, and their common options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from forkyard.cli.app import App

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType):
    """Seconds as ``90``, ``1.5``, ``90s``, ``10m``, ``2h`` or ``1d``; the value is a float."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)", value.strip())
        if not found:
            self.fail(f"{value!r} is no time; write seconds (90) or 90s, 10m, 2h, 1d", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class Pair(click.ParamType):
    """``KEY=VALUE``; with ``from_env`` a bare ``KEY`` takes this process's own value."""

    name = "k=v"

    def __init__(self, *, from_env: bool = False) -> None:
        self.from_env = from_env

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if equals and key:
            return key, text
        if self.from_env and key and key in os.environ:
            return key, os.environ[key]
        self.fail(f"{value!r} is not KEY=VALUE", param, ctx)


DURATION = Duration()
PAIR = Pair()
ENV = Pair(from_env=True)


def complete_sandbox(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of sandboxes for shell completion; silence when there is no daemon."""
    return _names(ctx, incomplete, "list_sandboxes")


def complete_snapshot(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of snapshots for shell completion."""
    return _names(ctx, incomplete, "list_snapshots")


def _names(ctx: click.Context, incomplete: str, question: str) -> list[str]:
    try:
        with (ctx.find_object(App) or App()).running_client() as client:
            names = [item.name for item in getattr(client, question)() if item.name]
    except Exception:  # a completion that fails must leave the command line alone
        return []
    return [name for name in names if name.startswith(incomplete)]


def sandbox_argument(**options: Any) -> Callable[[F], F]:
    """The SANDBOX argument: an id or a name."""
    return click.argument("sandbox", metavar="SANDBOX", shell_complete=complete_sandbox, **options)


def json_option(text: str = "Print JSON.") -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def env_option(function: F) -> F:
    return click.option("--env", "-e", "env", type=ENV, multiple=True, metavar="K=V",
                        help="Set a variable; a bare K passes this shell's value on. Repeatable.")(function)


def label_option(text: str) -> Callable[[F], F]:
    return click.option("--label", "-l", "labels", type=PAIR, multiple=True, metavar="K=V", help=text)


def limit_options(function: F) -> F:
    """``--type`` and the figures that beat it."""
    for option in (
        click.option("--disk", "disk_mb", type=click.IntRange(min=1), metavar="MB", help="Size of its disk."),
        click.option("--mem", "mem_mb", type=click.IntRange(min=1), metavar="MB", help="Its memory."),
        click.option("--cpu-weight", "cpu_weight", type=click.IntRange(1, 10_000), metavar="N",
                     help="Its share of CPUs that others want too; 100 is usual."),
        click.option("--cpus", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Its CPUs."),
        click.option("--type", "type_", metavar="TYPE", help="Its size: small, medium or large."),
    ):
        function = option(function)
    return function


def life_options(function: F) -> F:
    """How long it lives and where it may connect to."""
    for option in (
        click.option("--allow", "allow", multiple=True, metavar="HOST",
                     help="Let it reach this host only: a name, *.name, name:port, @pip, @npm or @apt. "
                          "Repeatable."),
        click.option("--egress", type=click.Choice(["deny", "any"]), help="Close or open its network."),
        click.option("--auto-stop", "auto_stop_s", type=DURATION, metavar="SECONDS",
                     help="Stop it when idle for so long."),
        click.option("--ttl", "ttl_s", type=DURATION, metavar="SECONDS",
                     help="Delete it after so long (90, 10m, 2h)."),
        click.option("--queue", "wait_s", type=DURATION, default=0.0, metavar="SECONDS",
                     help="Wait so long for room on a full machine."),
    ):
        function = option(function)
    return function


def minutes(seconds: float | None) -> float | None:
    """The API counts lifetimes in minutes."""
    return None if seconds is None else seconds / 60


def given(**values: Any) -> dict[str, Any]:
    """The keyword arguments that were given: None, () and {} are left to the defaults."""
    return {key: value for key, value in values.items() if value is not None and value != () and value != {}}
