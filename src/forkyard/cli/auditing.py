"""``forkyard audit``: what was done, and the proof that nobody changed the record of it."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forkyard import errors
from forkyard.cli.app import EXIT_FAILED, App, note, pass_app, report
from forkyard.cli.output import print_json, print_table, record
from forkyard.cli.params import DURATION, complete_sandbox, given, json_option

if TYPE_CHECKING:
    from forkyard.types import AuditVerdict


class Since(click.ParamType):
    """A moment: a length of time ago (``10m``) or a date and time in ISO form; seconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return time.time() - DURATION.convert(value, param, ctx)


@click.group("audit")
def audit_verb() -> None:
    """Read, verify or copy the audit log."""


@audit_verb.command("ls", epilog="""\b
Examples:
  forkyard audit ls work
  forkyard audit ls --since 10m --json | jq -r .kind""")
@click.argument("which", metavar="[SANDBOX]", required=False, shell_complete=complete_sandbox)
@click.option("--sandbox", metavar="SANDBOX", help="The same as naming it.")
@click.option("--since", type=Since(), metavar="TIME", help="From then on: 10m (ago), or 2030-01-31T12:00.")
@json_option("Print one JSON record a line.")
@pass_app
def audit_ls(app: App, which: str | None, sandbox: str | None, since: float | None, as_json: bool) -> None:
    """List audit records, of all or of one sandbox, the oldest first."""
    records = app.client.audit(**given(sandbox=which or sandbox, since=since))
    if as_json:
        for item in records:
            sys.stdout.write(json.dumps(record(item), separators=(",", ":"), ensure_ascii=False) + "\n")
        return
    print_table(
        ("seq", "time", "sandbox", "what", "details"),
        [(str(item.seq), datetime.fromtimestamp(item.time).strftime("%F %T.%f")[:-3], item.sandbox or "-",
          item.kind, " ".join(f"{key}={_short(value)}" for key, value in item.data.items()))
         for item in records],
        empty="No records.",
    )


@audit_verb.command("show", epilog="""\b
Examples:
  forkyard audit show 1234
  forkyard audit show 1234 | jq .data.argv""")
@click.argument("seq", type=click.IntRange(min=1))
@pass_app
def audit_show(app: App, seq: int) -> None:
    """Print one audit record, all of it, as JSON."""
    print_json(record(app.client.audit(seq=seq)[0]))


@audit_verb.command("head", epilog="""\b
Examples:
  forkyard audit head                           keep this elsewhere
  forkyard audit head --sign > head.txt         with a signature of this home's key""")
@click.option("--sign", is_flag=True, help="Sign it with this home's key, which is made when first needed.")
@pass_app
def audit_head(app: App, sign: bool) -> None:
    """Print the newest record's number and hash, SEQ:HASH, for `audit verify --head` to find later."""
    newest = app.client.audit(limit=1)
    if not newest:
        raise errors.NotFoundError("the audit log is empty")
    head = newest[0].seq, newest[0].hash
    if not sign:
        print(f"{head[0]}:{head[1]}")
        return
    from forkyard import config
    from forkyard.audit.heads import key_of, sign_head

    home = config.load().home
    sys.stdout.write(sign_head(head, home))
    note(f"signed by {key_of(home)}.pub: keep a copy of that elsewhere as well")


@audit_verb.command("export", epilog="""\b
Examples:
  forkyard audit export audit.tar.gz
  forkyard audit verify audit.tar.gz --head head.txt --key audit-head.key.pub   on another machine""")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@pass_app
def audit_export(app: App, file: Path) -> None:
    """Write a copy of the audit log to FILE, a tar archive (.gz: compressed), to be verified anywhere."""
    from forkyard import config
    from forkyard.audit import export

    newest = app.client.audit(limit=1)
    export(config.load().home / "audit", file)
    note(f"{newest[0].seq if newest else 0} records in {file}")


class Head(click.ParamType):
    """``SEQ:HASH``, or a file that begins so: number, hash, and the file's text if it is one."""

    name = "seq:hash"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str, str]:
        from forkyard.audit.heads import parse_head

        if isinstance(value, tuple):
            return value
        text = ""
        try:
            if Path(value).is_file():
                text = Path(value).read_text()
            return *parse_head(text or value), text
        except (errors.InvalidRequestError, UnicodeDecodeError):
            self.fail(f"{value!r} is neither SEQ:HASH nor a file that begins so", param, ctx)


@audit_verb.command("verify", epilog="""\b
Examples:
  forkyard audit verify
  head=$(forkyard audit head)                   keep this elsewhere
  forkyard audit verify --head "$head"          later: nothing was cut off
  forkyard audit verify audit.tar.gz            a copy, without a daemon""")
@click.argument("source", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--head", type=Head(), metavar="SEQ:HASH|FILE",
              help="A record that has to be there, as `audit head` printed it.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="The public key that the head has to be signed with.")
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, path_type=Path),
              hidden=True)
@json_option()
@pass_app
def audit_verify(app: App, source: Path | None, head: tuple[int, str, str] | None, key: Path | None,
                 directory: Path | None, as_json: bool) -> int:
    """Check that no record was changed, removed, moved or put in; print the newest as SEQ:HASH.

    SOURCE is a copy: a directory of the log's files, or what `audit export` wrote; otherwise this
    machine's log is checked. The exit code is 1 if the log is not whole; the first record that is wrong
    is named. That its end was cut off shows only against a HEAD that was kept elsewhere.
    """
    if head is not None and not _trusted(head[2], key):
        report("the head was not signed with that key", "use the head and the key that you kept yourself")
        return EXIT_FAILED
    source = source or directory
    wanted = head[:2] if head is not None else None
    found = app.client.verify_audit(wanted) if source is None else _verify_files(source, wanted)
    if as_json:
        print_json({"ok": found.ok, "seq": found.seq, "why": found.why,
                    "head": f"{found.head[0]}:{found.head[1]}" if found.head else None})
    elif found.ok:
        print(f"{found.head[0]}:{found.head[1]}" if found.head else "0:")
        note(f"{found.seq} records, all of them whole")
    else:
        report(f"record {found.seq} is the first that is wrong: {found.why}")
    return 0 if found.ok else EXIT_FAILED


def _trusted(text: str, key: Path | None) -> bool:
    from forkyard.audit.heads import signed_by

    if key is not None:
        return signed_by(text, key)
    if "SIGNATURE" in text:
        note("the head's signature was not checked: give --key")
    return True


def _verify_files(source: Path, head: tuple[int, str] | None) -> AuditVerdict:
    from forkyard.audit import newest, verify
    from forkyard.types import AuditVerdict

    if source.is_dir() and not any(source.glob("*.jsonl")):
        raise errors.NotFoundError(f"{source} holds no audit log", hint="its files are YYYY-MM-DD.jsonl")
    return AuditVerdict(*verify(source, head), head=newest(source))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 100 else text[:97] + "..."
