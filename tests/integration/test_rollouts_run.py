"""Rollouts on real sandboxes: how samples end, what is tried again, and what an interruption costs."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rollout_kit as kit
from image_kit import tar_of
from rollout_kit import Answer, until
from small_root import write_root
from yard_home import YardHome, client, yard  # noqa: F401

from forkyard import Client
from forkyard.errors import CommandFailedError, ConflictError, InvalidRequestError, NotFoundError
from forkyard.rollouts import (
    Commands,
    Dockerfile,
    Image,
    Limits,
    Report,
    Task,
    Timeouts,
    aevaluate,
    evaluate,
    regrade,
)
from forkyard.rollouts.keys import sample_seed
from forkyard.rollouts.prepare import LABEL

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def idle_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that runs out is never the host's doing, whoever else loads this machine now."""
    monkeypatch.setattr("forkyard.rollouts.contention.STOLEN", 2.0)
    monkeypatch.setattr("forkyard.rollouts.contention.WAITED", 2.0)


@pytest.mark.usefixtures("idle_host")
def test_how_samples_end(client: Client, tmp_path: Path) -> None:  # noqa: F811
    tasks = kit.misbehaving()
    report = evaluate(tasks, kit.misbehave, client=client, out=tmp_path / "run", parallel=2)
    ended = {sample.task: sample for sample in report.samples}
    assert {name: sample.outcome for name, sample in ended.items()} == {name: name for name in ended}
    assert len(ended) == len(tasks) and [s.task for s in report.samples] == [t.id for t in tasks]
    assert {s.task: s.reward for s in report.samples if s.reward} == {"passed": 1.0}
    assert all(sample.retries == 0 and sample.valid for sample in report.samples)
    assert re.fullmatch(r".*spoke in tongues \(rollout_kit\.py:\d+\)", ended["policy_error"].message)
    log = report.episode(ended["policy_error"])["log"]
    assert any("ValueError" in line.get("traceback", "") for line in log)
    assert [s["kind"] for s in report.suspicions] == ["self-inflicted-loss"]
    phases = ended["policy_timeout"].phases
    assert 2 <= phases.policy_s < 20 and phases.sandbox_s > 1.5 and phases.start_s > 0
    passed = ended["passed"]
    assert report.transcript(passed) == {"did": "passed"} and passed.verdict.tests == {"answer": "True"}
    assert report.diff(passed).paths[-1].endswith("/answer")
    assert report.diff(ended["failed"]) is not None and report.diff(ended["policy_error"]) is None
    commands = report.episode(passed)["commands"]
    assert [c["command"] for c in commands if c["kind"] == "exec"] == ["echo 42 > answer"]
    assert passed.audit[0] <= commands[0]["seq"] <= passed.audit[1]
    assert client.list_sandboxes() == []
    again = Report.load(tmp_path / "run")
    assert again.outcomes == report.outcomes and again.score == report.score
    assert "spoke in tongues" in again.to_html()


def test_breaking_the_sandbox_buys_no_second_try(client: Client) -> None:  # noqa: F811
    begun: Counter[int] = Counter()

    def policy(episode: Any) -> None:
        begun[episode.sample] += 1
        if episode.sample < 3:
            kit.solve(episode.sandbox, episode.task)
        else:
            episode.sandbox.shell("kill -9 1", user="root")

    report = evaluate([kit.task()], policy, samples=10, client=client)
    assert report.outcomes == {"passed": 3, "sandbox_broken": 7}
    assert report.score.value == report.score.strict == pytest.approx(0.3)
    assert set(begun.values()) == {1} and len(begun) == 10


def test_what_the_host_lost_is_tried_again(client: Client, yard: YardHome) -> None:  # noqa: F811
    begun: list[str] = []

    def policy(episode: Any) -> None:
        begun.append(episode.sandbox.id)
        if len(begun) < 3:
            Client(home=yard.home).shutdown("delete")
        kit.solve(episode.sandbox, episode.task)

    report = evaluate([kit.task()], policy, client=client)
    (sample,) = report.samples
    assert (sample.outcome, sample.retries, len(set(begun))) == ("passed", 2, 3)

    def unlucky(episode: Any) -> None:
        begun.append(episode.sandbox.id)
        Client(home=yard.home).shutdown("delete")
        kit.solve(episode.sandbox, episode.task)

    begun.clear()
    report = evaluate([kit.task()], unlucky, client=client)
    (sample,) = report.samples
    assert (sample.outcome, sample.retries, sample.valid, len(begun)) == ("infra", 2, False, 3)
    assert report.score.strict == 0 and report.score.value != report.score.value


def test_a_killed_daemon_costs_no_sample(client: Client, yard: YardHome) -> None:  # noqa: F811
    killed: list[int] = []
    once = threading.Lock()

    def policy(sandbox: Any, task: Task) -> None:
        with once:
            if not killed:
                killed.append(yard.pid)
                os.kill(killed[0], signal.SIGKILL)
        kit.solve(sandbox, task)

    report = evaluate([kit.task()], policy, samples=2, client=client, parallel=2)
    assert report.outcomes == {"passed": 2} and yard.pid != killed[0]


RUN = """
import sys
sys.path[:0] = {paths!r}
import rollout_kit as kit
from forkyard import Client
from forkyard.rollouts import evaluate
evaluate(kit.several(), kit.slow, samples=4, out={out!r}, parallel=2, client=Client(home={home!r}))
"""


def test_an_interrupted_run_goes_on(
    client: Client, yard: YardHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    out, begun = tmp_path / "run", tmp_path / "begun"
    monkeypatch.setenv("KIT_BEGUN", str(begun))
    code = RUN.format(paths=sys.path, out=str(out), home=str(yard.home))
    lines = out / "samples.jsonl"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until(lambda: process.poll() is not None or (lines.exists() and lines.read_bytes().count(b"\n") >= 4))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it was over too soon"
    before = Report.load(out)
    assert 4 <= len(before.samples) < 12
    assert before.missing == 12 - len(before.samples)
    assert f"incomplete: {before.missing} more are to come" in str(before)
    until(lambda: client.list_sandboxes() == [])
    # The line that was being written.
    with lines.open("ab") as file:
        file.write(lines.read_bytes().splitlines()[0][:100])
    seen: list[Any] = []
    report = evaluate(
        kit.several(), kit.slow, samples=4, out=out, parallel=2, client=client, progress=seen.append
    )
    assert report.outcomes == {"passed": 12} and report.run == before.run
    assert len(lines.read_bytes().splitlines()) == 12
    assert {(s.task, s.sample) for s in report.samples} == {(f"t{t}", n) for t in range(3) for n in range(4)}
    ended = {(s.task, s.sample): s for s in before.samples}
    assert all(report.samples.count(sample) == 1 for sample in before.samples)
    tries = Counter(tuple(line.split()) for line in begun.read_text().splitlines())
    assert {tries[task, str(number)] for task, number in ended} == {1}
    assert (seen[0].resumed, seen[-1].done) == (len(ended), 12)
    assert Report.load(out).missing == 0 and "incomplete" not in str(Report.load(out))
    again = evaluate(kit.several(), kit.slow, samples=4, out=out, client=client)
    assert again.samples == report.samples and sum(tries.values()) == len(begun.read_text().splitlines())
    more = evaluate(kit.several(), kit.slow, samples=5, out=out, client=client)
    assert more.outcomes == {"passed": 15} and set(map(repr, report.samples)) < set(map(repr, more.samples))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("task or grader", {"tasks": [kit.task(instruction="otherwise")]}),
        ("task or grader", {"tasks": [kit.task(grader=Answer("7"))]}),
        ("limits", {"tasks": [kit.task(limits=Limits(mem_mb=300))]}),
        ("prepared state", {"tasks": [kit.task(files={"x": "1"})]}),
        ("policy", {"version": "2"}),
        ("grade", {"grade": "final"}),
    ],
)
def test_another_key_is_refused(
    client: Client, tmp_path: Path, what: str, change: dict[str, Any]  # noqa: F811
) -> None:
    given: dict[str, Any] = {"tasks": [kit.task()], "version": "1", "out": tmp_path, "client": client}
    evaluate(policy=kit.solve, **given)
    kept = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(ConflictError, match=f"of another {what}"):
        evaluate(policy=kit.fail, **given | change)
    assert (tmp_path / "samples.jsonl").read_bytes() == kept
    if what == "policy":
        report = evaluate(policy=kit.fail, new=True, **given | change)
        assert report.outcomes == {"failed": 1} and (tmp_path / "before-1/samples.jsonl").read_bytes() == kept


def test_each_sample_has_its_seed(client: Client) -> None:  # noqa: F811
    async def policy(episode: Any) -> list[Any]:
        said = await episode.sandbox.shell("echo $FORKYARD_SEED $COLOUR")
        return [episode.seed, said.stdout.split(), episode.sample]

    tasks = [kit.task("a", env={"COLOUR": "red"}, grader=None), kit.task("b", grader=None)]
    report = evaluate(tasks, policy, samples=2, client=client, run="known")
    told = [report.transcript(sample) for sample in report.samples]
    assert [seed for seed, _, _ in told] == [s.seed for s in report.samples]
    assert [s.seed for s in report.samples] == [sample_seed("known", t, n) for t in "ab" for n in (0, 1)]
    assert told[0][1] == [str(told[0][0]), "red"] and told[2][1] == [str(told[2][0])]
    assert len({seed for seed, _, _ in told}) == 4 and report.identical == {}
    # Nothing grades: it is through, and worth nothing.
    assert report.outcomes == {"passed": 4} and report.score.value == 0


def test_warm_programs_share_their_generator(client: Client) -> None:  # noqa: F811
    client.create_sandbox("warm")
    client.run_code("warm", "import random; random.seed(1)", timeout_s=60)
    client.snapshot("warm", "dice")
    client.delete_sandbox("warm")
    task = kit.task(prepare="dice", grader=None)
    report = evaluate([task], kit.roll, samples=3, client=client)
    assert report.identical == {"answer": [[0, 1, 2]]}
    assert "identical" in str(report)

    def seeded(episode: Any) -> float:
        episode.sandbox.run_code("import os; random.seed(int(os.environ.get('FORKYARD_SEED', 1)))")
        episode.sandbox.run_code(f"random.seed({episode.seed})")
        return kit.roll(episode)

    assert evaluate([task], seeded, samples=3, client=client).identical == {}


def test_states_are_prepared_once_and_kept(client: Client) -> None:  # noqa: F811
    prepare = Commands(["echo built >> log", "mkdir -p sub"], timeout_s=60)
    tasks = [kit.task(f"t{n}", prepare=prepare, files={"sub/given": "g", "raw": b"\0"}) for n in range(3)]
    seen: list[str] = []

    def policy(sandbox: Any, task: Task) -> None:
        seen.append(sandbox.shell("cat log sub/given; stat -c %s raw").stdout)
        kit.solve(sandbox, task)

    report = evaluate(tasks, policy, client=client, parallel=3)
    assert report.outcomes == {"passed": 3} and seen == ["built\ng1\n"] * 3
    (kept,) = client.list_snapshots(LABEL)
    assert {sample.prepared for sample in report.samples} == {kept.name}
    evaluate(tasks, policy, client=client)
    assert [one.id for one in client.list_snapshots(LABEL)] == [kept.id]
    # Another process that prepares the same at the same time waits for this one.
    both = [threading.Thread(target=evaluate, args=([kit.task(prepare=Commands(["sleep 1"]))], kit.solve),
                             kwargs={"client": client}) for _ in range(2)]  # fmt: skip
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(client.list_snapshots(LABEL)) == 2


def test_prepared_states_are_evicted_by_last_use(client: Client) -> None:  # noqa: F811
    def tasks(*numbers: int) -> list[Task]:
        return [kit.task(f"t{n}", prepare=Commands([f"echo {n} > n"])) for n in numbers]

    def names() -> set[str | None]:
        return {one.name for one in client.list_snapshots(LABEL)}

    first = evaluate(tasks(1), kit.solve, client=client)
    # With no room for what is not in use, each state goes when the next one is made.
    report = evaluate(tasks(2, 3), kit.solve, client=client, disk_budget_mb=0, parallel=1)
    assert report.outcomes == {"passed": 2} and first.samples[0].prepared not in names()
    again = evaluate(tasks(1), kit.solve, client=client)
    assert again.outcomes == {"passed": 1} and first.samples[0].prepared in names()


def test_what_cannot_be_prepared_is_told(client: Client) -> None:  # noqa: F811
    late = kit.task("late", prepare=Commands(["sleep 100"]), timeouts=Timeouts(prepare_s=2))
    report = evaluate([late, kit.task("good")], kit.solve, client=client)
    said = {sample.task: (sample.outcome, sample.message) for sample in report.samples}
    assert said["late"][0] == "infra" and "was not prepared within 2 s" in said["late"][1]
    assert said["good"][0] == "passed"
    assert client.list_sandboxes() == []


def test_a_mistake_in_prepare_ends_the_run_at_once(client: Client, tmp_path: Path) -> None:  # noqa: F811
    """It is no sample's outcome: none could be made. What has ended is kept."""
    good, typo = kit.task("good"), kit.task("typo", prepare=Commands(["true", "echo said; pipp install x"]))
    assert evaluate([good], kit.solve, client=client, out=tmp_path / "run").outcomes == {"passed": 1}
    told_of = "'typo'.* command 2 of 2, 'echo said; pipp .*exited with 127"
    with pytest.raises(CommandFailedError, match=told_of) as told:
        evaluate([good, typo], kit.solve, client=client, out=tmp_path / "run")
    assert "pipp: not found" in str(told.value) and told.value.result.stdout == "said\n"
    closed = kit.task("closed", prepare=Commands(["getent hosts index.invalid"]))
    with pytest.raises(CommandFailedError, match=r"may not reach index\.invalid: see egress_allow"):
        evaluate([closed], kit.solve, client=client)
    with pytest.raises(NotFoundError, match="no-such-template"):
        evaluate([kit.task("absent", prepare="no-such-template")], kit.solve, client=client)
    assert client.list_sandboxes() == []
    assert evaluate([good], kit.solve, client=client, out=tmp_path / "run").outcomes == {"passed": 1}


def test_a_dockerfile_is_a_prepared_state(client: Client, tmp_path: Path) -> None:  # noqa: F811
    text = "FROM forkyard/base\nUSER root\nARG WHO\nRUN echo $WHO > /etc/who\nWORKDIR /srv/app\n"
    (tmp_path / "Dockerfile").write_text(text)
    task = kit.task(prepare=Dockerfile(tmp_path, args={"WHO": "me"}), user="root")

    def policy(sandbox: Any, task: Task) -> str:
        kit.solve(sandbox, task)
        return str(sandbox.shell("pwd; cat /etc/who; id -un").stdout)

    report = evaluate([task], policy, client=client)
    assert report.outcomes == {"passed": 1}, report.samples[0].message
    assert report.transcript(report.samples[0]) == "/srv/app\nme\nroot\n"


def test_an_image_is_a_prepared_state(client: Client, tmp_path: Path) -> None:  # noqa: F811
    write_root(tmp_path / "root", programs=True)
    (tmp_path / "root/etc/made-of").write_text("a tar\n")
    archive = tar_of(tmp_path / "root", tmp_path / "root.tar")
    task = kit.task(prepare=Image(str(archive)), files={"given": tmp_path / "root/usr/local/bin/counter"})

    def policy(sandbox: Any, task: Task) -> str:
        kit.solve(sandbox, task)
        return str(sandbox.shell("pwd; cat /etc/made-of; test -x given && echo runs", check=True).stdout)

    report = evaluate([task], policy, samples=2, client=client)
    assert report.outcomes == {"passed": 2}, report.samples[0].message
    assert report.transcript(report.samples[1]) == "/home/user\na tar\nruns\n"


def test_grading_again_needs_no_policy(client: Client, tmp_path: Path) -> None:  # noqa: F811
    def policy(episode: Any) -> None:
        (kit.solve if episode.sample else kit.fail)(episode.sandbox, episode.task)

    tasks = [kit.task("a", files={"given": "x"}), kit.task("b", prepare=Commands(["true"]))]
    report = evaluate(tasks, policy, samples=2, client=client, out=tmp_path)
    assert report.outcomes == {"passed": 2, "failed": 2}
    for snapshot in client.list_snapshots(LABEL):
        client.delete_snapshot(snapshot.id)
    again = regrade(tmp_path, Answer("41"), client=client)
    assert [s.outcome for s in again.samples] == ["passed", "failed", "passed", "failed"]
    assert [s.outcome for s in report.samples] == ["failed", "passed", "failed", "passed"]
    per_task = regrade(report, lambda task: Answer("41" if task.id == "a" else "42"), client=client)
    assert [s.outcome for s in per_task.samples] == ["passed", "failed", "failed", "passed"]
    assert Report.load(tmp_path).outcomes == report.outcomes
    with pytest.raises(NotFoundError):
        regrade(tmp_path / "no-run", Answer())
    with pytest.raises(InvalidRequestError, match="does not keep how it was graded"):
        regrade(tmp_path, client=client)
    with pytest.raises(InvalidRequestError, match="neither a grader nor a function"):
        regrade(tmp_path, {"a": Answer("41")}, client=client)  # type: ignore[arg-type]


def test_a_grader_that_fails_is_not_the_policys_fault(client: Client) -> None:  # noqa: F811
    class Broken(Answer):
        async def grade(self, grading: Any) -> Any:
            raise ZeroDivisionError("in the grader")

    report = evaluate([kit.task(grader=Broken()), kit.task("good")], kit.solve, client=client)
    assert [s.outcome for s in report.samples] == ["grader_error", "passed"]
    assert "in the grader" in report.samples[0].message
    assert report.score.value == 1 and report.score.strict == 0.5


def test_a_time_limit_on_a_starved_host(client: Client) -> None:  # noqa: F811
    spin = [sys.executable, "-c", "while True: pass"]
    hogs: list[subprocess.Popen[bytes]] = []
    begun: list[int] = []

    def policy(episode: Any) -> None:
        begun.append(episode.sample)
        if len(begun) == 1:
            hogs.extend(subprocess.Popen(spin) for _ in range(4 * (os.cpu_count() or 1)))
            episode.sandbox.shell("sleep 1000")
        for hog in hogs:
            hog.kill()
        kit.solve(episode.sandbox, episode.task)

    task = kit.task(timeouts=Timeouts(policy_s=4))

    try:
        report = evaluate([task], policy, client=client)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    (sample,) = report.samples
    assert (sample.outcome, sample.retries, len(begun)) == ("passed", 1, 2)


@pytest.mark.usefixtures("idle_host")
def test_a_policy_that_is_late_is_told_and_left(client: Client) -> None:  # noqa: F811
    ended = threading.Event()

    def policy(episode: Any) -> None:
        while not episode.cancelled:
            ended.wait(0.01)
        ended.set()

    report = evaluate([kit.task(timeouts=Timeouts(policy_s=1))], policy, client=client)
    assert report.outcomes == {"policy_timeout": 1} and ended.wait(10)


def test_what_a_policy_forks_goes_with_it(client: Client) -> None:  # noqa: F811
    async def policy(sandbox: Any, task: Task) -> str:
        forks = (await sandbox.fork(2)).forks
        said = await sandbox.client.sandbox(forks[0].id).shell("echo 42 > answer; cat answer")
        await sandbox.shell(f"echo {said.stdout.strip()} > answer")
        return str(said.stdout)

    report = evaluate([kit.task()], policy, client=client)
    assert report.outcomes == {"passed": 1} and client.list_sandboxes() == []


async def test_from_a_loop_that_runs(client: Client, yard: YardHome) -> None:  # noqa: F811
    seen: list[Any] = []
    report = await aevaluate([kit.task()], kit.solve, client=client, progress=seen.append)
    assert report.outcomes == {"passed": 1} and [p.done for p in seen] == [0, 1]
    loops = await asyncio.to_thread(lambda: evaluate([kit.task()], kit.solve, client=client).outcomes)
    assert loops == {"passed": 1} and evaluate([kit.task()], kit.solve, client=client).outcomes == loops


def test_as_which_user(client: Client) -> None:  # noqa: F811
    async def policy(episode: Any) -> list[Any]:
        sandbox = episode.sandbox
        await sandbox.write_file("made", "x")
        tools = sandbox.client
        return [
            (await sandbox.shell("id -un; stat -c %U made")).stdout.split(),
            (await sandbox.shell("id -un", user="user")).stdout.strip(),
            (await tools.read_file(sandbox.id, "/home/user/made", "root")),
            (await sandbox.run_code("import os; os.getuid()", timeout_s=60)).result,
            inspect.iscoroutinefunction(tools.shell),
        ]

    report = evaluate([kit.task(user="root", grader=None)], policy, client=client)
    told = report.transcript(report.samples[0])
    assert told == [["root", "root"], "user", b"x", "0", True], report.samples[0].message


def test_arguments_are_checked(client: Client, tmp_path: Path) -> None:  # noqa: F811
    for wrong in (
        {"tasks": [kit.task("a"), kit.task("a")]}, {"samples": 0}, {"samples": 2, "ks": (3,)},
        {"parallel": 0}, {"parallel": "many"}, {"policy": lambda: None},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            evaluate(**{"tasks": [kit.task()], "policy": kit.solve, "client": client} | wrong)
    assert client.list_sandboxes() == []


def test_on_the_command_line(client: Client, yard: YardHome, tmp_path: Path) -> None:  # noqa: F811
    env = os.environ | {"FORKYARD_HOME": str(yard.home), "PYTHONPATH": os.pathsep.join(sys.path)}

    def fy(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "forkyard.cli", *args], cwd=tmp_path, env=env, text=True,
                              capture_output=True, timeout=120, check=False)  # fmt: skip

    done = fy("eval", "rollout_kit:several", "--policy", "rollout_kit:solve", "-k", "2", "--out", "run",
              "--html", "page.html")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 samples of 3 tasks" in done.stdout and "pass@2" in done.stdout and "6/6 samples" in done.stderr
    assert "<svg" in (tmp_path / "page.html").read_text()
    shown = fy("eval", "report", "run", "-k", "2", "--json")
    assert json.loads(shown.stdout)["outcomes"] == {"passed": 6}
    one = fy("rollout", "rollout_kit:several::t1", "--policy", "rollout_kit:fail", "--json")
    assert one.returncode == 1 and json.loads(one.stdout)["task"] == "t1"
    refused = fy("eval", "rollout_kit:several", "--policy", "rollout_kit:fail", "--out", "run", "-k", "2")
    assert refused.returncode == 4 and "another policy" in refused.stderr
    assert fy("eval", "report", "absent").returncode == 3
    assert fy("eval", "rollout_kit:several", "--policy", "nonsense:x").returncode == 3


def test_a_policy_whose_own_task_is_cancelled_is_not_lost(client: Client) -> None:  # noqa: F811
    async def policy(episode: Any) -> None:
        async with asyncio.TaskGroup() as group:
            inner = group.create_task(asyncio.sleep(1000))
            inner.cancel()
            await inner

    report = evaluate([kit.task()], policy, samples=2, client=client)
    assert report.outcomes == {"policy_error": 2}


def test_a_state_that_another_process_evicts_is_made_again(client: Client) -> None:  # noqa: F811
    def policy(episode: Any) -> None:
        if episode.sample == 0:
            kept = client.list_snapshots(LABEL)[0]
            client.delete_sandbox(episode.sandbox.id)
            client.delete_snapshot(kept.id)
        else:
            kit.solve(episode.sandbox, episode.task)

    report = evaluate([kit.task()], policy, samples=2, client=client, parallel=1)
    assert [(s.outcome, s.retries) for s in report.samples] == [("sandbox_broken", 0), ("passed", 1)]


def test_ctrl_c_keeps_what_ended_and_leaves_nothing(
    client: Client, yard: YardHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setenv("KIT_BEGUN", str(tmp_path / "begun"))
    env = os.environ | {"FORKYARD_HOME": str(yard.home), "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "forkyard.cli", "eval", "rollout_kit:several"]
    line += ["--policy", "rollout_kit:slow", "-k", "20", "--out", "run"]
    lines = tmp_path / "run/samples.jsonl"
    with subprocess.Popen(line, cwd=tmp_path, env=env) as process:
        until(lambda: process.poll() is not None or (lines.exists() and lines.read_bytes().count(b"\n") >= 2))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert client.list_sandboxes() == []
    report = Report.load(tmp_path / "run")
    assert 2 <= len(report.samples) < 60 and report.outcomes == {"passed": len(report.samples)}
