"""Searches on real sandboxes: what they find, and what they leave."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from yard_home import YardHome, client, yard  # noqa: F401

from forkyard import AsyncClient, Client, InvalidRequestError, NotFoundError
from forkyard.rollouts.search import Budget, abest_of_n, amcts, beam, best_of_n, mcts
from forkyard.rollouts.tree import Node, SearchResult

pytestmark = [pytest.mark.root, pytest.mark.slow]

TARGET = "/tmp/number"
SCORE = f"python3 -c 'n = int(open(\"{TARGET}\").read()); print(1 - abs(42 - n) / 42)'"
STEPS = [f"echo $(( $(cat {TARGET}) {step} )) > {TARGET}" for step in ("+ 1", "+ 5", "* 2")]


@pytest.fixture
def source(client: Client) -> str:  # noqa: F811
    client.create_sandbox("numbers")
    client.shell("numbers", f"echo 3 > {TARGET}", check=True)
    return "numbers"


def left(client: Client, done: SearchResult, *others: str) -> None:  # noqa: F811
    """Only what was there and the winner's sandbox is left."""
    names = {info.name for info in client.list_sandboxes()}
    assert names == {*others, *([done.sandbox.name] if done.sandbox else [])}
    assert client.list_snapshots() == []


@pytest.mark.parametrize("way", ["auto", "fork", "rewind"])
def test_beam_finds_the_number(client: Client, source: str, way: Any) -> None:  # noqa: F811
    done = beam(client, source, STEPS, SCORE, width=3, depth=6, target=1.0, way=way)
    assert done.best is not None and done.best.score == 1.0 and done.stopped == "target"
    value = 3
    for action in done.best.actions:
        value = eval(f"{value} {'*' if '* 2' in action else '+'} {action.split(') ')[1].split()[1]}")
    assert value == 42
    assert done.sandbox is not None and client.read_text(done.sandbox.id, TARGET) == "42\n"
    assert client.read_text(source, TARGET) == "3\n"
    if way != "auto":
        other = "rewind" if way == "fork" else "fork"
        # Where only rewinds are wanted, forks make the sandboxes that are rewound.
        assert len(done.returns[other]) <= (8 if way == "rewind" else 0)
    left(client, done, source)


def test_the_best_of_n_chains(client: Client, source: str) -> None:  # noqa: F811
    seen: list[int] = []

    def propose(node: Node) -> list[str]:
        seen.append(node.number)
        return STEPS

    done = best_of_n(client, source, propose, SCORE, n=5, depth=3, keep=False)
    assert done.nodes == 15 and done.stopped == "exhausted" and done.sandbox is None
    # Tries 1, 4: +1 +1 +1; 2, 5: +5 +1 +1; 3: *2 +1 +1. The root was asked twice.
    assert sorted(len(node.actions) for node in done.tree) == [0] + [1] * 5 + [2] * 5 + [3] * 5
    assert seen.count(0) == 2
    assert done.best is not None and done.best.score == pytest.approx(1 - 32 / 42)
    left(client, done, source)


def test_mcts_goes_where_the_scores_are(client: Client, source: str) -> None:  # noqa: F811
    done = mcts(client, source, STEPS, SCORE, budget=Budget(nodes=30), depth=8, c=0.3)
    assert done.nodes == 30 and done.stopped == "nodes"
    assert done.best is not None and done.best.score > 0.8 and done.best.depth >= 3
    assert done.tree.root.visits == 30
    for node in done.tree:
        if node.children:
            own = 0 if node.parent is None else 1
            assert node.visits == own + sum(child.visits for child in node.children)
    assert str(done.tree).count("\n") == 30 and done.tree.to_svg().count("<circle") == 31
    left(client, done, source)


def test_the_hidden_check_is_asked_last_and_changes_nothing(client: Client, source: str) -> None:  # noqa: F811
    asked: list[int] = []
    scored: list[int] = []

    def score(sandbox: Any) -> float:
        assert not asked
        scored.append(int(sandbox.read_text(TARGET)))
        return scored[-1]

    def check(sandbox: Any) -> bool:
        asked.append(int(sandbox.read_text(TARGET)))
        sandbox.write_file("/tmp/expected", "42")
        return asked[-1] == 8

    done = best_of_n(client, source, STEPS, score, n=3, check=check, marks=(1, 2), parallel=1)
    assert scored == [4, 8, 6] and asked == [4, 8]
    assert [(mark.nodes, mark.score, mark.passed) for mark in done.marks] == [
        (1, 4, False), (2, 8, True), (3, 8, True)]  # fmt: skip
    assert done.passed and done.sandbox is not None
    with pytest.raises(NotFoundError):
        client.read_text(done.sandbox.id, "/tmp/expected")
    left(client, done, source)


async def test_losers_are_cancelled(yard: YardHome, client: Client, source: str) -> None:  # noqa: F811
    """The first that reaches the target ends commands that would run for minutes."""
    begun = time.monotonic()
    async with AsyncClient(home=yard.home) as aio:
        actions = ["sleep 300", f"sleep 1; echo 42 > {TARGET}"]
        done = await abest_of_n(aio, source, actions, SCORE, n=2, parallel=2, target=1.0, keep=False)
    assert time.monotonic() - begun < 60
    assert [node.ended for node in done.tree.root.children] == ["cancelled", "leaf"]
    left(client, done, source)


def test_time_is_a_budget(client: Client, source: str) -> None:  # noqa: F811
    begun = time.monotonic()
    done = beam(
        client, source, [f"echo 7 > {TARGET}", "sleep 300"], SCORE, parallel=2, budget=Budget(seconds=4)
    )
    assert done.stopped == "seconds" and time.monotonic() - begun < 60
    assert done.best is not None and done.sandbox is not None
    assert client.read_text(done.sandbox.id, TARGET) == "7\n"
    left(client, done, source)


@pytest.mark.parametrize("way", ["auto", "fork", "rewind"])
def test_memory_is_a_budget(client: Client, source: str, way: Any) -> None:  # noqa: F811
    """With room for few sandboxes or states the worst states are freed, and the rest goes on: at no
    moment there is more than the budget, but for the little that a state is larger than others."""
    assert client.run_code(source, "import os; held = os.urandom(30 << 20)").ok
    fork = client.fork(source, 1).forks[0].id
    one, state = client.usage(fork).mem_mb, client.checkpoint(fork).size_bytes / 2**20
    client.delete_sandbox(fork)
    budget = Budget(nodes=10, memory_mb=1.3 * max(one, state) + 2.5 * state)
    done = mcts(client, source, STEPS, SCORE, budget=budget, parallel=4, way=way)
    assert done.nodes == 10
    assert "memory" in {node.ended for node in done.tree}
    assert 0 < done.peak_mb <= 1.03 * (budget.memory_mb or 0)
    assert done.best is not None and done.sandbox is not None
    left(client, done, source)


def test_what_does_not_fit_is_not_tried(client: Client, source: str) -> None:  # noqa: F811
    """One sandbox and one state: nothing can be tried beside the best state, and that is said."""
    assert client.run_code(source, "import os; held = os.urandom(30 << 20)").ok  # noise is little beside
    with pytest.raises(InvalidRequestError, match="one sandbox takes"):
        mcts(client, source, STEPS, SCORE, budget=Budget(nodes=10, memory_mb=1))
    fork = client.fork(source, 1).forks[0].id
    one, state = client.usage(fork).mem_mb, client.checkpoint(fork).size_bytes / 2**20
    client.delete_sandbox(fork)
    room = Budget(nodes=10, memory_mb=max(one, state) * 1.1 + state * 1.3)
    done = beam(client, source, STEPS, SCORE, width=2, budget=room, way="fork", keep=False)
    assert done.stopped == "memory" and 1 <= done.nodes < 10 and done.best is not None
    assert done.peak_sandboxes == 1 and done.peak_mb <= 1.03 * (room.memory_mb or 0)
    left(client, done, source)


def test_an_action_that_ends_its_sandbox_fails_alone(client: Client) -> None:  # noqa: F811
    """Neither the best state nor the source goes with it."""
    for way in ("rewind", "fork"):

        def apply(sandbox: Any, action: str) -> None:
            if action == "die":
                sandbox.client.delete_sandbox(sandbox.id)
            else:
                sandbox.shell(f"echo {action} >> /tmp/log")

        def score(sandbox: Any) -> float:
            return len(sandbox.read_text("/tmp/log").split())

        done = beam(
            client, "base", ["good", "die"], score, width=1, depth=3, apply=apply, way=way, parallel=1
        )
        assert done.best is not None and done.best.actions == ["good"] * 3, str(done)
        failed = [node for node in done.tree if node.action == "die"]
        assert failed and all(node.ended == "failed" and node.error for node in failed)
        assert done.sandbox is not None
        assert client.read_text(done.sandbox.id, "/tmp/log") == "good\n" * 3
        client.delete_sandbox(done.sandbox.id)
        assert client.list_sandboxes() == [] and client.list_snapshots() == []


def test_what_a_function_raises_ends_the_search_and_leaves_nothing(client: Client, source: str) -> None:  # noqa: F811
    def score(sandbox: Any) -> float:
        return float(sandbox.read_text("/no/such/file"))

    with pytest.raises(NotFoundError, match="no/such"):
        mcts(client, source, STEPS, score, budget=Budget(nodes=5))
    with pytest.raises(ZeroDivisionError):
        best_of_n(client, source, lambda node: [1 / 0], SCORE)
    with pytest.raises(TypeError, match="unknown arguments: buget"):
        beam(client, source, STEPS, SCORE, buget=3)  # type: ignore[call-arg]
    assert [info.name for info in client.list_sandboxes()] == [source] and client.list_snapshots() == []


async def test_cancelled_from_outside_it_leaves_nothing(yard: YardHome, client: Client, source: str) -> None:  # noqa: F811
    running = asyncio.Event()

    async def apply(sandbox: Any, action: str) -> None:
        running.set()
        await sandbox.shell("sleep 300")

    async with AsyncClient(home=yard.home) as aio, asyncio.TaskGroup() as group:
        task = group.create_task(amcts(aio, source, STEPS, SCORE, apply=apply))
        await running.wait()
        task.cancel()
    assert task.cancelled()
    assert [info.name for info in client.list_sandboxes()] == [source] and client.list_snapshots() == []


def test_memory_goes_along(client: Client) -> None:  # noqa: F811
    """A state is more than files: a running interpreter's variables are searched over."""
    client.create_sandbox("warm")
    client.run_code("warm", "total = 1")

    def apply(sandbox: Any, action: str) -> None:
        assert sandbox.run_code(f"total {action}").ok

    def score(sandbox: Any) -> float:
        return float(sandbox.run_code("total").result)

    for way in ("fork", "rewind"):
        done = beam(
            client, "warm", ["+= 2", "*= 3"], score, width=2, depth=3, apply=apply, way=way, keep=False
        )
        assert (
            done.best is not None and done.best.score == 27 and done.best.actions[1:] == ["*= 3", "*= 3"]
        )
    assert client.run_code("warm", "total").result == "1"


def test_the_tree_is_drawn(client: Client, source: str, tmp_path: Path) -> None:  # noqa: F811
    done = beam(client, source, STEPS[:2], SCORE, width=1, depth=2, keep=False, parallel=1)
    lines = str(done.tree).splitlines()
    assert lines[0].startswith("*0  root") and len(lines) == 5
    assert sum(line.lstrip("│ ├└─").startswith("*") for line in lines) == 3
    done.tree.save_svg(tmp_path / "tree.svg")
    assert "<title>A search tree of 5 nodes</title>" in (tmp_path / "tree.svg").read_text()
    assert [row["best"] for row in done.tree.to_dict()].count(True) == 1
