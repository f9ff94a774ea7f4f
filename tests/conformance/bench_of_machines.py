"""Bare machines for the engine's own tests: an engine, disks, an agent, and nothing of the yard."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from yards import Home

from forkyard.engines.base import Engine, Machine, MachineSpec
from forkyard.guest import Guest, Identity, SpawnSpec
from forkyard.yard import agents
from forkyard.yard.background import Services


@dataclasses.dataclass
class Bench:
    """``boot`` and ``restore`` give a machine and its agent; :meth:`close` ends what a test left."""

    home: Home
    engine: Engine
    disks: object
    agent: Path
    tg: Services
    _made: list[tuple[Machine, Guest]] = dataclasses.field(default_factory=list)
    _boxes: list[str] = dataclasses.field(default_factory=list)

    async def spec(self, layers: list[str] | None = None) -> MachineSpec:
        """A box with a disk, and no machine yet."""
        spec = self.place()
        await self._disk(spec.box, layers or ["base"])
        return spec

    async def _disk(self, box: str, layers: list[str]) -> None:
        create = self.disks.create_image_box if self.engine.own_kernel else self.disks.create_box  # type: ignore[attr-defined]
        await create(box, layers, 256)

    def place(self) -> MachineSpec:
        """A box without a disk."""
        box = f"bench{len(self._boxes)}"
        self._boxes.append(box)
        where = self.disks.disk_image if self.engine.own_kernel else self.disks.rootfs  # type: ignore[attr-defined]
        return MachineSpec(
            box=box,
            dir=self.home.short / "boxes" / box,
            rootfs=where(box),
            agent=self.agent,
            mem_mb=256,
            disk_mb=256,
            processes=64,
        )

    async def hear(self, machine: Machine, *, fork: bool = False) -> Guest:
        guest = Guest(machine.to_guest, machine.from_guest, box=machine.spec.box)
        self._made.append((machine, guest))
        await guest.attach(self.tg, timeout_s=self.engine.boot_timeout_s)
        await guest.identify(Identity("bench", "0" * 32, machine.spec.box, fork=fork))
        return guest

    async def boot(self) -> tuple[Machine, Guest]:
        machine = await self.engine.boot(await self.spec())
        return machine, await self.hear(machine)

    async def restore(self, image: Path, layers: list[str]) -> tuple[Machine, Guest]:
        machine = await self.engine.restore(await self.spec(layers), image)
        return machine, await self.hear(machine, fork=True)

    async def restore_prepared(self, image: Path, layers: list[str]) -> tuple[Machine, Guest]:
        """As :meth:`restore`, with what the engine does ahead done before there is a disk."""
        spec = self.place()
        prepared = await self.engine.prepare(spec)
        await self._disk(spec.box, layers)
        machine = await self.engine.restore(spec, image, prepared)
        return machine, await self.hear(machine, fork=True)

    async def freeze(self, machine: Machine, guest: Guest, name: str) -> tuple[Path, list[str]]:
        """Save memory and disk; the machine goes on. The image, and the layers that belong to it."""
        image = self.home.path / name
        await guest.quiesce()
        await self.engine.pause(machine)
        try:
            await self.engine.save(machine, image)
            await self.disks.seal(machine.spec.box, name)  # type: ignore[attr-defined]
        finally:
            await self.engine.resume(machine)
            await guest.unquiesce()
        return image, [name, "base"]

    async def close(self) -> None:
        for machine, guest in self._made:
            await guest.close()
            await self.engine.kill(machine)
        for box in self._boxes:
            await self.disks.remove_box(box)  # type: ignore[attr-defined]
        await self.disks.sweep([], ["base", *self.home.warm_layers()])  # type: ignore[attr-defined]


async def out(guest: Guest, command: str, *, user: str = "root") -> str:
    """Stdout of a command that has to succeed."""
    process = await guest.spawn(SpawnSpec(["/bin/sh", "-c", command], {}, user=user))
    data = b"".join([item.data async for item in process.output()])
    status = await process.wait()
    assert status.code == 0, (command, status, data)
    return data.decode().removesuffix("\n")


@contextlib.asynccontextmanager
async def bench_of(home: Home) -> AsyncIterator[Bench]:
    await home.make_base()
    disks = home.disks()
    await disks.open()
    agent = home.short / "agents" / agents.install(home.short)
    async with Services() as tg:
        bench = Bench(home, await home.kind.engine(home.short), disks, agent, tg)
        try:
            yield bench
        finally:
            await bench.close()
    await disks.close(unmount=False)
