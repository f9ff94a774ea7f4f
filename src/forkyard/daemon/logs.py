"""The daemon's log: one line an event, in a file that is rotated by size."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 8 << 20
KEPT = 3


class LineFormatter(logging.Formatter):
    """``time level logger message``; line breaks in it are written as ``\\n``, so that a line is
    an event and nothing that a guest says can forge one."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += " | " + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        return f"{when}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name} {text}"


class OwningHandler(RotatingFileHandler):
    """The file also takes what the process writes to stdout and stderr: an interpreter's last
    words are no log records."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8", errors="replace")
        self._take_over()

    def doRollover(self) -> None:
        super().doRollover()
        self._take_over()

    def _take_over(self) -> None:
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)


def set_up(path: Path | None, level: str) -> None:
    """Log to ``path``, or to stderr without one."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if path is None else OwningHandler(path)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
