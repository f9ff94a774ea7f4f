"""The states of a search, and the sandboxes that stand in them.

A state is kept as a checkpoint of the sandbox that reached it (that one can be taken back to it,
and others forked from it) or as a snapshot (fork only, and the sandbox may go). At most
``parallel`` sandboxes work at a time. One that holds the only copy of a state is kept as long as
somebody may return to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.errors import ConflictError, InvalidRequestError, NotFoundError, SandboxLostError
from forkyard.rollouts.costs import Costs
from forkyard.rollouts.tree import Node, Way
from forkyard.types import SandboxInfo

LABEL = "forkyard.search"
Forker = Callable[..., Awaitable[SandboxInfo]]


class Box:
    """One sandbox of the search. ``at`` is the node whose state it stands in untouched, ``copies``
    are its checkpoints by node. One beyond the limit is ``temporary`` and keeps no checkpoints."""

    def __init__(self, sandbox: str, temporary: bool) -> None:
        self.sandbox = sandbox
        self.temporary = temporary
        self.busy = True
        self.lost = False
        self.at: Node | None = None
        self.copies: dict[Node, str] = {}


class States:
    """Brings sandboxes into states, keeps states and frees them.

    Args:
        source: A sandbox, snapshot, checkpoint or template.
        parallel: How many sandboxes may work at a time.
        memory_mb: What sandboxes and kept states may take together.
        apply: Does an action in a sandbox: what was lost is done again.
    """

    def __init__(
        self,
        client: AsyncClient,
        source: str,
        costs: Costs,
        parallel: int,
        memory_mb: float | None,
        apply: Callable[[str, Any], Awaitable[Any]],
    ) -> None:
        self.client = client
        self.source = source
        self.costs = costs
        self.parallel = parallel
        self.memory_mb = memory_mb
        # Nodes whose state went with the sandbox that held it, though somebody may return there.
        self.lost: set[Node] = set()
        self._apply = apply
        # What one sandbox and one state take: the most that any has taken so far.
        self.box_mb = 0.0
        self.state_mb = 0.0
        self.saved_mb: dict[Node, float] = {}
        self.peak = 0
        self.peak_mb = 0.0
        self._inherit: dict[str, Any] = {}
        self._kept_ephemeral = False
        self._boxes: list[Box] = []
        self._snapshots: set[str] = set()
        self._in_use: list[tuple[str | None, str]] = []
        self._mark = {LABEL: uuid.uuid4().hex[:12]}
        self._delete_s = 0.0
        self._working = 0
        # Forks under way.
        self._coming = 0
        self._changed = asyncio.Condition()

    async def open(self, root: Node) -> None:
        """Freeze the source, if it is a sandbox; it is not touched any more."""
        try:
            info = await self.client.get_sandbox(self.source)
        except NotFoundError:
            self._inherit = {"labels": self._mark}
            root.state = self.source
        else:
            self._inherit = {
                "egress": None if info.egress == "allow" else info.egress,
                "egress_allow": info.egress_allow or None,
                "labels": {**info.labels, **self._mark},
            }
            self._kept_ephemeral = info.ephemeral
            kept = await self.client.snapshot(info.id, labels=self._mark)
            self._snapshots.add(kept.id)
            root.state = kept.id
            # A fork has what the state holds in memory of its own, used or not yet.
            self.box_mb = self.state_mb = kept.size_bytes / (1 << 20)
        if self.memory_mb is not None:
            await self._fit(root, self.memory_mb)

    async def _fit(self, root: Node, memory_mb: float) -> None:
        """Work in as many sandboxes as the budget holds with a state each, by what the first ones take."""
        box = await self._fork(root)
        box.at = root
        self.box_mb = max(self.box_mb, (await self.client.usage(box.sandbox)).mem_mb)
        each_mb = max(self.box_mb + self.state_mb, 1)
        if each_mb > memory_mb:
            raise InvalidRequestError(
                f"one sandbox takes {self.box_mb:.0f} MiB and one state {self.state_mb:.0f}, "
                f"the budget is {memory_mb:.0f}",
                hint="raise memory_mb",
            )
        self.parallel = min(self.parallel, int(memory_mb // each_mb))
        if self.costs.cheaper() == "rewind":
            # Where no second sandbox fits, this one has to come back to the beginning.
            box.copies[root] = (await self.client.checkpoint(box.sandbox)).id
        box.busy = False

    @contextlib.asynccontextmanager
    async def place(
        self, node: Node, make_room: Callable[[Callable[[], bool]], Awaitable[bool]]
    ) -> AsyncIterator[bool]:
        """Leave to work from ``node``, once one of the sandboxes may and there is memory for it and
        for the state it makes. False: there is none, and nothing is left whose end would give some.

        Args:
            make_room: Frees states until its argument holds; whether it does then.
        """
        async with self._changed:
            while True:
                if self._may_begin(node):
                    may = await make_room(lambda: self._fits(node))
                    if may or not self._working:
                        break
                await self._changed.wait()
            self._working += may
        try:
            yield may
        finally:
            self._working -= may
            async with self._changed:
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def at(self, node: Node, further: int) -> AsyncIterator[tuple[Box, Way, float]]:
        """A sandbox that stands in ``node``'s state, the way it came there and the seconds; for
        whoever has a place.

        Args:
            further: How many more returns to this state are to be expected.
        """
        begun = time.perf_counter()
        box, way = await self._stand(node, further)
        took = time.perf_counter() - begun
        try:
            box.at = None
            yield box, way, took
        finally:
            box.busy = False
            if box.lost or self._needless(box):
                await self._delete(box)

    def _may_begin(self, node: Node) -> bool:
        if self._working >= self.parallel:
            return False
        owners = [box for box in self._boxes if node in box.copies or box.at is node]
        if self.costs.choice != "rewind" or not owners or any(not box.busy for box in owners):
            return True
        # Rewind only: as long as no further sandbox fits, it waits for one that can be taken back.
        return len(self._boxes) < self.parallel or any(
            not box.busy and not self._holds_a_state(box) for box in self._boxes
        )

    def _fits(self, node: Node) -> bool:
        """Whether one more may work from ``node`` within the memory: all who work have a sandbox and
        make a state, beside the idle sandboxes that hold states and cannot be the one it works in."""
        if self.memory_mb is None:
            return True
        idle = [box for box in self._boxes if not box.busy and self._holds_a_state(box)]
        own = any(node in box.copies or box.at is node for box in idle)
        working = self._working + 1
        boxes = working + len(idle) - own
        return boxes * self.box_mb + self._saved_mb + working * self.state_mb <= self.memory_mb

    async def _stand(self, node: Node, further: int) -> tuple[Box, Way]:
        for box in self._boxes:
            if box.at is node and not box.busy:
                box.busy = True
                self.costs.record("stay", 0.0)
                return box, "stay"
        owner = next((b for b in self._boxes if node in b.copies and not b.busy), None)
        back = owner is not None and (self.costs.next() == "rewind" or not self._room_beside())
        if owner is not None and back and await self._rewind(owner, node):
            return owner, "rewind"
        begun = time.perf_counter()
        self._coming += 1
        try:
            made_room = await self._make_room()
            box = await self._fork(node)
        finally:
            self._coming -= 1
        # The sandbox that goes for it is part of the price, now or when this one goes.
        price = time.perf_counter() - begun + (0.0 if made_room else self._delete_s)
        self.costs.record("fork", price)
        if further and not box.temporary and self.costs.cheaper() == "rewind":
            # Paid once, so that it can be taken back here.
            box.copies[node] = (await self.client.checkpoint(box.sandbox)).id
        return box, "fork"

    async def _rewind(self, box: Box, node: Node) -> bool:
        """False if the sandbox is gone."""
        box.busy = True
        begun = time.perf_counter()
        try:
            await self.client.rewind(box.sandbox, to=box.copies[node])
        except (NotFoundError, SandboxLostError):
            await self._delete(box)
            return False
        except BaseException:
            box.busy = False
            raise
        self.costs.record("rewind", time.perf_counter() - begun)
        return True

    async def _make_room(self) -> bool:
        """Delete idle sandboxes that nobody needs, where there are as many as may work or as fit."""
        made = False
        while len(self._boxes) + self._coming > self.parallel or not self._room_beside():
            box = next((b for b in self._boxes if not b.busy and not self._holds_a_state(b)), None)
            if box is None:
                break
            await self._delete(box)
            made = True
        return made

    def _room_beside(self) -> bool:
        """Whether the memory holds a sandbox more than there are, those that are coming included."""
        if self.memory_mb is None:
            return True
        boxes = len(self._boxes) + max(self._coming, 1)
        return boxes * self.box_mb + self._saved_mb + self._working * self.state_mb <= self.memory_mb

    async def _fork(self, node: Node) -> Box:
        await self._restore(node)
        assert node.state is not None
        done = await self.client.fork(node.state, 1, ephemeral=True, **self._inherit)
        box = Box(done.forks[0].id, temporary=len(self._boxes) >= self.parallel)
        self._boxes.append(box)
        self.peak = max(self.peak, len(self._boxes))
        self._note_peak()
        return box

    async def _restore(self, node: Node) -> None:
        """Reach a lost state once more, from the nearest one above that is still there."""
        if node not in self.lost:
            return
        above, actions = node, []
        while above.state is None:
            assert above.parent is not None
            actions.append(above.action)
            above = above.parent
        done = await self.client.fork(above.state, 1, ephemeral=True, **self._inherit)
        sandbox = done.forks[0].id
        for action in reversed(actions):
            await self._apply(sandbox, action)
        kept = await self.client.snapshot(sandbox, labels=self._mark)
        self._snapshots.add(kept.id)
        node.state = kept.id
        self._saved(node, kept.size_bytes)
        self.lost.discard(node)
        await self.client.delete_sandbox(sandbox)

    def _holds_a_state(self, box: Box) -> bool:
        return any(node.state == kept for node, kept in box.copies.items())

    def _needless(self, box: Box) -> bool:
        if self._holds_a_state(box):
            return False
        return box.temporary or (not box.copies and box.at is None and self.costs.cheaper() == "fork")

    async def keep(self, node: Node, box: Box) -> None:
        """Save the state that ``box`` is in as ``node``'s."""
        begun = time.perf_counter()
        if box.temporary or self.costs.cheaper() == "fork":
            kept = await self.client.snapshot(box.sandbox, labels=self._mark)
            self._snapshots.add(kept.id)
        else:
            kept = await self.client.checkpoint(box.sandbox)  # type: ignore[assignment]
            box.copies[node] = kept.id
        node.state, box.at = kept.id, node
        node.save_s = time.perf_counter() - begun
        self._saved(node, kept.size_bytes)

    def _saved(self, node: Node, size_bytes: int) -> None:
        self.saved_mb[node] = size_bytes / (1 << 20)
        self.state_mb = max(self.state_mb, self.saved_mb[node])
        self._note_peak()

    async def weigh(self, box: Box) -> None:
        """What an action made of its sandbox counts for all that follow, where memory is limited."""
        if self.memory_mb is not None:
            self.box_mb = max(self.box_mb, (await self.client.usage(box.sandbox)).mem_mb)
            self._note_peak()

    @property
    def _saved_mb(self) -> float:
        return sum(self.saved_mb.values())

    @property
    def _used_mb(self) -> float:
        return len(self._boxes) * self.box_mb + self._saved_mb

    def _note_peak(self) -> None:
        self.peak_mb = max(self.peak_mb, self._used_mb)

    @property
    def over_budget(self) -> bool:
        """Whether sandboxes and kept states take more than the budget."""
        return self.memory_mb is not None and self._used_mb > self.memory_mb

    async def free(self, node: Node) -> None:
        """Nobody returns to this state: delete whatever holds it."""
        self.lost.discard(node)
        if node.state is None:
            return
        state, node.state = node.state, None
        self.saved_mb.pop(node, None)
        if state in self._snapshots:
            self._snapshots.discard(state)
            await self._drop(None, state)
        await self.free_copies(node)

    async def free_copies(self, node: Node) -> None:
        """Delete the checkpoints that sandboxes hold of a state; what ``node.state`` names stays."""
        for box in list(self._boxes):
            kept = box.copies.get(node)
            if kept is not None and kept != node.state:
                del box.copies[node]
                await self._drop(box.sandbox, kept)
            if box.at is node:
                box.at = None
            if not box.busy and box in self._boxes and self._needless(box):
                await self._delete(box)

    async def _drop(self, sandbox: str | None, kept: str) -> None:
        try:
            if sandbox is None:
                await self.client.delete_snapshot(kept)
            else:
                await self.client.delete_checkpoint(sandbox, kept)
        except ConflictError:
            # A sandbox that was forked from it still runs: once that is gone.
            self._in_use.append((sandbox, kept))
        except NotFoundError:
            pass

    async def _delete(self, box: Box) -> None:
        self._boxes.remove(box)
        for node, kept in box.copies.items():
            if node.state == kept:
                node.state = None
                self.lost.add(node)
                self.saved_mb.pop(node, None)
        begun = time.perf_counter()
        with contextlib.suppress(NotFoundError):
            await self.client.delete_sandbox(box.sandbox)
        self._delete_s = time.perf_counter() - begun
        waiting, self._in_use = self._in_use, []
        for sandbox, kept in waiting:
            await self._drop(sandbox, kept)

    async def copy_of(self, node: Node) -> SandboxInfo:
        """An ephemeral copy, for a check; the caller deletes it."""
        await self._restore(node)
        assert node.state is not None
        return (await self.client.fork(node.state, 1, ephemeral=True, **self._inherit)).forks[0]

    async def hand_over(self, node: Node, forker: Forker) -> SandboxInfo:
        """A copy that stays when the search's own sandboxes and states are gone."""
        await self._restore(node)
        labels = {key: value for key, value in self._inherit["labels"].items() if key != LABEL}
        chosen = {**self._inherit, "labels": labels, "ephemeral": self._kept_ephemeral}
        assert node.state is not None
        if node.state not in self._snapshots:
            return await forker(node.state, **chosen)
        # A snapshot is not deleted while a sandbox that started from it lives: by way of another.
        box = await self.copy_of(node)
        try:
            return await forker(box.id, **chosen)
        finally:
            await self.client.delete_sandbox(box.id)

    async def close(self) -> None:
        """Delete every sandbox and state of the search, also of calls that were cut short."""
        self._boxes = []
        await self.client.delete_sandboxes(self._mark)
        for kept in await self.client.list_snapshots(self._mark):
            with contextlib.suppress(NotFoundError):
                await self.client.delete_snapshot(kept.id)
