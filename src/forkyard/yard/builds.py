"""Templates from Dockerfiles, built by buildah."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forkyard.errors import CommandFailedError, InternalError, InvalidRequestError, NotFoundError
from forkyard.host.files import rmtree, tree_bytes, write_atomic
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
_NOISE = re.compile(r"^(-->|COMMIT\b|\[\d+/\d+\] COMMIT\b|Getting image source|Copying |Writing manifest|"
                    r"Storing signatures|\(Reading database|subprocess exited with status|"
                    r"Successfully tagged|[0-9a-f]{64}$)")  # fmt: skip
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
        """The instruction that failed, with its output, or else what buildah says of it."""
        said = [line for line in self.lines if not line.startswith("Error: building at STEP")]
        output = "\n".join(said or self.lines or ended.lines)[-_SAID:]
        return CommandFailedError(f"building {name} failed at `{self.step}`:\n{output}")


class Builder:
    """Builds recipes, each input once; instructions that were built before come out of a cache.

    Args:
        cache_bytes: What the cache may hold; with more it is dropped, when nothing builds.
    """

    def __init__(self, templates: Templates, tools: Tools, material: Material, cache_bytes: int) -> None:
        self.templates = templates
        self.tools = tools
        self.material = material
        self.cache_bytes = cache_bytes
        self._offering = asyncio.Lock()
        self._building = 0

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
        self._building += 1
        try:
            made = await self._build(recipe, scratch, say)
        finally:
            self._building -= 1
        if not self._building:
            await self._bound_the_cache(scratch)
        return made

    async def _bound_the_cache(self, scratch: Path) -> None:
        """All or nothing: which of its layers will be wanted, nobody knows."""
        held = await asyncio.to_thread(tree_bytes, self.tools.storage)
        if held > self.cache_bytes and not self._building:
            gone = scratch / "gone"
            self.tools.storage.rename(gone)  # a build that begins now makes another one
            await asyncio.to_thread(rmtree, gone)

    async def _build(self, recipe: Recipe, scratch: Path, say: Say) -> Made:
        spec = recipe.spec
        await self.tools.require("buildah", say)
        await self.tools.require("skopeo", say)
        await self.tools.sweep(scratch)
        known = {doc.name: await self._offer(name, doc, scratch, say) for name, doc in recipe.parents.items()}
        listener = _Listener(say)
        binds = self._binds(recipe.parents.values(), known)
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
            binds=binds,
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
    #
    # A template's layers are overlays' layers, and so are those in the tools' storage. So that no
    # gigabyte is copied, what is given to them are stand-ins, and the layers themselves are
    # mounted in their place for as long as a build runs. Other drivers get a copy.

    @property
    def _offers_file(self) -> Path:
        return self.tools.storage / "forkyard.json"

    def _offers(self) -> dict[str, Any]:
        """What of the yard's is in the tools' storage: ``tags`` (name: content) and ``images``
        (content: diff ids)."""
        try:
            found: dict[str, Any] = json.loads(self._offers_file.read_bytes())
            return found
        except (OSError, ValueError):
            return {"tags": {}, "images": {}}

    async def _offer(self, name: str, doc: TemplateDoc, scratch: Path, say: Say) -> list[str]:
        """Give a template to buildah as the image ``localhost/forkyard/<name>``; its layers' diff ids."""
        what = [VERSION, doc.layers, doc.user, doc.workdir, doc.env, doc.entrypoint, doc.cmd]
        content = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        tag = f"localhost/forkyard/{name}" + ("" if ":" in name else ":latest")
        async with self._offering:
            driver = await self.tools.driver(scratch)
            offers = self._offers()
            known = offers["images"].get(content)
            if known is not None and offers["tags"].get(tag) == content:
                return list(known)
            say("note", f"giving {name} to buildah, once for each version of it")
            offers["images"][content] = await self._copy_in(doc, tag, scratch, stand_in=driver == "overlay")
            offers["tags"][tag] = content
            write_atomic(self._offers_file, json.dumps(offers), durable=False)
            return list(offers["images"][content])

    async def _copy_in(self, doc: TemplateDoc, tag: str, scratch: Path, *, stand_in: bool) -> list[str]:
        directory = scratch / "template"
        rmtree(directory)
        directory.mkdir()
        layers: list[tuple[str, int]] = []
        for layer in reversed(doc.layers):
            archive = directory / "archive"
            if stand_in:
                empty = scratch / "stand-in"
                rmtree(empty)
                (empty / f".forkyard-{layer}").mkdir(parents=True)
                digest = await self.material.pack(empty, archive)
            else:
                digest = await self.material.pack(self.material.path(layer), archive)
            layers.append((digest, archive.stat().st_size))
            archive.rename(directory / digest)
        diff_ids = images.write(directory, config_of(doc), layers)
        source, target = f"dir:{directory}", self.tools.stored(scratch, tag)
        done = await self.tools.skopeo(scratch, "copy", "--quiet", source, target)
        await asyncio.to_thread(rmtree, directory)
        if done.rc:
            raise InternalError(f"buildah did not take template {doc.name}: {done.text[-500:]}")
        return diff_ids

    def _binds(self, parents: Iterable[TemplateDoc], known: dict[str, list[str]]) -> list[tuple[Path, Path]]:
        """What to mount over the stand-ins."""
        found: dict[Path, Path] = {}
        for doc in parents:
            chain = known[doc.name]
            for count, layer in enumerate(reversed(doc.layers), start=1):
                directory = self.tools.layer_directory(chain[:count])
                if directory is not None:
                    found[directory] = self.material.path(layer)
        return [(source, target) for target, source in found.items()]
