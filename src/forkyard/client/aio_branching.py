"""The client's verbs that compare states, carry changes over, and try several ways at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkyard import errors
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.client import _protocol as protocol
from forkyard.client import holding, materials
from forkyard.client.aio_transport import AsyncTransport
from forkyard.client.pools import AsyncPool

Chooser = str | Callable[[list[ty.VariantResult]], Any]
Progress = Callable[[rq.ExploreEvent], None]


class AsyncBranching:
    _transport: AsyncTransport
    _took: Callable[..., None]
    prepare: Callable[..., Any]
    _pools: set[AsyncPool]

    async def diff(self, sandbox: str, since: str | None = None) -> ty.Diff:
        """What changed on its disk, computed by the daemon from the disk itself; the sandbox is not asked.

        Args:
            since: A snapshot, or one of its checkpoints (id or label); by default the state that
                it started from.

        Raises:
            NotFoundError: no such ``since``. CapacityError: more than 100,000 paths differ.
        """
        request = protocol.made(rq.DiffRequest, sandbox=sandbox, since=since)
        return await self._transport.call("diff", request)

    async def apply(
        self,
        sandbox: str,
        diff: ty.Diff,
        paths: Sequence[str] | None = None,
        user: str | None = None,
        *,
        request_id: str | None = None,
    ) -> ty.Transfer:
        """Make the changes of a diff in another sandbox: by content, with deletions, modes and links.

        Args:
            paths: Only these and what is below them; relative ones start at the working directory.
            user: Whose rights it takes, and whose the files then are; ``root`` keeps their owners.

        Raises:
            InvalidRequestError: the diff does not hold all the content that it takes.
            AccessDeniedError: the user may not change one of the paths; those before it are done.
            ConflictError: a directory that the diff knows nothing of is in the way.
        """
        return await self._transport.call(
            "apply",
            rq.Apply(
                sandbox=sandbox,
                changes=diff.changes,
                paths=None if paths is None else list(paths),
                user=user,
                request_id=request_id or protocol.new_request_id(),
            ),
        )

    async def explore(
        self,
        source: str | None,
        variants: Sequence[str | Sequence[str] | Mapping[str, Any]],
        *,
        image: str | None = None,
        timeout_s: float | None = None,
        parallel: int | None = None,
        keep: Chooser = "fastest",
        ephemeral: bool | None = None,
        on_progress: Progress | None = None,
        lease: str | None = None,
    ) -> ty.ExploreResult:
        """Try each variant in its own copy of ``source``; keep the best copy, delete the others.

        Args:
            source: A sandbox, snapshot, checkpoint or template; it is not changed. What none of
                these is called may be an image, as :meth:`pull_template` takes it.
            image: An image, whatever else has that name; ``source`` is None then.
            variants: Each a command (text for ``/bin/sh -c``, or a list of words), or a mapping of
                ``command`` and, where wanted, ``name``, ``files`` (``{path: data}``, written before
                it runs) and ``env``. A name is made up from its place where there is none.
            timeout_s: For each command.
            parallel: How many copies at a time; by default as many as make sense on the machine.
            keep: ``"fastest"`` of those that exit with 0, ``"first"`` of them in the order given,
                or a function that is given the results and returns one of them, or None.
            ephemeral: For the copy that is kept; where not given, as the source.
            on_progress: Called with each event as it comes.

        Raises:
            CapacityError: there is no room for even one copy. NotFoundError: no such source.
        """
        if (source is None) == (image is None):
            raise errors.InvalidRequestError("explore needs a source or an image, and not both")
        if image is not None:
            source = await self._template_of(image)
        asked = protocol.made(
            rq.Explore,
            source=source,
            variants=[protocol.variant(one, number) for number, one in enumerate(variants, 1)],
            timeout_s=timeout_s,
            parallel=parallel,
            keep="choose" if callable(keep) else keep,
            ephemeral=ephemeral,
            lease=holding.lease_of(self._transport.remote, lease),
            request_id=protocol.new_request_id(),
        )
        if asked.lease is not None and asked.lease.stream is not None:
            # The copies run for as long as it takes.
            holding.keep(self._transport.remote, asked.request_id)
        try:
            return await self._explore(asked, keep, on_progress)
        except errors.NotFoundError:
            if image is not None or source is None or not materials.looks_like_an_image(source):
                raise
            asked.source = await self._template_of(source)
            return await self._explore(asked, keep, on_progress)
        finally:
            holding.let_go(self._transport.remote, asked.request_id)

    def pool(self, source: str, size: int, **options: Any) -> AsyncPool:
        """``size`` running copies made ahead: ``acquire()`` gives one at once, and another is made
        behind it. A context manager: what is ready is deleted at its end.

        Args:
            source: A sandbox (as it is when the first copies are made), snapshot, checkpoint or template.
            size: From 1 to 1000. Each counts as a sandbox from the moment that it is ready.
            options: As for :meth:`fork`, but for names, leases and ``ttl_min``, which would run while a copy
                waits. Copies are ephemeral: they end with this process at the latest.
        """
        made = AsyncPool(self, source, size, options)  # type: ignore[arg-type]
        self._pools.add(made)
        return made

    async def _template_of(self, image: str) -> str:
        (made,) = await self.prepare([{"image": image}])
        return str(made.name)

    async def _explore(
        self, asked: rq.Explore, keep: Chooser, on_progress: Progress | None
    ) -> ty.ExploreResult:
        stream = await self._transport.open("explore", asked)
        try:
            while frames := await stream.read():
                for frame in frames:
                    event: rq.ExploreEvent = protocol.decode("explore", frame)
                    if on_progress is not None:
                        on_progress(event)
                    if event.kind == "choose" and callable(keep) and event.outcome is not None:
                        await self._choose(asked.request_id, keep, event.outcome)
                    elif event.kind == "done" and event.outcome is not None:
                        outcome = event.outcome
                        if outcome.winner is not None and outcome.winner.sandbox is not None:
                            self._took(asked.lease, outcome.winner.sandbox)
                        return outcome
        finally:
            await stream.close()
        raise errors.UnavailableError("the daemon ended an explore without an outcome", retryable=True)

    async def _choose(self, explore: str, keep: Callable[..., Any], outcome: ty.ExploreResult) -> None:
        chosen = keep(outcome.results)
        name = chosen.name if isinstance(chosen, ty.VariantResult) else chosen
        request = protocol.made(
            rq.ExploreChoice, explore=explore, winner=name, request_id=protocol.new_request_id()
        )
        await self._transport.call("explore_choose", request)
