"""A tour in two parts: the loop of an RL environment, and a running program that is forked.

    python demo/run.py

It needs a machine that ``forkyard setup`` made ready, and leaves nothing behind.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from show import Show, duration
from wheels import pytest_wheels

from forkyard import Client
from forkyard.errors import ForkyardError

ENV = Path(__file__).parent / "env"
RUN = uuid.uuid4().hex[:6]
LABELS = {"demo": RUN}
POLICIES = ("shallow", "careful", "sweeping")
COPIES = 8
SEND = "curl -sS --max-time 5 'localhost:8000/add?n={}'"


def episodes(client: Client, show: Show) -> None:
    """Prepare once, start three episodes from that state, grade each, throw them away."""
    show.title("1  An environment, prepared once, and three episodes")
    with show.step("a sandbox from the base template") as step:
        source = client.create_sandbox(
            name=f"demo-{RUN}", ttl_min=30, ephemeral=True, labels=LABELS, egress="deny")
        step.note = source.name
    box = client.sandbox(source.id)

    python = box.shell("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'", check=True)
    wheels = pytest_wheels(python.stdout.strip())
    with show.step("the project and pytest go in, without network") as step:
        box.upload(str(ENV), "env")
        box.write_files({f"wheels/{wheel.name}": wheel.read_bytes() for wheel in wheels})
        box.shell("pip install -q --no-index --find-links wheels pytest && rm -rf wheels", check=True)
        step.note = f"{len(wheels)} wheels from the cache"
    with show.step("the tests as they stand") as step:
        step.note = words(json.loads(box.shell("python3 env/grade.py", check=True).stdout))
    box.shell("rm -f verdict.json", check=True)
    with show.step("a snapshot of it, memory included") as step:
        snapshot = client.snapshot(source.id, f"demo-{RUN}")
        step.note = f"the source stood still for {duration(snapshot.paused_ms)}"

    rows = []
    for number, policy in enumerate(POLICIES, 1):
        how = "fork" if number == len(POLICIES) else "new --from"
        name = f"demo-{RUN}-ep{number}"
        started = time.perf_counter()
        if how == "fork":
            one = client.fork(source.id, names=[name], ephemeral=True, labels=LABELS).forks[0]
        else:
            one = client.create_sandbox(name, snapshot=snapshot.id, ephemeral=True, labels=LABELS)
        ready = (time.perf_counter() - started) * 1000
        with show.step(f"episode {number}: {how}, policy {policy!r}") as step:
            episode = client.sandbox(one.id)
            if not episode.shell("test ! -e verdict.json").ok:
                raise SystemExit(f"episode {number} did not start clean")
            episode.shell(f"cp env/policies/{policy}.py env/spans.py && python3 env/grade.py", check=True)
            verdict = json.loads(episode.read_text("verdict.json"))
            client.delete_sandbox(one.id)
            step.note = f"clean start in {duration(ready)}, {words(verdict)}"
        tests = f"{verdict['passed']}/{verdict['passed'] + verdict['failed']}"
        rows.append((str(number), how, duration(ready), policy, tests, f"{verdict['reward']:.2f}"))
    show.table(("episode", "method", "start", "policy", "tests", "reward"), rows)
    client.delete_snapshot(snapshot.id)
    client.delete_sandbox(source.id)


def words(verdict: dict[str, Any]) -> str:
    total = verdict["passed"] + verdict["failed"]
    return f"{verdict['passed']} of {total} pass, reward {verdict['reward']:.2f}"


def living(client: Client, show: Show) -> None:
    """Fork a program while it runs; break one copy and take it back."""
    show.title(f"2  A running program, forked {COPIES} times")
    with show.step("a sandbox") as step:
        root = client.create_sandbox(
            f"ledger-{RUN}", ttl_min=30, ephemeral=True, labels=LABELS, egress="deny")
        step.note = root.name
    box = client.sandbox(root.id)
    with show.step("a server starts in it and loads its table"):
        box.write_file("ledger.py", (ENV / "ledger.py").read_text())
        box.spawn("exec python3 ledger.py >ledger.log 2>&1", detach=True)
        box.shell("until curl -s localhost:8000 >/dev/null; do sleep 0.05; done", timeout_s=30, check=True)
    before = ask(client, root.id, 100)
    show.say(f"it counts to {before['count']}, holds {before['rows']} rows, "
             f"and drew the token {before['token']} when it started")

    with show.step(f"fork it {COPIES} times, while it runs") as step:
        done = client.fork(root.id, COPIES, prefix=f"ledger-{RUN}-", ephemeral=True, labels=LABELS)
        step.note = (f"{duration(done.total_ms / COPIES)} each; "
                     f"the source stood still for {duration(done.paused_ms)}")
    with show.step(f"each of the {COPIES} counts on, all at once"):
        answers = client.exec_many(
            [(fork.id, SEND.format(number)) for number, fork in enumerate(done.forks, 1)], check=True)
    rows = [(root.name, "0", *cells(ask(client, root.id, 0)))]
    rows += [(fork.name, f"+{number}", *cells(json.loads(answer.stdout)))
             for number, (fork, answer) in enumerate(zip(done.forks, answers, strict=True), 1)]
    show.table(("sandbox", "adds", "count", "rows", "token"), rows)
    show.say("one token: all go on from the memory of one program, and none hears of the others")

    brave = done.forks[2]
    with show.step("a checkpoint of one of them") as step:
        point = client.checkpoint(brave.id, label="before the clean-up")
        step.note = f"it stood still for {duration(point.paused_ms)}"
    with show.step("a bad idea: rm -rf its data, kill the server") as step:
        client.shell(brave.id, "rm -rf ledger-data && pkill -9 python3", check=True)
        dead = client.shell(brave.id, SEND.format(0))
        step.note = f"curl: exit {dead.exit_code}, nobody answers"
    with show.step("rewind it"):
        client.rewind(brave.id)
    after = ask(client, brave.id, 0)
    show.say(f"the server answers: count {after['count']}, {after['rows']} rows, {after['files']} files, "
             f"token {after['token']}")
    if (after["count"], after["token"], after["files"]) != (before["count"] + 3, before["token"], 20):
        raise SystemExit("the rewound sandbox is not as it was")

    show.title("The family")
    from forkyard.cli.forking import grow

    for tree in grow(client.tree(root.id), everything=True):
        show.draw(tree)


def ask(client: Client, sandbox: str, add: int) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(client.shell(sandbox, SEND.format(add), check=True).stdout)
    return answer


def cells(answer: dict[str, Any]) -> tuple[str, str, str]:
    return str(answer["count"]), str(answer["rows"]), answer["token"]


def clean(client: Client) -> None:
    """Delete whatever this run made that is still there."""
    client.delete_sandboxes(labels=LABELS)
    for snapshot in client.list_snapshots():
        if snapshot.name == f"demo-{RUN}":
            client.delete_snapshot(snapshot.id)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    show = Show()
    started = time.perf_counter()
    try:
        with Client() as client:
            try:
                episodes(client, show)
                living(client, show)
            finally:
                # A second Ctrl-C must not cut the clean-up short.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                with show.step("everything deleted"):
                    clean(client)
    except KeyboardInterrupt:
        return 130
    except ForkyardError as error:
        print(f"demo: {error.message}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n",
              file=sys.stderr)
        return 1
    show.say(f"{duration((time.perf_counter() - started) * 1000)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
