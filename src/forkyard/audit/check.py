"""Checking a log, or a copy of one, and making such a copy. Needs no daemon."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from forkyard.audit.log import GENESIS, HASH_TAIL, AuditLog, chain_hash, day_files, lines, parse
from forkyard.errors import InvalidRequestError, NotFoundError

__all__ = ["Verdict", "export", "newest", "verify"]

_DAY_FILE = re.compile(r"\d{4}-\d\d-\d\d\.jsonl")


class Verdict(NamedTuple):
    """``seq`` is the first record that is wrong, or the last one if all are right."""

    ok: bool
    seq: int
    why: str


def verify(source: Path, head: tuple[int, str] | None = None) -> Verdict:
    """Check the whole chain in a directory or in a file that :func:`export` made; with a ``head`` kept
    elsewhere, also that this record is in it, so that nothing was cut off or written anew.

    Blocks for about a second per 200,000 records: call it in a thread.

    Raises:
        InvalidRequestError: ``source`` is a file, and no export. NotFoundError: it is not there.
    """
    with _files_of(source) as directory:
        return _verify(directory, head)


def newest(source: Path) -> tuple[int, str] | None:
    """Number and hash of the last record in a directory or an export; None if it has none."""
    with _files_of(source) as directory:
        last = AuditLog(directory).read(limit=1)
    return (last[0].seq, last[0].hash) if last else None


@contextlib.contextmanager
def _files_of(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="forkyard-audit-") as scratch:
        _unpack(source, Path(scratch))
        yield Path(scratch)


def _verify(directory: Path, head: tuple[int, str] | None) -> Verdict:
    seq, prev = 0, GENESIS
    torn: tuple[int, str] | None = None
    for path in day_files(directory):
        raw = b""
        for _, raw_line in lines(path):
            line, ended = raw_line.removesuffix(b"\n"), raw_line.endswith(b"\n")
            record = parse(line) if ended else None
            if record is None:
                raw += raw_line
                torn = (len(raw.removesuffix(b"\n")), hashlib.sha256(raw.removesuffix(b"\n")).hexdigest())
                continue
            if torn is not None:
                said = record["data"]
                if record["kind"] != "recovered" or (said.get("torn_bytes"), said.get("sha256")) != torn:
                    return Verdict(
                        False, seq + 1, f"{path.name}: something that is no record stands before it"
                    )
                torn, raw = None, b""
            if record["seq"] != seq + 1:
                return Verdict(False, seq + 1, f"{path.name}: record {record['seq']} follows {seq}")
            if record["prev"] != prev:
                return Verdict(False, seq + 1, f"{path.name}: it does not follow from the record before it")
            if record["hash"] != chain_hash(prev, line[:-HASH_TAIL] + b"}"):
                return Verdict(False, seq + 1, f"{path.name}: its hash is not its content's")
            seq, prev = record["seq"], record["hash"]
            if head is not None and seq == head[0] and prev != head[1]:
                why = "it is not the record that was kept elsewhere: the log was written anew"
                return Verdict(False, seq, f"{path.name}: {why}")
    if torn is not None:
        return Verdict(False, seq + 1, "the last record is torn; opening the log seals it")
    if head is not None and head[0] > seq:
        return Verdict(False, seq + 1, "it is missing, and so is all up to the head: the end was cut off")
    return Verdict(True, seq, "")


def export(directory: Path, file: Path) -> None:
    """Write a copy of the log to ``file``, a tar archive that :func:`verify` checks anywhere.

    A record that is being written meanwhile is not in it. Blocks: call it in a thread.

    Raises:
        NotFoundError: there is no log in ``directory``.
    """
    found = day_files(directory)
    if not found:
        raise NotFoundError(f"{directory} holds no audit log", hint="its files are YYYY-MM-DD.jsonl")
    part = file.with_name(f"{file.name}.part")
    try:
        with tarfile.open(part, "w:gz" if file.suffix in (".gz", ".tgz") else "w") as tar:
            for path in found:
                with open(path, "rb") as day:
                    entry = tar.gettarinfo(arcname=path.name, fileobj=day)
                    entry.size = _whole_bytes(path)
                    entry.uid = entry.gid = 0
                    entry.uname = entry.gname = ""
                    tar.addfile(entry, day)
        os.chmod(part, 0o600)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _whole_bytes(path: Path) -> int:
    """How much of a file are lines that have ended."""
    end = 0
    for offset, line in lines(path):
        if line.endswith(b"\n"):
            end = offset + len(line)
    return end


def _unpack(file: Path, directory: Path) -> None:
    """Only files of days are taken out of an archive, whatever else is in it."""
    try:
        with tarfile.open(file) as tar:
            for entry in tar:
                if entry.isreg() and _DAY_FILE.fullmatch(entry.name):
                    day = tar.extractfile(entry)
                    assert day is not None
                    with open(directory / entry.name, "wb") as copy:
                        while piece := day.read(1 << 20):
                            copy.write(piece)
    except FileNotFoundError:
        raise NotFoundError(f"there is no {file}") from None
    except tarfile.TarError as error:
        raise InvalidRequestError(
            f"{file} is no copy of an audit log: {error}", hint="forkyard audit export makes one"
        ) from error
    if not day_files(directory):
        raise InvalidRequestError(f"{file} holds no audit log")
