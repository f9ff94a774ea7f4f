"""The command line over a home of its own; import ``own_yard``, ``programs`` and ``yard``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from yard_home import YardHome, yard  # noqa: F401


@dataclass
class OwnYard:
    """``env`` is an environment in which ``forkyard`` is found and uses the home."""

    home: Path
    env: dict[str, str]

    def run(
        self, *args: str, stdin: bytes = b"", timeout_s: float = 120
    ) -> subprocess.CompletedProcess[bytes]:
        """One command line of ``forkyard``."""
        return subprocess.run([sys.executable, "-m", "forkyard.cli", *args], input=stdin, env=self.env,
                              capture_output=True, timeout=timeout_s, check=False)

    def out(self, *args: str, stdin: bytes = b"") -> str:
        """Stdout of one that has to succeed, without the line's end."""
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, f"forkyard {args}: {done.returncode}\n{done.stderr.decode()}"
        return done.stdout.decode().removesuffix("\n")

    def names(self) -> list[str]:
        """Of all sandboxes."""
        return [line.split()[0] for line in self.out("ls").splitlines()[1:]]


@pytest.fixture(scope="module")
def programs(yard: YardHome, tmp_path_factory: pytest.TempPathFactory) -> OwnYard:  # noqa: F811
    """``forkyard`` and ``fy`` on the PATH, as after an installation, for the module's home."""
    tools = tmp_path_factory.mktemp("bin")
    for name in ("forkyard", "fy"):
        (tools / name).write_text(f"#!{sys.executable}\nfrom forkyard.cli.main import main\nmain()\n")
        (tools / name).chmod(0o755)
    keep = {key: value for key, value in os.environ.items()
            if not key.startswith("FORKYARD_") or key == "FORKYARD_BASE_FROM"}
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return OwnYard(yard.home, keep | {"FORKYARD_HOME": str(yard.home), "PATH": path})


@pytest.fixture
def own_yard(programs: OwnYard, yard: YardHome) -> Iterator[OwnYard]:  # noqa: F811
    """The command line; after the test everything it made is deleted, and nothing may be left."""
    yield programs
    yard.clear()
