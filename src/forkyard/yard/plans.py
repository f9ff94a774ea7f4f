"""From a request to what is to be started: template or snapshot, limits, rights and lifetime."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.config import TYPES
from forkyard.egress.policy import check_rules
from forkyard.engines.base import Engine
from forkyard.errors import CorruptSnapshotError, InvalidRequestError, UnsupportedError
from forkyard.host import process
from forkyard.requests import CreateSandbox, Fork
from forkyard.types import CPU_WEIGHT
from forkyard.yard import names
from forkyard.yard.context import Context
from forkyard.yard.machines import Limits
from forkyard.yard.model import SandboxDoc, SnapshotDoc
from forkyard.yard.snapshots import Snapshots, inherited, limits_of
from forkyard.yard.templates import TemplateDoc, Templates, limits, whole_cpus

MIN_MEM_MB = 64
MIN_DISK_MB = 16
MAX_ENV_BYTES = 1 << 20


@dataclass(slots=True)
class Plan:
    """A sandbox to be: its document so far, its layers, and the memory image to restore.

    ``template`` is where it starts from one, ``cold`` that one if it has to be warmed behind this
    start. ``quiet``: nothing runs in the image but the agent.
    """

    doc: SandboxDoc
    limits: Limits
    agent: str
    image: str | None = None
    image_bytes: int | None = None
    cold: TemplateDoc | None = None
    start_from: SnapshotDoc | None = None
    quiet: bool = False
    template: TemplateDoc | None = None

    def image_path(self, context: Context) -> Path | None:
        return context.images.path(self.image) if self.image else None


def for_create(request: CreateSandbox, context: Context, templates: Templates, snapshots: Snapshots) -> Plan:
    """What ``create_sandbox`` asks for.

    Raises:
        InvalidRequestError, NotFoundError, UnsupportedError: it cannot be.
    """
    if request.snapshot is not None and request.template is not None:
        raise InvalidRequestError("template and snapshot exclude each other", hint="give one of them")
    check_limits(request.type, request.cpus, request.mem_mb, request.disk_mb, request.cpu_weight)
    check_times(request.ttl_min, request.auto_stop_min)
    check_env(request.env)
    defaults = context.settings.defaults
    egress, allow = resolve_egress(
        request.egress, request.egress_allow, defaults.egress, defaults.egress_allow
    )
    common: dict[str, Any] = {
        "egress": egress,
        "egress_allow": allow,
        "labels": dict(request.labels),
        "auto_stop_min": _first(request.auto_stop_min, defaults.auto_stop_min),
        "ephemeral": request.ephemeral,
        "lease": request.lease if request.ephemeral else None,
    }
    if request.snapshot is not None:
        source = snapshots.get(request.snapshot)
        plan = from_snapshot(source, context, snapshots, request, request.name, common, request.memory)
        plan.doc.resumed_from = source.name or source.id
    else:
        plan = _from_template(request, context, templates, common)
    plan.doc.set_ttl(_first(request.ttl_min, defaults.ttl_min), process.boot_id())
    return plan


def _from_template(
    request: CreateSandbox, context: Context, templates: Templates, common: dict[str, Any]
) -> Plan:
    defaults = context.settings.defaults
    template = templates.get(request.template or defaults.template)
    type_name = request.type or defaults.type
    templates.touch(template)
    explicit = request.type is not None
    bounds = limits(
        type_name,
        _engine(request.engine or template.engine, context),
        _first(request.cpus, None if explicit else defaults.cpus),
        _first(request.mem_mb, None if explicit else defaults.mem_mb),
        _first(request.disk_mb, None if explicit else defaults.disk_mb),
    )
    bounds = dataclasses.replace(bounds, cpu_weight=_first(request.cpu_weight, bounds.cpu_weight))
    image = templates.image(template, bounds)
    layers = templates.disk(template, image)
    doc = SandboxDoc(
        **_identity(request.name),
        template=template.name,
        type=type_name,
        user=request.user or defaults.user or template.user,
        workdir=template.workdir,
        env={**template.env, **request.env},
        layers=layers,
        origin=list(layers),
        tainted=template.tainted,
        **_limit_fields(bounds),
        **common,
    )
    plan = Plan(doc, bounds, context.agent, image, template=template)
    if plan.image is None:
        plan.cold = template
    else:
        plan.image_bytes = context.images.size(plan.image)
        plan.quiet = template.warm is None
    return plan


def from_snapshot(
    source: SnapshotDoc,
    context: Context,
    snapshots: Snapshots,
    request: CreateSandbox | Fork,
    name: str | None,
    common: dict[str, Any],
    memory: bool,
) -> Plan:
    """A sandbox from a snapshot, checkpoint or fork: what it inherits, less what is overridden."""
    check_limits(request.type, request.cpus, request.mem_mb, request.disk_mb, request.cpu_weight)
    kept = inherited(source)
    restore = memory and source.image is not None
    asked = getattr(request, "engine", None)
    if asked is None and (restore or source.engine in context.engines):
        asked = source.engine
    engine = _engine(asked, context)
    bounds = limits_of(kept, source.engine)
    if request.type is not None:
        bounds = _keep_shape(limits(request.type, engine), bounds)
        kept["type"] = request.type
    bounds = dataclasses.replace(
        bounds,
        cpus=_first(request.cpus, bounds.cpus),
        cpu_weight=_first(request.cpu_weight, bounds.cpu_weight),
        mem_mb=_first(request.mem_mb, bounds.mem_mb),
        disk_mb=_first(request.disk_mb, bounds.disk_mb),
    )
    bounds = _on_engine(bounds, engine, source, restore)
    if restore:
        snapshots.check_restorable(source)
        used_mb = math.ceil(source.memory_bytes / (1 << 20))
        if bounds.mem_mb < used_mb:
            raise InvalidRequestError(
                f"mem_mb={bounds.mem_mb} is less than the {used_mb} MiB in the snapshot's memory",
                hint=f"ask for at least {used_mb}",
            )
        if not context.images.exists(source.image or ""):
            raise CorruptSnapshotError(
                f"the memory image of snapshot {source.id} is missing",
                hint="start it with memory=False: its disk, freshly booted",
            )
    user = getattr(request, "user", None)
    env = {**kept["env"], **request.env}
    check_env(env)  # each of a line of forks may bring more
    kept |= _limit_fields(bounds) | {"env": env, "user": user or kept["user"]}
    doc = SandboxDoc(
        **_identity(name),
        **kept,
        snapshot=source.id,
        parent=source.sandbox,
        memory_restored=restore,
        layers=list(source.layers),
        origin=list(source.layers),
        **common,
    )
    return Plan(
        doc,
        bounds,
        source.agent if restore else context.agent,
        image=source.image if restore else None,
        image_bytes=source.memory_bytes if restore else None,
        start_from=source,
    )


def _engine(asked: str | None, context: Context) -> Engine:
    """The engine that is asked for; ``auto`` and None are the yard's own choice."""
    if asked in (None, "auto"):
        return context.engine
    return context.machines.engine(asked or "")


def _on_engine(bounds: Limits, engine: Engine, source: SnapshotDoc, restore: bool) -> Limits:
    """The limits of a start from ``source``, on ``engine``.

    Raises:
        UnsupportedError: that engine cannot go on with its memory.
        InvalidRequestError: memory or disk of a machine with a kernel of its own cannot change.
    """
    if restore and engine.name != source.engine:
        raise UnsupportedError(
            f"the memory of snapshot {source.id} is {source.engine}'s, not for {engine.name}",
            hint="start it with memory=False: its disk, freshly booted",
        )
    if engine.own_kernel:
        if restore and (bounds.mem_mb, bounds.disk_mb) != (bounds.shape_mem_mb, bounds.shape_disk_mb):
            raise InvalidRequestError(
                f"snapshot {source.id} is of a machine with {bounds.shape_mem_mb} MiB of memory and "
                f"{bounds.shape_disk_mb} MiB of disk, which goes on with just these",
                hint="leave type, mem_mb and disk_mb out, or start it with memory=False",
            )
        bounds = dataclasses.replace(bounds, shape_mem_mb=bounds.mem_mb, shape_disk_mb=bounds.disk_mb)
        if not restore:
            bounds = dataclasses.replace(bounds, shape_cpus=whole_cpus(bounds.cpus, engine))
    elif engine.name != source.engine:
        shaped = limits("small", engine, mem_mb=bounds.mem_mb, disk_mb=bounds.disk_mb)
        bounds = _keep_shape(bounds, shaped)
    return dataclasses.replace(bounds, engine=engine.name)


def resolve_egress(
    egress: str | None, allow: list[str] | None, default: str = "deny", default_allow: list[str] | None = None
) -> tuple[str, list[str]]:
    """The network policy that the arguments and the defaults come to.

    Returns:
        ``deny`` or ``any``, or ``allow`` and the rules: a list that is not empty is all that is open.

    Raises:
        InvalidRequestError: ``egress`` is neither ``deny`` nor ``any``, or a rule is malformed or too wide.
    """
    if egress not in (None, "deny", "any") and not (egress == "allow" and allow):
        raise InvalidRequestError(
            f"egress={egress!r} is not known", hint="use deny or any, or egress_allow=[...]"
        )
    if egress is None and allow is None:
        egress, allow = default, default_allow or []
    if allow:
        return "allow", check_rules(allow)
    return ("any" if egress == "any" else "deny"), []


def check_limits(
    type_name: str | None,
    cpus: float | None,
    mem_mb: int | None,
    disk_mb: int | None,
    cpu_weight: int | None = None,
) -> None:
    """Raises InvalidRequestError for a limit that no sandbox can have."""
    if type_name is not None and type_name not in TYPES:
        raise InvalidRequestError(f"type {type_name!r} is not known", hint=f"use one of {', '.join(TYPES)}")
    if cpus is not None and not 0.05 <= cpus <= 1024:
        raise InvalidRequestError(f"cpus={cpus} is not between 0.05 and 1024")
    if cpu_weight is not None and not 1 <= cpu_weight <= 10_000:
        raise InvalidRequestError(
            f"cpu_weight={cpu_weight} is not between 1 and 10000", hint=f"{CPU_WEIGHT} is what others have"
        )
    if mem_mb is not None and mem_mb < MIN_MEM_MB:
        raise InvalidRequestError(f"mem_mb={mem_mb} is less than {MIN_MEM_MB}")
    if disk_mb is not None and disk_mb < MIN_DISK_MB:
        raise InvalidRequestError(f"disk_mb={disk_mb} is less than {MIN_DISK_MB}")


def check_times(ttl_min: float | None, auto_stop_min: float | None) -> None:
    """Raises InvalidRequestError for a lifetime that is not a positive number of minutes."""
    for name, value in (("ttl_min", ttl_min), ("auto_stop_min", auto_stop_min)):
        if value is not None and not 0 < value < 1e9:
            raise InvalidRequestError(f"{name}={value} is not a positive number of minutes")


def check_env(env: dict[str, str]) -> None:
    """Raises InvalidRequestError for an environment that no process can have."""
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value:
            raise InvalidRequestError(f"the environment variable {key!r} is not allowed")
    if sum(len(key) + len(value) for key, value in env.items()) > MAX_ENV_BYTES:
        raise InvalidRequestError(f"the environment is larger than {MAX_ENV_BYTES} bytes")


def _identity(name: str | None) -> dict[str, Any]:
    sandbox_id = names.sandbox_id()
    # An id is no allowed name, so that the made-up name takes its letters without the mark.
    chosen = names.check_name(name) if name is not None else sandbox_id.replace("_", "-")
    return {
        "id": sandbox_id,
        "name": chosen,
        "state": "creating",
        "created_at": time.time(),
    }


def _limit_fields(bounds: Limits) -> dict[str, Any]:
    return dataclasses.asdict(bounds)


def _keep_shape(bounds: Limits, shaped: Limits) -> Limits:
    """Limits of another type for a guest whose kernel was booted with ``shaped``; no type has a weight."""
    return dataclasses.replace(
        bounds,
        shape_mem_mb=shaped.shape_mem_mb,
        shape_disk_mb=shaped.shape_disk_mb,
        shape_cpus=shaped.shape_cpus,
        processes=shaped.processes,
        cpu_weight=shaped.cpu_weight,
    )


def _first(*values: Any) -> Any:
    """The first that was given."""
    return next((value for value in values if value is not None), None)
