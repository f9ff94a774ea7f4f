"""Making templates: each input once however many ask, told while it happens, kept within a budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forkyard.errors import (
    AccessDeniedError,
    ConflictError,
    ForkyardError,
    InternalError,
    InvalidRequestError,
    to_wire,
)
from forkyard.host import files
from forkyard.host.failpoint import failpoint
from forkyard.oci.tools import Say, Tools
from forkyard.requests import (
    Caller,
    CreateSandbox,
    Deposit,
    MakeTemplate,
    Prepare,
    TemplateEvent,
    TemplateSpec,
)
from forkyard.yard import names, warmup
from forkyard.yard.background import begin
from forkyard.yard.builds import Builder
from forkyard.yard.context import Context
from forkyard.yard.material import Made, Material
from forkyard.yard.pulls import Puller
from forkyard.yard.snapshots import Snapshots
from forkyard.yard.templates import TemplateDoc, Templates

__all__ = ["Making"]

log = logging.getLogger("forkyard.yard")

T = TypeVar("T")
_ID = re.compile(r"[0-9a-f]{8,64}")
_CHUNK = 1 << 20
_DEPOSIT_S = 3600.0
_BACKLOG = 2000


class _Shared:
    """One piece of work and all who wait for it."""

    def __init__(self) -> None:
        self.listeners: list[Say] = []
        self.waiting = 0
        self.backlog: list[tuple[str, str]] = []
        self.task: asyncio.Task[None] | None = None
        self.future: asyncio.Future[Any] | None = None

    def say(self, kind: str, text: str) -> None:
        if len(self.backlog) < _BACKLOG:
            self.backlog.append((kind, text))
        for listener in self.listeners:
            listener(kind, text)


class Making:
    """The verbs that make templates."""

    def __init__(self, context: Context, templates: Templates, snapshots: Snapshots, tools: Tools) -> None:
        self.context = context
        self.templates = templates
        self.snapshots = snapshots
        self.tools = tools
        material = Material(context)
        self.builder = Builder(templates, tools, material, context.settings.build_cache_gb << 30)
        self.puller = Puller(templates, tools, material)
        self._shared: dict[str, _Shared] = {}

    # -- what clients send beforehand

    async def deposit(self, request: Deposit, chunks: AsyncIterator[bytes], caller: Caller) -> None:
        """Keep what a client sends, for its next request; an hour at most."""
        path = self._deposit_path(request.id)
        await asyncio.to_thread(self._expire)
        part = path.with_suffix(".part")
        try:
            with open(part, "wb", buffering=0) as file:  # noqa: ASYNC230
                gathered = bytearray()
                async for chunk in chunks:
                    gathered += chunk
                    if len(gathered) >= _CHUNK:
                        await asyncio.to_thread(file.write, gathered)
                        gathered = bytearray()
                await asyncio.to_thread(file.write, gathered)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _deposit_path(self, deposit: str) -> Path:
        if not _ID.fullmatch(deposit):
            raise InvalidRequestError(f"{deposit[:80]!r} is no deposit's id")
        return self.tools.root / "deposits" / deposit

    def _deposited(self, deposit: str | None) -> Path | None:
        if deposit is None:
            return None
        path = self._deposit_path(deposit)
        if not path.exists():
            raise ConflictError(
                "what was sent for this request is gone", hint="send it again", retryable=True
            )
        return path

    def _expire(self) -> None:
        for path in (self.tools.root / "deposits").iterdir():
            if path.stat().st_mtime < time.time() - _DEPOSIT_S:
                path.unlink(missing_ok=True)

    # -- verbs

    async def make(self, request: MakeTemplate, caller: Caller) -> AsyncIterator[TemplateEvent]:
        """See API: ``build_template`` and ``pull_template``. Closing the stream gives up, unless
        others wait for the same."""
        events: asyncio.Queue[TemplateEvent] = asyncio.Queue()

        def say(kind: Any, text: str) -> None:
            events.put_nowait(TemplateEvent(kind=kind, text=text))

        async with _Stream(self.context.tg, self._make(request.spec, caller, say)) as stream:
            async for event in stream.events(events):
                yield event
            doc = stream.result()
        yield TemplateEvent(kind="done", template=self.templates.info(doc))

    async def prepare(self, request: Prepare, caller: Caller) -> AsyncIterator[TemplateEvent]:
        """See API: ``prepare``."""
        if request.parallel is not None and request.parallel < 1:
            raise InvalidRequestError(f"parallel={request.parallel} is less than 1")
        events: asyncio.Queue[TemplateEvent] = asyncio.Queue()
        slots = asyncio.Semaphore(request.parallel or max(2, os.cpu_count() or 2))
        made: set[str] = set()

        async def one(index: int, spec: TemplateSpec) -> None:
            def say(kind: Any, text: str) -> None:
                events.put_nowait(TemplateEvent(kind=kind, text=text, index=index))

            async with slots:
                try:
                    doc = await self._make(spec, caller, say)
                except ForkyardError as error:
                    events.put_nowait(TemplateEvent(kind="failed", index=index, error=to_wire(error)))
                    return
                except Exception as unexpected:
                    # The others are not to suffer for it.
                    log.exception("preparing spec %d failed", index)
                    told = to_wire(InternalError(f"the daemon failed ({type(unexpected).__name__})"))
                    events.put_nowait(TemplateEvent(kind="failed", index=index, error=told))
                    return
            made.add(doc.name)
            info = self.templates.info(doc)
            events.put_nowait(TemplateEvent(kind="done", index=index, template=info))

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for index, spec in enumerate(request.specs):
                    group.create_task(one(index, spec))
            if request.disk_budget_mb is not None:
                left = await self.fit(request.disk_budget_mb, made, caller)
                if left > request.disk_budget_mb:
                    text = (
                        f"templates in use hold {left} MiB, more than the budget of {request.disk_budget_mb}"
                    )
                    events.put_nowait(TemplateEvent(kind="note", text=text))

        async with _Stream(self.context.tg, all_of_them()) as stream:
            async for event in stream.events(events):
                yield event
            stream.result()

    async def for_sandbox(self, request: CreateSandbox, caller: Caller) -> CreateSandbox:
        """A request for a sandbox from an image as one for a sandbox from a template, which is
        pulled if it is not here."""
        if request.image is None:
            return request
        if request.template is not None or request.snapshot is not None:
            raise InvalidRequestError(
                "image, template and snapshot exclude each other", hint="give one of them"
            )
        spec = TemplateSpec(
            image=request.image,
            format=request.image_format,
            deposit=request.image_deposit,
            auths=request.auths,
        )
        doc = self._same_image(request.image) if spec.format == "registry" else None
        if doc is None:
            doc = await self._make(spec, caller, lambda kind, text: None)
        return msgspec.structs.replace(
            request,
            image=None,
            image_deposit=None,
            auths={},
            template=doc.name,
            user=request.user or doc.user,
        )

    def _same_image(self, image: str) -> TemplateDoc | None:
        """The plain template of what was pulled by that reference before."""
        made = self.puller.known(image)
        if made is None:
            return None
        for doc in self.templates.all():
            if doc.image == made.image and doc.content == made.content and doc.warm is None:
                return doc
        return None

    # -- the work

    async def _make(self, spec: TemplateSpec, caller: Caller, say: Say) -> TemplateDoc:
        deposit = self._deposited(spec.deposit)
        try:
            self._engine(spec.engine)
            ready = warmup.check(
                spec.ready, warmup.TIMEOUT_S if spec.ready_timeout_s is None else spec.ready_timeout_s
            )
            if spec.name is not None:
                names.check_name(spec.name, "template name")
            if spec.dockerfile is not None:
                if spec.name is None:
                    raise InvalidRequestError("a template that is built needs a name")
                self._check_free(spec.name)
                return await self._build(spec, deposit, ready, caller, say)
            if spec.image is not None:
                if spec.name is not None:
                    self._check_free(spec.name)
                return await self._pull(spec, deposit, ready, caller, say)
            if spec.name is None:
                raise InvalidRequestError("give a Dockerfile, an image or a template's name")
            doc = self.templates.get(spec.name)
            await self.templates.warm(doc, self.templates.usual(doc), say)
            self.templates.touch(doc)
            return doc
        finally:
            if deposit is not None:
                deposit.unlink(missing_ok=True)

    def _check_free(self, name: str) -> None:
        there = self.templates.find(name)
        if there is not None and there.kind == "recipe":
            raise ConflictError(f"{name!r} is a template of forkyard's own", hint="choose another name")

    async def _build(
        self, spec: TemplateSpec, deposit: Path | None, ready: Any, caller: Caller, say: Say
    ) -> TemplateDoc:
        async with self.tools.scratch("build") as scratch:
            recipe = await self.builder.recipe(spec, deposit, scratch)
            parents = [layer for doc in recipe.parents.values() for layer in doc.layers]
            self.snapshots.hold(parents)
            try:
                made = self.builder.known(recipe)
                if made is None:
                    made = await self._share(
                        f"build:{recipe.source}", lambda say: self.builder.build(recipe, scratch, say), say
                    )
                else:
                    say("note", "nothing has changed: it is built already")
                return await self._name(made, spec, ready, caller, say)
            finally:
                await self.snapshots.release(parents)

    async def _pull(
        self, spec: TemplateSpec, deposit: Path | None, ready: Any, caller: Caller, say: Say
    ) -> TemplateDoc:
        key = f"pull:{spec.image}:{sorted(spec.auths)}" if deposit is None else f"pull:{deposit}"
        made = await self._share(key, lambda say: self.puller.pull(spec, deposit, say), say)
        return await self._name(made, spec, ready, caller, say)

    async def _name(
        self, made: Made, spec: TemplateSpec, ready: Any, caller: Caller, say: Say
    ) -> TemplateDoc:
        """Make a template of a disk: its name, its warm image, its record."""
        self.snapshots.hold(made.layers)
        try:
            await failpoint("template.made")
            warm = _warm_argv(spec.warm, made)
            key = made.content
            if warm is not None:
                key = hashlib.sha256(json.dumps([made.content, warm, ready]).encode()).hexdigest()
            doc = TemplateDoc(
                name=spec.name or self._made_up_name(made),
                key=key,
                layers=made.layers,
                user=made.config.user,
                workdir=made.config.workdir,
                env=dict(made.config.env),
                size_bytes=made.size_bytes,
                created_at=time.time(),
                kind=made.kind,
                content=made.content,
                source=made.source,
                image=made.image,
                entrypoint=made.config.entrypoint,
                cmd=made.config.cmd,
                warm=warm,
                ready=ready if warm is not None else None,
                ready_timeout_s=spec.ready_timeout_s or warmup.TIMEOUT_S,
                engine=self._engine(spec.engine),
            )
            return await self._share(
                f"name:{doc.name}:{doc.key}:{doc.engine}", lambda say: self._publish(doc, caller, say), say
            )
        finally:
            await self.snapshots.release(made.layers)

    def _engine(self, asked: str | None) -> str | None:
        """The engine that a template says.

        Raises:
            UnsupportedError: it is not set up here. InvalidRequestError: there is none of that name.
        """
        if asked in (None, "auto"):
            return None
        return self.context.machines.engine(asked or "").name

    async def _publish(self, doc: TemplateDoc, caller: Caller, say: Say) -> TemplateDoc:
        usual = self.templates.usual(doc)
        same = self.templates.find(doc.name)
        if same is not None and (same.key, same.layers) == (doc.key, doc.layers):
            doc = msgspec.structs.replace(doc, created_at=same.created_at)
        elif same is not None:
            _check_replaces(same, doc, caller)
        if doc.warm is not None:
            # A template whose warm command fails is none.
            await self.templates.warm(doc, usual, say)
        await failpoint("template.warmed")
        before = self.templates.put(doc)
        await failpoint("template.put")
        await self.snapshots.drop_unheld(before)
        if doc.warm is None:
            self.templates.warm_behind(doc, usual)
        kind = "template.built" if doc.kind == "build" else "template.pulled"
        await self.context.record(kind, caller, None, name=doc.name, key=doc.key, image=doc.image)
        return doc

    def _made_up_name(self, made: Made) -> str:
        """An image's own name where it is free, else one made of its content."""
        if made.image is not None:
            try:
                name = names.check_name(made.image)
                there = self.templates.find(name)
                if there is None or (there.kind == "image" and there.image == made.image and not there.warm):
                    return name
            except InvalidRequestError:
                pass
        return f"image-{hashlib.sha256(made.content.encode()).hexdigest()[:16]}"

    async def _share(self, key: str, work: Callable[[Say], Awaitable[T]], say: Say) -> T:
        """Do ``work``, or wait for whoever does the same already. It is given up with its last waiter."""
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared()

            async def run() -> T:
                try:
                    return await work(shared.say)
                finally:
                    if self._shared.get(key) is shared:
                        del self._shared[key]

            shared.task, shared.future = begin(self.context.tg, run())
        else:
            for kind, text in shared.backlog:
                say(kind, text)
        assert shared.task is not None and shared.future is not None
        shared.listeners.append(say)
        shared.waiting += 1
        try:
            result: T = await asyncio.shield(shared.future)
            return result
        finally:
            shared.listeners.remove(say)
            shared.waiting -= 1
            if not shared.waiting and not shared.future.done():
                if self._shared.get(key) is shared:
                    del self._shared[key]
                shared.task.cancel()
                # Its scratch directory is ours.
                await asyncio.wait([shared.task])

    # -- the budget

    async def fit(self, budget_mb: int, keep: set[str], caller: Caller) -> int:
        """Delete templates that nothing uses, least recently used first, until the rest fits.

        Returns:
            What templates other than set-up's own then hold, in MiB.
        """
        while True:
            held = {doc.name: await self._bytes(doc) for doc in self.templates.all() if doc.kind != "recipe"}
            sizes: dict[str, int] = {}
            for layers in held.values():
                sizes.update(layers)
            total = sum(sizes.values()) >> 20
            if total <= budget_mb:
                return total
            used = {sandbox.doc.template for sandbox in self.context.sandboxes}
            idle = [doc for doc in self.templates.all()
                    if doc.kind != "recipe" and doc.name not in keep and doc.name not in used]  # fmt: skip
            if not idle:
                return total
            oldest = min(idle, key=self.templates.last_used_at)
            await self.delete(oldest.name, caller, why="budget")

    async def _bytes(self, doc: TemplateDoc) -> dict[str, int]:
        """Bytes by layer and image of a template, set-up's own layers left out."""
        own = {layer for other in self.templates.all() if other.kind == "recipe" for layer in other.layers}
        found = {}
        for layer in self.templates.all_layers(doc):
            if layer not in own:
                found[layer] = await self.context.disks.layer_bytes(layer)
        for image in self.templates.images(doc):
            found[image] = self.context.images.size(image)
        return found

    async def delete(self, name: str, caller: Caller, **why: Any) -> None:
        """Delete a template. Sandboxes made from it live on.

        Raises:
            ConflictError: it is ``base``. NotFoundError: there is none.
        """
        if name == "base":
            raise ConflictError(
                "base is what sandboxes start from where nothing else is said", hint="delete others by name"
            )
        layers = self.templates.remove(name)
        await self.snapshots.drop_unheld(layers)
        await self.context.record("template.deleted", caller, None, name=name, **why)

    def close(self) -> None:
        """Leave no half-made thing behind; the tools' cache stays."""
        for name in ("tmp", "deposits"):
            files.rmtree(self.tools.root / name)


def _check_replaces(same: TemplateDoc, doc: TemplateDoc, caller: Caller) -> None:
    """Raises AccessDeniedError for a token that would replace somebody's template and may delete none."""
    # Of a registry's name, that registry's owner may say something new at any time.
    renewed = doc.image is not None and (doc.kind, doc.image) == (same.kind, same.image)
    if caller.token is not None and "delete_template" not in caller.rights and not renewed:
        raise AccessDeniedError(
            f"there is another template {doc.name!r}, and the token {caller.name!r} may delete none",
            hint="choose another name",
        )


def _warm_argv(warm: str | list[str] | bool | None, made: Made) -> list[str] | None:
    """The argv of a warm command.

    Raises:
        InvalidRequestError: the image has none of its own, or it is empty.
    """
    if warm is None or warm is False:
        return None
    if warm is True:
        argv = [*made.config.entrypoint, *made.config.cmd]
        if not argv:
            raise InvalidRequestError(
                "warm=True runs the image's ENTRYPOINT and CMD, and it has neither", hint="give the command"
            )
        return argv
    if isinstance(warm, str):
        if not warm.strip():
            raise InvalidRequestError("the warm command is empty")
        return ["/bin/sh", "-c", warm]
    if not warm or not warm[0]:
        raise InvalidRequestError("the warm command names no program")
    return list(warm)


class _Stream:
    """Work whose events are a stream: they come while it runs, and it ends with whoever reads them."""

    def __init__(self, tg: Any, work: Any) -> None:
        self._task, self._future = begin(tg, work)

    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._future.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def events(self, queue: asyncio.Queue[TemplateEvent]) -> AsyncIterator[TemplateEvent]:
        """What is queued, until the work has ended and no more is."""
        self._future.add_done_callback(lambda _: queue.put_nowait(_END))
        while (event := await queue.get()) is not _END:
            yield event

    def result(self) -> Any:
        """What the work gave, or raises what it raised."""
        return self._future.result()


_END = TemplateEvent(kind="note")
