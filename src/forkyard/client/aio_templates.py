"""The client's verbs that make templates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forkyard import errors
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client import materials
from forkyard.client.aio_transport import PATIENCE_S, TRIES, AsyncTransport
from forkyard.types import Progress, TemplateInfo

OnProgress = Callable[[Progress], None]
Warm = str | Sequence[str] | bool | None
Spec = str | Mapping[str, Any]


class AsyncTemplates:
    _transport: AsyncTransport

    async def build_template(
        self,
        name: str,
        context: str | os.PathLike[str],
        dockerfile: str | os.PathLike[str] = "Dockerfile",
        build_args: Mapping[str, str] | None = None,
        warm: Warm = None,
        on_progress: OnProgress | None = None,
        *,
        ready: str | int | None = None,
        ready_timeout_s: float | None = None,
        pull: bool = False,
        engine: str | None = None,
        credentials: str | Mapping[str, str] | None = None,
    ) -> TemplateInfo:
        """Build a template from a Dockerfile; the same input is built once.

        Args:
            context: The directory that COPY and ADD read, less what its ``.dockerignore`` leaves out.
            dockerfile: Its path, relative to the context.
            warm: A command (or argv) that runs in the template, so that every sandbox starts with
                it; True: the image's own ENTRYPOINT and CMD.
            on_progress: Called with each step, line of output and note.
            ready: What says that it is ready: a port, ``"log:TEXT"``, or a command that exits
                with 0. None: it has ended with 0, or has been idle for a second.
            ready_timeout_s: How long that may take (default 120).
            pull: Ask registries for newer images.
            engine: What its sandboxes run on unless they say (:meth:`create_sandbox`).
            credentials: ``user:password``, or that by registry; default: the user's auth file.

        Raises:
            CommandFailedError: an instruction or the warm command failed; with its output.
            NotFoundError: no context, Dockerfile or image. DeadlineError: not ready in time.
        """
        spec, packed = materials.build_spec(
            name,
            context,
            dockerfile,
            build_args or {},
            credentials,
            warm=warm if warm is None or isinstance(warm, str | bool) else list(warm),
            ready=ready,
            ready_timeout_s=ready_timeout_s,
            pull=pull,
            engine=engine,
        )
        return await self._made("build_template", spec, packed, on_progress)

    async def pull_template(
        self,
        name: str,
        image: str,
        *,
        warm: Warm = None,
        ready: str | int | None = None,
        ready_timeout_s: float | None = None,
        engine: str | None = None,
        credentials: str | Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> TemplateInfo:
        """Make a template of an image: a registry's reference, ``oci:DIRECTORY``,
        ``docker-archive:FILE``, or the path of a root directory's tar.

        A reference is looked up anew; content that is here already is not fetched again. The other
        arguments are those of :meth:`build_template`.

        Raises:
            NotFoundError, AccessDeniedError, UnavailableError: the registry says so.
        """
        spec, packed = self._image_spec(
            name,
            image,
            credentials,
            warm=warm if warm is None or isinstance(warm, str | bool) else list(warm),
            ready=ready,
            ready_timeout_s=ready_timeout_s,
            engine=engine,
        )
        return await self._made("pull_template", spec, packed, on_progress)

    async def prepare(
        self,
        specs: Sequence[Spec],
        *,
        parallel: int | None = None,
        disk_budget_mb: int | None = None,
        check: bool = True,
        on_progress: OnProgress | None = None,
    ) -> list[TemplateInfo]:
        """Make all of these templates, those that are here excepted, and return them in order.

        Args:
            specs: Each the name of a template or an image, or a mapping with the arguments of
                :meth:`build_template` (those with ``context``) or :meth:`pull_template`.
            parallel: So many at a time (default: one for each CPU, at least 2).
            disk_budget_mb: Afterwards, templates that nothing uses are deleted, least recently
                used first, until those that were built or pulled fit; never one of these.
            check: Raise the first failure when all are through; False: an error object in its place.
        """
        known = {info.name for info in await self._transport.call("list_templates", rq.Empty())}
        wanted = []
        for spec in specs:
            made, packed = self._spec(spec, known)
            if packed is not None:
                made.deposit = await self._deposit(packed)
            wanted.append(made)
        request = protocol.made(
            rq.Prepare,
            specs=wanted,
            parallel=parallel,
            disk_budget_mb=disk_budget_mb,
            request_id=protocol.new_request_id(),
        )
        found: list[Any] = [None] * len(wanted)
        stream = await self._transport.open("prepare", request)
        try:
            while frames := await stream.read():
                for frame in frames:
                    event = protocol.decode("prepare", frame)
                    materials.template_event(event, on_progress)
                    if event.kind == "done":
                        found[event.index] = event.template
                    elif event.kind == "failed":
                        found[event.index] = errors.from_wire(event.error)
        finally:
            await stream.close()
        for result in found:
            if check and isinstance(result, errors.ForkyardError):
                raise result
        return found

    def _spec(self, spec: Spec, known: set[str]) -> tuple[rq.TemplateSpec, Any]:
        if isinstance(spec, str):
            if spec in known:
                return rq.TemplateSpec(name=spec), None
            return self._image_spec(None, spec, None)
        given = dict(spec)
        try:
            if "context" in given:
                name, context = given.pop("name"), given.pop("context")
                file, args = given.pop("dockerfile", "Dockerfile"), given.pop("build_args", {})
                return materials.build_spec(
                    name, context, file, args, given.pop("credentials", None), **given
                )
            if "image" in given:
                name, image = given.pop("name", None), given.pop("image")
                return self._image_spec(name, image, given.pop("credentials", None), **given)
            return protocol.made(rq.TemplateSpec, name=given["name"]), None
        except KeyError as error:
            raise errors.InvalidRequestError(f"a spec needs {error}: {sorted(spec)} are given") from None

    def _image_spec(
        self, name: str | None, image: str, credentials: Any, **fields: Any
    ) -> tuple[rq.TemplateSpec, Any]:
        local = materials.local_image(image)
        if local is None:
            auths = materials.logins([image], credentials)
            return protocol.made(rq.TemplateSpec, name=name, image=image, auths=auths, **fields), None
        shown = local.image
        return protocol.made(rq.TemplateSpec, name=name, image=shown, format=local.format, **fields), local

    async def _image_fields(self, image: str | None) -> dict[str, Any]:
        """What ``create_sandbox`` says of its image; one that is in files is sent first."""
        if image is None:
            return {"image": None}
        local = materials.local_image(image)
        if local is None:
            return {"image": image, "auths": materials.auths_of(image)}
        deposit = await self._deposit(local)
        return {"image": local.image, "image_format": local.format, "image_deposit": deposit}

    async def _deposit(self, packed: Any) -> str:
        """Send what a template is to be made of; what the next request calls it."""
        deposit = protocol.new_request_id()
        request = rq.Deposit(id=deposit, request_id=deposit)
        await self._transport.send("deposit", request, lambda: packed, repeatable=True)
        return deposit

    async def _made(
        self, verb: str, spec: rq.TemplateSpec, packed: Any, on_progress: OnProgress | None
    ) -> TemplateInfo:
        """Have a template made. A daemon that restarts meanwhile is asked again: its caches know
        how far it was."""
        tries = 0
        while True:
            try:
                if packed is not None:
                    spec.deposit = await self._deposit(packed)
                return await self._once(verb, spec, on_progress)
            except errors.UnavailableError as error:
                tries += 1
                if not error.retryable or tries == TRIES:
                    raise
                await self._transport.reach(PATIENCE_S)

    async def _once(self, verb: str, spec: rq.TemplateSpec, on_progress: OnProgress | None) -> TemplateInfo:
        request = rq.MakeTemplate(spec=spec, request_id=protocol.new_request_id())
        stream = await self._transport.open(verb, request)
        try:
            while frames := await stream.read():
                for frame in frames:
                    event = protocol.decode(verb, frame)
                    materials.template_event(event, on_progress)
                    if event.template is not None:
                        return event.template
        finally:
            await stream.close()
        raise errors.InternalError("the daemon did not say what became of the template")
