"""The guest agents of this yard, one directory per build.

A restored process maps its program from the file it was started from, so an image needs the
very agent it was saved with: a build is never replaced, a new one lies beside it.

All sandboxes share these files. gVisor is told that their mount is read-only, but an open with
O_TRUNC reaches the host before its kernel looks at that: root in one sandbox could end every
other. So the directories are mounted read-only on the host, over themselves.
"""

from __future__ import annotations

from pathlib import Path

import forkyard
from forkyard.errors import UnavailableError
from forkyard.host import mounts
from forkyard.host.files import rmtree, sha256_file, write_atomic
from forkyard.yard.machines import AGENT_NAME


def install(home: Path) -> str:
    """Copy the package's agent into the yard, if it is not there.

    Returns:
        Its digest, which names its directory.

    Raises:
        UnavailableError: this installation has no agent.
    """
    built = Path(forkyard.__file__).parent / "agent" / AGENT_NAME
    if not built.exists():
        raise UnavailableError(
            "this installation of forkyard has no guest agent",
            hint="reinstall it where a C compiler is: pip install --force-reinstall 'forkyard[host]'",
        )
    digest = sha256_file(built)[:16]
    directory = home / "agents" / digest
    target = directory / AGENT_NAME
    if not target.exists() or sha256_file(target)[:16] != digest:
        mounts.unmount(directory)
        # Readable for all: inside, a plain user's process may look at its own parent.
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        write_atomic(target, built.read_bytes(), mode=0o755)
    return digest


def add(home: Path, digest: str, program: bytes) -> None:
    """Put in a build that came with an imported image, unless it is there. It stays if nothing comes of
    the import, since another may use it by then; :func:`sweep` has an eye on that.

    Args:
        digest: What the image calls it; the caller has checked that ``program`` is that.
    """
    target = home / "agents" / digest / AGENT_NAME
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        write_atomic(target, program, mode=0o755)


def sweep(home: Path, used: set[str]) -> None:
    """Remove the builds that nothing uses. For a daemon that starts, before it takes requests."""
    for directory in (home / "agents").resolve().iterdir():
        if directory.name not in used:
            mounts.unmount(directory)
            rmtree(directory)


def protect(home: Path) -> None:
    """Mount every build read-only over itself, unless it is."""
    done = set(mounts.mounts_below(home / "agents"))
    for directory in (home / "agents").resolve().iterdir():
        if directory not in done:
            mounts.bind_read_only(directory, directory)


def release(home: Path) -> None:
    """Undo :func:`protect`; no sandbox is left."""
    for target in mounts.mounts_below(home / "agents"):
        mounts.unmount(target)
