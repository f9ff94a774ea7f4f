"""``python -m forkyard.setup``: the same as ``forkyard setup``."""

import asyncio
import sys

from forkyard import config
from forkyard.errors import ForkyardError
from forkyard.setup import run_setup


def main() -> int:
    try:
        report = asyncio.run(run_setup(config.load(), newest="--newest" in sys.argv))
    except ForkyardError as error:
        print(f"forkyard setup: {error}", file=sys.stderr)
        return 1
    print(f"{report.home} is ready ({report.ms / 1000:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
