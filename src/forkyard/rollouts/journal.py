"""A run's directory: what each sample came to, one line each, written and synced as it ends.

    run.json             what this is: format, the run's id, when it began
    tasks.json           the tasks, as far as grading again needs them
    samples.jsonl        one line per sample; the last one for a sample counts
    transcripts/KEY.msgpack   what the policy returned
    diffs/KEY.msgpack    what it changed
    episodes/KEY.json    its log, its commands, and what looked suspicious

Whatever a line refers to is on the disk before the line is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from forkyard.errors import ConflictError, InvalidRequestError, NotFoundError
from forkyard.rollouts.types import Sample
from forkyard.types import Diff

FORMAT = 1
HEAD, TASKS, LINES, LOCK = "run.json", "tasks.json", "samples.jsonl", "lock"
KINDS = ("transcripts", "diffs", "episodes")


class Memory:
    """What a run without a directory keeps: the same, for as long as the process lives."""

    path: Path | None = None
    dropped = 0

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = {"format": FORMAT, **head}
        self.samples: dict[tuple[str, int], Sample] = {}
        self.files: dict[str, bytes] = {}
        self.tasks: dict[str, Any] = {}

    @property
    def run(self) -> str:
        return str(self.head["run"])

    def append(self, sample: Sample) -> None:
        self.samples[sample.task, sample.sample] = sample

    def keep(self, kind: str, key: str, data: bytes) -> str:
        name = _file_name(kind, key)
        self.files[name] = data
        return name

    def keep_tasks(self, tasks: dict[str, Any]) -> None:
        self.tasks = tasks

    def read(self, name: str) -> bytes:
        return self.files[name]


class Journal:
    """A run's directory, locked while it is open for writing. See :func:`open_journal`.

    Attributes:
        run: The run's id, of which the seeds are made.
        samples: What has ended, by task and number.
        dropped: How many bytes of a line that was being written when its process died.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.samples: dict[tuple[str, int], Sample] = {}
        self.dropped = 0

    @property
    def run(self) -> str:
        return str(self.head["run"])

    def _begin(self, head: dict[str, Any]) -> None:
        for kind in KINDS:
            (self.path / kind).mkdir(exist_ok=True)
        if (self.path / HEAD).exists():
            self.head = read_head(self.path)
            self.samples, self.dropped = self._recover()
            return
        self.head = {"format": FORMAT, **head}
        write_whole(self.path / HEAD, json.dumps(self.head, indent=1).encode())

    def _recover(self) -> tuple[dict[tuple[str, int], Sample], int]:
        """The samples; what follows the last end of a line is cut off."""
        path = self.path / LINES
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        return _parse(path, data[:whole]), len(data) - whole

    def append(self, sample: Sample) -> None:
        """Write and sync one line, or leave the file as it was (a full disk). Blocks."""
        line = msgspec.json.encode(sample, enc_hook=shown) + b"\n"
        with (self.path / LINES).open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / LINES))
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), before)
                raise
        self.samples[sample.task, sample.sample] = sample

    def keep(self, kind: str, key: str, data: bytes) -> str:
        """Write a file that a line will refer to; its name within the directory. Blocks."""
        name = _file_name(kind, key)
        write_whole(self.path / name, data)
        return name

    def keep_tasks(self, tasks: dict[str, Any]) -> None:
        """Replace what is known of the tasks."""
        write_whole(self.path / TASKS, json.dumps(tasks, ensure_ascii=False).encode())

    def read(self, name: str) -> bytes:
        """A file that a line refers to. Raises NotFoundError."""
        return read_file(self.path, name)


@contextlib.contextmanager
def open_journal(path: Path, head: dict[str, Any], *, new: bool = False) -> Iterator[Journal]:
    """The run's directory, made if it is not there, held by this process alone.

    Args:
        head: For ``run.json`` of a new run.
        new: Begin again: what is there is moved into ``before-N`` within the directory.

    Raises:
        ConflictError: another process writes to it, or it holds something else.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / HEAD).exists() and {item.name for item in path.iterdir()} - {LOCK, *KINDS}:
        raise ConflictError(
            f"{path} is not empty and holds no run", hint="name a directory that is not there yet"
        )
    lock = (path / LOCK).open("a+")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConflictError(
                f"{path} is being written by process {lock.read().strip() or 'unknown'}",
                hint="wait for it, or name another directory",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        if new:
            _set_aside(path)
        journal = Journal(path)
        journal._begin(head)
        yield journal
    finally:
        lock.close()


def _file_name(kind: str, key: str) -> str:
    return f"{kind}/{key}.{'json' if kind == 'episodes' else 'msgpack'}"


def _set_aside(path: Path) -> None:
    kept = [name for name in (HEAD, TASKS, LINES, *KINDS) if (path / name).exists()]
    if HEAD not in kept:
        return
    number = 1
    while (path / f"before-{number}").exists():
        number += 1
    (path / f"before-{number}").mkdir()
    for name in reversed(kept):
        (path / name).rename(path / f"before-{number}" / name)


def read_head(path: Path) -> dict[str, Any]:
    """``run.json``. Raises NotFoundError, InvalidRequestError (not a run, or of a later version)."""
    try:
        head = json.loads((path / HEAD).read_bytes())
        version = head["format"]
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} holds no run", hint="forkyard eval ... --out DIRECTORY makes one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path / HEAD} cannot be read: {error}") from None
    if version != FORMAT:
        raise InvalidRequestError(
            f"{path} is a run of format {version}, this version reads {FORMAT}",
            hint="use the version it is of",
        )
    return dict(head)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a run that may be going on; a line that is being written is left out."""
    read_head(path)
    lines = path / LINES
    data = lines.read_bytes() if lines.exists() else b""
    return list(_parse(lines, data[: data.rfind(b"\n") + 1]).values())


def read_tasks(path: Path) -> dict[str, Any]:
    """What ``tasks.json`` tells of a run's tasks; nothing where it has none yet."""
    try:
        return dict(json.loads((path / TASKS).read_bytes()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"{path / TASKS} is damaged: {error}", hint="remove it; evaluate writes it anew"
        ) from None


def _parse(path: Path, data: bytes) -> dict[tuple[str, int], Sample]:
    found: dict[tuple[str, int], Sample] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            sample = msgspec.json.decode(line, type=Sample)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                f"line {number} of {path} is damaged: {error}",
                hint="remove the line; that sample is run again",
            ) from None
        found[sample.task, sample.sample] = sample
    return found


def read_file(path: Path, name: str) -> bytes:
    """A file that a line refers to. Raises NotFoundError."""
    try:
        return (path / name).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"{path / name} is gone, and a sample refers to it") from None


def pack_diff(diff: Diff) -> bytes:
    return msgspec.msgpack.encode(diff)


def unpack_diff(data: bytes) -> Diff:
    return msgspec.msgpack.decode(data, type=Diff)


def pack_transcript(value: Any) -> tuple[bytes, str]:
    """A policy's return value, and what could not be kept of it ("" if nothing)."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_array), ""
    except Exception as error:
        # Also what an object's own methods raise: it costs the transcript, not the run.
        text = {"repr": printable(_repr(value)[:100_000])}
        return msgspec.msgpack.encode(text), f"the transcript is not plain data ({error}): kept as text"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def printable(text: str) -> str:
    """``text`` as UTF-8 can hold it: half characters, of bytes that were none, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def _array(value: Any) -> Any:
    """An array (numpy's, torch's) as lists of its numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")


def shown(value: Any) -> Any:
    """What a verdict's evidence may hold besides JSON's own types, as a reader sees it."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_whole(path: Path, data: bytes) -> None:
    """All of ``data`` or the file as it was, also after a crash."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
