"""Templates, and the memory images that make starting from one a restore.

A template is layers and defaults in ``templates/<name>.json``. Its warm image is a cache: a
machine was booted from it once and saved before it ran anything but the agent. The key
is all that the image depends on, so a changed engine, agent or template is a miss,
which boots cold and makes the image behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from pathlib import Path

import msgspec

from forkyard.config import TYPES
from forkyard.errors import ForkyardError, NotFoundError
from forkyard.host.files import write_atomic
from forkyard.types import TemplateInfo
from forkyard.yard.context import Context
from forkyard.yard.machines import Frozen, Limits, Start, identity

log = logging.getLogger("forkyard.yard")

PROCESSES = {"small": 512, "medium": 1024, "large": 2048}


class TemplateDoc(msgspec.Struct, kw_only=True):
    """A template as ``templates/<name>.json`` has it."""

    name: str
    key: str
    layers: list[str]
    user: str = "root"
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    size_bytes: int = 0
    created_at: float = 0.0


class Templates:
    """Finds templates and keeps their warm images."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._making: dict[str, asyncio.Task[None]] = {}

    @property
    def directory(self) -> Path:
        return self.context.home / "templates"

    def find(self, name: str) -> TemplateDoc | None:
        """The template, or None."""
        path = self.directory / f"{_file_name(name)}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=TemplateDoc)
        except FileNotFoundError:
            return None

    def get(self, name: str) -> TemplateDoc:
        """The template.

        Raises:
            NotFoundError: there is none of that name.
        """
        found = self.find(name)
        if found is None:
            known = ", ".join(sorted(doc.name for doc in self.all())) or "none"
            hint = "forkyard setup builds base" if name == "base" else f"there are: {known}"
            raise NotFoundError(f"no template {name!r}", hint=hint)
        return found

    def all(self) -> list[TemplateDoc]:
        """Every template whose file can be read."""
        found = []
        for path in sorted(self.directory.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=TemplateDoc))
        return found

    def layers(self) -> set[str]:
        """The layers of all templates."""
        return {layer for doc in self.all() for layer in doc.layers}

    def put(self, doc: TemplateDoc) -> None:
        """Write a template's file whole."""
        self.directory.mkdir(exist_ok=True)
        write_atomic(self.directory / f"{_file_name(doc.name)}.json", msgspec.json.encode(doc))

    def remove(self, name: str) -> None:
        """Forget a template and its warm images. Its layers go with their last user."""
        doc = self.get(name)
        (self.directory / f"{_file_name(name)}.json").unlink()
        for type_name in TYPES:
            self.context.images.delete(self._image_name(doc, shape(type_name)))

    def info(self, doc: TemplateDoc) -> TemplateInfo:
        """The public view."""
        return TemplateInfo(
            name=doc.name,
            key=doc.key,
            user=doc.user,
            workdir=doc.workdir,
            size_bytes=doc.size_bytes,
            warm=self.image(doc, shape("small")) is not None,
            created_at=doc.created_at,
            env=dict(doc.env),
        )

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
        try:
            await self.warm(doc, shaped)
        except (ForkyardError, OSError) as error:
            log.warning("template %s stays cold: %s", doc.name, error)

    async def warm(self, doc: TemplateDoc, shaped: Limits) -> None:
        """Boot a machine from the template, save its memory, end it.

        Raises:
            ForkyardError: it did not boot or could not be saved; starts from it are cold then.
        """
        context = self.context
        name = self._image_name(doc, shaped)
        if context.images.exists(name):
            return
        who = identity("sandbox", "", generation=0)
        box = await context.machines.start(Start(doc.layers, shaped, who, context.agent))
        layer = f"warm-{box.id}"
        try:
            frozen = await context.machines.freeze(box, layer, name)
        finally:
            await context.machines.end(box)
        # Nothing ran but the agent, so that the template's own layers are its disk.
        await context.disks.drop_layer(layer)
        await self._publish(name, frozen)

    async def _publish(self, name: str, frozen: Frozen) -> None:
        await self.context.images.publish(
            name,
            fingerprint=frozen.fingerprint,
            agent=self.context.agent,
            layers=[],
        )

    def _image_name(self, doc: TemplateDoc, shaped: Limits) -> str:
        parts = [
            self.context.engine.fingerprint(),
            self.context.agent,
            doc.key,
            doc.layers,
            shaped.shape_mem_mb,
            shaped.shape_disk_mb,
            shaped.processes,
        ]
        return "warm-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def shape(type_name: str) -> Limits:
    """The limits of a type."""
    cpus, mem_mb, disk_mb = TYPES[type_name]
    return Limits(cpus, mem_mb, disk_mb, mem_mb, disk_mb, PROCESSES[type_name])


def limits(
    type_name: str, cpus: float | None = None, mem_mb: int | None = None, disk_mb: int | None = None
) -> Limits:
    """The limits of a type with explicit ones in their place.

    The guest's kernel is booted with the shape of the smallest type that holds them, so that
    odd sizes share their type's warm image; the exact figures bind on the host.
    """
    base = shape(type_name)
    mem = base.mem_mb if mem_mb is None else mem_mb
    disk = base.disk_mb if disk_mb is None else disk_mb
    for name, (_, type_mem, type_disk) in TYPES.items():
        if type_mem >= mem and type_disk >= disk:
            fitting = shape(name)
            break
    else:
        fitting = Limits(0, mem, disk, mem, disk, PROCESSES["large"])
    return Limits(
        cpus=base.cpus if cpus is None else cpus,
        mem_mb=mem,
        disk_mb=disk,
        shape_mem_mb=fitting.shape_mem_mb,
        shape_disk_mb=fitting.shape_disk_mb,
        processes=fitting.processes,
    )


def _file_name(name: str) -> str:
    """A template's name is never used as a path."""
    return name.encode().hex() if not name.replace("-", "").replace("_", "").isalnum() else name
