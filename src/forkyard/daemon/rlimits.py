"""The kernel's limits on the daemon, which every sandbox's processes inherit from it.

They are those of whoever happened to start it. A shell's small ones would break every sandbox, with
errors that name anything but the cause.
"""

from __future__ import annotations

import contextlib
import resource

from forkyard.errors import UnavailableError

# Each sandbox costs a handful of descriptors, each client one.
FILES = 256
_UNLIMITED = {
    "file size": (resource.RLIMIT_FSIZE, "-f"),
    "address space": (resource.RLIMIT_AS, "-v"),
    "data": (resource.RLIMIT_DATA, "-d"),
    "CPU time": (resource.RLIMIT_CPU, "-t"),
}


def raise_limits() -> None:
    """Raise them as far as they may be.

    Raises:
        UnavailableError: that is too little, for this one.
    """
    for number in (resource.RLIMIT_NOFILE, *(number for number, _ in _UNLIMITED.values())):
        hard = resource.getrlimit(number)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (hard, hard))
    for what, (number, flag) in _UNLIMITED.items():
        if resource.getrlimit(number)[0] != resource.RLIM_INFINITY:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if (left := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY:
            raise UnavailableError(
                f"the {what} of a process is limited to {left} here, which no sandbox works with",
                hint=f"start the daemon where `ulimit {flag}` says unlimited",
            )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < FILES:
        raise UnavailableError(
            f"a process may have {files} open files here, the daemon needs {FILES}",
            hint=f"start it where `ulimit -n` says at least {FILES}",
        )
