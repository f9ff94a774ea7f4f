"""Engines: what runs a sandbox's machine. The yard opens the one that set-up chose."""

from __future__ import annotations

import json
from pathlib import Path

from forkyard.config import Settings
from forkyard.engines.base import Engine
from forkyard.engines.gvisor import GVisor, Runsc
from forkyard.errors import UnavailableError


async def open_engine(settings: Settings, home: Path) -> Engine:
    """The engine of the yard in ``home``: the one in ``engine/engine.json``, or in the settings.

    Raises:
        UnavailableError: set-up has not chosen one yet.
        UnsupportedError: the chosen one does not run here.
    """
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
