"""From files to a template's disk: unpacking layers into the store, and layers out of it for builds."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.errors import CapacityError, InternalError, InvalidRequestError
from forkyard.host import mounts, process
from forkyard.host.files import rmtree
from forkyard.oci.image import ImageConfig
from forkyard.yard.context import Context
from forkyard.yard.templates import TemplateDoc

__all__ = ["Made", "Material", "config_of"]

# The agent answers there.
DNS = "nameserver 127.0.0.1\n"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Made:
    """A disk and its defaults, ready to be called a template.

    ``source`` identifies what it was made from, ``content`` what it is.
    """

    kind: str
    content: str
    source: str
    layers: list[str]
    size_bytes: int
    config: ImageConfig
    image: str | None = None

    @classmethod
    def of(cls, doc: TemplateDoc) -> Made:
        """What a template is made of."""
        return cls(
            doc.kind, doc.content, doc.source, list(doc.layers), doc.size_bytes, config_of(doc), doc.image
        )


def config_of(doc: TemplateDoc) -> ImageConfig:
    """A template's defaults, as an image has them."""
    return ImageConfig(
        user=doc.user,
        workdir=doc.workdir,
        env=dict(doc.env),
        entrypoint=list(doc.entrypoint),
        cmd=list(doc.cmd),
    )


class Material:
    """Fills layers of the yard's store."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def unpack(self, root: Path, archives: list[Path], **job: Any) -> dict[str, Any]:
        """Unpack ``archives`` (lowest first) into ``root``; see :mod:`forkyard.oci.unpack`.

        Raises:
            InvalidRequestError: they are damaged, or lack what they name.
            CapacityError: the disk is full.
        """
        what = {"root": str(root), "layers": [str(path) for path in archives], **job}
        argv = [sys.executable, "-m", "forkyard.oci.unpack"]
        done = await process.run(argv, input=json.dumps(what).encode(), timeout_s=None)
        if done.rc == 0:
            result: dict[str, Any] = json.loads(done.stdout)
            return result
        why = done.complaint
        if "No space left" in why or "quota exceeded" in why:
            raise CapacityError(f"unpacking an image: {why}", hint="delete sandboxes, snapshots or templates")
        if done.rc == 1:
            raise InvalidRequestError(f"the image cannot be unpacked: {why}")
        raise InternalError(f"unpacking an image ended with {done.rc}: {why}")

    async def layer(
        self, name: str, archives: list[Path], config: ImageConfig, parent: TemplateDoc | None = None
    ) -> tuple[list[str], int]:
        """One layer of the store from an image's ``archives``, on top of the parent's.

        Returns:
            All layers, top first, and the bytes in them.
        """
        disks = self.context.disks
        below = list(parent.layers) if parent is not None else []
        layer = f"t-{hashlib.sha256('/'.join([name, *below]).encode()).hexdigest()[:24]}"
        await disks.drop_layer(layer)
        job = {"complete": {"user": config.user, "workdir": config.workdir, "dns": DNS}}

        async def fill(up: Path) -> None:
            up.chmod(0o755)
            if not below:
                await self.unpack(up, archives, **job)
                return
            # Whiteouts are the overlay's own work, done on the merged root.
            root, work = up.with_name("root"), up.with_name("work")
            for path in (root, work):
                path.mkdir(mode=0o700)
            mounts.mount_overlay([disks.layer_path(one) for one in below], up, work, root)
            try:
                await self.unpack(root, archives, **job)
            finally:
                mounts.unmount(root)
                root.rmdir()
                rmtree(work)

        size = await disks.import_layer(layer, fill, above=below[0] if below else None)
        return [layer, *below], size + (parent.size_bytes if parent is not None else 0)

    def path(self, layer: str) -> Path:
        """Where a layer of the store lies."""
        return self.context.disks.layer_path(layer)

    async def pack(self, path: Path, archive: Path) -> str:
        """Write a layer (a directory) as an image's archive; returns its digest in hexadecimal."""
        argv = [sys.executable, "-m", "forkyard.oci.pack", str(path), str(archive)]
        done = await process.run(argv, timeout_s=None, check=True)
        return done.stdout.decode().strip()
