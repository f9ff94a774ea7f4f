"""What changed on a sandbox's disk, and bringing such changes into another.

A diff is made of sealed layers, on the host. The guest is asked for nothing (only to write out
what it has cached, which it may refuse to its own harm), so a verdict may rest on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forkyard.errors import CapacityError, ConflictError
from forkyard.requests import Caller, DiffRequest
from forkyard.store.overlay import Difference, Shown, Unreadable
from forkyard.types import Change, Diff
from forkyard.yard.background import finish
from forkyard.yard.context import locked
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.model import Sandbox
from forkyard.yard.patches import named_only, patch_of

MAX_CHANGES = 100_000
# After so long the rest of a patch is made without looking for the shortest one.
PATIENCE_S = 1.0
# What the agent writes for itself, and where other filesystems are mounted.
OWN = ("run/forkyard", "etc/hostname", "etc/hosts", "etc/machine-id", "etc/resolv.conf", ".forkyard")
MOUNTED = ("proc", "sys", "dev", "tmp", "var/tmp")
_LEFT_OUT = frozenset(OWN + MOUNTED)

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


@dataclass(frozen=True, slots=True)
class Caps:
    """How much a Diff carries, in bytes: of one file's content, of all content, of one file in the
    patch, and of the patch."""

    file: int = 8 << 20
    content: int = 16 << 20
    text: int = 1 << 20
    patch: int = 4 << 20

    def share(self, n: int) -> Caps:
        """The caps of each of ``n`` diffs that travel together."""
        content, patch = self.content // n, self.patch // n
        return Caps(min(self.file, content), content, min(self.text, patch), patch)


class Diffs:
    """The verb ``diff``."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context
        self.snapshots = lifecycle.snapshots

    async def diff(self, request: DiffRequest, caller: Caller) -> Diff:
        """See API: ``diff``."""
        sandbox = self.context.sandboxes.get(request.sandbox)
        if sandbox.doc.state == "creating":
            async with locked(sandbox):
                pass
        return await self.of(sandbox, request.since)

    async def of(self, sandbox: Sandbox, since: str | None = None, caps: Caps | None = None) -> Diff:
        """What the sandbox's disk shows now and did not show then, or the other way round.

        Raises:
            NotFoundError: there is no such ``since``. CapacityError: too much differs.
        """
        stopped = threading.Event()
        work = self._of(sandbox, since, caps or Caps(), stopped)
        try:
            return await finish(self.context.tg, work)
        except asyncio.CancelledError:
            stopped.set()
            raise

    async def _of(self, sandbox: Sandbox, since: str | None, caps: Caps, stopped: threading.Event) -> Diff:
        begun = time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            async with locked(sandbox):
                old = self._past(sandbox, since)
                self.snapshots.hold(old)
                stack.push_async_callback(self.snapshots.release, old)
                new, box = await self._present(sandbox)
                stack.push_async_callback(self.snapshots.release, new)
            frozen = time.perf_counter()
            collector = _Collector(caps)
            await self.context.disks.compare(
                new,
                old,
                collector.take,
                box=box,
                leave_out=_LEFT_OUT.__contains__,
                unreadable=collector.unreadable,
                stop=stopped.is_set,
            )
            compared = time.perf_counter()
        return collector.diff((frozen - begun) * 1e3, (compared - frozen) * 1e3)

    def _past(self, sandbox: Sandbox, since: str | None) -> list[str]:
        """The layers to compare with."""
        if since is not None:
            own = {kept.id: kept for kept in self.snapshots.checkpoints(sandbox)}
            labelled = {kept.name: kept for kept in own.values() if kept.name}
            kept = own.get(since) or labelled.get(since) or self.snapshots.get(since)
            return list(kept.layers)
        if not sandbox.doc.origin:
            raise ConflictError(
                f"it is not known what {sandbox.doc.name!r} started from",
                hint="name a snapshot or a checkpoint with since=",
                sandbox=sandbox.id,
            )
        return list(sandbox.doc.origin)

    async def _present(self, sandbox: Sandbox) -> tuple[list[str], str | None]:
        """The layers of its disk as it is now, held for the caller, and the box they were sealed from."""
        doc = sandbox.doc
        kept = self.context.snapshots.get(doc.resume or "")
        if doc.state == "stopped" and kept is not None:
            layers = list(kept.layers)
            self.snapshots.hold(layers)
            return layers, None
        box = self.lifecycle.box_of(sandbox)
        seal = f"d-{secrets.token_hex(8)}"
        layers = [seal, *doc.layers]
        await self.context.machines.freeze(box, seal, None)
        # Nobody else knows the seal: it goes when the caller lets go of it.
        self.snapshots.hold(layers)
        return layers, box.id


class _Collector:
    """Makes a Diff of differences, in a thread; within its caps."""

    def __init__(self, caps: Caps) -> None:
        self._room = caps.content
        self._caps = caps
        self._changes: list[Change] = []
        self._patch: list[str] = []
        self.unreadable = Unreadable()

    def take(self, differences: Iterable[Difference]) -> None:
        found: list[Difference] = []
        for one in differences:
            found.append(one)
            if len(found) > MAX_CHANGES:
                raise CapacityError(
                    f"more than {MAX_CHANGES} paths differ",
                    hint="take a checkpoint after what changes so much, and ask since= it",
                )
        found.sort(key=lambda one: one.path)
        patch_room, deadline = self._caps.patch, time.monotonic() + PATIENCE_S
        for one in found:
            change = self._change(one)
            self._changes.append(change)
            if patch_room > 0:
                part = "".join(self._part(one, change, coarse=time.monotonic() > deadline))
                patch_room -= len(part)
                if patch_room <= 0:
                    part = named_only(one.path, "the patch is too large")
                self._patch.append(part)

    def diff(self, frozen_ms: float, compare_ms: float) -> Diff:
        """The outcome."""
        changes = self._changes
        return Diff(
            added=[one for one in changes if one.old_kind is None],
            modified=[one for one in changes if one.mode is not None and one.old_kind is not None],
            deleted=[one for one in changes if one.mode is None],
            patch="".join(self._patch),
            complete=not any(one.omitted for one in changes),
            skipped=[_shown(f"/{path}")[0] for path in self.unreadable.paths],
            frozen_ms=round(frozen_ms, 2),
            compare_ms=round(compare_ms, 2),
        )

    def _change(self, one: Difference) -> Change:
        shown = one.new or one.old
        assert shown is not None
        path, raw_path = _shown(f"/{one.path}")
        target, raw_target = _shown(shown.target()) if shown.is_link else (None, b"")
        data = None
        omitted = False
        if one.new is not None and one.new.is_file and one.content:
            size = one.new.info.st_size
            omitted = size > min(self._caps.file, self._room)
            if not omitted:
                data = one.new.read(size)
                self._room -= size
        return Change(
            path=path,
            kind=_KINDS[stat.S_IFMT(shown.info.st_mode)],
            mode=stat.S_IMODE(one.new.info.st_mode) if one.new else None,
            old_kind=_KINDS[stat.S_IFMT(one.old.info.st_mode)] if one.old else None,
            old_mode=stat.S_IMODE(one.old.info.st_mode) if one.old else None,
            size=one.new.info.st_size if one.new and one.new.is_file else 0,
            old_size=one.old.info.st_size if one.old and one.old.is_file else 0,
            uid=shown.info.st_uid,
            gid=shown.info.st_gid,
            content=one.content,
            target=target,
            data=data,
            omitted=omitted,
            raw_path=raw_path,
            raw_target=raw_target,
        )

    def _part(self, one: Difference, change: Change, *, coarse: bool) -> Iterator[str]:
        """The parts of the patch for one path: two where its type changed, none for a directory."""
        path = one.path
        old, new = _git_mode(one.old), _git_mode(one.new)
        if max(change.size, change.old_size) > self._caps.text and one.content:
            yield named_only(path, "too large")
            return
        was = _content(one.old) if one.content and one.old is not None and old else None
        now = change.data if one.content else None
        if one.new is not None and new and one.content and now is None:
            now = _content(one.new)
        if old and new and old & 0o170000 != new & 0o170000:
            yield patch_of(path, was, None, old_mode=old, new_mode=None, coarse=coarse)
            yield patch_of(path, None, now, old_mode=None, new_mode=new, coarse=coarse)
        elif old or new:
            yield patch_of(path, was, now, old_mode=old, new_mode=new, coarse=coarse)


def _git_mode(entry: Shown | None) -> int | None:
    """The mode that git would record, or None where it records nothing."""
    if entry is not None and entry.is_link:
        return 0o120000
    if entry is not None and entry.is_file:
        return 0o100755 if entry.info.st_mode & 0o100 else 0o100644
    return None


def _content(entry: Shown) -> bytes:
    return os.fsencode(entry.target()) if entry.is_link else entry.read(entry.info.st_size)


def _shown(name: str) -> tuple[str, bytes]:
    """A guest's name as text, and its bytes where the text does not say them."""
    raw = os.fsencode(name)
    try:
        return raw.decode(), b""
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace"), raw
