"""Run the tests with three workers, and what failed once more alone.

Sandboxes that start at the same moment on two cores can make a deadline of a test
that watches a third pass. Such a failure is shown, and then tried again with the machine to
itself: what fails there fails the run.
"""

from __future__ import annotations

import subprocess
import sys

FAILED = 1


def main(args: list[str]) -> int:
    """Run pytest with ``args``; its exit code, or that of the second try."""
    pytest = [sys.executable, "-m", "pytest"]
    code = subprocess.call([*pytest, "-n", "3", "--dist", "loadgroup", *args])
    if code != FAILED:
        return code
    print("tests: trying what failed once more, alone", flush=True)
    return subprocess.call([*pytest, "--last-failed", "--last-failed-no-failures", "none", *args])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
