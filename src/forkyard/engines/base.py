"""The engine protocol: what it takes to run one sandbox machine.

An engine knows nothing of names, leases or snapshots. It boots a root directory, restores
a memory image onto one, pauses, saves, resumes and kills. Everything else (what is
frozen when, who may do it, what is undone after a failure) is the yard's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forkyard.host import process

KNOWN = ("gvisor", "qemu")
"""The engines that a host may have."""
OWN_KERNEL = frozenset({"qemu"})
"""Those of them whose machines have kernels of their own (:attr:`Engine.own_kernel`)."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One machine to be.

    Attributes:
        box: Id of the box, unique on the host; never a guest's or a user's words.
        dir: The box's own directory for runtime files (FIFOs, pid, engine state).
        rootfs: The mounted root directory, or the image of the disk (see :attr:`Engine.own_kernel`).
        agent: Directory that holds the guest agent, mounted read-only in the guest. An
            image is restored with the very agent it was saved with.
        mem_mb, disk_mb, processes: The limits that the guest's own kernel enforces.
        cpus: How many a machine with a kernel of its own has.
        wrap: Turns an argv into one that first enters the box's cgroup.
    """

    box: str
    dir: Path
    rootfs: Path
    agent: Path
    mem_mb: int
    disk_mb: int
    processes: int
    cpus: int = 1
    wrap: Callable[[list[str]], list[str]] = list


@dataclass(slots=True)
class Machine:
    """A live machine. ``died`` is set when its main process ends, however it ends."""

    spec: MachineSpec
    pid: int
    start_time: int
    to_guest: int
    from_guest: int
    died: asyncio.Event = field(default_factory=asyncio.Event)
    exit_status: int | None = None
    private: Any = None

    def record(self) -> dict[str, Any]:
        """What :meth:`Engine.reattach` needs to find it again after the daemon's death."""
        return {"pid": self.pid, "start_time": self.start_time, "boot_id": process.boot_id()}


@dataclass(frozen=True, slots=True)
class Frozen:
    """A saved image: its directory and what it takes to restore it."""

    dir: Path
    fingerprint: str
    size_bytes: int


class Engine(Protocol):
    """Errors are :mod:`forkyard.errors`; cancellation leaves nothing of a new machine behind."""

    name: str
    shares_files: bool
    """Whether guests reach files of the host, the agent's among them."""
    own_kernel: bool
    """Whether each machine has a kernel of its own: with a disk of its own for it (``spec.rootfs`` is that
    disk's image), which it caches and must write out, and memory that it divides itself."""
    boot_timeout_s: float
    """How long its agent may take to answer after a boot."""

    def fingerprint(self) -> str:
        """Identifies what can restore an image made now: engine, version, platform, CPU flags."""
        ...

    async def boot(self, spec: MachineSpec) -> Machine:
        """Start the agent on ``spec.rootfs`` with fresh memory."""
        ...

    async def prepare(self, spec: MachineSpec) -> Any | None:
        """Do ahead what a restore needs whatever the image and the disk; None if that is nothing.
        ``spec.rootfs`` is not there yet. Ended by :meth:`restore` or :meth:`discard`."""
        ...

    async def discard(self, prepared: Any) -> None:
        """End what :meth:`prepare` made."""
        ...

    async def restore(self, spec: MachineSpec, image: Path, prepared: Any | None = None) -> Machine:
        """Start a machine from the image in ``image`` on ``spec.rootfs``.

        ``prepared`` is what :meth:`prepare` made for this spec, whose root is mounted by now;
        whatever happens, it is used up.

        Raises:
            UnsupportedError: the image was made by something this engine cannot restore.
            CorruptSnapshotError: the image is damaged.
        """
        ...

    def guest_root(self, machine: Machine, pids: list[int]) -> int | None:
        """Which of the machine's processes is the one that all its guest's later processes come
        from; None if they come from no one in particular."""
        ...

    async def pause(self, machine: Machine) -> None:
        """Stop the guest's time. Returns when nothing in it runs any more."""
        ...

    async def save(self, machine: Machine, image: Path) -> Frozen:
        """Write the memory of a paused machine to the new directory ``image``; it stays paused.

        Raises:
            ConflictError: something in the guest cannot be saved; the message names it.
            CapacityError: the disk is full. The machine is unharmed either way.
        """
        ...

    async def resume(self, machine: Machine) -> None:
        """Let a paused guest go on."""
        ...

    async def kill(self, machine: Machine) -> None:
        """End every process of the machine and wait until they are gone. Idempotent."""
        ...

    async def close(self) -> None:
        """Remove what machines share on the host; none is left."""
        ...

    async def reattach(self, spec: MachineSpec, record: dict[str, Any]) -> Machine | None:
        """The machine that an earlier daemon started, or None if it is gone."""
        ...

    async def sweep(self, directory: Path) -> None:
        """End whatever runs for the box of ``directory``, finished or half-made, without a
        :class:`Machine`: for a new daemon that finds a box which no record names."""
        ...
