"""Search over states of a machine: best of n, beam search, Monte Carlo tree search.

A caller gives functions, each sync or async: ``propose(node)`` names the actions worth trying
from a state, ``apply(sandbox, action)`` does one, ``score(sandbox)`` says how good the state is.
The hidden ``check`` never takes part: it is asked when the search has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Unpack

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import InvalidRequestError
from forkyard.rollouts.clients import run_sync
from forkyard.rollouts.growing import Search
from forkyard.rollouts.search_options import Budget, Options, Propose, Score
from forkyard.rollouts.tree import Node, SearchResult
from forkyard.rollouts.uct import Uct

__all__ = ["Budget", "abeam", "abest_of_n", "amcts", "beam", "best_of_n", "mcts"]

Strategy = Callable[[Search], Awaitable[None]]


async def abest_of_n(
    client: AsyncClient,
    source: str,
    propose: Propose,
    score: Score,
    n: int = 8,
    *,
    depth: int = 1,
    **options: Unpack[Options],
) -> SearchResult:
    """``n`` independent tries from ``source``; the best state of all of them.

    Try i begins with the i-th action that ``propose(root)`` names (it is asked again while it has
    named fewer, as one samples a policy), and goes on with the first that ``propose(node)`` names,
    until there is none or ``depth`` actions were done. Every state on the way is scored.

    Args:
        source: A sandbox (frozen once, not changed), snapshot, checkpoint or template.
        propose: Actions to try from a node; a plain list means the same ones everywhere.
        score: Higher is better; or a command that prints a number last. What it leaves behind in
            the sandbox stays in the state. None is no score: the node is not gone on from.
        options: See :class:`forkyard.rollouts.search_options.Options`.

    Raises:
        InvalidRequestError: n or depth is below 1. And whatever a function of the caller's raises.
    """
    return await Search(client, source, propose, score, depth, options).run(_tries(n))


async def abeam(
    client: AsyncClient,
    source: str,
    propose: Propose,
    score: Score,
    width: int = 4,
    *,
    depth: int = 8,
    **options: Unpack[Options],
) -> SearchResult:
    """Beam search: of all children of a level's nodes the ``width`` best make the next level.

    The states of the others are freed. Arguments as :func:`abest_of_n`.
    """
    return await Search(client, source, propose, score, depth, options).run(_levels(width))


async def amcts(
    client: AsyncClient,
    source: str,
    propose: Propose,
    score: Score,
    *,
    depth: int = 16,
    c: float = 1.4,
    **options: Unpack[Options],
) -> SearchResult:
    """Monte Carlo tree search by UCT (Kocsis and Szepesvári 2006).

    Each step goes down from the root to the child with the highest mean score plus
    ``c * sqrt(ln(visits of the parent) / visits)``, tries the first untried action of the node it
    ends at, and counts the new state's score on the whole way up. Scores should be in 0..1.
    It ends with the budget, the target, or when everything was tried. Arguments as
    :func:`abest_of_n`; a budget of nodes or seconds is wise.
    """
    return await Search(client, source, propose, score, depth, options).run(_uct(c))


def best_of_n(
    client: Client,
    source: str,
    propose: Propose,
    score: Score,
    n: int = 8,
    *,
    depth: int = 1,
    **options: Unpack[Options],
) -> SearchResult:
    """As :func:`abest_of_n`, for a sync client."""
    return _here(client, source, propose, score, depth, options, _tries(n))


def beam(
    client: Client,
    source: str,
    propose: Propose,
    score: Score,
    width: int = 4,
    *,
    depth: int = 8,
    **options: Unpack[Options],
) -> SearchResult:
    """As :func:`abeam`, for a sync client."""
    return _here(client, source, propose, score, depth, options, _levels(width))


def mcts(
    client: Client,
    source: str,
    propose: Propose,
    score: Score,
    *,
    depth: int = 16,
    c: float = 1.4,
    **options: Unpack[Options],
) -> SearchResult:
    """As :func:`amcts`, for a sync client."""
    return _here(client, source, propose, score, depth, options, _uct(c))


def _here(
    client: Client,
    source: str,
    propose: Propose,
    score: Score,
    depth: int,
    options: Options,
    strategy: Strategy,
) -> SearchResult:
    done: SearchResult = run_sync(
        lambda: Search(client, source, propose, score, depth, options).run(strategy)
    )
    return done


def _tries(n: int) -> Strategy:
    if n < 1:
        raise InvalidRequestError(f"n={n}", hint="n counts tries: 1 or more")

    async def run(search: Search) -> None:
        actions: list[Any] = []
        while len(actions) < n and (more := await search.actions(search.root)):
            actions += more
        left = min(n, len(actions))

        async def one(action: Any) -> None:
            nonlocal left
            left -= 1
            node = await search.grow(search.root, action, left)
            while node is not None and search.open(node) and not search.spent:
                following = await search.actions(node)
                child = await search.grow(node, following[0], 0) if following else None
                await search.finish(node, "expanded" if child else "leaf")
                node = child

        async with asyncio.TaskGroup() as group:
            for action in actions[:n]:
                group.create_task(one(action))

    return run


def _levels(width: int) -> Strategy:
    if width < 1:
        raise InvalidRequestError(f"width={width}", hint="a beam has at least one node")

    async def run(search: Search) -> None:
        level = [search.root]
        while level and not search.spent:
            level = await _next_level(search, level, width)

    return run


async def _next_level(search: Search, level: list[Node], width: int) -> list[Node]:
    chosen: list[Node] = []

    def wanted(node: Node) -> bool:
        """Whether it is among the best of its level so far: only then its state is kept."""
        chosen.append(node)
        chosen.sort(key=lambda other: (-(other.score or 0.0), other.number))
        return node in chosen[:width]

    async def from_one(parent: Node) -> None:
        actions = await search.actions(parent)

        async def child(action: Any, further: int) -> None:
            await search.grow(parent, action, further, wanted)
            for loser in chosen[width:]:
                await search.finish(loser, "pruned")

        async with asyncio.TaskGroup() as group:
            for number, action in enumerate(actions, 1):
                group.create_task(child(action, len(actions) - number))
        await search.finish(parent, "expanded" if actions else "leaf")

    async with asyncio.TaskGroup() as group:
        for node in level:
            group.create_task(from_one(node))
    return [node for node in chosen[:width] if search.open(node)]


def _uct(c: float) -> Strategy:
    if c < 0:
        raise InvalidRequestError(f"c={c}", hint="the weight of exploration is 0 or more")

    async def run(search: Search) -> None:
        await Uct(search, c).run()

    return run
