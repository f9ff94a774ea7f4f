"""Find a usable runsc, or get one: Debian 13's, the official release, or the newest from source.

Nothing here touches the system's own packages: what is fetched lives in ``<home>/engine``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import ssl
import tempfile
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.config import Settings
from forkyard.engines.gvisor.runsc import Runsc
from forkyard.errors import ForkyardError, UnsupportedError
from forkyard.host.files import rmtree, write_atomic
from forkyard.setup import apt

__all__ = ["Candidate", "candidates", "engine_file", "fetch", "find", "read_engine"]

# As gVisor's installation page gives it; for hosts that are not Debian.
RELEASES = "https://storage.googleapis.com/gvisor/releases/release/latest"
SUITE = "trixie"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runsc on this machine. ``origin`` is setting, PATH, debian, release or newest."""

    path: Path
    origin: str


def engine_file(home: Path) -> Path:
    return home / "engine" / "engine.json"


def read_engine(home: Path) -> dict[str, Any] | None:
    """What set-up recorded of the engine (``runsc``, ``version``, ``digest``, ``platform``,
    ``candidates``), or None if it did not, or the program has changed since."""
    try:
        record = json.loads(engine_file(home).read_text())
        info = os.stat(record["runsc"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = record.get("size") == info.st_size and record.get("mtime") == info.st_mtime
    return record if same else None


def write_engine(home: Path, runsc: Runsc, platform: str, known: list[dict[str, Any]]) -> dict[str, Any]:
    """Record the engine that is to be used."""
    info = runsc.path.stat()
    record = {
        "runsc": str(runsc.path),
        "version": runsc.version,
        "digest": runsc.digest,
        "platform": platform,
        "size": info.st_size,
        "mtime": info.st_mtime,
        "candidates": known,
    }
    write_atomic(engine_file(home), json.dumps(record, indent=1) + "\n", mode=0o644)
    return record


def candidates(settings: Settings) -> list[Candidate]:
    """Every runsc that this machine has, best first; a setting stands alone.

    One built on request comes before one that the machine came with.
    """
    if settings.runsc:
        return [Candidate(Path(settings.runsc), "setting")]
    engine = settings.home / "engine"
    found = [
        Candidate(engine / "newest" / "runsc", "newest"),
        Candidate(engine / "release" / "runsc", "release"),
        Candidate(engine / "debian" / "usr" / "bin" / "runsc", "debian"),
    ]
    if on_path := shutil.which("runsc"):
        found.insert(1, Candidate(Path(on_path), "PATH"))
    return [c for c in found if c.path.is_file() and os.access(c.path, os.X_OK)]


async def find(
    settings: Settings, check: Callable[[Runsc], Awaitable[None]] | None = None
) -> tuple[Runsc, str] | tuple[None, str]:
    """The best usable runsc and its origin, or None and why none is.

    Args:
        check: Proves that one works, by raising if it does not.

    Raises:
        UnsupportedError: the one that a setting names is not usable.
    """
    reasons = []
    for candidate in candidates(settings):
        try:
            runsc = await Runsc.probe(candidate.path)
            if check is not None:
                await check(runsc)
            return runsc, candidate.origin
        except ForkyardError as error:
            if candidate.origin == "setting":
                raise
            reasons.append(f"{candidate.path}: {error.message}")
    return None, "; ".join(reasons) or "none is installed"


async def fetch(home: Path) -> Path:
    """Get a runsc that this distribution offers: Debian 13's on Debian, else the official release.

    Raises:
        UnsupportedError: none could be had, with what to do.
    """
    engine = home / "engine"
    engine.mkdir(parents=True, exist_ok=True)
    release = apt.host_release()
    if release.id == "debian":
        return await _fetch_debian(release, engine)
    return await asyncio.to_thread(_fetch_release, engine / "release")


async def _fetch_debian(release: apt.Release, engine: Path) -> Path:
    archives = [entry for entry in apt.sources(release) if entry.suite == release.codename]
    if not archives:
        raise UnsupportedError(
            f"this machine's apt sources name no archive of {release.codename}",
            hint="install a runsc from 2024 or later and set FORKYARD_RUNSC to its path",
        )
    keyring = archives[0].signed_by or str(apt.DEBIAN_KEYRING)
    source = apt.Source(archives[0].uri, SUITE, ("main",), keyring)
    try:
        unpacked = await apt.download("runsc", [source], engine / "debian")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"runsc of Debian 13: {error.message}",
            hint="if it is about a key: apt-get install --only-upgrade debian-archive-keyring; "
            "or set FORKYARD_RUNSC to a runsc from 2024 or later",
        ) from None
    return unpacked / "usr" / "bin" / "runsc"


def _fetch_release(into: Path, base: str = RELEASES) -> Path:
    """Download the official release and compare it with the checksum published beside it."""
    url = f"{base}/{os.uname().machine}"
    context = ssl.create_default_context()
    scratch = Path(tempfile.mkdtemp(dir=into.parent, prefix=".release-"))
    try:
        for name in ("runsc.sha512", "runsc"):
            request = urllib.request.urlopen(f"{url}/{name}", timeout=60, context=context)
            with request as response, (scratch / name).open("wb") as file:
                shutil.copyfileobj(response, file)
        expected = (scratch / "runsc.sha512").read_text().split()[0]
        with (scratch / "runsc").open("rb") as file:
            actual = hashlib.file_digest(file, "sha512").hexdigest()
        if actual != expected:
            raise UnsupportedError(f"{url}/runsc does not have the checksum published for it")
        (scratch / "runsc").chmod(0o755)
        scratch.chmod(0o755)
        rmtree(into)
        scratch.rename(into)
    except OSError as error:
        raise UnsupportedError(
            f"the official runsc could not be downloaded: {error}",
            hint="install runsc as gVisor's installation page says and set FORKYARD_RUNSC to its path",
        ) from None
    finally:
        rmtree(scratch)
    return into / "runsc"
