"""What goes on over time on the toy agent's wire: a command's reader, a file out, a file in."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from forkyard import wire
from forkyard.engines.fake.commands import Command
from forkyard.engines.fake.tree import Who, describe
from forkyard.wire import MAX_DATA, SpawnFlag, Type, Unpacker

if TYPE_CHECKING:
    from forkyard.engines.fake.agent import Agent

UPLOAD_WINDOW = 1 << 20


class CommandStream:
    """A command's reader."""

    def __init__(self, agent: Agent, command: Command, number: int) -> None:
        self.agent = agent
        self.command = command
        self.number = number
        self.limits = [wire.WINDOW] * 3

    def pump(self) -> bool:
        c = self.command
        waiting = False
        for which, ring in enumerate(c.rings):
            if ring.sent == ring.end:
                continue
            waiting = True
            if ring.sent < self.limits[which + 1]:
                data = ring.next_piece(self.limits[which + 1])
                self.agent.emit_data(self.number, which + 1, ring.sent, data)
                ring.sent += len(data)
                return True
        if not waiting and c.drained and not c.exit_sent:
            self.agent.emit(Type.EXIT, self.number, c.exit_status())
            c.exit_sent = True
        return False

    def frame(self, type_: int, chan: int, u: Unpacker) -> None:
        c, agent = self.command, self.agent
        if type_ == Type.DATA and chan == wire.STDIN:
            self._stdin(u.u64(), u.raw(u.left))
        elif type_ == Type.EOF and chan == wire.STDIN:
            c.stdin_eof = True
        elif type_ == Type.ACK and chan in (wire.STDOUT, wire.STDERR):
            ring = c.rings[chan - 1]
            ring.acknowledge(min(u.u64(), ring.sent))
        elif type_ == Type.RESIZE and c.tty:
            tty = agent.kernel.state.ttys[c.tty]
            tty.rows, tty.cols = u.u16(), u.u16()
        elif type_ == Type.SIGNAL:
            agent.signal_command(c, u.u32(), u.u8())
        elif type_ == Type.RELEASE:
            agent.drop(self.number)
            if c.exited:
                agent.free(c)
            else:
                c.flags |= SpawnFlag.DETACHED
                c.drop = True

    def _stdin(self, offset: int, data: bytes) -> None:
        c = self.command
        if offset > c.stdin_seen:
            return
        data = data[c.stdin_seen - offset :]
        c.stdin_seen += len(data)
        if c.into and not c.stdin_eof:
            c.stdin += data
        elif data:
            self.agent.acknowledge(self.number, c.stdin_seen, c.stdin_seen + wire.WINDOW)

    def close(self) -> None:
        if self.command.stream == self.number:
            self.command.stream = 0


class Sending:
    """A file's content, or a listing, on its way out."""

    def __init__(self, agent: Agent, number: int, offset: int, take: Callable[[int], bytes]) -> None:
        self.agent = agent
        self.number = number
        self.offset = offset
        self.take = take
        self.limits = [0, offset + wire.WINDOW, 0]

    def pump(self) -> bool:
        room = min(MAX_DATA, self.limits[1] - self.offset)
        if room <= 0:
            return False
        try:
            data = self.take(room)
        except OSError as error:
            self.agent.end(self.number, error.errno or errno.EIO, error.strerror or "")
            return False
        if not data:
            self.agent.end(self.number, 0, "")
            return False
        self.agent.emit_data(self.number, wire.STDOUT, self.offset, data)
        self.offset += len(data)
        return True

    def frame(self, type_: int, chan: int, u: Unpacker) -> None:
        pass

    def close(self) -> None:
        pass


class Upload:
    """A file on its way in; it takes its place when it is whole."""

    def __init__(self, agent: Agent, number: int, who: Who, path: str, mode: int | None) -> None:
        self.agent = agent
        self.number = number
        self.who = who
        self.path = path
        self.mode = mode
        self.data = bytearray()
        self.acked = 0
        self.limits = [0, 0, 0]

    def pump(self) -> bool:
        return False

    def frame(self, type_: int, chan: int, u: Unpacker) -> None:
        if type_ == Type.DATA:
            if u.u64() != len(self.data):
                self.agent.end(self.number, errno.EPROTO, "data out of order")
                return
            self.data += u.raw(u.left)
            if len(self.data) - self.acked >= UPLOAD_WINDOW // 8:
                self.acked = len(self.data)
                self.agent.acknowledge(self.number, self.acked, self.acked + UPLOAD_WINDOW)
        elif type_ == Type.EOF:
            try:
                if self.path != "/dev/null":
                    self.agent.kernel.tree.replace(self.path, bytes(self.data), self.who, self.mode)
                self.agent.end(self.number, 0, "", describe(self.agent.kernel.tree, self.path))
            except OSError as error:
                self.agent.end(self.number, error.errno or errno.EIO, error.strerror or "")

    def close(self) -> None:
        pass
