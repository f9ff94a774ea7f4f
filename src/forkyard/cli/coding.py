"""``forkyard run``: code in a session of a sandbox, with what it showed as files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forkyard import errors
from forkyard.cli.app import EXIT_TIMED_OUT, App, note, pass_app
from forkyard.cli.output import print_json
from forkyard.cli.params import DURATION, given, json_option, sandbox_argument
from forkyard.cli.running import write_all

if TYPE_CHECKING:
    from forkyard.types import Artifact, CodeResult

BY_SUFFIX = {".py": "python", ".ipy": "python", ".sh": "bash", ".bash": "bash", ".js": "javascript"}
SUFFIX = {
    "image/png": ".png", "image/jpeg": ".jpg", "image/svg+xml": ".svg", "text/html": ".html",
    "application/json": ".json", "application/pdf": ".pdf", "text/csv": ".csv", "text/plain": ".txt",
}


@click.command("run", epilog="""\b
Examples:
  forkyard run work analysis.py --out plots
  echo 'x = 41' | forkyard run work -
  echo 'x + 1' | forkyard run work -""")
@sandbox_argument()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--language", "-l", metavar="L",
              help="python, bash or javascript (default: by FILE's suffix, else python).")
@click.option("--session", "-s", metavar="S", help="Which session (default: default).")
@click.option("--timeout", "timeout_s", type=DURATION, metavar="SECONDS",
              help="Interrupt it after so long; the exit code is then 124.")
@click.option("--user", "-u", metavar="U", help="Who runs it (default: the sandbox's user).")
@click.option("--out", "-o", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Write figures, tables and files that the code shows into DIR.")
@json_option("Print the result as JSON, without the artifacts' data.")
@pass_app
def run_verb(
    app: App, sandbox: str, file: str, language: str | None, session: str | None, timeout_s: float | None,
    user: str | None, out: Path | None, as_json: bool,
) -> int:
    """Run FILE (or stdin: -) in a session of a sandbox. Its variables stay for the next run.

    What the code prints and its last expression's value are printed; the exit code is 1 after an error.
    """
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    what = language or BY_SUFFIX.get(Path(file).suffix, "python")
    result = app.client.run_code(
        sandbox, text, language=what, **given(session=session, timeout_s=timeout_s, user=user))
    saved = save(result.artifacts, out) if out is not None else []
    if as_json:
        data = result.to_dict()
        data["artifacts"] = [
            {"mime": one.mime, "name": one.name, "bytes": len(one.data)} for one in result.artifacts]
        print_json(data)
    else:
        show(result)
        for path in saved:
            note(f"forkyard: wrote {path}")
        if out is None and result.artifacts:
            note(f"forkyard: {len(result.artifacts)} artifacts were shown; --out DIR keeps them")
    return EXIT_TIMED_OUT if result.timed_out else result.exit_code


def show(result: CodeResult) -> None:
    """Its output, value and error to stdout and stderr."""
    out, err = result.stdout, result.stderr
    if result.result is not None:
        out += result.result + "\n"
    if result.error is not None:
        err += (result.error.traceback or f"{result.error.name}: {result.error.value}").rstrip() + "\n"
    write_all(1, out.encode("utf-8", "replace"))
    write_all(2, err.encode("utf-8", "replace"))


def save(artifacts: list[Artifact], directory: Path) -> list[Path]:
    """Write artifacts into ``directory``, each under a name of its own.

    Raises:
        InvalidRequestError: it cannot be written there.
    """
    taken: set[str] = set()
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(artifacts, 1):
            # The guest chose the name: only its last part counts, and no link is followed.
            name = os.path.basename(one.name or "") or f"artifact{number}{SUFFIX.get(one.mime, '.bin')}"
            if name in taken or name in (".", ".."):
                name = f"{number}-{name}"
            taken.add(name)
            path = directory / name
            path.unlink(missing_ok=True)
            path.write_bytes(one.data)
            paths.append(path)
    except OSError as error:
        raise errors.InvalidRequestError(f"{error.filename}: {error.strerror}") from None
    return paths
