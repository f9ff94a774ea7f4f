"""Output that was acknowledged to the agent before its client had it, on disk.

Short output never comes here: it stays in the agent's ring until the command has ended and
the reply is on its way. Longer output is acknowledged piecemeal, so that the command can go
on, and what is acknowledged is first written here, up to what a reply can hold.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forkyard.requests import Exec
from forkyard.yard.capture import Capture
from forkyard.yard.commands import tag_of


class Spool:
    """The two spool files of one command: its stdout's and its stderr's beginnings.

    Args:
        directory: The box's runtime directory.
    """

    THRESHOLD = 384 << 10

    def __init__(self, directory: Path, request: Exec, uid: int) -> None:
        self._limit = request.max_output
        self._paths: tuple[Path, Path] | None = None
        self._written = [0, 0]
        self._made = False
        if request.request_id:
            name = tag_of(request, uid).decode()
            self._paths = directory / f"spool-{name}.1", directory / f"spool-{name}.2"

    def write(self, out: Capture, err: Capture) -> None:
        """Append what the captures have beyond what is spooled already."""
        for index, capture in enumerate((out, err)):
            pieces = capture.unspooled(self._limit - self._written[index])
            if self._paths is None:
                continue
            self._made = self._made or bool(pieces)
            for piece in pieces:
                with contextlib.suppress(OSError), self._paths[index].open("ab") as file:
                    os.chmod(file.fileno(), 0o600)
                    file.write(piece)
                    self._written[index] += len(piece)

    def read(self, out: Capture, err: Capture) -> None:
        """Feed the captures what an earlier daemon spooled."""
        if self._paths is None:
            return
        self._made = True
        for index, (path, capture) in enumerate(zip(self._paths, (out, err), strict=True)):
            with contextlib.suppress(FileNotFoundError):
                data = path.read_bytes()
                capture.feed(data)
                self._written[index] = len(data)
        # What was fed from here is on disk already.
        out.unspooled(0)
        err.unspooled(0)

    def remove(self) -> None:
        """Delete the files, if there are any: most commands never have one."""
        if self._made:
            for path in self._paths or ():
                path.unlink(missing_ok=True)
