"""Engines: what runs a sandbox's machine. The yard opens those that set-up chose."""

from __future__ import annotations

import json
from pathlib import Path

from forkyard.config import Settings
from forkyard.engines.base import Engine
from forkyard.engines.gvisor import GVisor, Runsc
from forkyard.engines.qemu import Qemu, load_kit
from forkyard.errors import UnavailableError


async def open_engines(settings: Settings, home: Path) -> dict[str, Engine]:
    """The engines of the yard in ``home``, by name: the default one first, as the settings say or,
    where they leave it open, microVMs if the CPU runs them (KVM) and else gVisor.

    Raises:
        UnavailableError: set-up has not chosen one yet, or not the one in the settings.
        UnsupportedError: the chosen one does not run here.
    """
    found: dict[str, Engine] = {}
    lacking: dict[str, UnavailableError] = {}
    try:
        found["gvisor"] = await _gvisor(settings, home)
    except UnavailableError as error:
        lacking["gvisor"] = error
    try:
        found["qemu"] = qemu = Qemu(load_kit(home / "engine" / "qemu"))
        usual = "qemu" if qemu.kit.accel == "kvm" else "gvisor"
    except UnavailableError as error:
        lacking["qemu"] = error
        usual = "gvisor"
    first = usual if settings.engine == "auto" else settings.engine
    if first not in found and settings.engine == "auto" and found:
        first = next(iter(found))
    if first not in found:
        raise lacking[first]
    return {first: found.pop(first), **found}


async def _gvisor(settings: Settings, home: Path) -> GVisor:
    chosen: dict[str, str] = {}
    try:
        chosen = json.loads((home / "engine" / "engine.json").read_text())
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise UnavailableError(
            f"{home}/engine/engine.json cannot be read: {error}", hint="forkyard setup writes it anew"
        ) from None
    path = settings.runsc or chosen.get("runsc")
    if not path:
        raise UnavailableError(f"the yard in {home} is not set up", hint="forkyard setup")
    platform = settings.platform
    if platform == "auto":
        platform = chosen.get("platform") or "systrap"
    runsc = await Runsc.probe(Path(path))
    return GVisor(runsc, platform, home / "engine" / "shared")
