"""A run's directory: torn lines, locks, what is set aside, and what goes in and comes out untouched."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_samples import sample

from forkyard.errors import ConflictError, InvalidRequestError, NotFoundError
from forkyard.rollouts.journal import (
    open_journal,
    pack_diff,
    pack_transcript,
    read_samples,
    unpack_diff,
)
from forkyard.rollouts.report import Report
from forkyard.rollouts.types import Verdict
from forkyard.types import Change, Diff

HEAD = {"run": "r1", "created_at": 1.0}


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    verdict = Verdict(True, 0.5, "half", {"a::b": "passed"}, {"n": [1, {"x": None}]}, trusted=False)
    first = sample("tä/sk", 0, verdict=verdict, metadata={"deep": [1, 2.5]}, audit=(3, 9))
    with open_journal(tmp_path / "run", HEAD) as journal:
        journal.append(first)
        journal.append(sample("t", 1, outcome="infra"))
    assert read_samples(tmp_path / "run") == [first, sample("t", 1, outcome="infra")]
    with open_journal(tmp_path / "run", {"run": "other"}) as journal:
        assert journal.run == "r1" and journal.samples["tä/sk", 0] == first


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    with open_journal(tmp_path, HEAD) as journal:
        for number in range(3):
            journal.append(sample("t", number))
    lines = tmp_path / "samples.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-cut])
    assert [s.sample for s in read_samples(tmp_path)] == [0, 1]
    with open_journal(tmp_path, HEAD) as journal:
        assert sorted(journal.samples) == [("t", 0), ("t", 1)] and journal.dropped > 0
        journal.append(sample("t", 2))
    assert lines.read_bytes() == whole


def test_a_disk_that_is_full_keeps_what_ended(tmp_path: Path) -> None:
    """The line that did not fit leaves nothing behind: others may follow, and the run goes on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_journal(tmp_path / "run", {"run": "r"}) as journal:
        journal.append(sample("t", 0))
        lines = tmp_path / "run/samples.jsonl"
        before = lines.read_bytes()
        # What fits is written, as on a disk with a little room.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        try:
            with pytest.raises(OSError, match="No space"):
                journal.append(sample("t", 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert lines.read_bytes() == before and set(journal.samples) == {("t", 0)}
        journal.append(sample("t", 2))
    assert [one.sample for one in Report.load(tmp_path / "run").samples] == [0, 2]


def test_tasks_that_are_damaged_are_told(tmp_path: Path) -> None:
    with open_journal(tmp_path / "run", {"run": "r"}) as journal:
        journal.keep_tasks({"t": {}})
        (tmp_path / "run/tasks.json").write_text('{"t"')
    with pytest.raises(InvalidRequestError, match=r"tasks\.json is damaged"):
        Report.load(tmp_path / "run")


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEAD) as journal:
        journal.append(sample("t", 0))
        journal.append(sample("t", 1))
    lines = tmp_path / "samples.jsonl"
    first, second = lines.read_text().splitlines()
    lines.write_text(f"{first[:40]}\n{second}\n")
    with pytest.raises(InvalidRequestError, match="line 1 of"):
        read_samples(tmp_path)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forkyard.rollouts.journal import open_journal\n"
        f"with open_journal(Path({str(tmp_path)!r}), {HEAD!r}):\n"
        "    print('mine', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None and other.stdout.readline() == b"mine\n"
        with pytest.raises(ConflictError, match=f"process {other.pid}"), open_journal(tmp_path, HEAD):
            pass
        other.kill()
    with open_journal(tmp_path, HEAD):
        pass


def test_new_sets_aside_what_was_there(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEAD) as journal:
        journal.append(sample("t", 0))
        journal.keep("diffs", "k", b"x")
    for number in (1, 2):
        with open_journal(tmp_path, {"run": f"again{number}"}, new=True) as journal:
            assert journal.run == f"again{number}" and not journal.samples
        assert (tmp_path / f"before-{number}" / "run.json").exists()
    assert [s.task for s in read_samples(tmp_path / "before-1")] == ["t"]
    assert (tmp_path / "before-1" / "diffs" / "k.msgpack").read_bytes() == b"x"


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConflictError, match="holds no run"), open_journal(tmp_path, HEAD):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(NotFoundError):
        Report.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InvalidRequestError, match="format 99"):
        Report.load(tmp_path)


def test_transcripts_are_untouched(tmp_path: Path) -> None:
    numbers = {"ids": [0, 2**63, -1], "logprobs": [-0.1, math.inf, 5e-324], "raw": b"\0\xff", "text": "é\0"}
    data, lost = pack_transcript(numbers)
    with open_journal(tmp_path, HEAD) as journal:
        name = journal.keep("transcripts", "k", data)
        journal.append(sample("t", 0, transcript=name))
    report = Report.load(tmp_path)
    assert report.transcript(report.samples[0]) == numbers and lost == ""
    data, lost = pack_transcript({"model": object()})
    assert b"object object" in data and "not plain data" in lost


def test_diffs_are_untouched() -> None:
    change = Change("/a/caf\\xe9", "file", 0o755, raw_path=b"/a/caf\xe9", data=b"\0\xff", size=2)
    diff = Diff([change], [], [Change("/b", "link", None, "link", 0o777, target=None)], patch="x")
    assert unpack_diff(pack_diff(diff)) == diff
