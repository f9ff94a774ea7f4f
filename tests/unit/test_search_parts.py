"""What a search decides by itself: which way back, where to go on, and how a tree looks."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.costs import TRY_AGAIN, Costs
from forkyard.rollouts.growing import Search
from forkyard.rollouts.search_options import Budget
from forkyard.rollouts.tree import Node, Tree
from forkyard.rollouts.uct import Plan, Uct


def test_the_cheaper_way_is_taken_and_the_other_tried_again() -> None:
    costs = Costs()
    costs.record("fork", 0.05)
    assert costs.next() == "rewind", "what was never tried comes first"
    costs.record("rewind", 0.08)
    ways = [costs.next() for _ in range(2 * TRY_AGAIN)]
    assert ways.count("rewind") == 2 and ways[TRY_AGAIN - 1] == ways[-1] == "rewind"
    for _ in range(9):
        costs.record("fork", 0.5)
    assert costs.cheaper() == "rewind", "only the newest count"


def test_a_fixed_way_stays() -> None:
    costs = Costs("fork")
    costs.record("fork", 9)
    costs.record("rewind", 0.001)
    assert {costs.next() for _ in range(100)} == {"fork"}
    with pytest.raises(InvalidRequestError, match="way='teleport'"):
        Costs("teleport")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"seconds": -1}, {"memory_mb": 0}])
def test_a_budget_leaves_something(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Budget(**wrong).check()


def grown(parent: Node, visits: int, total: float, state: str | None = "s") -> Node:
    node = Node(state, f"a{len(parent.children)}", score=total / visits, parent=parent)
    node.visits, node.total = visits, total
    parent.children.append(node)
    return node


def uct(root: Node, c: float) -> Uct:
    search = SimpleNamespace(root=root, open=lambda node: node.state is not None and not node.ended)
    return Uct(cast(Search, search), c)


def test_uct_takes_the_highest_bound() -> None:
    root = Node("s")
    root.visits = 10
    sure, rare = grown(root, 8, 5.6), grown(root, 2, 0.8)
    for c in (0.0, 0.1, 0.5, 1.4, 5.0):
        tree = uct(root, c)
        tree.plans[root] = Plan(asked=True)
        tree.plans |= {sure: Plan(), rare: Plan()}
        bounds = [n.total / n.visits + c * math.sqrt(math.log(10) / n.visits) for n in (sure, rare)]
        assert tree.bound(sure, 10) == pytest.approx(bounds[0])
        assert tree.choose(root) is (sure if bounds[0] >= bounds[1] else rare)


def test_uct_workers_part_and_dead_ends_are_left() -> None:
    root = Node("s")
    root.visits = 4
    one, two = grown(root, 2, 1.2), grown(root, 2, 1.0)
    tree = uct(root, 0.5)
    tree.plans = {root: Plan(asked=True), one: Plan(asked=True, untried=["x"]), two: Plan(asked=True)}
    tree.plans[two].untried = ["y"]
    assert tree.choose(root) is one
    tree.plans[root].pending = tree.plans[one].pending = 2
    assert tree.choose(root) is two, "others are below the first already"
    one.ended = "leaf"
    tree.plans[one].untried = []
    tree.plans[two].asking = True
    assert tree.choose(root) is None and tree.plans[one].dead
    assert not tree.plans[root].dead, "there is more to come from the second"
    tree.plans[two].asking = False
    assert tree.choose(root) is two
    two.ended = "memory"
    assert tree.choose(root) is None and tree.plans[root].dead


def test_a_tree_as_text_and_svg() -> None:
    root = Node("s")
    a = Node("s", "make <test> & go", score=0.25, number=1, parent=root)
    b = Node(None, ["ls", "-l"], score=None, number=2, parent=root, error="it is gone", ended="failed")
    c = Node(None, "x" * 99, score=1.0, number=3, parent=a)
    root.children, a.children = [a, b], [c]
    tree = Tree(root, c)
    assert [node.number for node in tree] == [0, 1, 3, 2] and len(tree) == 4
    lines = str(tree).splitlines()
    assert lines[0] == "*0  root"
    assert lines[1] == "├─*1  make <test> & go  0.25"
    assert lines[2] == f"│ └─*3  {'x' * 59}…  1"
    assert lines[3] == "└─ 2  ['ls', '-l']  (it is gone)"
    picture = ElementTree.fromstring(tree.to_svg())
    assert len(picture.findall("{*}circle")) == 4 and len(picture.findall("{*}path")) == 3
    assert "make <test> & go" in [title.text for title in picture.findall(".//{*}title")][2] or ""
    assert [row["parent"] for row in tree.to_dict()] == [None, 0, 1, 0]
    assert c.depth == 2 and c.actions == ["make <test> & go", "x" * 99]
    again = Tree.from_dict(tree.to_dict())
    assert again.to_svg() == tree.to_svg() and str(again) == str(tree)
