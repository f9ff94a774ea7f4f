"""Docker, to compare with, where this machine has a daemon and the image."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Self


def image_there(image: str) -> bool:
    """Whether Docker answers and has the image; nothing is pulled."""
    try:
        asked = subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


class Container:
    """A fresh container without a network, removed at the end of the block."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._id = ""

    def __enter__(self) -> Self:
        self._id = _docker("run", "-d", "--network=none", self._image, "sleep", "infinity").strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _docker("rm", "-f", self._id)

    def run(self, *argv: str, stdin: str = "") -> str:
        """A command's stdout; it has to succeed."""
        return _docker("exec", "-i", self._id, *argv, stdin=stdin)


def _docker(*args: str, stdin: str = "") -> str:
    done = subprocess.run(["docker", *args], input=stdin, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"docker {args[0]}: {done.stderr[-400:]}")
    return done.stdout
