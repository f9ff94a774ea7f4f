"""Figures and forms of a report; whose doing a loss was; when a time limit is the host's."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from rollout_samples import sample

from forkyard.rollouts.contention import Load, contended, starved
from forkyard.rollouts.episode import Meter, is_async, wants_episode
from forkyard.rollouts.journal import Memory, open_journal, pack_diff
from forkyard.rollouts.losses import loss
from forkyard.rollouts.progress import Board, Progress, shown
from forkyard.rollouts.report import Report, compare
from forkyard.rollouts.tree import Node, Tree
from forkyard.rollouts.types import Phases, Task, Verdict
from forkyard.types import AuditRecord, Change, Diff


def _report(*samples: Any, ks: tuple[int, ...] = (1,)) -> Report:
    return Report("r", list(samples), ks, 2, None)


def test_losses_count_apart_and_as_failures() -> None:
    report = _report(
        sample("a", 0), sample("a", 1, outcome="infra"), sample("b", 0, outcome="failed"),
        sample("b", 1, outcome="sandbox_broken"), sample("c", 0, outcome="timeout_contended", retries=1),
        sample("c", 1, outcome="grader_error"),
    )  # fmt: skip
    assert report.outcomes["infra"] == 1
    # c has no valid sample; a's only valid one passed; b broke its sandbox, which counts.
    assert report.score.value == pytest.approx((1 + 0) / 2)
    assert report.score.strict == pytest.approx((0.5 + 0 + 0) / 3)
    (rate,) = (rate for rate in report.rates if rate.name == "pass@1")
    assert rate.value == pytest.approx(0.5) and rate.short == ("c",)
    rows = {row.task: row for row in report.table}
    assert rows["a"].valid == 1 and rows["b"].valid == 2 and rows["c"].retries == 1
    assert math.isnan(rows["c"].reward) and rows["c"].strict == 0


def test_identical_samples_are_reported() -> None:
    report = _report(
        sample("a", 0, trajectory="x"), sample("a", 1, trajectory="y"), sample("a", 2, trajectory="x"),
        sample("b", 0, trajectory="x"), sample("b", 1, trajectory="z"),
        sample("b", 2, outcome="infra", trajectory="z"),
    )  # fmt: skip
    assert report.identical == {"a": [[0, 2]]}
    assert [row.identical for row in report.table] == [2, 0]


def test_suspicions_have_base_rates() -> None:
    canary = {"kind": "canary", "severity": "strong", "message": "m", "evidence": {}}
    report = _report(
        sample("a", 0, suspicions=[canary, canary]),
        sample("a", 1),
        sample("b", 0, suspicions=[canary]),
        sample("b", 1),
    )
    assert [(s["task"], s["base_rate"]) for s in report.suspicions] == [("a", 0.5), ("a", 0.5), ("b", 0.5)]


def test_where_the_time_went() -> None:
    phases = Phases(queue_s=5, start_s=1, policy_s=10, sandbox_s=4, freeze_s=0.5, grade_s=2)
    times = _report(sample("a", 0, phases=phases), sample("a", 1, phases=phases)).times
    assert (times.model_s, times.sandbox_s, times.queue_s) == (12, 8, 10)
    assert times.worker_hours == pytest.approx(27 / 3600) and times.sandbox_hours == pytest.approx(15 / 3600)


def _kept(path: Path) -> Report:
    diff = Diff([Change("/w/a", "file", 0o644)], [], [], patch="+<b>patched</b>\n")
    ran = {"seq": 1, "at": 1.0, "kind": "exec", "command": "echo <img src=x>", "exit_code": 3}
    story = {"log": [{"at": 1.0, "note": "</pre><script>alert(1)</script>"}], "commands": [ran],
             "outside": ["/etc/<hosts>"], "refused": {"/w/link": "it leads out"}}  # fmt: skip
    verdict = Verdict(False, 0.25, "<i>no</i>", {"t::<u>": "failed"}, {"why": [1]}, trusted=False)
    with open_journal(path, {"run": "r<1>"}) as journal:
        journal.append(
            sample("t", 0, outcome="failed", reward=0.25, verdict=verdict, message="<i>no</i>",
                   diff=journal.keep("diffs", "k", pack_diff(diff)),
                   episode=journal.keep("episodes", "k", json.dumps(story).encode()))
        )  # fmt: skip
        journal.append(sample("t", 1, outcome="infra", retries=2))
    return Report.load(path)


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    report = _kept(tmp_path / "run")
    text = report.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == text
    page = _Page()
    page.feed(text)
    assert page.links == [] and not {"script", "link", "img", "iframe", "b", "i", "u"} & set(page.tags)
    assert page.tags.count("svg") >= 4 and "url(" not in text and "@import" not in text
    shown_as_text = ("echo <img src=x>", "+<b>patched</b>", "alert(1)", "t::<u>", "/etc/<hosts>")
    for said in (*shown_as_text, "untrusted", "reward 0.250", "it leads out"):
        assert said in page.text, said


def test_the_page_draws_what_a_policy_searched(tmp_path: Path) -> None:
    root = Node(None)
    root.children = [Node(None, "<script>", 0.5, 1, root)]
    rows = Tree(root, root.children[0]).to_dict()
    with open_journal(tmp_path / "run", {"run": "r"}) as journal:
        for number, tree in enumerate((rows, [{"number": 0}], "a word", [{**rows[0], "score": "high"}])):
            story = {"log": [{"at": 1.0, "tree": tree}], "commands": [], "outside": [], "refused": {}}
            kept = journal.keep("episodes", f"k{number}", json.dumps(story).encode())
            journal.append(sample("t", number, episode=kept))
    text = Report.load(tmp_path / "run").to_html()
    assert text.count("A search tree of 2 nodes") == text.count("Search tree") == 1 and "<script>" not in text


def test_json_and_frames(tmp_path: Path) -> None:
    report = _kept(tmp_path / "run")
    data = json.loads(report.to_json())
    assert data["outcomes"] == {"failed": 1, "infra": 1} and len(data["samples"]) == 2
    assert json.loads(_report(sample("a", 0, outcome="infra")).to_json())["score"]["value"] is None
    pandas = pytest.importorskip("pandas")
    frame = report.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and list(frame["outcome"]) == ["failed", "infra"]
    assert {"policy_s", "sandbox_s", "reward", "valid"} <= set(frame.columns)


def test_reports_compare_and_pickle(tmp_path: Path) -> None:
    a = _report(sample("x", 0), sample("y", 0, outcome="failed"))
    b = _report(sample("x", 0), sample("y", 0))
    assert compare(a, b).difference == pytest.approx(0.5)
    report = pickle.loads(pickle.dumps(_kept(tmp_path / "run")))
    assert report.diff(report.samples[0]).patch == "+<b>patched</b>\n"
    memory = Memory({"run": "m"})
    memory.append(sample("x", 0, diff=memory.keep("diffs", "k", pack_diff(Diff([], [], [], "p")))))
    again = pickle.loads(pickle.dumps(Report.of(memory, [Task("x")], (1,), {}, 1)))
    assert again.diff(again.samples[0]).patch == "p"


def _record(kind: str, actor: str = "yard", **data: Any) -> AuditRecord:
    return AuditRecord(1, 1.0, kind, "sb_1", actor, data, "", "")


@pytest.mark.parametrize(
    ("records", "outcome", "host"),
    [
        ([_record("sandbox.failed", cause="host"), _record("sandbox.deleted")], "infra", True),
        ([_record("sandbox.failed", cause="guest"), _record("sandbox.deleted")], "sandbox_broken", False),
        ([_record("sandbox.failed", cause="unknown"), _record("sandbox.deleted")], "sandbox_broken", False),
        ([_record("sandbox.failed", cause="guest", oom=True)], "oom", False),
        ([_record("sandbox.deleted")], "infra", True),
        ([_record("sandbox.deleted", actor="uid:0/pid:7")], "sandbox_broken", False),
        ([], "sandbox_broken", False),
    ],
)
def test_whose_doing_a_loss_was(records: list[AuditRecord], outcome: str, host: bool) -> None:
    found = loss(records)
    assert (found.outcome, found.host) == (outcome, host)


def _load(at: float, idle: int, busy: int, steal: int = 0, waited: int | None = 0) -> Load:
    return Load(at, idle + busy + steal, idle, steal, waited)


def test_when_a_time_limit_is_the_hosts() -> None:
    before = _load(0, 0, 0)
    idle, full = _load(10, 1000, 1000, waited=10_000_000), _load(10, 0, 2000, waited=9_000_000)
    assert not starved(before, idle) and starved(before, full)
    assert not starved(before, _load(10, 0, 2000, waited=100_000)), "busy, but nothing waited"
    assert starved(before, _load(10, 1000, 700, steal=300)), "another tenant"
    assert not starved(before, _load(0.1, 0, 20, waited=100_000)), "too short to say"
    assert contended(before, full, used_cpu_s=4, cpus=1)
    assert not contended(before, full, used_cpu_s=9.5, cpus=1), "it had all it may use"
    assert not contended(before, idle, used_cpu_s=4, cpus=1)


def test_kinds_of_policies() -> None:
    async def later(episode: Any) -> None: ...

    class Callable_:
        async def __call__(self, sandbox: Any, task: Any) -> None: ...

    assert wants_episode(later) and is_async(later)
    assert not wants_episode(Callable_()) and is_async(Callable_())
    assert not is_async(lambda sandbox, task: None) and wants_episode(lambda episode, extra=1: None)


def test_errors_that_the_daemon_did_not_give_prove_nothing() -> None:
    meter, given = Meter(), ConnectionError("x")
    with pytest.raises(ConnectionError), meter.call():
        raise given
    assert not meter.gave(given)
    from forkyard.errors import CapacityError

    real = CapacityError("full")
    with pytest.raises(CapacityError), meter.call():
        raise real
    wrapped = RuntimeError("agent failed")
    wrapped.__cause__ = real
    assert meter.gave(real) and meter.gave(wrapped) and not meter.gave(CapacityError("full"))


def test_progress_counts(capsys: pytest.CaptureFixture[str]) -> None:
    board, seen = Board(4), []
    board.resumed([sample("a", 0)])
    with shown(board, seen.append):
        board.started()
        board.ended(sample("a", 1, outcome="failed"))
        board.left()
    last: Progress = seen[-1]
    assert (last.done, last.total, last.resumed, last.score) == (2, 4, 1, 0.5)
    assert last.left_s is not None and last.per_min > 0 and dict(last.outcomes) == {"passed": 1, "failed": 1}
    with shown(Board(3), True):
        pass
    assert capsys.readouterr().err == "0/3 samples, 0 running, score -, 0.0/min\n"
    board = Board(1)
    with shown(board, True):
        board.started()
        board.left()
        board.ended(sample("a", 0))
    assert [line[:11] for line in capsys.readouterr().err.splitlines()] == ["1/1 samples"], "once, not twice"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    board = Board(2)
    with shown(board, None):
        board.ended(sample("a", 0, outcome="failed"))
    assert "1/2" in terminal.getvalue() and "[failed 1]" in terminal.getvalue()


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample("a", 0).reward = 2.0  # type: ignore[misc]
