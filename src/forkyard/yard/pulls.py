"""Templates from images: out of a registry, an OCI layout, an archive, or a root's tar."""

from __future__ import annotations

import asyncio
from pathlib import Path

from forkyard.errors import (
    AccessDeniedError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from forkyard.host.files import sha256_file
from forkyard.oci import image as images
from forkyard.oci.image import ImageConfig
from forkyard.oci.reference import check_reference, is_loopback, registry_of
from forkyard.oci.tools import Ended, Say, Tools
from forkyard.requests import TemplateSpec
from forkyard.yard.material import PATH, Made, Material
from forkyard.yard.templates import Templates

__all__ = ["Puller"]


class Puller:
    """Makes templates' disks from images, each content once."""

    def __init__(self, templates: Templates, tools: Tools, material: Material) -> None:
        self.templates = templates
        self.tools = tools
        self.material = material

    def known(self, image: str) -> Made | None:
        """What was pulled by that reference before, without asking its registry again."""
        name = check_reference(image)
        for doc in self.templates.all():
            if doc.kind == "image" and doc.image == name and self._there(doc.layers):
                return Made.of(doc)
        return None

    async def pull(self, spec: TemplateSpec, deposit: Path | None, say: Say) -> Made:
        """Get an image and unpack it.

        Raises:
            NotFoundError, AccessDeniedError, UnavailableError: the registry says so.
            InvalidRequestError: it is no image, or cannot be unpacked.
        """
        assert spec.image is not None
        if spec.format == "tar":
            return await self._root(spec.image, _given(deposit), say)
        await self.tools.require("skopeo", say)
        async with self.tools.scratch("pull") as scratch:
            if spec.format == "registry":
                return await self._registry(spec, check_reference(spec.image), scratch, say)
            source = await self._local(spec, _given(deposit), scratch)
            return await self._fetch(spec, source, [], scratch, None, say)

    async def _registry(self, spec: TemplateSpec, name: str, scratch: Path, say: Say) -> Made:
        say("step", f"PULL {name}")
        # Nothing but this machine's own may speak plain HTTP.
        insecure = is_loopback(registry_of(name))
        source = f"docker://{name}"
        asked = await self.tools.skopeo(
            scratch,
            *("inspect", "--config", "--raw", *(["--tls-verify=false"] if insecure else []), source),
            auths=spec.auths,
            capture=True,
        )
        if asked.rc:
            raise _failure(f"pulling {name}", asked)
        config = images.config_of(asked.out)
        if (made := self._same(config.digest, name)) is not None:
            say("note", "it is here already")
            return made
        flags = ["--src-tls-verify=false"] if insecure else []
        return await self._fetch(spec, source, flags, scratch, name, say)

    async def _local(self, spec: TemplateSpec, deposit: Path, scratch: Path) -> str:
        """What the client sent, in skopeo's words."""
        assert spec.image is not None
        _, _, rest = spec.image.partition(":")
        tag = rest.partition(":")[2]
        if spec.format == "docker-archive":
            return f"docker-archive:{deposit}" + (f":{tag}" if tag else "")
        layout = scratch / "layout"
        layout.mkdir()
        await self.material.unpack(layout, [deposit])
        return f"oci:{layout}" + (f":{tag}" if tag else "")

    async def _fetch(
        self, spec: TemplateSpec, source: str, flags: list[str], scratch: Path, name: str | None, say: Say
    ) -> Made:
        target = scratch / "image"
        args = [
            "copy",
            "--quiet",
            "--dest-decompress",
            "--remove-signatures",
            *flags,
            source,
            f"dir:{target}",
        ]
        done = await self.tools.skopeo(scratch, *args, auths=spec.auths)
        if done.rc:
            raise _failure(f"pulling {spec.image}", done)
        found = images.read(target)
        if (made := self._same(found.config.digest, name)) is not None:
            say("note", "it is here already")
            return made
        await asyncio.to_thread(_check, found)
        say("step", f"UNPACK {len(found.layers)} layers")
        return await self._unpacked(found.config, found.layers, name)

    async def _root(self, name: str, deposit: Path, say: Say) -> Made:
        digest = await asyncio.to_thread(sha256_file, deposit)
        config = ImageConfig(digest=f"tar-{digest}", env={"PATH": PATH})
        if (made := self._same(config.digest, None)) is not None:
            say("note", "it is here already")
            return made
        say("step", f"UNPACK {name}")
        return await self._unpacked(config, [deposit], None)

    async def _unpacked(self, config: ImageConfig, layers: list[Path], name: str | None) -> Made:
        if "PATH" not in config.env:
            config.env["PATH"] = PATH
        made, size = await self.material.layer(config.digest, layers, config)
        return Made("image", config.digest, config.digest, made, size, config, name)

    def _same(self, content: str, name: str | None) -> Made | None:
        for doc in self.templates.all():
            if doc.content == content and self._there(doc.layers):
                made = Made.of(doc)
                return Made(
                    "image", content, content, made.layers, made.size_bytes, made.config, name or made.image
                )
        return None

    def _there(self, layers: list[str]) -> bool:
        try:
            for layer in layers:
                self.templates.context.disks.layer_path(layer)
        except ForkyardError:
            return False
        return True


def _check(image: images.Image) -> None:
    """Layers are what the configuration names, whose digest is what an image is known by from now on.

    Raises:
        InvalidRequestError: one is not.
    """
    for path, named in zip(image.layers, image.config.diff_ids, strict=True):
        if f"sha256:{sha256_file(path)}" != named:
            raise InvalidRequestError(
                f"the image is not whole: a layer is not {named[:80]}, which its configuration names",
                hint="make or fetch it again",
            )


def _given(deposit: Path | None) -> Path:
    if deposit is None:
        raise InvalidRequestError("the image's file was not sent")
    return deposit


def _failure(what: str, ended: Ended) -> ForkyardError:
    """What a registry's answer means."""
    said = next((line for line in reversed(ended.lines) if "level=fatal" in line), ended.text[-1000:])
    if "msg=" in said:
        said = said.partition("msg=")[2].strip('"').replace('\\"', '"')
    low = said.lower()
    text = f"{what}: {said[-1000:]}"
    if any(word in low for word in ("unauthorized", "authentication required", "denied", "forbidden")):
        return AccessDeniedError(text, hint="give credentials=, or log in with skopeo login")
    if any(word in low for word in ("manifest unknown", "name unknown", "not found", "no such file")):
        return NotFoundError(text)
    if any(word in low for word in ("http response to https", "x509", "certificate")):
        return UnavailableError(text, hint="only a registry on this machine may do without TLS")
    if any(word in low for word in ("dial tcp", "no such host", "timeout", "connection", "unexpected eof")):
        return UnavailableError(text, hint="is the registry up, and its name right?", retryable=True)
    return InvalidRequestError(text)
