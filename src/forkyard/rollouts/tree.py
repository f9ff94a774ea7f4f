"""What a search leaves: nodes, the tree of them, and the result with its drawings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forkyard.rollouts import tree_drawing
from forkyard.types import Record, SandboxInfo

# How a sandbox came to stand in a node's state: a new copy, the same one taken back, or it was
# still there.
Way = Literal["fork", "rewind", "stay"]
Stopped = Literal["exhausted", "nodes", "seconds", "memory", "target"]


@dataclass(eq=False, slots=True)
class Node:
    """One state of a search.

    Attributes:
        state: Id of the snapshot or checkpoint that holds it; None where nobody can return to it.
        action: What led here from ``parent``; None at the root.
        score: What ``score`` said; None for the root, and where the action or the score failed.
        number: In the order in which they were begun; the root is 0.
        result: What ``apply`` returned (an ``ExecResult`` for plain commands).
        error: Why there is no score.
        ended: Why nothing further was tried from here, empty if the search just stopped:
            ``expanded`` (all its actions were tried), ``leaf`` (no actions, or the depth's end),
            ``pruned``, ``failed``, ``cancelled``, ``memory`` (freed to stay within the budget).
        visits, total: Of UCT: how many scores were counted here, and their sum.
        way, return_s, apply_s, score_s, save_s: How a sandbox came to the parent's state, and
            where the time went.
    """

    state: str | None
    action: Any = None
    score: float | None = None
    number: int = 0
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    result: Any = None
    error: str = ""
    ended: str = ""
    visits: int = 0
    total: float = 0.0
    way: Way | None = None
    return_s: float = 0.0
    apply_s: float = 0.0
    score_s: float = 0.0
    save_s: float = 0.0

    @property
    def depth(self) -> int:
        """How many actions from the root."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def actions(self) -> list[Any]:
        """The way here from the root."""
        return [] if self.parent is None else [*self.parent.actions, self.action]

    def __repr__(self) -> str:
        return f"Node({self.number}, score={self.score}, action={self.action!r})"


@dataclass(frozen=True, slots=True)
class Tree:
    """Every node that was tried, also those whose state is gone. ``str()`` draws it."""

    root: Node
    best: Node | None = None

    def __iter__(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __str__(self) -> str:
        return tree_drawing.as_text(self.root, self.best)

    def to_svg(self) -> str:
        """A picture: one dot a node, darker where the score is higher, the way to the best thick."""
        return tree_drawing.as_svg(self.root, self.best)

    def save_svg(self, path: str | Path) -> None:
        """Write :meth:`to_svg` to a file."""
        Path(path).write_text(self.to_svg())

    @classmethod
    def from_dict(cls, rows: Sequence[Mapping[str, Any]]) -> Tree:
        """What :meth:`to_dict` gave, to be drawn again. Raises KeyError, TypeError: it is none."""
        nodes: dict[int, Node] = {}
        best = None
        for row in rows:
            parent = None if row["parent"] is None else nodes[row["parent"]]
            node = Node(None, row["action"], row["score"], row["number"], parent)
            node.error, node.ended = row["error"], row["ended"]
            nodes[node.number] = node
            if parent is not None:
                parent.children.append(node)
            best = node if row["best"] else best
        return cls(next(iter(nodes.values()), Node(None)), best)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data, a line for each node; actions that are no plain data become text."""
        return [
            {
                "number": node.number,
                "parent": None if node.parent is None else node.parent.number,
                "action": node.action if isinstance(node.action, str | int | float) else repr(node.action),
                "score": node.score,
                "error": node.error,
                "ended": node.ended,
                "visits": node.visits,
                "way": node.way,
                "seconds": round(node.return_s + node.apply_s + node.score_s + node.save_s, 4),
                "best": node is self.best,
            }
            for node in self
        ]


@dataclass(frozen=True, slots=True)
class Mark(Record):
    """What the search would have answered after ``nodes`` nodes: ``node``, with the score that
    chose it. ``passed`` and ``reward`` are the hidden check's word on it, given after the search
    had ended; None without a check."""

    nodes: int
    seconds: float
    node: Node | None
    score: float | None
    passed: bool | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SearchResult(Record):
    """``best`` is the node with the highest score (the first of them), None if there is none, and
    ``sandbox`` a running copy of its state, yours to delete. ``marks`` give pass at a budget, the last
    of them at the whole one. ``returns`` has the seconds of each return, by way; ``stopped`` why
    the search ended. ``peak_mb`` is the most that its sandboxes and states came to while it searched,
    as ``Budget.memory_mb`` counts them."""

    best: Node | None
    tree: Tree
    sandbox: SandboxInfo | None
    marks: list[Mark]
    nodes: int
    seconds: float
    stopped: Stopped
    returns: Mapping[Way, list[float]] = field(default_factory=dict)
    peak_sandboxes: int = 0
    peak_mb: float = 0.0

    @property
    def passed(self) -> bool | None:
        """Whether the best state passed the hidden check; None without a check."""
        return self.marks[-1].passed if self.marks else None

    def __str__(self) -> str:
        ways = ", ".join(
            f"{len(took)} by {way} (median {statistics.median(took) * 1e3:.0f} ms)"
            for way, took in self.returns.items()
            if took
        )
        return f"{self.nodes} nodes in {self.seconds:.1f} s, stopped: {self.stopped}; {ways}\n{self.tree}"
