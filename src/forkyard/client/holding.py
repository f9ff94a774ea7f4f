"""How this process holds leases on another machine's daemon: by a stream that a thread keeps open.

The daemon cannot watch a process on another machine, so the stream's end stands for the process's. It
is one for each daemon and process, begun with the first ephemeral sandbox; when it breaks it is opened
again, for which the daemon waits a minute. A child of this process has none until it makes its own.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from forkyard import errors
from forkyard import requests as rq
from forkyard.access import HoldLease
from forkyard.client import _protocol as protocol
from forkyard.client.remote import Remote
from forkyard.client.sync_transport import Stream, Transport

GRACE_S = 60.0
RETRY_S = 1.0
REFUSED_S = 30.0
FORK_S = 2.0
"""So long a fork waits for a stream that is being opened: where nobody answers that takes longer."""

log = logging.getLogger("forkyard.client")


class Hold:
    """One lease and its stream.

    Attributes:
        lease: What the sandboxes carry that live for this process.
    """

    def __init__(self, remote: Remote) -> None:
        self.lease = rq.Lease(stream=os.urandom(16).hex())
        self._remote = remote
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._stream: Stream | None = None

    def keep(self, *sandboxes: str) -> None:
        """Hold the lease, for these, from now until they are let go."""
        with self._lock:
            self._kept.update(sandboxes)
            if self._over is None:
                self._over = threading.Event()
                threading.Thread(
                    target=self._run, args=(self._over,), name="forkyard-lease", daemon=True
                ).start()

    def let_go(self, *sandboxes: str) -> None:
        """The stream ends with the last that it was held for."""
        with self._lock:
            self._kept.difference_update(sandboxes)
            if self._kept or self._over is None:
                return
            self._over.set()
            self._over = None
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _run(self, over: threading.Event) -> None:
        transport = Transport(Path(), Path(), remote=self._remote)
        while not over.is_set():
            pause_s = RETRY_S
            try:
                self._hold(transport, over)
            except errors.AccessDeniedError as error:
                log.warning("the lease of this process is not held: %s", error)
                pause_s = REFUSED_S
            except Exception as error:
                # Whatever it was: a thread that ended would end the sandboxes.
                log.info("the lease of this process is held again soon: %s", error)
            over.wait(pause_s)

    def _hold(self, transport: Transport, over: threading.Event) -> None:
        request = HoldLease(lease=self.lease.stream or "", grace_s=GRACE_S)
        with _opening:
            stream = transport.open_once("hold_lease", request)
        try:
            with self._lock:
                if over.is_set():
                    return
                self._stream = stream
            while stream.read():
                pass
        finally:
            with self._lock:
                if self._stream is stream:
                    self._stream = None
            stream.close()


_opening = threading.Lock()
"""Held while the stream is opened. A fork in the midst of it would give the child a share in a connection
that nobody knows yet, and that would outlive this process."""
_forking = threading.local()


def _before_fork() -> None:
    _forking.has_lock = _opening.acquire(timeout=FORK_S)


def _after_fork() -> None:
    if _forking.has_lock:
        _opening.release()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)

_holds: dict[tuple[int, str, str | None], Hold] = {}


def lease_of(remote: Remote | None, lease: str | None) -> rq.Lease:
    """The lease that this process holds on the daemon (None: this machine's), or a run's."""
    if lease is not None or remote is None:
        return protocol.lease_of(lease)
    return _hold_of(remote).lease


def keep(remote: Remote | None, *what: str) -> None:
    """Hold this process's lease for these."""
    if remote is not None and what:
        _hold_of(remote).keep(*what)


def let_go(remote: Remote | None, *what: str) -> None:
    if remote is not None:
        _hold_of(remote).let_go(*what)


def _hold_of(remote: Remote) -> Hold:
    """This very process's, not that of the one it was forked from."""
    # No lock, which a fork could copy while it is held: setdefault is one step.
    return _holds.setdefault((os.getpid(), remote.url, remote.token), Hold(remote))
