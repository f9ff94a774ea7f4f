"""Templates, and the memory images that make starting from one a restore.

A template is layers and defaults in ``templates/<name>.json``. Its warm image is a cache: a
machine was booted from it once and saved, after its warm command was ready where it has one and
else before it ran anything but the agent. The key is all that the image depends on, so a
changed engine, agent or template is a miss, which boots cold (and runs the warm command) and makes
the image behind. What a warm command wrote is a layer of the image's own, on top of the template's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import hashlib
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from forkyard.config import TYPES
from forkyard.engines.base import Engine
from forkyard.errors import CorruptSnapshotError, ForkyardError, NotFoundError, UnsupportedError
from forkyard.host.failpoint import failpoint
from forkyard.host.files import write_atomic
from forkyard.types import TemplateInfo
from forkyard.yard import names, warmup
from forkyard.yard.background import finish
from forkyard.yard.context import Context
from forkyard.yard.machines import Box, Limits, Start

log = logging.getLogger("forkyard.yard")

# Raised when machines are launched otherwise: a memory image keeps how its own was (who may open the
# agent's descriptors, for one), so that those of before are made anew.
WARM_REVISION = 3
# By CPU: with more than these, busy ones leave the sentry no time for the agent (docs/security.md).
PROCESSES = {"small": 256, "medium": 512, "large": 1024}


class TemplateDoc(msgspec.Struct, kw_only=True):
    """A template as ``templates/<name>.json`` has it.

    ``kind`` is ``recipe`` (set-up made it), ``build`` or ``image``. ``content`` identifies the
    disk and defaults alone, ``source`` what they were made from (so that the same input is made
    once), ``image`` is the reference that was pulled. ``warm`` is the argv of its warm command,
    ``engine`` what its sandboxes run on unless they say.
    """

    name: str
    key: str
    layers: list[str]
    user: str = "root"
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    size_bytes: int = 0
    created_at: float = 0.0
    kind: str = "recipe"
    content: str = ""
    source: str = ""
    image: str | None = None
    entrypoint: list[str] = []
    cmd: list[str] = []
    warm: list[str] | None = None
    ready: str | int | None = None
    ready_timeout_s: float = warmup.TIMEOUT_S
    engine: str | None = None

    @property
    def tainted(self) -> bool:
        """Whether root's command has run in what its sandboxes start from."""
        return self.warm is not None and self.user.partition(":")[0].strip() in ("root", "0", "")


class Templates:
    """Finds templates and keeps their warm images."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._making: dict[str, asyncio.Task[None]] = {}
        # Layers that an image is being made on, behind.
        self._busy: collections.Counter[str] = collections.Counter()
        # Drops those of some layers that nothing holds.
        self.drop: Callable[[Iterable[str]], Awaitable[None]] = _keep_all
        self._warming: dict[str, asyncio.Lock] = {}
        self._docs: dict[str, tuple[int, TemplateDoc]] = {}

    @property
    def directory(self) -> Path:
        return self.context.home / "templates"

    def find(self, name: str) -> TemplateDoc | None:
        """The template, or None."""
        try:
            return self._read(os.fspath(self._path(name)))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                return None
            raise

    def _path(self, name: str) -> Path:
        return self.directory / f"{_file_name(name)}.json"

    def _read(self, path: str) -> TemplateDoc:
        """A template's file; set-up may write one while we run."""
        changed = os.stat(path).st_ctime_ns
        known = self._docs.get(path)
        if known is None or known[0] != changed:
            with open(path, "rb") as file:
                known = self._docs[path] = (changed, msgspec.json.decode(file.read(), type=TemplateDoc))
        return known[1]

    def get(self, name: str) -> TemplateDoc:
        """The template.

        Raises:
            NotFoundError: there is none of that name.
        """
        found = self.find(name)
        if found is None:
            known = ", ".join(sorted(doc.name for doc in self.all())) or "none"
            hint = "forkyard setup builds base" if name == "base" else f"there are: {known}"
            raise NotFoundError(f"no template {name[:140]!r}", hint=hint)
        return found

    def all(self) -> list[TemplateDoc]:
        """Every template whose file can be read."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            paths = sorted(entry.path for entry in entries if entry.name.endswith(".json"))
            for path in paths:
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    found.append(self._read(path))
        return found

    def layers(self) -> set[str]:
        """The layers of all templates, those of their warm images included."""
        docs = self.all()
        held = {layer for doc in docs for layer in doc.layers} | set(+self._busy)
        for image in self.context.images.names():
            if self.owns(image):
                held.update(self._image_layers(image))
        return held

    def _image_layers(self, image: str) -> list[str]:
        """The disk that goes with a warm image; empty where it is the template's own."""
        with contextlib.suppress(NotFoundError, CorruptSnapshotError, UnsupportedError):
            return self.context.images.manifest(image).layers
        return []

    def put(self, doc: TemplateDoc) -> list[str]:
        """Write a template's file whole.

        Returns:
            The layers that its predecessor of that name had, for the caller to drop if unheld.
        """
        self.directory.mkdir(exist_ok=True)
        before = self.find(doc.name)
        path = self._path(doc.name)
        write_atomic(path, msgspec.json.encode(doc))
        self._docs.pop(os.fspath(path), None)
        return self._forgotten(before) if before is not None else []

    def remove(self, name: str) -> list[str]:
        """Forget a template and its warm images.

        Returns:
            Its layers, for the caller to drop if unheld: they go with their last user.
        """
        doc = self.get(name)
        path = self._path(name)
        path.unlink()
        self._docs.pop(os.fspath(path), None)
        return self._forgotten(doc)

    def _forgotten(self, doc: TemplateDoc) -> list[str]:
        """Delete the warm images of a template that is gone, unless another has the same."""
        layers = list(doc.layers)
        tag = self._tag(doc)
        if all(self._tag(other) != tag for other in self.all()):
            for image in self.context.images.names():
                if image.startswith(tag):
                    layers += self._image_layers(image)
                    self.context.images.delete(image)
        return layers

    def images(self, doc: TemplateDoc) -> list[str]:
        """The warm images of a template, of every shape."""
        tag = self._tag(doc)
        return [image for image in self.context.images.names() if image.startswith(tag)]

    def all_layers(self, doc: TemplateDoc) -> list[str]:
        """A template's layers, and those that its warm images have on top."""
        extra = [layer for image in self.images(doc) for layer in self._image_layers(image)]
        return list(dict.fromkeys([*doc.layers, *extra]))

    def owns(self, image: str) -> bool:
        """Whether a warm image is one of a template there is."""
        return any(image.startswith(self._tag(doc)) for doc in self.all())

    def touch(self, doc: TemplateDoc) -> None:
        """Note that something was made from it: the time of its file is that of its last use."""
        with contextlib.suppress(OSError):
            os.utime(self._path(doc.name))
            path = os.fspath(self._path(doc.name))
            self._docs[path] = (os.stat(path).st_ctime_ns, doc)

    def last_used_at(self, doc: TemplateDoc) -> float:
        """When something was last made from it."""
        with contextlib.suppress(OSError):
            return os.stat(self._path(doc.name)).st_mtime
        return doc.created_at

    def info(self, doc: TemplateDoc) -> TemplateInfo:
        """The public view."""
        return TemplateInfo(
            name=doc.name,
            key=doc.key,
            user=doc.user,
            workdir=doc.workdir,
            size_bytes=doc.size_bytes,
            warm=self._is_warm(doc),
            created_at=doc.created_at,
            env=dict(doc.env),
            kind=doc.kind,
            image=doc.image,
            last_used_at=self.last_used_at(doc),
            warm_command=None if doc.warm is None else list(doc.warm),
            engine=doc.engine,
        )

    def usual(self, doc: TemplateDoc) -> Limits:
        """Those that most of its sandboxes will have.

        Raises:
            UnsupportedError: its engine is not set up here.
        """
        context = self.context
        engine = context.machines.engine(doc.engine) if doc.engine else context.engine
        return limits(context.settings.defaults.type, engine)

    def _is_warm(self, doc: TemplateDoc) -> bool:
        with contextlib.suppress(UnsupportedError):
            return self.image(doc, self.usual(doc)) is not None
        return False

    def image(self, doc: TemplateDoc, shaped: Limits) -> str | None:
        """Name of the warm image for machines of that shape, or None."""
        name = self._image_name(doc, shaped)
        return name if self.context.images.exists(name) else None

    def warm_behind(self, doc: TemplateDoc, shaped: Limits) -> None:
        """Make the warm image in the background, once however many ask."""
        name = self._image_name(doc, shaped)
        if name in self._making or self.context.images.exists(name):
            return
        task = self.context.tg.create_task(self._warm_quietly(doc, shaped))
        self._making[name] = task
        task.add_done_callback(lambda _: self._making.pop(name, None))

    async def _warm_quietly(self, doc: TemplateDoc, shaped: Limits) -> None:
        self._busy.update(doc.layers)
        try:
            await self.warm(doc, shaped)
        except (ForkyardError, OSError) as error:
            log.warning("template %s stays cold: %s", doc.name, error)
        finally:
            self._busy.subtract(doc.layers)
            await self._forget_unowned(doc, self._image_name(doc, shaped))

    async def _forget_unowned(self, doc: TemplateDoc, image: str) -> None:
        """After a template went while its warm image was made: that goes too."""
        if not self.owns(image):
            layers = self._image_layers(image) or doc.layers
            self.context.images.delete(image)
            await self.drop(layers)

    def disk(self, doc: TemplateDoc, image: str | None) -> list[str]:
        """The layers to start on, with that warm image or without one."""
        return list((self._image_layers(image) if image else []) or doc.layers)

    async def warm(self, doc: TemplateDoc, shaped: Limits, say: warmup.Say | None = None) -> None:
        """Boot a machine from the template, run its warm command, save its memory, end it.

        Raises:
            CommandFailedError, DeadlineError: the warm command ended or was not ready in time.
            ForkyardError: it did not boot or could not be saved; starts from it are cold then.
        """
        name = self._image_name(doc, shaped)
        # One machine however many ask, here and behind.
        async with self._warming.setdefault(name, asyncio.Lock()):
            try:
                if not self.context.images.exists(name):
                    await self._warm(doc, shaped, name, say)
            finally:
                if self.context.images.exists(name):
                    self._warming.pop(name, None)

    async def _warm(self, doc: TemplateDoc, shaped: Limits, name: str, say: warmup.Say | None) -> None:
        context = self.context
        who = names.identity("sandbox", "", generation=0)
        box = await context.machines.start(Start(doc.layers, shaped, who, context.agent))
        try:
            await failpoint("template.booted")
            if doc.warm is not None:
                await warmup.run(box.guest, doc, say)
        except BaseException:
            await finish(context.tg, context.machines.end(box))
            raise
        # From here on it comes to its end; what nobody waits for any more is removed then.
        wanted = asyncio.Event()
        wanted.set()
        try:
            await finish(context.tg, self._keep(box, doc, name, wanted))
        except asyncio.CancelledError:
            wanted.clear()
            raise

    async def _keep(self, box: Box, doc: TemplateDoc, name: str, wanted: asyncio.Event) -> None:
        """Save a machine as the warm image ``name``, and end it."""
        context = self.context
        layer = f"warm-{box.id}"
        try:
            frozen = await context.machines.freeze(box, layer, name)
        finally:
            await context.machines.end(box)
        layers: list[str] = []
        try:
            if doc.warm is None and not box.engine.own_kernel:
                # Nothing ran but the agent, so that the template's own layers are its disk. (A kernel of
                # its own has mounted its disk, and goes on with the very same.)
                await context.disks.drop_layer(layer)
            else:
                layers = [layer, *box.layers]
            await failpoint("template.frozen")
            await context.images.publish(
                name, fingerprint=frozen.fingerprint, agent=context.agent, layers=layers
            )
        except BaseException:
            await context.machines.forget(frozen, name)
            raise
        if not wanted.is_set():
            await self._forget_unowned(doc, name)

    def _image_name(self, doc: TemplateDoc, shaped: Limits) -> str:
        parts = [
            self.context.machines.engine(shaped.engine).fingerprint(),
            shaped.shape_mem_mb,
            shaped.shape_disk_mb,
            shaped.processes,
        ]
        if shaped.shape_cpus > 1:
            parts.append(shaped.shape_cpus)
        return self._tag(doc) + _digest(parts)

    def _tag(self, doc: TemplateDoc) -> str:
        """What the names of a template's warm images begin with. Those of an older forkyard go unowned."""
        parts: list[Any] = [doc.key, doc.layers, self.context.agent, WARM_REVISION]
        if doc.warm is not None:
            parts += [doc.warm, doc.ready]
        return f"warm-{_digest(parts)}-"


async def _keep_all(layers: Iterable[str]) -> None:
    """Drop nothing: set-up has no other holders to ask."""


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def limits(
    type_name: str,
    engine: Engine,
    cpus: float | None = None,
    mem_mb: int | None = None,
    disk_mb: int | None = None,
) -> Limits:
    """The limits of a type with explicit ones in their place.

    The guest's kernel is booted with the shape of the smallest type that holds them, so that
    odd sizes share their type's warm image; the exact figures bind on the host. A machine's own kernel
    has exactly the memory and the disk that its machine has, and whole CPUs.
    """
    type_cpus, type_mem, type_disk = TYPES[type_name]
    mem = type_mem if mem_mb is None else mem_mb
    disk = type_disk if disk_mb is None else disk_mb
    shape_mem, shape_disk, processes = mem, disk, PROCESSES["large"]
    for name, (_, fitting_mem, fitting_disk) in TYPES.items():
        if fitting_mem >= mem and fitting_disk >= disk:
            processes = PROCESSES[name]
            if not engine.own_kernel:
                shape_mem, shape_disk = fitting_mem, fitting_disk
            break
    share = type_cpus if cpus is None else cpus
    return Limits(
        cpus=share,
        mem_mb=mem,
        disk_mb=disk,
        shape_mem_mb=shape_mem,
        shape_disk_mb=shape_disk,
        processes=processes,
        engine=engine.name,
        shape_cpus=whole_cpus(share, engine),
    )


def whole_cpus(share: float, engine: Engine) -> int:
    """How many CPUs a machine is booted with that may use so much of the host's."""
    return max(1, math.ceil(share)) if engine.own_kernel else 1


def _file_name(name: str) -> str:
    """A template's name is never used as a path."""
    if name.replace("-", "").replace("_", "").isalnum():
        return name
    return f"={hashlib.sha256(name.encode()).hexdigest()[:40]}"
