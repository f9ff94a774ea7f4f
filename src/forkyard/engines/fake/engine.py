"""The engine protocol over toy machines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forkyard.engines.base import Frozen, Machine, MachineSpec
from forkyard.engines.fake.agent import Agent, AgentState
from forkyard.engines.fake.kernel import State
from forkyard.engines.fake.requests import HANDLERS
from forkyard.engines.fake.world import WORLD, ToyMachine
from forkyard.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    UnsupportedError,
)

T = TypeVar("T")
IMAGE = "checkpoint.img"
MAGIC = b"forkyard toy image\n"


class _Image(msgspec.Struct):
    fingerprint: str
    kernel: State
    agent: AgentState


class Fake:
    """See :class:`forkyard.engines.base.Engine`.

    Args:
        version: What its images can be restored by, like an engine's version.
    """

    name = "fake"
    shares_files = False
    own_kernel = False
    boot_timeout_s = 20.0

    def __init__(self, version: str = "1") -> None:
        self.version = version

    def fingerprint(self) -> str:
        return f"fake/{self.version}"

    async def boot(self, spec: MachineSpec) -> Machine:
        return await self._start(spec, lambda: (State(), AgentState()))

    async def prepare(self, spec: MachineSpec) -> None:
        return None

    async def discard(self, prepared: None) -> None:
        return None

    async def restore(self, spec: MachineSpec, image: Path, prepared: None = None) -> Machine:
        return await self._start(spec, lambda: self._load(image))

    async def _start(self, spec: MachineSpec, load: Callable[[], tuple[State, AgentState]]) -> Machine:
        kernel, agent = await asyncio.to_thread(load)
        if not spec.rootfs.is_dir():
            raise InternalError(f"there is no root directory {spec.rootfs}")
        fifos = [spec.dir / "in", spec.dir / "out"]
        toy: ToyMachine | None = None
        try:
            for fifo in fifos:
                os.mkfifo(fifo, 0o600)
            toy = WORLD.start(spec.dir, Agent(spec.rootfs, kernel, agent, HANDLERS))
            # Here a cancellation finds a machine that nobody knows yet.
            await asyncio.sleep(0)
            return _machine(spec, toy)
        except BaseException:
            if toy is not None:
                toy.end()
            for fifo in fifos:
                fifo.unlink(missing_ok=True)
            raise

    def guest_root(self, machine: Machine, pids: list[int]) -> int | None:
        return None

    async def pause(self, machine: Machine) -> None:
        await _on(machine, lambda toy: toy.pause())

    async def resume(self, machine: Machine) -> None:
        await _on(machine, lambda toy: toy.resume())

    async def save(self, machine: Machine, image: Path) -> Frozen:
        raw = await _on(machine, self._dump)
        body = MAGIC + hashlib.sha256(raw).digest() + raw
        try:
            await asyncio.to_thread(_write, image, body)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CapacityError(
                    "the disk is full: the memory image could not be written", retryable=True
                ) from error
            raise
        return Frozen(image, self.fingerprint(), len(body))

    def _dump(self, toy: ToyMachine) -> bytes:
        if not toy.paused:
            raise ConflictError("a machine that runs cannot be saved")
        agent = toy.agent
        return msgspec.msgpack.encode(_Image(self.fingerprint(), agent.kernel.state, agent.state))

    def _load(self, image: Path) -> tuple[State, AgentState]:
        try:
            body = (image / IMAGE).read_bytes()
        except FileNotFoundError:
            raise CorruptSnapshotError(f"the memory image lacks {IMAGE}") from None
        head, digest, raw = body[: len(MAGIC)], body[len(MAGIC) : len(MAGIC) + 32], body[len(MAGIC) + 32 :]
        if head != MAGIC or hashlib.sha256(raw).digest() != digest:
            raise CorruptSnapshotError(f"the memory image {image.name} is damaged: its checksum is wrong")
        kept = msgspec.msgpack.decode(raw, type=_Image)
        if kept.fingerprint != self.fingerprint():
            raise UnsupportedError(
                f"the memory image {image.name} was made by {kept.fingerprint}, this is {self.fingerprint()}"
            )
        return kept.kernel, kept.agent

    async def kill(self, machine: Machine) -> None:
        toy: ToyMachine = machine.private
        await toy.ask(toy.kill)
        machine.died.set()
        for fd in (machine.to_guest, machine.from_guest):
            if fd >= 0:
                os.close(fd)
        machine.to_guest = machine.from_guest = -1

    async def reattach(self, spec: MachineSpec, record: dict[str, Any]) -> Machine | None:
        toy = WORLD.find(int(record["pid"]), spec.dir)
        return _machine(spec, toy) if toy is not None else None

    async def sweep(self, directory: Path) -> None:
        for toy in list(WORLD.machines.values()):
            if toy.directory == directory:
                await toy.ask(toy.kill)

    async def close(self) -> None:
        """Nothing is shared by the boxes."""


def _write(image: Path, body: bytes) -> None:
    image.mkdir(mode=0o700)
    (image / IMAGE).write_bytes(body)


def _machine(spec: MachineSpec, toy: ToyMachine) -> Machine:
    loop = asyncio.get_running_loop()
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
    to_guest = os.open(spec.dir / "in", flags)
    try:
        from_guest = os.open(spec.dir / "out", flags)
    except BaseException:
        os.close(to_guest)
        raise
    machine = Machine(spec, toy.pid, toy.pid, to_guest, from_guest, private=toy)

    def died() -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop wants to hear nothing
            loop.call_soon_threadsafe(machine.died.set)

    toy.on_death.append(died)
    return machine


async def _on(machine: Machine, function: Callable[[ToyMachine], T]) -> T:
    toy: ToyMachine = machine.private
    if toy.dead:
        raise ConnectionResetError("the machine is dead")
    return await toy.ask(lambda: function(toy))
