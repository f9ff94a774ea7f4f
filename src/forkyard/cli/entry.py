"""What the installed commands call: an installation without the command line's parts says so."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("click") is None:
        sys.exit(
            "forkyard: this is the SDK alone, without the command line\n"
            "hint: pip install '/path/to/forkyard[host]' (the checkout)"
        )
    from forkyard.cli.main import main as run

    run()
