"""``forkyard eval`` and ``forkyard rollout``: a policy over tasks, and what it came to."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import print_fields
from forkyard.cli.params import json_option
from forkyard.cli.running import denied
from forkyard.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkyard.rollouts import Report, Task

POLICY = click.option("--policy", required=True, metavar="MODULE:NAME",
                      help="What acts: a function of (episode) or (sandbox, task), sync or async.")
GRADE = click.option("--grade", type=click.Choice(["clean", "final", "service"]),
                     help="How to grade, instead of as each task says.")
OUT = click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                   help="The run's directory; an interrupted run goes on there.")


class _Eval(click.Group):
    """``eval SUITE ...`` is ``eval run SUITE ...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("eval", cls=_Eval, epilog="""\b
Examples:
  forkyard eval humaneval --policy agent:solve -k 4 --out runs/first
  forkyard eval report runs/first
  forkyard eval run --help        the options of "forkyard eval SUITE\"""")
def eval_verb() -> None:
    """Run a policy over a suite of tasks (eval SUITE), or read what a run came to (eval report)."""


@eval_verb.command("run", epilog="""\b
Examples:
  forkyard eval humaneval --policy agent:solve -k 4 --out runs/first
  forkyard eval ./my-tasks --policy agent:solve --out runs/mine --html mine.html
  forkyard eval report runs/first""")
@click.argument("suite", metavar="SUITE")
@POLICY
@click.option("-k", "samples", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Samples of each task; the report gives pass@1 and pass@N.")
@OUT
@click.option("--new", is_flag=True, help="Begin again; what DIR holds is set aside within it.")
@click.option("-j", "--parallel", type=click.IntRange(min=1), metavar="N",
              help="Episodes at a time (default: what the machine holds).")
@GRADE
@click.option("--only", multiple=True, metavar="TASK",
              help="Only this task of the suite, or those that match ('HumanEval/1?'). Repeatable.")
@click.option("--policy-version", metavar="TEXT", help="Part of each sample's key, in place of a digest "
                                                       "of the policy's source.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write the report as one page.")
@json_option("Print the report as JSON.")
@pass_app
def run_verb(
    app: App, suite: str, policy: str, samples: int, out: Path | None, new: bool, parallel: int | None,
    grade: Any, only: tuple[str, ...], policy_version: str | None, html: Path | None, as_json: bool,
) -> int:
    """Run a policy over the tasks of SUITE, each sample in a fresh fork, and print the report.

    SUITE is humaneval, mutants, a directory of Harbor or Terminal-Bench tasks, or MODULE:NAME, a
    list of tasks or a function that returns one. Modules are also looked for in the present directory.
    The exit code is 0 whatever the score, and 1 where nothing could be scored.
    """
    from forkyard.rollouts import evaluate

    tasks = _tasks(suite)
    if only:
        tasks = list({task.id: task for name in only for task in _matching(tasks, name)}.values())
    report = evaluate(tasks, _policy(policy), samples, tuple(sorted({1, samples})), grade,
                      parallel or "auto", out, new, client=app.client, version=policy_version,
                      progress=True)
    return _print(report, html, as_json)


@eval_verb.command("report", epilog="""\b
Examples:
  forkyard eval report runs/first
  forkyard eval report runs/first -k 1 -k 4 --html first.html
  forkyard eval report runs/first --json | jq .score""")
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@click.option("-k", "ks", type=click.IntRange(min=1), multiple=True, metavar="K",
              help="A k of pass@k and pass^k (default 1). Repeatable.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write it as one page.")
@json_option("Print it as JSON.")
@pass_app
def report_verb(app: App, run: Path, ks: tuple[int, ...], html: Path | None, as_json: bool) -> int:
    """Show what a run in DIR came to; it may still go on. The exit code is 1 if nothing is scored."""
    from forkyard.rollouts import Report

    return _print(Report.load(run, ks or (1,)), html, as_json)


@click.command("rollout", epilog="""\b
Examples:
  forkyard rollout humaneval::HumanEval/0 --policy agent:solve
  forkyard rollout tasks:one --policy agent:solve --html episode.html""")
@click.argument("task", metavar="TASK")
@POLICY
@GRADE
@OUT
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write commands, diff and verdict as one page.")
@json_option("Print the sample as JSON.")
@pass_app
def rollout_verb(
    app: App, task: str, policy: str, grade: Any, out: Path | None, html: Path | None, as_json: bool
) -> int:
    """Run a policy once on TASK and print how it ended; the exit code is 1 unless it passed.

    TASK is SUITE::ID, or a suite (see eval) of a single task.
    """
    from forkyard.rollouts import evaluate

    suite, found, name = task.partition("::")
    tasks = _tasks(suite)
    if not found and len(tasks) != 1:
        raise InvalidRequestError(
            f"{suite} has {len(tasks)} tasks", hint=f"name one: {suite}::{tasks[0].id if tasks else 'ID'}"
        )
    chosen = _named(tasks, name) if found else tasks[0]
    report = evaluate([chosen], _policy(policy), grade=grade, out=out, client=app.client, progress=False)
    if html is not None:
        report.to_html(html)
    sample = report.samples[0]
    for line in report.episode(sample)["log"]:
        if "traceback" in line:
            note(line["traceback"].rstrip())
    if as_json:
        import msgspec

        print(msgspec.json.encode(sample, enc_hook=str).decode())
    else:
        records = report.episode(sample)["commands"]
        for command in records:
            if command["kind"] in ("exec", "code"):
                said = command.get("command") or command.get("argv") or command.get("code")
                note(f"[{command.get('exit_code')}] {said}")
        phases = sample.phases
        times = f"start {phases.start_s:.2f}, policy {phases.policy_s:.2f}, grade {phases.grade_s:.2f}"
        print_fields([("task", sample.task), ("outcome", sample.outcome), ("reward", f"{sample.reward:g}"),
                      ("message", sample.message), ("seconds", times)])
        refused = denied((record["kind"], record) for record in records)
        if refused and sample.outcome != "passed" and sys.stderr.isatty():
            note(f"forkyard: the sandbox may not reach {refused}: the task's egress says what it may, "
                 "like egress=(\"@pip\",)")
    return 0 if sample.outcome == "passed" else 1


def _print(report: Report, html: Path | None, as_json: bool) -> int:
    """The exit code: a score, low or high, is a result; none at all is a failure."""
    if html is not None:
        report.to_html(html)
        note(f"wrote {html}")
    print(report.to_json() if as_json else report, flush=True)
    from forkyard.rollouts.types import UNSCORED

    unscored = sorted((name, count) for name, count in report.outcomes.items() if name in UNSCORED)
    counts = ", ".join(f"{count} {name}" for name, count in unscored)
    if not any(sample.valid for sample in report.samples):
        note(f"forkyard: nothing was scored: {counts or 'there are no samples'}")
        return 1
    if counts:
        note(f"forkyard: not scored: {counts}")
    return 0


def _tasks(suite: str) -> list[Task]:
    """The tasks of a suite: see ``run_verb``."""
    from forkyard.rollouts import Task, suites

    if suite.partition(":")[0] in suites.SUITES:
        return list(suites.load(suite))
    if os.path.isdir(suite):
        return list(suites.load(f"harbor:{suite}"))
    if ":" not in suite:
        near = _near(suite, [*suites.SUITES, *(f"{module}:NAME" for module in _modules_here())])
        hint = f"{near}there are {', '.join(suites.SUITES)}, a directory of task folders, and MODULE:NAME"
        raise NotFoundError(f"there is no suite {suite!r}", hint=hint)
    found = _imported(suite)
    if callable(found):
        if any(one.default is one.empty for one in inspect.signature(found).parameters.values()):
            raise InvalidRequestError(
                f"{suite} takes arguments, so it makes no suite",
                hint="a suite is a list of tasks or a function of nothing; --policy names what acts",
            )
        found = found()
    tasks = list(found) if isinstance(found, list | tuple) else [found]
    for one in tasks:
        if not isinstance(one, Task):
            raise InvalidRequestError(
                f"{suite} has {type(one).__name__}, not Task",
                hint="it names a Task or a list of them, or a function that makes it",
            )
    return tasks


def _near(name: str, known: Sequence[str]) -> str:
    """The beginning of a hint: what was meant by ``name``, if anything known is like it."""
    from difflib import get_close_matches

    found = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {found[0]}? " if found else ""


def _modules_here() -> list[str]:
    """The modules of the present directory."""
    here = Path.cwd()
    found = [path.stem for path in here.glob("*.py")]
    found += [path.parent.name for path in here.glob("*/__init__.py")]
    return sorted(name for name in found if name.isidentifier())


def _matching(tasks: list[Task], name: str) -> list[Task]:
    if any(task.id == name for task in tasks):
        return [_named(tasks, name)]
    return [task for task in tasks if fnmatchcase(task.id, name)] or [_named(tasks, name)]


def _named(tasks: list[Task], name: str) -> Task:
    for task in tasks:
        if task.id == name:
            return task
    near = _near(name, [task.id for task in tasks]) or (f"there is {tasks[0].id!r}" if tasks else "")
    raise NotFoundError(f"the suite has no task {name!r}", hint=near.strip())


def _policy(name: str) -> Any:
    found = _imported(name)
    found = found() if isinstance(found, type) else found
    if not callable(found):
        raise InvalidRequestError(f"{name} is {type(found).__name__}, not something to call")
    return found


def _imported(name: str) -> Any:
    """What ``MODULE:NAME`` names."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise InvalidRequestError(f"{name!r} is not MODULE:NAME", hint="agent:solve is solve in agent.py")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise
        modules = _modules_here()
        near = _near(module, modules) or (f"here are {', '.join(modules[:8])}; " if modules else "")
        raise NotFoundError(
            f"there is no module {module!r} in {os.getcwd()} or among what is installed",
            hint=f"{near}run it where the module is",
        ) from None
    for at, part in enumerate(parts := path.split(".")):
        if not hasattr(found, part):
            names = [one for one in dir(found) if not one.startswith("_")]
            whole = ":".join(filter(None, (module, ".".join(parts[:at]))))
            raise NotFoundError(f"{whole!r} has no {part!r}", hint=_near(part, names).strip())
        found = getattr(found, part)
    return found
