"""What the toy agent keeps of each command: its output by offset, and its end."""

from __future__ import annotations

import signal

import msgspec

from forkyard.engines.fake.kernel import Fd, Kernel, Proc
from forkyard.wire import MAX_DATA, WINDOW, Packer, SpawnFlag

RING_BYTES = 1 << 20
GAP_S = 0.1
CUT_S = 0.5


class Ring(msgspec.Struct):
    """Bytes ``[start, start + len(data))`` of a stream, sent up to ``sent``."""

    data: bytearray = msgspec.field(default_factory=bytearray)
    start: int = 0
    sent: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def acknowledge(self, offset: int) -> None:
        offset = min(offset, self.end)
        if offset > self.start:
            del self.data[: offset - self.start]
            self.start = offset
        self.sent = max(self.sent, self.start)

    def add(self, data: bytes, *, drop: bool) -> None:
        self.data += data
        if drop and len(self.data) > RING_BYTES:
            self.acknowledge(self.end - RING_BYTES * 3 // 4)

    def next_piece(self, limit: int) -> bytes:
        at = self.sent - self.start
        return bytes(self.data[at : at + min(MAX_DATA, limit - self.sent)])


class Command(msgspec.Struct):
    """One command; ``stream`` is 0 while nobody reads it. ``outs`` are the pipes it is read from."""

    id: int
    pid: int
    flags: int
    tag: bytes
    outs: list[int] = []
    into: int = 0
    tty: int = 0
    rings: list[Ring] = msgspec.field(default_factory=lambda: [Ring(), Ring()])
    stdin: bytearray = msgspec.field(default_factory=bytearray)
    stdin_seen: int = 0
    stdin_eof: bool = False
    stream: int = 0
    exited: bool = False
    drained: bool = False
    exit_sent: bool = False
    oom: bool = False
    drop: bool = False
    code: int = 0
    signal: int = 0
    cpu_us: int = 0
    rss_kb: int = 0
    gap_at: float = 0.0
    cut_at: float = 0.0

    # -- its pipes

    def read(self, k: Kernel) -> None:
        """Move output from its pipes into the rings, as far as there is room."""
        for which, number in enumerate(self.outs):
            if not number:
                continue
            pipe, ring = k.pipe(number), self.rings[which]
            room = RING_BYTES if self.drop else RING_BYTES - len(ring.data)
            if pipe.data and room > 0:
                ring.add(bytes(pipe.data[:room]), drop=self.drop)
                del pipe.data[:room]
                if self.exited:
                    self.gap_at = k.now() + GAP_S
            if not pipe.data and not pipe.writers:
                self._close_out(k, which)

    def _close_out(self, k: Kernel, which: int) -> None:
        if self.outs[which]:
            k.close(Fd("pipe", self.outs[which]))
            self.outs[which] = 0

    def feed(self, k: Kernel) -> tuple[bool, bool]:
        """Move stdin into its pipe; whether any moved, and whether its reader is gone."""
        if not self.into:
            return False, False
        pipe = k.pipe(self.into)
        if not self.tty and not pipe.readers:
            self.close_stdin(k)
            return False, True
        moved = False
        if self.stdin and self.tty:
            k.type_in(self.tty, bytes(self.stdin))
            moved = True
            self.stdin.clear()
        elif self.stdin and len(pipe.data) < RING_BYTES // 16:
            room = RING_BYTES // 16 - len(pipe.data)
            pipe.data += self.stdin[:room]
            del self.stdin[:room]
            moved = True
        if self.stdin_eof and not self.stdin:
            if self.tty:
                k.type_in(self.tty, b"\x04")
                self.into = 0
            else:
                self.close_stdin(k)
        return moved, False

    def close_stdin(self, k: Kernel) -> None:
        if self.into and not self.tty:
            k.close(Fd("pipe", self.into, writes=True))
        self.into = 0
        self.stdin.clear()

    # -- its end

    def ended(self, k: Kernel, proc: Proc) -> None:
        self.exited = True
        self.code = 128 + proc.signal if proc.signal else self.code or proc.code
        self.signal = proc.signal
        self.cpu_us, self.rss_kb = proc.cpu_us, max(proc.rss_kb, 1)
        self.gap_at, self.cut_at = k.now() + GAP_S, k.now() + CUT_S

    def settle(self, k: Kernel) -> None:
        """Decide whether the output of those that outlive it has been waited for long enough."""
        if not self.exited or self.drained:
            return
        held_up = not self.drop and any(
            number and len(ring.data) >= RING_BYTES
            for number, ring in zip(self.outs, self.rings, strict=False)
        )
        if held_up:
            self.gap_at, self.cut_at = k.now() + GAP_S, k.now() + CUT_S
            return
        if any(self.outs) and k.now() < min(self.gap_at, self.cut_at):
            return
        self.drained = True
        self.close_stdin(k)

    @property
    def next_timer(self) -> float | None:
        waits = self.exited and not self.drained
        return min(self.gap_at, self.cut_at) if waits else None

    def kill_tree(self, k: Kernel) -> None:
        for proc in k.descendants(
            lambda p: p.command == self.id or p.session == self.pid or p.pgrp == self.pid
        ):
            k.deliver(proc, signal.SIGKILL)

    def free(self, k: Kernel) -> None:
        """Let go of it. Pipes that a living process writes to stay, and are emptied."""
        self.close_stdin(k)

    # -- for the wire

    def opened(self) -> bytes:
        p = Packer().u32(self.pid).u32(self.id).u32(self.flags & 15)
        for ring in self.rings:
            p.u64(ring.start)
        return p.u64(self.stdin_seen).done()

    def row(self, p: Packer) -> None:
        """Its line in the table of a greeting."""
        flags = self.flags & 15
        flags |= (SpawnFlag.EXITED if self.exited else 0) | (SpawnFlag.OOM if self.oom else 0)
        p.u32(self.pid).u32(self.id).u32(flags)
        for ring in self.rings:
            p.u64(ring.start).u64(ring.end)
        p.u64(self.stdin_seen).u32(self.code).u32(self.signal).str(self.tag)

    def exit_status(self) -> bytes:
        p = Packer().u32(self.code).u32(self.signal).u32(int(self.oom)).u64(self.cpu_us).u64(self.rss_kb)
        return p.u64(self.rings[0].end).u64(self.rings[1].end).done()


__all__ = ["WINDOW", "Command", "Ring"]
