"""What each system under test can do, in words that all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

HEAP = (
    "import os, time\n"
    "held = [os.urandom(1 << 20) for _ in range({mb})]\n"
    "print('ready', flush=True)\n"
    "while True:\n"
    "    time.sleep(0.2)\n"
)


def argv_of_heap(mb: int) -> list[str]:
    """A live Python process that holds so many MiB, none of them alike, and says ``ready``."""
    return ["python3", "-c", HEAP.format(mb=mb)]


@dataclass(frozen=True)
class Forked:
    """The copies, running, and what the system itself says of the fork."""

    boxes: list[str]
    said: dict[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """Boxes are named by whatever the system names them by. Every method raises if it fails.

    ``forks_memory`` is False for one whose "fork" copies the disk and starts anew.
    """

    name: str
    forks_memory: bool

    def open(self) -> None: ...

    def close(self) -> None: ...

    def start(self) -> str:
        """A new box, running; returns when commands can be given."""
        ...

    def run(self, box: str, argv: list[str]) -> None: ...

    def read_out(self, box: str, argv: list[str]) -> int:
        """Run a command and read what it prints as it comes; how many bytes that was."""
        ...

    def end(self, box: str) -> None:
        """Leaves nothing of the box."""
        ...

    def source(self, heap_mb: int) -> str:
        """A box to fork, with a live process of that size if it is not 0, and memory for it."""
        ...

    def fork(self, box: str, n: int, heap_mb: int) -> Forked: ...

    def check_heap(self, box: str) -> None: ...

    def checkpoint(self, box: str) -> dict[str, float]: ...

    def rewind(self, box: str) -> str:
        """Back to the checkpoint; returns the box's name from now on."""
        ...

    def put(self, box: str, data: bytes) -> None: ...

    def get(self, box: str) -> int:
        """Read back what was put; its size."""
        ...

    def pids(self, box: str) -> set[int]:
        """The host's processes of this box alone."""
        ...

    def shared_pids(self) -> set[int]:
        """The host's processes that serve all boxes."""
        ...
