"""Monte Carlo tree search by UCT (Kocsis and Szepesvári 2006), for several workers at once."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from forkyard.rollouts.growing import Search
from forkyard.rollouts.tree import Node


@dataclass(slots=True)
class Plan:
    """What is left to try from a node. ``pending`` counts workers below it, whose scores are not in
    yet: they weigh as visits without a score, so that workers part."""

    asked: bool = False
    asking: bool = False
    untried: list[Any] = field(default_factory=list)
    coming: int = 0
    pending: int = 0
    dead: bool = False


class Uct:
    """Args: ``c`` weighs exploration."""

    def __init__(self, search: Search, c: float) -> None:
        self.search = search
        self.c = c
        self.plans: dict[Node, Plan] = {search.root: Plan()}
        self._changed = asyncio.Condition()
        self._busy = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.search.parallel):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while not self.search.spent:
            leaf = self.choose(self.search.root)
            if leaf is None:
                async with self._changed:
                    if not self._busy:
                        return
                    await self._changed.wait()
                continue
            self._busy += 1
            try:
                await self._step(leaf)
            finally:
                self._busy -= 1
                async with self._changed:
                    self._changed.notify_all()

    def choose(self, node: Node) -> Node | None:
        """The node to try something from, found by going down; None if all are taken or done."""
        plan = self.plans[node]
        if plan.dead or plan.asking:
            return None
        # The root is open whatever the depth; another one as long as its state is there.
        if (node.parent is None or self.search.open(node)) and (plan.untried or not plan.asked):
            return node
        alive = self._alive(node)
        visits = node.visits + plan.pending
        for child in sorted(alive, key=lambda child: -self.bound(child, visits)):
            if (found := self.choose(child)) is not None:
                return found
        plan.dead = not plan.coming and not self._alive(node)
        return None

    def _alive(self, node: Node) -> list[Node]:
        return [child for child in node.children if child in self.plans and not self.plans[child].dead]

    def bound(self, node: Node, parent_visits: int) -> float:
        """The upper confidence bound: mean score and exploration."""
        visits = node.visits + self.plans[node].pending
        if not visits:
            return math.inf
        return node.total / visits + self.c * math.sqrt(math.log(max(parent_visits, 1)) / visits)

    async def _step(self, leaf: Node) -> None:
        plan, above = self.plans[leaf], _upwards(leaf)
        for node in above:
            self.plans[node].pending += 1
        plan.coming += 1
        child = None
        try:
            if not plan.asked:
                plan.asking = True
                plan.untried = await self.search.actions(leaf)
                plan.asked, plan.asking = True, False
            if plan.untried:
                action = plan.untried.pop(0)
                child = await self.search.grow(leaf, action, len(plan.untried))
        finally:
            plan.coming -= 1
            for node in above:
                self.plans[node].pending -= 1
        if child is not None:
            if not child.error:
                self.plans[child] = Plan()
            for node in [*above, child]:
                node.visits += 1
                node.total += child.score or 0.0
        if not plan.untried and not plan.coming and plan.asked:
            await self.search.finish(leaf, "expanded" if leaf.children else "leaf")


def _upwards(node: Node) -> list[Node]:
    found = [node]
    while (parent := found[-1].parent) is not None:
        found.append(parent)
    return found
