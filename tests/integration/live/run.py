"""Runs one kind: see ``state.py``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback

import events
import processes
import sockets
import storage
from state import KINDS, LIVE

__all__ = ["events", "processes", "sockets", "storage"]

STUCK_S = 25


def run(name: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    state = KINDS[name]()
    stuck = open(f"{LIVE}/{name}.stuck", "w")  # noqa: SIM115

    def tell(what: str, text: str) -> None:
        with open(f"{LIVE}/{name}.new", "w") as file:
            file.write(text)
        os.rename(f"{LIVE}/{name}.new", f"{LIVE}/{name}.{what}")

    try:
        next(state)
        tell("ready", str(os.getpid()))
        signal.sigwait([signal.SIGUSR1])
        faulthandler.dump_traceback_later(STUCK_S, file=stuck)
        assert next(state, "end") == "end"
        tell("result", "ok")
    except BaseException:
        text = traceback.format_exc()
        tell("ready", text)
        tell("result", text)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    os.makedirs(LIVE, exist_ok=True)
    run(sys.argv[1])
