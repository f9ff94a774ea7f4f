"""Trial machines: the engine proves itself on a scratch root before anything relies on it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import forkyard
from forkyard.config import short
from forkyard.engines.base import Machine, MachineSpec
from forkyard.engines.gvisor import GVisor, Runsc
from forkyard.errors import UnavailableError
from forkyard.guest import Guest, SpawnSpec
from forkyard.host import mounts
from forkyard.host.files import rmtree

__all__ = ["Timings", "Trial", "agent_dir", "choose_platform", "open_trial"]

TIMEOUT_S = 20.0
# Agents think between commands, so the figure after a pause is the one a user feels.
# Under 0.2 s, systrap is sometimes still awake.
PAUSE_S = 0.3
ROUNDS = 7
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def agent_dir() -> Path:
    """The directory of this installation's guest agent.

    Raises:
        UnavailableError: it has none.
    """
    directory = Path(forkyard.__file__).parent / "agent"
    if not (directory / "fy-agent").exists():
        raise UnavailableError(
            "this installation of forkyard has no guest agent",
            hint="install it where a C compiler is: pip install --force-reinstall 'forkyard[host]'",
        )
    return directory


class Trial:
    """A directory for trial machines of one engine, all on one root. See :func:`open_trial`."""

    def __init__(self, engine: GVisor, directory: Path, tg: asyncio.TaskGroup) -> None:
        self.engine = engine
        self.dir = directory
        self._tg = tg
        self._live: list[tuple[Machine, Guest]] = []

    def spec(self, name: str) -> MachineSpec:
        box = self.dir / name
        box.mkdir(mode=0o700)
        return MachineSpec(
            box=name,
            dir=box,
            rootfs=self.dir / "rootfs",
            agent=agent_dir(),
            mem_mb=512,
            disk_mb=512,
            processes=256,
        )

    async def boot(self, name: str = "a") -> tuple[Machine, Guest]:
        """A machine with fresh memory, its agent heard."""
        return await self._hear(await self.engine.boot(self.spec(name)))

    async def restore(self, image: Path, name: str = "b") -> tuple[Machine, Guest]:
        """A machine from an image, its agent heard."""
        return await self._hear(await self.engine.restore(self.spec(name), image))

    async def save(self, machine: Machine) -> Path:
        """Pause, save and resume a machine; returns the image's directory."""
        image = self.dir / "image"
        await self.engine.pause(machine)
        try:
            await self.engine.save(machine, image)
        finally:
            await self.engine.resume(machine)
        return image

    async def end(self, machine: Machine, guest: Guest) -> None:
        self._live = [pair for pair in self._live if pair[0] is not machine]
        await guest.close()
        await self.engine.kill(machine)

    async def end_all(self) -> None:
        for machine, guest in list(self._live):
            await self.end(machine, guest)

    async def _hear(self, machine: Machine) -> tuple[Machine, Guest]:
        guest = Guest(machine.to_guest, machine.from_guest, box=machine.spec.box)
        self._live.append((machine, guest))
        await guest.attach(self._tg, timeout_s=TIMEOUT_S)
        return machine, guest


@contextlib.asynccontextmanager
async def open_trial(
    runsc: Runsc, platform: str, home: Path, lowers: list[Path] | None = None
) -> AsyncIterator[Trial]:
    """A scratch directory in ``home`` with a root: an overlay of ``lowers``, or nothing but the agent.

    Everything is gone again at the end, also after a failure.
    """
    directory = Path(tempfile.mkdtemp(prefix="try-", dir=short(home)))
    engine = GVisor(runsc, platform, directory / "shared")
    rootfs = directory / "rootfs"
    rootfs.mkdir()
    try:
        if lowers:
            for name in ("up", "wk"):
                (directory / name).mkdir()
            mounts.mount_overlay(lowers, directory / "up", directory / "wk", rootfs)
        else:
            for name in ("proc", "dev", "sys", "tmp", "var/tmp", ".forkyard"):
                (rootfs / name).mkdir(parents=True)
        async with asyncio.TaskGroup() as tg:
            trial = Trial(engine, directory, tg)
            try:
                yield trial
            finally:
                await trial.end_all()
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        mounts.unmount(rootfs)
        await engine.close()
        rmtree(directory)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong, without the task group around it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, slots=True)
class Timings:
    """One platform's figures, in ms: boot until the agent answers, and a command after a pause."""

    platform: str
    boot_ms: float
    command_ms: float


async def measure(runsc: Runsc, platform: str, home: Path, lowers: list[Path]) -> Timings:
    """Boot once and run ``sh -c true`` with pauses in between."""
    async with open_trial(runsc, platform, home, lowers) as trial:
        started = time.perf_counter()
        _, guest = await trial.boot()
        boot_ms = (time.perf_counter() - started) * 1000
        took = []
        for _ in range(ROUNDS):
            await asyncio.sleep(PAUSE_S)
            started = time.perf_counter()
            child = await guest.spawn(SpawnSpec(argv=["/bin/sh", "-c", "true"], env={"PATH": PATH}))
            await child.wait()
            took.append((time.perf_counter() - started) * 1000)
        return Timings(platform, boot_ms, sorted(took)[ROUNDS // 2])


async def choose_platform(
    runsc: Runsc,
    home: Path,
    lowers: list[Path],
    platforms: tuple[str, ...] = ("systrap", "ptrace"),
) -> tuple[str, list[Timings]]:
    """The platform on which commands start quickest here, and every figure measured.

    ``systrap`` is two to three times quicker at system calls in bulk, so ``ptrace`` has to be
    clearly better at starting commands to be chosen. In builds before 2026 ``systrap`` keeps a
    ticker running in every idle sandbox, which costs 2-4 % of a core and shows as slow commands
    only on a quiet machine: there it is enough that ``ptrace`` is about as quick. A platform
    that fails is left out.

    Args:
        home: Where the trial machines live, for seconds.
        lowers: Layers of a root with a shell, top first.

    Raises:
        Whatever went wrong, if no platform works.
    """
    found: list[Timings] = []
    failure: Exception | None = None
    for platform in platforms:
        try:
            found.append(await measure(runsc, platform, home, lowers))
        except Exception as error:
            failure = error
    if not found:
        assert failure is not None
        raise failure
    best = found[0]
    for other in found[1:]:
        if other.command_ms * (1.5 if runsc.validates_specs else 0.8) < best.command_ms:
            best = other
    return best.platform, found
