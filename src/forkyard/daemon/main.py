"""The daemon: ``python -m forkyard.daemon.main [--foreground] [--home DIR]``.

Order matters. The lock comes before anything is read or reaped, the socket after everything
works, ``daemon.json`` last. SIGTERM ends the daemon and keeps the sandboxes; nothing else
that a terminal or a broken pipe sends ends it. Exit codes: 0, 1 (could not start), 3 (another
daemon has this home).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from forkyard import __version__, config, errors, verbs
from forkyard.daemon import lock, logs
from forkyard.daemon.rlimits import raise_limits
from forkyard.host import priority, trace, userns
from forkyard.host.failpoint import arm_from_environment

TAKEN = 3

log = logging.getLogger("forkyard.daemon")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="forkyard.daemon.main", description="The forkyard daemon.")
    parser.add_argument("--foreground", action="store_true", help="stay, and log to stderr")
    parser.add_argument(
        "--detach", action="store_true", help="leave the parent, as the client's launcher wants"
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help="told 'ready' or 'taken PID', then closed")
    parser.add_argument("--home", default=None)
    parser.add_argument("--socket", default=None)
    args = parser.parse_args(argv)
    try:
        settings = config.load({"home": args.home, "socket": args.socket})
        raise_limits()
        userns.enter(settings.home, settings.socket)
    except (errors.ForkyardError, OSError) as error:
        print(f"forkyard daemon: {error}", file=sys.stderr)
        return 1
    if args.detach:
        if os.fork():
            os._exit(0)
        os.setsid()
    ready = _Ready(args.ready_fd)
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        arm_from_environment()
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = lock.take(settings.home / "lock")
    except lock.TakenError as taken:
        ready.say(f"taken {taken.pid}")
        print(f"a daemon has this home already: pid {taken.pid}", file=sys.stderr)
        return TAKEN
    except (errors.ForkyardError, OSError) as error:
        print(f"forkyard daemon: {error}", file=sys.stderr)
        return 1
    logs.set_up(None if args.foreground else settings.home / "daemon.log", settings.log_level)
    try:
        _run(settings, ready)
    except BaseException:
        log.critical("the daemon failed", exc_info=True)
        return 1
    finally:
        os.close(held)
    return 0


class _Ready:
    """The pipe to whoever started the daemon. Children never inherit it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)

    def say(self, word: str) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, word.encode() + b"\n")
            os.close(self._fd)
            self._fd = -1


def _run(settings: config.Settings, ready: _Ready) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(settings, ready))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, ready))


async def _serve(settings: config.Settings, ready: _Ready) -> None:
    from forkyard.daemon.access import Access
    from forkyard.daemon.app import App
    from forkyard.daemon.server import bind, serving
    from forkyard.host.files import write_atomic
    from forkyard.host.process import become_subreaper, start_time
    from forkyard.setup import apt, quick_setup
    from forkyard.yard.yard import open_yard

    become_subreaper()
    # All streams of all sandboxes pass through this thread: who keeps the CPUs busy must not keep it waiting.
    priority.go_first()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    log.info("starting: version %s, pid %d, home %s", __version__, os.getpid(), settings.home)
    about = settings.home / "daemon.json"
    # A home of its own beside a machine's ready one borrows that one's engine and base.
    await quick_setup(settings)
    async with (
        _tracing(settings.trace),
        open_yard(settings, install=apt.install) as yard,
        asyncio.TaskGroup() as tasks,
    ):
        access = Access(settings.home, tasks, yard.record)
        app = App(yard, tasks, stop.set, access)
        sock = bind(settings.socket)
        # The socket goes first: whoever is being served over either is then told to ask the next daemon.
        async with access.serving(app), serving(app, sock, app.drain):
            write_atomic(
                about,
                json.dumps(
                    {
                        "pid": os.getpid(),
                        "start_time": start_time(os.getpid()),
                        "version": __version__,
                        "wire": verbs.API_VERSION,
                        "socket": str(settings.socket),
                    }
                ),
            )
            # What is alive now stays: the collector need not walk it at every request.
            gc.collect()
            gc.freeze()
            log.info("serving on %s", settings.socket)
            ready.say("ready")
            signalled = tasks.create_task(asked.wait())
            stopped = tasks.create_task(stop.wait())
            await asyncio.wait({signalled, stopped}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            stopped.cancel()
            if not stop.is_set():
                await yard.prepare_shutdown("keep")
            log.info("stopping")
            _forget(about, settings.socket)
    log.info("stopped")


@contextlib.asynccontextmanager
async def _tracing(path: Path | None) -> AsyncIterator[None]:
    with trace.tracing(path):
        yield


def _forget(about: Path, socket: Path) -> None:
    """A daemon that goes takes its signs down while it still holds the lock."""
    for path in (about, socket):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
