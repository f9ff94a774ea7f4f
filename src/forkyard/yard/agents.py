"""The guest agents of this yard, one directory per build.

A restored process maps its program from the file it was started from, so an image needs the
very agent it was saved with: a build is never replaced, a new one lies beside it.
"""

from __future__ import annotations

from pathlib import Path

import forkyard
from forkyard.errors import UnavailableError
from forkyard.host.files import sha256_file, write_atomic
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
    if not (directory / AGENT_NAME).exists():
        # Readable for all: inside, a plain user's process may look at its own parent.
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        write_atomic(directory / AGENT_NAME, built.read_bytes(), mode=0o755)
    return digest
