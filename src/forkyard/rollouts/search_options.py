"""What a search is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from forkyard.errors import InvalidRequestError
from forkyard.rollouts.costs import Choice
from forkyard.rollouts.tree import Node
from forkyard.types import Record

Propose = Callable[[Node], Any] | Sequence[Any]
Score = Callable[[Any], Any] | str


@dataclass(frozen=True, slots=True)
class Budget(Record):
    """What a search may use: ``nodes`` tried (the root is free), ``seconds`` from its start, and
    ``memory_mb``, MiB of its running sandboxes and kept states together. None is no limit.

    A sandbox counts as the one that took most so far, a state as what it keeps on the disk (the
    source's own is not counted). Nothing is tried unless it and the state that it makes fit beside
    what is there: for that the states with the lowest scores go, and at last the one it was to be tried
    from, but never the best one's, those of marks and those from which something is being tried; where
    not even something from the best one or the root fits, the search ends. What is
    not known before may exceed it: what an action uses more than any before (each sandbox's own
    ``mem_mb`` is the wall), and by how much a state is larger than any before. And when the search has
    ended, one copy at a time is made for checks and the result.
    """

    nodes: int | None = None
    seconds: float | None = None
    memory_mb: float | None = None

    def check(self) -> None:
        """Raises InvalidRequestError where a limit leaves nothing."""
        for name in ("nodes", "seconds", "memory_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidRequestError(f"Budget({name}={value})", hint="a limit is above 0, or None")


class Options(TypedDict, total=False):
    """What all searches take besides their own arguments.

    Attributes:
        apply: ``apply(sandbox, action)``. Without it a string is a command for ``sh -c`` and a list
            of words a command; the ``ExecResult`` is ``node.result``.
        check: The hidden grader, ``check(sandbox)`` -> bool, number or ``Verdict``. It is called
            after the search has ended, in copies of the chosen states.
        marks: Numbers of nodes at which the best so far is checked too (pass at a budget).
        budget: When to stop, and what memory to take.
        target: Stop as soon as a score is at least this; what still runs is cancelled.
        parallel: How many sandboxes work at a time; one for each CPU if not given.
        way: ``fork`` or ``rewind`` fixes how states are returned to; ``auto`` measures.
        keep: Whether the best state is left as a running sandbox.
        on_node: Called with each node as it ends.
    """

    apply: Callable[[Any, Any], Any] | None
    check: Callable[[Any], Any] | None
    marks: Sequence[int]
    budget: Budget
    target: float | None
    parallel: int | None
    way: Choice
    keep: bool
    on_node: Callable[[Node], None] | None
