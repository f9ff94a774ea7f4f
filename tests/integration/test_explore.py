"""Several ways at once, on real sandboxes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from yard_home import YardHome, client, until, yard  # noqa: F401

from forkyard import Client, VariantResult
from forkyard.audit import verify
from forkyard.errors import InvalidRequestError, NotFoundError, UnavailableError
from forkyard.requests import ExploreEvent

pytestmark = [pytest.mark.root, pytest.mark.slow]


def _states(results: list[VariantResult]) -> list[str]:
    return [result.state for result in results]


def test_the_fastest_that_passes_is_kept(client: Client) -> None:  # noqa: F811
    client.create_sandbox("work", labels={"run": "7"})
    client.write_file("work", "given", "from the source")
    events = []
    begun = time.monotonic()
    done = client.explore(
        "work",
        [
            "sleep 300",
            # Not before the third has failed: those that still run when one passes are cancelled.
            {"name": "quick", "command": "cat given extra; echo $WAY >&2; echo kept > mark; sleep 3",
             "files": {"extra": "+"}, "env": {"WAY": "this"}},
            ["sh", "-c", "rm given; exit 3"],
        ],
        on_progress=events.append,
    )  # fmt: skip
    assert time.monotonic() - begun < 60
    assert _states(done.results) == ["cancelled", "passed", "failed"]
    assert done.winner == done.results[1] and done.winner.name == "quick" and done.winner["ok"]
    assert done.winner.output == "from the source+this\n" and done.winner.exit_code == 0
    assert done.winner.diff.paths == ["/home/user/extra", "/home/user/mark"]
    assert done.results[2].exit_code == 3 and done.results[2].diff.paths == ["/home/user/given"]
    assert done.results[0].diff is None and done.results[0].id is None
    assert {info.id for info in client.list_sandboxes()} == {client.get_sandbox("work").id, done.winner.id}
    kept = client.get_sandbox(done.winner.id)
    assert kept.parent == client.get_sandbox("work").id and kept.labels == {"run": "7"}
    assert client.read_text(kept.id, "mark") == "kept\n"
    assert not client.shell("work", "ls mark").ok and done.paused_ms > 0
    assert {event.kind for event in events} == {"frozen", "started", "result", "done"}
    assert client.audit(kept.id)[-1].kind != "" and client.verify_audit().ok


def test_the_first_in_order(client: Client) -> None:  # noqa: F811
    client.create_sandbox("work")
    point = client.checkpoint("work")
    done = client.explore(point.id, ["exit 1", "sleep 1", "true"], keep="first")
    assert done.winner.name == "variant-2" and _states(done.results)[:2] == ["failed", "passed"]
    assert len(client.list_sandboxes()) == 2


def test_a_function_chooses_while_all_copies_live(client: Client) -> None:  # noqa: F811
    seen = []

    def most(results: list[VariantResult]) -> VariantResult:
        seen.append([client.read_text(result.id, "score") for result in results if result.id])
        return max(results, key=lambda result: int(result.output or 0))

    done = client.explore("base", [f"echo {n} | tee score; exit {n % 2}" for n in (2, 7, 4)], keep=most)
    assert seen == [["2\n", "7\n", "4\n"]] and done.winner.output == "7\n" and not done.winner.ok
    assert [info.id for info in client.list_sandboxes()] == [done.winner.id]
    assert client.explore("base", ["true"], keep=lambda results: None).winner is None
    with pytest.raises(ZeroDivisionError):
        client.explore("base", ["true"], keep=lambda results: 1 / 0)
    until(lambda: len(client.list_sandboxes()) == 1)


def test_nobody_passes(client: Client) -> None:  # noqa: F811
    done = client.explore("base", ["exit 1", "sleep 60"], timeout_s=0.5, parallel=1)
    assert done.winner is None and _states(done.results) == ["failed", "timed_out"]
    assert client.list_sandboxes() == []


def test_what_cannot_be(client: Client) -> None:  # noqa: F811
    with pytest.raises(InvalidRequestError):
        client.explore("base", ["true"], image="debian")
    with pytest.raises(InvalidRequestError):
        client.explore(None, ["true"])
    with pytest.raises(NotFoundError, match="no-such-image"):
        client.explore("oci:/no-such-image", ["true"])
    with pytest.raises(NotFoundError):
        client.explore("nobody", ["true"])
    for variants in ([], [{"name": "x"}], [{"command": "a", "name": "x"}, {"command": "b", "name": "x"}],
                     [{"command": "a", "wrong": 1}]):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            client.explore("base", variants)
    for wrong in ({"keep": "best"}, {"timeout_s": 0.0}, {"parallel": 0}):
        with pytest.raises(InvalidRequestError):
            client.explore("base", ["true"], **wrong)


def test_a_client_that_goes_takes_all_copies_with_it(yard: YardHome, client: Client) -> None:  # noqa: F811
    program = (
        "import sys; from forkyard import Client\n"
        "Client(home=sys.argv[1]).explore('base', ['sleep 300'] * 2,"
        " on_progress=lambda event: print(event.kind, flush=True))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(yard.home)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        heard = [child.stdout.readline() for _ in range(3)]
        assert heard == [b"frozen\n", b"started\n", b"started\n"] and len(client.list_sandboxes()) == 2
    finally:
        child.kill()
        child.wait()
    until(lambda: client.list_sandboxes() == [])
    yard.wait_empty()


def test_a_daemon_that_dies_leaves_no_copy(yard: YardHome, client: Client) -> None:  # noqa: F811
    client.create_sandbox("work")
    killed = []

    def kill(event: ExploreEvent) -> None:
        if event.kind == "started" and not killed:
            killed.append(os.kill(yard.pid, signal.SIGKILL))

    with pytest.raises(UnavailableError):
        client.explore("work", ["sleep 300", "sleep 301"], on_progress=kill)
    assert [info.name for info in client.list_sandboxes()] == ["work"]
    until(lambda: len([name for name in yard.boxes() if name.startswith(f"{yard.home}/boxes")]) <= 2)
    assert client.shell("work", "true").ok


def test_the_log_and_a_copy_that_was_changed(yard: YardHome, client: Client, tmp_path: Path) -> None:  # noqa: F811
    client.create_sandbox("audited")
    first = client.verify_audit()
    assert first.ok and first.head[0] == first.seq
    client.shell("audited", "true")
    assert client.verify_audit(first.head).ok and not client.verify_audit((first.seq, "0" * 64)).ok
    for path in (yard.home / "audit").iterdir():
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace('"audited"', '"another"'))
    found = verify(tmp_path)
    assert not found.ok and found.seq <= first.seq
