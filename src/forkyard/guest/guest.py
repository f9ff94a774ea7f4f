"""A machine's agent, as methods. What it says is a claim of whoever was root in that memory."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forkyard import wire
from forkyard.errors import (
    DeadlineError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnavailableError,
)
from forkyard.guest.channel import Channel
from forkyard.guest.files import GuestFiles
from forkyard.guest.network import Connection, Server, opener
from forkyard.guest.process import GuestProcess, KnownProcess, SpawnSpec
from forkyard.guest.request import REQUEST_S
from forkyard.host.process import TaskStarter
from forkyard.types import ProcessInfo
from forkyard.wire import Feature, NetFlag, Op, Packer, Scope, Unpacker, WireError

T = TypeVar("T")
MAX_TABLE = 4096
RESYNC_S = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the machine is from now on.

    ``fork`` runs the guest's on-fork hooks (10 s for all of them) and lets go of the source's
    commands: they run on as detached processes. ``seed`` is mixed into the kernel's entropy.
    ``network``: a :class:`NetFlag`, see :meth:`Guest.set_network`.
    """

    hostname: str
    machine_id: str
    fork_id: str
    generation: int = 0
    fork: bool = False
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(64))
    network: int = 0

    def encode(self) -> bytes:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})", self.hostname or "x"):
            raise InvalidRequestError(f"{self.hostname!r} is no host name")
        if not re.fullmatch(r"[0-9a-f]{32}|", self.machine_id):
            raise InvalidRequestError(f"{self.machine_id!r} is no machine id")
        p = Packer().u32(1 if self.fork else 0).u32(self.generation)
        p.str(self.hostname.encode()).str(self.machine_id.encode()).str(self.fork_id.encode()[:120])
        return p.str(self.seed[:512]).u64(time.time_ns()).u32(self.network).done()


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """The agent's answer to an attach. ``processes`` are the commands that it still keeps."""

    version: int
    features: int
    build: str
    pid: int
    uptime_ms: int
    fork_id: str
    processes: list[KnownProcess]


@dataclass(frozen=True, slots=True)
class User:
    uid: int
    gid: int
    name: str
    home: str
    shell: str


@dataclass(frozen=True, slots=True)
class Activity:
    """``cpu_ms`` is what the guest's own processes have used so far, ended ones included."""

    cpu_ms: int
    processes: int


@dataclass(frozen=True, slots=True)
class Killed:
    """What :meth:`Guest.kill_largest` and :meth:`Guest.kill_crowd` killed; ``command`` is the pid of the
    command it belonged to, or 0; ``processes`` how many they were, of a crowd."""

    pid: int
    rss_mb: float
    command: int
    processes: int = 0


class Guest(GuestFiles):
    """One guest's agent over two FIFOs, whose descriptors stay the caller's.

    The caller opens both FIFOs itself, for reading and writing (so that the daemon's death is
    not an end of file for the agent), and says when the machine has died: :meth:`lost`.
    """

    def __init__(self, to_guest_fd: int, from_guest_fd: int, *, box: str) -> None:
        self.box = box
        self._channel = Channel(
            to_guest_fd, from_guest_fd, box=box, on_violation=self._violated, on_lost=self._on_lost
        )
        self._group: TaskStarter | None = None
        self._live: set[GuestProcess] = set()
        self.info: AgentInfo | None = None
        # Called once, when the guest itself made the channel useless.
        self.on_lost: Callable[[ForkyardError], None] = lambda error: None

    # ---- life

    async def attach(self, tg: TaskStarter | None = None, *, timeout_s: float = 10) -> AgentInfo:
        """Begin a new epoch: after a boot, a restore, and a daemon's start.

        Requests under way end with UnavailableError; commands that this object is attached to go
        on without a gap. With ``tg``, a guest that breaks the protocol gets one more chance by a
        new epoch; without, it is lost at once.

        Raises:
            DeadlineError: the agent did not answer. SandboxLostError: it is gone, or of a version
            that this daemon cannot speak to (``UnavailableError``).
        """
        if tg is not None:
            self._group = tg
        live = [p for p in self._live if not p.finished]
        for process in live:
            process.suspend()
        payload = await self._channel.attach(timeout_s)
        try:
            info = _read_hello(Unpacker(payload))
        except WireError as e:
            error = SandboxLostError(f"the agent's greeting is malformed: {e}", cause="guest")
            self._channel.lost(error)
            raise error from None
        if not wire.VERSION_MIN <= info.version <= wire.VERSION:
            raise UnavailableError(
                f"the agent in {self.box} speaks no wire version from {wire.VERSION_MIN} to {wire.VERSION}"
            )
        self.info = info
        known = {p.id for p in info.processes}
        self._live.clear()
        for process in live:
            if process.id in known:
                stream, request = process.rebind()
                self._channel.send(*wire.encode_request(Op.ADOPT, stream, self._channel.epoch, request))
                self._live.add(process)
            else:
                process.fail(SandboxLostError("the agent no longer knows this process", cause="guest"))
        return info

    def _violated(self, why: str) -> None:
        if self._group is None:
            self.lost(SandboxLostError(f"the guest broke the wire protocol: {why}", cause="guest"))
        else:
            self._group.create_task(self._resync(why))

    async def _resync(self, why: str) -> None:
        try:
            await self.attach(timeout_s=RESYNC_S)
        except ForkyardError:
            self.lost(SandboxLostError(f"the guest broke the wire protocol: {why}", cause="guest"))

    def lost(self, error: ForkyardError) -> None:
        """The machine died: whatever waits, and every later call, raises ``error``."""
        self._channel.lost(error)

    def _on_lost(self, error: ForkyardError) -> None:
        live, self._live = self._live, set()
        for process in live:  # those that have no stream just now, between two epochs, too
            process.fail(error)
        if isinstance(error, SandboxLostError) and error.cause != "host":
            self.on_lost(error)

    @property
    def error(self) -> ForkyardError | None:
        """Why this guest is lost, or None."""
        return self._channel.error

    async def close(self) -> None:
        """Stop listening. The guest runs on, and another Guest may attach."""
        self._channel.close()

    async def ping(self, timeout_s: float = 5) -> float:
        """Seconds to the agent and back."""
        return await self._channel.ping(timeout_s)

    async def quiesce(self, timeout_s: float = 0.25, *, sync: bool = False) -> bool:
        """Make the wire silent both ways, until :meth:`unquiesce` or the next :meth:`attach`.

        True: the agent is silent and nothing is in the pipes. Frames of ours wait meanwhile. False:
        it did not answer in time, and a freeze goes on regardless. A save by gVisor takes what is in
        the pipes out of them, so after one that was not quiet call :meth:`attach`, not
        :meth:`unquiesce`. ``sync`` makes the agent flush the guest's file systems first.
        """
        return await self._channel.quiesce(timeout_s, sync=sync)

    async def unquiesce(self) -> None:
        self._channel.unquiesce()

    def _parse(self, read: Callable[[Unpacker], T], u: Unpacker) -> T:
        try:
            return read(u)
        except WireError as e:
            self._channel.violation(str(e))
            raise UnavailableError("the agent sent a malformed answer", retryable=True) from None

    async def identify(self, identity: Identity) -> list[tuple[str, int]]:
        """Give the machine its identity; the hooks that ran, with their exit codes (124: out of time)."""
        u = await self._ask(Op.IDENTIFY, identity.encode(), "identify", timeout_s=REQUEST_S)
        return self._parse(
            lambda u: [(u.str().decode("utf-8", "replace"), u.u32() & 0xFF) for _ in range(_count(u, 64))], u
        )

    # ---- processes

    async def spawn(self, spec: SpawnSpec, *, timeout_s: float = REQUEST_S) -> GuestProcess:
        """Start a command. A program that is missing (127) or cannot run (126) exits like a shell's.

        Raises:
            NotFoundError: no such user or working directory. AccessDeniedError: not for this user.
            CapacityError: the guest has no room for a process.
        """
        payload = spec.encode()
        process = GuestProcess(self._channel, stdin=spec.pty or spec.stdin == "pipe")
        self._channel.hold()
        self._channel.send(*wire.encode_request(Op.SPAWN, process.stream, self._channel.epoch, payload))
        return await self._started(process, "the command", timeout_s, new=True)

    async def process(
        self, pid: int, *, stdout_offset: int = 0, stderr_offset: int = 0, timeout_s: float = REQUEST_S
    ) -> GuestProcess:
        """Attach to a command that was started through an agent: by an earlier daemon, before a
        rewind, or in a fork's source. Output goes on at the offsets, where it is still kept.

        Raises:
            NotFoundError: there is none with this pid.
        """
        process = GuestProcess(self._channel, stdin=True)
        process.pid = pid
        process.start_at(stdout_offset, stderr_offset)
        frames = wire.encode_request(Op.ADOPT, process.stream, self._channel.epoch, process.adopt_request())
        self._channel.send(*frames)
        return await self._started(process, f"process {pid}", timeout_s)

    async def _started(
        self, process: GuestProcess, what: str, timeout_s: float, *, new: bool = False
    ) -> GuestProcess:
        try:
            async with asyncio.timeout(timeout_s):
                await process.opened()
        except BaseException as e:
            if new:
                process.abandon()  # it may have started, and nobody will ever hear of it
            else:
                process.leave()
            if isinstance(e, TimeoutError):
                raise DeadlineError(f"{what}: the agent did not answer within {timeout_s:g} s") from None
            raise
        self._live = {p for p in self._live if not p.finished}
        self._live.add(process)
        return process

    async def processes(self) -> list[ProcessInfo]:
        """Every process but the agent. ``handle`` is the pid of the command that it belongs to."""
        u = await self._ask(Op.PROCS, b"", "processes")
        return self._parse(_read_processes, u)

    async def signal(self, pid: int, number: int, *, scope: Scope = Scope.PROCESS) -> None:
        """Signal any process of the guest but the agent; ``Scope.TREE`` reaches its descendants too."""
        if pid <= 1:
            raise InvalidRequestError(f"process {pid} cannot be signalled")
        await self._ask(Op.KILL, Packer().u32(pid).u32(number).u8(scope).done(), f"process {pid}")

    async def kill_largest(self, *, crowded: bool = False, timeout_s: float = 5) -> Killed | None:
        """Free memory: kill the process that has most of it, without starting anything. A one-shot
        command ends whole; a PTY or a session fed by a pipe loses the process only. The command's
        exit says ``oom``. ``crowded``: so many run that all are stopped first, for the agent to look
        around. None: nothing runs but the agent."""
        how = Packer().u8(2 if crowded else 0).done()
        u = await self._ask(Op.KILL_LARGEST, how, "kill_largest", timeout_s)
        killed = self._parse(lambda u: Killed(u.u32(), u.u64() / 1024, u.u32()), u)
        return killed if killed.pid else None

    @property
    def has_crowds(self) -> bool:
        """Whether this agent knows :meth:`kill_crowd`; those in older images do not."""
        return self.info is not None and bool(self.info.features & Feature.CROWDS)

    async def kill_crowd(self, least: int, *, timeout_s: float = 30) -> Killed | None:
        """End the command, or what is left of one, that has the most processes, without starting
        anything; None: none has as many as ``least``. Of a terminal or a session fed by a pipe all goes but
        the command's own process. The command's exit says ``crowded``."""
        u = await self._ask(Op.KILL_LARGEST, Packer().u8(3).u32(least).done(), "kill_crowd", timeout_s)
        killed = self._parse(lambda u: Killed(u.u32(), u.u64() / 1024, u.u32(), u.u32()), u)
        return killed if killed.pid else None

    async def deleted_files(self) -> list[tuple[str, int, str]]:
        """Deleted files that are still held (up to 64): path, pid and name of the holder."""
        u = await self._ask(Op.DELETED, b"", "deleted_files")
        return self._parse(lambda u: [(_text(u), u.u32(), _text(u)) for _ in range(_count(u, 256))], u)

    # ---- network

    def serve(self, server: Server) -> None:
        """Let ``server`` answer the guest's questions and carry its connections from now on; before
        that all of them are refused."""
        self._channel.opener = opener(self._channel, server)

    @property
    def has_network(self) -> bool:
        """Whether this agent knows of names and connections; those in older images do not."""
        return self.info is not None and bool(self.info.features & Feature.NETWORK)

    async def set_network(self, flags: NetFlag) -> None:
        """``PROXY`` opens proxies on 127.0.0.1 inside: 3128 for HTTP, 1080 for SOCKS5."""
        await self._ask(Op.EGRESS, Packer().u32(flags).done(), "the network")

    async def connect(self, port: int, *, timeout_s: float = 10) -> Connection:
        """A connection to a port on the guest's loopback.

        Raises:
            ConnectionError: nothing listens there, or the sandbox is gone.
        """
        return await Connection.into(self._channel, port, timeout_s)

    async def activity(self) -> Activity:
        u = await self._ask(Op.ACTIVITY, b"", "activity")
        return self._parse(lambda u: Activity(u.u64(), u.u32()), u)

    async def lookup_user(self, name: str) -> User:
        """By name, ``uid`` or ``uid:gid``, as the guest's own files say.

        Raises:
            NotFoundError: no such user.
        """
        try:
            u = await self._ask(Op.LOOKUP, Packer().str(name.encode()[:128]).done(), f"user {name[:64]!r}")
        except NotFoundError:
            raise NotFoundError(f"the guest has no user {name[:64]!r}") from None
        return self._parse(lambda u: User(u.u32(), u.u32(), *(_text(u) for _ in range(3))), u)


def _count(u: Unpacker, limit: int) -> int:
    n = u.u32()
    if n > limit:
        raise WireError(f"{n} entries, {limit} are allowed")
    return n


def _text(u: Unpacker) -> str:
    return u.str().decode("utf-8", "replace")


def _read_hello(u: Unpacker) -> AgentInfo:
    version, features, build, pid, uptime, fork_id = (
        u.u16(), u.u64(), _text(u), u.u32(), u.u64(), _text(u)
    )  # fmt: skip
    table = [KnownProcess.read(u) for _ in range(_count(u, MAX_TABLE))]
    return AgentInfo(version, features, build[:64], pid, uptime, fork_id, table)


def _read_processes(u: Unpacker) -> list[ProcessInfo]:
    found = []
    for _ in range(_count(u, 65536)):
        pid, ppid, _uid, state, cpu, rss, command, detached = (
            u.u32(), u.u32(), u.u32(), u.u8(), u.u64(), u.u64(), u.u32(), u.u8()
        )  # fmt: skip
        user, line = _text(u), _text(u)
        found.append(
            ProcessInfo(
                pid=pid,
                ppid=ppid,
                user=user,
                command=line,
                state=chr(state) if chr(state).isalpha() else "?",
                cpu_ms=float(cpu),
                rss_mb=rss / 1024,
                handle=str(command) if command else None,
                detached=bool(detached),
            )
        )
    return found
