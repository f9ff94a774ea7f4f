"""One search as it runs: it grows nodes, keeps the best, frees states, and stops in time."""

from __future__ import annotations

import asyncio
import collections
import math
import os
import shlex
import time
from collections.abc import Awaitable, Callable
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.sync import Client
from forkyard.errors import CommandFailedError, InvalidRequestError, NotFoundError, SandboxLostError
from forkyard.rollouts.attempt import in_thread
from forkyard.rollouts.calling import Callbacks
from forkyard.rollouts.clients import both
from forkyard.rollouts.costs import Costs
from forkyard.rollouts.gone import afind_loss
from forkyard.rollouts.search_options import Budget, Options, Propose, Score
from forkyard.rollouts.states import Box, States
from forkyard.rollouts.tree import Mark, Node, SearchResult, Stopped, Tree
from forkyard.rollouts.types import Verdict
from forkyard.types import ExecResult, SandboxInfo

# A loss that was the host's is no word on the action: once more.
TRIES_AFTER_HOST_LOSS = 2


class Search:
    """See :mod:`forkyard.rollouts.search` for the arguments.

    Args:
        client: Of either kind; the sandbox that is left is made by it, and its lease is held by it.
    """

    def __init__(
        self,
        client: AsyncClient | Client,
        source: str,
        propose: Propose,
        score: Score,
        depth: int,
        options: Options,
    ) -> None:
        if depth < 1:
            raise InvalidRequestError(f"depth={depth}", hint="depth counts actions: 1 or more")
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
        self.options = options
        self.budget = options.get("budget") or Budget()
        self.budget.check()
        self.root = Node(None)
        self.depth = depth
        self.parallel = options.get("parallel") or 0
        self.best: Node | None = None
        # Nodes from which something is being tried, or that were not yet counted: their states stay.
        self._trying: collections.Counter[Node] = collections.Counter()
        self._given = client
        self._both = both(client)
        self._client = self._both.aio
        self._source = source
        self._propose = propose
        self._score = score
        self._calls = Callbacks(self._client, self._both.sync)
        self._costs = Costs(options.get("way", "auto"))
        self._states: States
        self._begun = self._ended = 0
        self._began_at = 0.0
        self._stopped: Stopped = "exhausted"
        self._marks: list[Mark] = []
        self._work: asyncio.Task[None] | None = None

    # -- for the strategies ------------------------------------------------------------

    @property
    def spent(self) -> bool:
        """Whether no further node may be begun."""
        if self._stopped == "memory":
            return True
        if self.budget.nodes is not None and self._begun >= self.budget.nodes:
            if self._stopped == "exhausted":
                self._stopped = "nodes"
            return True
        return False

    def open(self, node: Node) -> bool:
        """Whether something may be tried from this node."""
        there = node.state is not None or node in self._states.lost
        return there and not node.ended and node.depth < self.depth

    async def actions(self, node: Node) -> list[Any]:
        """What ``propose`` names."""
        if callable(self._propose):
            return list(await self._calls.plain(self._propose, node) or [])
        return list(self._propose)

    async def grow(
        self, parent: Node, action: Any, further: int, wanted: Callable[[Node], bool] = bool
    ) -> Node | None:
        """Try an action. None if the budget allows no further node, or none from this parent.

        Args:
            further: How many more actions are to be tried from the parent.
            wanted: Whether the new node, which has its score, may be returned to.
        """
        async with self._states.place(parent, lambda fits: self._make_room(parent, fits)) as may:
            # Only now: what waits for its turn has used nothing of the budget. And its state may
            # have gone meanwhile, to make room for another's.
            if self.spent or not self.open(parent):
                return None
            if not may:
                await self._give_up(parent)
                return None
            self._begun += 1
            node = Node(None, action, number=self._begun, parent=parent)
            parent.children.append(node)
            self._trying.update((parent, node))
            try:
                await self._try(node, parent, further, wanted)
            finally:
                self._trying[parent] -= 1
        if node.error:
            node.ended = "failed"
        elif node.depth >= self.depth:
            node.ended = "leaf"
        elif node.state is None:
            node.ended = "pruned"
        await self._after(node)
        return node

    async def _give_up(self, node: Node) -> None:
        """Nothing fits that is tried from here: go on elsewhere, if that helps."""
        if self._held(node):
            self._stopped = "memory"
        else:
            await self.finish(node, "memory")

    async def finish(self, node: Node, why: str) -> None:
        """Nothing further is tried from here."""
        node.ended = node.ended or why
        await self._release(node)

    # -- one node ----------------------------------------------------------------------

    async def _try(self, node: Node, parent: Node, further: int, wanted: Callable[[Node], bool]) -> None:
        for _ in range(TRIES_AFTER_HOST_LOSS):
            node.error = ""
            try:
                async with self._states.at(parent, further) as (box, node.way, node.return_s):
                    await self._in_box(node, box, wanted)
                return
            except asyncio.CancelledError:
                node.ended = "cancelled"
                raise
            except CommandFailedError as error:
                node.error = str(error)
                return
            except SandboxLostError as error:
                node.error = str(error)
                if error.cause != "host":
                    return

    async def _in_box(self, node: Node, box: Box, wanted: Callable[[Node], bool]) -> None:
        try:
            begun = time.perf_counter()
            node.result = await self._apply(box.sandbox, node.action)
            node.apply_s = time.perf_counter() - begun
            await self._states.weigh(box)
            begun = time.perf_counter()
            score = await self._rate(box.sandbox)
            node.score_s = time.perf_counter() - begun
            if score is None:
                node.error = "it has no score"
                return
            node.score = score
            best = self.best is None or self.best.score is None or score > self.best.score
            # Always asked: it also tells the strategy of the score.
            again = wanted(node) and node.depth < self.depth
            if best or again:
                await self._states.keep(node, box)
        except (SandboxLostError, NotFoundError) as error:
            lost = await afind_loss(self._client, box.sandbox, error)
            if lost is None:
                # Not about this sandbox: a file that a function of the caller's did not find.
                raise
            node.score = None
            box.lost = True
            cause = "host" if lost.host else "guest"
            raise SandboxLostError(lost.message, cause=cause, sandbox=box.sandbox) from error

    async def _apply(self, sandbox: str, action: Any) -> Any:
        if (apply := self.options.get("apply")) is not None:
            return await self._calls.on_sandbox(apply, sandbox, action)
        if isinstance(action, str):
            return await self._client.shell(sandbox, action)
        return await self._client.exec(sandbox, list(action))

    async def _rate(self, sandbox: str) -> float | None:
        if isinstance(self._score, str):
            said = await self._client.shell(sandbox, self._score)
            value: Any = _last_number(said)
        else:
            value = await self._calls.on_sandbox(self._score, sandbox)
        if value is None:
            return None
        number = float(value)
        return None if math.isnan(number) else number

    async def _after(self, node: Node) -> None:
        """Count it, and see whether it is the best."""
        self._ended += 1
        before = self.best
        if node.score is not None and node.state is not None:
            best = before is None or before.score is None or node.score > before.score
            self.best = node if best else before
        if self._ended in self.options.get("marks", ()):
            self._mark()
        self._trying[node] -= 1
        if self.best is not before and before is not None and before.ended:
            await self._release(before)
        if node.ended:
            await self._release(node)
        await self._stay_within_memory()
        if (told := self.options.get("on_node")) is not None:
            told(node)
        target = self.options.get("target")
        if target is not None and node.score is not None and node.score >= target:
            self._stop("target")

    def _mark(self) -> None:
        best = self.best
        took = time.perf_counter() - self._began_at
        self._marks.append(Mark(self._ended, round(took, 3), best, best.score if best else None))

    def _held(self, node: Node) -> bool:
        return node is self.root or node is self.best or any(mark.node is node for mark in self._marks)

    async def _release(self, node: Node) -> None:
        if not self._held(node):
            await self._states.free(node)
        elif node is self.root:
            await self._states.free_copies(node)

    async def _stay_within_memory(self) -> None:
        await self._make_room(None, lambda: not self._states.over_budget)

    async def _make_room(self, parent: Node | None, enough: Callable[[], bool]) -> bool:
        """Free the states with the lowest scores until there is enough; whether there is."""
        while not enough():
            kept = [n for n in self._states.saved_mb if n is not parent and not self._trying[n]]
            idle = [node for node in kept if not self._held(node)]
            if not idle:
                return False
            await self.finish(min(idle, key=lambda node: node.score or 0.0), "memory")
        return True

    # -- the whole ---------------------------------------------------------------------

    def _stop(self, why: Stopped) -> None:
        self._stopped = why
        if self._work is not None:
            self._work.cancel()

    async def run(self, strategy: Callable[[Search], Awaitable[None]]) -> SearchResult:
        """Everything from the frozen source to the result; nothing but its sandbox is left."""
        if not self.parallel:
            fits = (await self._client.capacity(self._source)).fits
            self.parallel = max(1, min(os.cpu_count() or 1, fits))
        self._states = States(
            self._client, self._source, self._costs, self.parallel, self.budget.memory_mb, self._apply
        )
        try:
            await self._states.open(self.root)
            self.parallel = self._states.parallel
            self._began_at = time.perf_counter()
            await self._until_stopped(strategy)
            seconds = time.perf_counter() - self._began_at
            if not self._marks or self._marks[-1].nodes != self._ended:
                self._mark()
            marks = await self._checked()
            sandbox = await self._left()
        finally:
            try:
                await self._states.close()
            finally:
                await self._close_other()
        return SearchResult(
            best=self.best,
            tree=Tree(self.root, self.best),
            sandbox=sandbox,
            marks=marks,
            nodes=self._begun,
            seconds=round(seconds, 3),
            stopped=self._stopped,
            returns=self._costs.took,
            peak_sandboxes=self._states.peak,
            peak_mb=round(self._states.peak_mb, 1),
        )

    async def _until_stopped(self, strategy: Callable[[Search], Awaitable[None]]) -> None:
        async def work() -> None:
            await strategy(self)

        try:
            async with asyncio.TaskGroup() as group:
                self._work = group.create_task(work())
                if self.budget.seconds is not None:
                    loop = asyncio.get_running_loop()
                    timer = loop.call_later(self.budget.seconds, self._stop, "seconds")
                    self._work.add_done_callback(lambda _: timer.cancel())
        except BaseExceptionGroup as group_error:
            raise _first(group_error) from group_error

    async def _checked(self) -> list[Mark]:
        """The hidden check's word on the nodes of the marks, each in a copy of its state."""
        check = self.options.get("check")
        if check is None:
            return self._marks
        words: dict[Node, tuple[bool, float]] = {}
        marks = []
        for mark in self._marks:
            node = mark.node
            if node is not None and node not in words:
                copy = await self._states.copy_of(node)
                try:
                    words[node] = _word(await self._calls.on_sandbox(check, copy.id))
                finally:
                    await self._client.delete_sandbox(copy.id)
            passed, reward = words.get(node, (False, 0.0)) if node is not None else (False, 0.0)
            marks.append(Mark(mark.nodes, mark.seconds, node, mark.score, passed, reward))
        return marks

    async def _left(self) -> SandboxInfo | None:
        if self.best is None or not self.options.get("keep", True):
            return None
        return await self._states.hand_over(self.best, self._fork_for_caller)

    async def _fork_for_caller(self, source: str, **chosen: Any) -> SandboxInfo:
        given = self._given
        if isinstance(given, AsyncClient):
            return (await given.fork(source, 1, **chosen)).forks[0]
        return (await in_thread(lambda: given.fork(source, 1, **chosen))).forks[0]

    async def _close_other(self) -> None:
        """The client that was made here, of the kind that the caller's is not."""
        if self._given is self._client:
            await in_thread(self._both.sync.close)
        else:
            await self._client.close()


def _word(said: Any) -> tuple[bool, float]:
    """What a check said, as passed and reward. A number passes from 1 up."""
    if isinstance(said, Verdict):
        return said.passed, said.reward
    return (said, float(said)) if isinstance(said, bool) else (float(said) >= 1.0, float(said))


def _last_number(said: ExecResult) -> float:
    words = said.stdout.split()
    try:
        return float(words[-1])
    except (IndexError, ValueError):
        raise InvalidRequestError(
            f"the score's command ended with {said.exit_code} and "
            f"{shlex.quote(words[-1][:60]) if words else 'no output'}, which is no number",
            hint=(said.stderr.strip().splitlines() or ["let it print a number last"])[-1][:200],
        ) from None


def _first(error: BaseException) -> BaseException:
    """The first cause in a group of failures: what one call after the other would have raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
