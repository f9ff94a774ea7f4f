"""Templates from Dockerfiles, built by buildah."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from forkyard.errors import CommandFailedError, InternalError, InvalidRequestError, NotFoundError
from forkyard.host.files import rmtree, write_atomic
from forkyard.oci import dockerfile
from forkyard.oci import image as images
from forkyard.oci.image import Image
from forkyard.oci.reference import is_loopback, registry_of
from forkyard.oci.tools import Ended, Say, Tools
from forkyard.requests import TemplateSpec
from forkyard.yard.material import PATH, Made, Material, config_of
from forkyard.yard.templates import TemplateDoc, Templates

__all__ = ["Builder", "Recipe"]

# Raised when what a build does changes without its input changing.
VERSION = 1
OURS = ("forkyard/", "localhost/forkyard/")
_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP (\d+)/(\d+): (.*)$")
_NOISE = re.compile(r"^(-->|COMMIT |\[\d+/\d+\] COMMIT |Getting image source|Copying |Writing manifest|"
                    r"Storing signatures|Successfully tagged|[0-9a-f]{64}$)")  # fmt: skip
_NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
                   r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")  # fmt: skip
_SAID = 2000


class Recipe:
    """A Dockerfile with its unpacked context: what it refers to, and the key of its input.

    Raises:
        NotFoundError: it starts from a template that there is not.
    """

    def __init__(self, spec: TemplateSpec, context_digest: str, templates: Templates) -> None:
        self.spec = spec
        self.text = spec.dockerfile or ""
        self.images = dockerfile.images(self.text, spec.build_args)
        self.parents: dict[str, TemplateDoc] = {}
        for image in self.images:
            if image.startswith(OURS):
                name = image.removeprefix("localhost/").removeprefix("forkyard/")
                doc = templates.find(name) or templates.find(name.removesuffix(":latest"))
                if doc is None:
                    raise NotFoundError(f"FROM {image}: no template {name!r}", hint="forkyard template ls")
                if not _NAME.fullmatch(name):
                    raise InvalidRequestError(
                        f"FROM {image}: {name!r} cannot stand in a Dockerfile",
                        hint="give that template a name of small letters, digits and . _ - /",
                    )
                self.parents[name] = doc
        known = {name: [doc.key, doc.layers] for name, doc in self.parents.items()}
        content = [VERSION, self.text, sorted(spec.build_args.items()), context_digest, known]
        self.source = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _Listener:
    """Reads buildah's words: which instruction it is at, and what that printed."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.step = "FROM"
        self.lines: list[str] = []

    def __call__(self, kind: str, text: str) -> None:
        found = _STEP.match(text)
        if found:
            self.step, self.lines = found[3], []
            self._say("step", f"{found[1]}/{found[2]} {found[3]}")
        elif not _NOISE.match(text):
            self.lines.append(text)
            self._say(kind, text)

    def failure(self, name: str, ended: Ended) -> CommandFailedError:
        """The instruction that failed, with its output."""
        output = "\n".join(self.lines or ended.lines)[-_SAID:]
        return CommandFailedError(f"building {name} failed at `{self.step}`:\n{output}")


class Builder:
    """Builds recipes, each input once; instructions that were built before come out of a cache."""

    def __init__(self, templates: Templates, tools: Tools, material: Material) -> None:
        self.templates = templates
        self.tools = tools
        self.material = material
        self._offering = asyncio.Lock()

    async def recipe(self, spec: TemplateSpec, deposit: Path | None, scratch: Path) -> Recipe:
        """Unpack the context into ``scratch/context``, and read the Dockerfile."""
        context = scratch / "context"
        context.mkdir()
        digest = ""
        if deposit is not None:
            digest = str((await self.material.unpack(context, [deposit], digest=True))["digest"])
        return Recipe(spec, digest, self.templates)

    def known(self, recipe: Recipe) -> Made | None:
        """What was built from this very input before."""
        for doc in self.templates.all():
            if doc.kind == "build" and doc.source == recipe.source and not recipe.spec.pull:
                return Made.of(doc)
        return None

    async def build(self, recipe: Recipe, scratch: Path, say: Say) -> Made:
        """Build it.

        Raises:
            CommandFailedError: an instruction failed; the message has it and what it printed.
        """
        spec = recipe.spec
        await self.tools.require("buildah", say)
        await self.tools.require("skopeo", say)
        await self.tools.sweep(scratch)
        known = {doc.name: await self._offer(name, doc, scratch, say) for name, doc in recipe.parents.items()}
        listener = _Listener(say)
        files = {name: scratch / name for name in ("Dockerfile", "ignore", "id")}
        files["Dockerfile"].write_text(recipe.text)
        files["ignore"].write_text("")  # the client has left out what is to be left out
        args: list[str | Path] = ["--layers", "--isolation", "chroot", "--network", "host"]
        args += ["--format", "docker", f"--pull={'always' if spec.pull and not known else 'false'}"]
        args += ["--file", files["Dockerfile"], "--ignorefile", files["ignore"], "--iidfile", files["id"]]
        for key, value in spec.build_args.items():
            args += ["--build-arg", f"{key}={value}"]
        loopback = {registry for image in recipe.images if is_loopback(registry := registry_of(image))}
        ended = await self.tools.buildah(
            scratch,
            *("build", *args, scratch / "context"),
            say=listener,
            auths=spec.auths,
            loopback=loopback,
        )
        if ended.rc:
            raise listener.failure(spec.name or "the template", ended)
        image_id = files["id"].read_text().strip().removeprefix("sha256:")
        say("step", "STORE the layers")
        found, parent = await self._export(image_id, scratch, list(recipe.parents.values()), known)
        below = len(known[parent.name]) if parent is not None else 0
        config = found.config
        if "PATH" not in config.env:
            config.env["PATH"] = PATH
        layers, size = await self.material.layer(config.digest, found.layers[below:], config, parent)
        return Made("build", config.digest, recipe.source, layers, size, config)

    async def _export(
        self, image_id: str, scratch: Path, parents: list[TemplateDoc], known: dict[str, list[str]]
    ) -> tuple[Image, TemplateDoc | None]:
        """Copy what was built out of the tools' storage, without what a parent has in the yard's."""
        out = scratch / "out"
        blobs = out / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for layer in {layer for layers in known.values() for layer in layers}:
            # A layer that seems to be there is not copied.
            (blobs / layer.removeprefix("sha256:")).touch()
        source = self.tools.stored(scratch, f"@{image_id}")
        args = ["copy", "--quiet", "--dest-oci-accept-uncompressed-layers", source, f"oci:{out}:latest"]
        done = await self.tools.skopeo(scratch, *args)
        if done.rc:
            raise InternalError(f"the built image could not be stored: {done.text[-500:]}")
        found = images.read_oci(out)
        best: TemplateDoc | None = None
        for doc in parents:
            layers = known[doc.name]
            if found.config.diff_ids[: len(layers)] == layers and (
                best is None or len(layers) > len(known[best.name])
            ):
                best = doc
        return found, best

    # -- templates as images

    @property
    def _offers_file(self) -> Path:
        return self.tools.storage / "forkyard.json"

    def _offers(self) -> dict[str, Any]:
        """What of the yard's is in the tools' storage: ``tags`` (name: content), ``images``
        (content: diff ids) and ``layers`` (name: [digest, size])."""
        try:
            found: dict[str, Any] = json.loads(self._offers_file.read_bytes())
            return found
        except (OSError, ValueError):
            return {"tags": {}, "images": {}, "layers": {}}

    async def _offer(self, name: str, doc: TemplateDoc, scratch: Path, say: Say) -> list[str]:
        """Give a template to buildah as the image ``localhost/forkyard/<name>``; its layers' diff ids."""
        content = hashlib.sha256(
            json.dumps([doc.layers, doc.user, doc.workdir, doc.env, doc.entrypoint, doc.cmd]).encode()
        ).hexdigest()
        tag = f"localhost/forkyard/{name}" + ("" if ":" in name else ":latest")
        async with self._offering:
            offers = self._offers()
            if content not in offers["images"]:
                say("note", f"giving {name} to buildah, once for each version of it")
                offers["images"][content] = await self._hand_over(doc, tag, offers, scratch)
            elif offers["tags"].get(tag) != content:
                stored = f"localhost/forkyard-content:{content}"
                done = await self.tools.buildah(scratch, "tag", stored, tag)
                if done.rc:
                    offers["images"][content] = await self._hand_over(doc, tag, offers, scratch)
            else:
                return list(offers["images"][content])
            await self.tools.buildah(scratch, "tag", tag, f"localhost/forkyard-content:{content}")
            offers["tags"][tag] = content
            write_atomic(self._offers_file, json.dumps(offers), durable=False)
            return list(offers["images"][content])

    async def _hand_over(
        self, doc: TemplateDoc, tag: str, offers: dict[str, Any], scratch: Path
    ) -> list[str]:
        """Pack a template's layers, those that buildah does not have, and let it take them in."""
        try:
            return await self._copy_in(doc, tag, offers, scratch)
        except InternalError:
            # It had layers by our notes that are gone.
            offers["layers"].clear()
            return await self._copy_in(doc, tag, offers, scratch)

    async def _copy_in(self, doc: TemplateDoc, tag: str, offers: dict[str, Any], scratch: Path) -> list[str]:
        directory = scratch / "template"
        rmtree(directory)
        directory.mkdir()
        layers: list[tuple[str, int]] = []
        for layer in reversed(doc.layers):
            if layer not in offers["layers"]:
                archive = directory / "archive"
                digest = await self.material.pack(layer, archive)
                offers["layers"][layer] = [digest, archive.stat().st_size]
                archive.rename(directory / digest)
            digest, size = offers["layers"][layer]
            layers.append((digest, size))
        diff_ids = images.write(directory, config_of(doc), layers)
        # Any command of buildah's makes the storage, which skopeo is then told of.
        await self.tools.buildah(scratch, "images", "--quiet")
        done = await self.tools.skopeo(
            scratch, "copy", "--quiet", f"dir:{directory}", self.tools.stored(scratch, tag)
        )
        await asyncio.to_thread(rmtree, directory)
        if done.rc:
            raise InternalError(f"buildah did not take template {doc.name}: {done.text[-500:]}")
        return diff_ids
