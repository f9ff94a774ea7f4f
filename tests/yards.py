"""Yards for tests: which engines there are, a home for each, and a yard with short words for its verbs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from copy_disks import CopyDisks
from small_root import write_root

from forkyard import requests as rq
from forkyard import types as ty
from forkyard.config import Settings, load, short
from forkyard.engines.base import Engine
from forkyard.engines.fake import Fake
from forkyard.engines.fake.world import WORLD
from forkyard.engines.gvisor import GVisor, Runsc
from forkyard.engines.qemu import Qemu, load_kit
from forkyard.errors import UnavailableError
from forkyard.host import mounts, process
from forkyard.setup.borrow import SYSTEM_HOME
from forkyard.setup.microvms import kit_dir
from forkyard.setup.runsc import candidates
from forkyard.store.disks import DiskStore
from forkyard.yard.model import SandboxDoc
from forkyard.yard.templates import TemplateDoc, Templates
from forkyard.yard.yard import Yard, open_yard

# Where a translated machine takes a minute to boot, beside others that do, there is more to wait for.
DEADLINE_S = 240.0 if os.environ.get("FORKYARD_TEST_ALL_MICROVMS") else 20.0
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Kind:
    """An engine to test: the fake one, or what gVisor or microVMs are run with."""

    name: str
    runsc: Path | None = None
    missing: str = ""
    microvms: Path | None = None

    @property
    def real(self) -> bool:
        return self.name != "fake"

    @property
    def times(self) -> float:
        """How many times as long something may take in its guests as in others'."""
        return 20 if self.name == "qemu" else 1

    async def engine(self, home: Path) -> Engine:
        if self.microvms is not None:
            return Qemu(load_kit(self.microvms))
        if self.runsc is None:
            return Fake()
        runsc = await Runsc.probe(self.runsc)
        return GVisor(runsc, "systrap", home / "engine" / "shared")


def kinds() -> list[Any]:
    """Every engine as a pytest parameter; those that this machine lacks are skipped with the reason."""
    found: dict[str, Path] = {}
    homes = {load(env={}).home, load().home, SYSTEM_HOME}
    for settings in [load(), *(dataclasses.replace(load(), home=home, runsc=None) for home in homes)]:
        for candidate in candidates(settings):
            found.setdefault("newest" if candidate.origin == "newest" else "debian13", candidate.path)
    if newest := os.environ.get("FORKYARD_TEST_NEWEST_RUNSC"):
        found["newest"] = Path(newest)
    params = [pytest.param(Kind("fake"), id="fake")]
    for name in ("debian13", "newest"):
        why = (
            "" if name in found else f"no {name} runsc here: forkyard setup{' --newest' * (name == 'newest')}"
        )
        if os.geteuid() != 0:
            why = "needs root"
        marks = [pytest.mark.root, pytest.mark.slow, pytest.mark.xdist_group(name)]
        if name == "newest":
            marks.append(pytest.mark.newest)
        if why:
            marks.append(pytest.mark.skip(reason=why))
        params.append(pytest.param(Kind(name, found.get(name), why), id=f"gvisor-{name}", marks=marks))
    return [*params, _microvms(homes)]


def _microvms(homes: set[Path]) -> Any:
    """MicroVMs as a pytest parameter."""
    places = [kit_dir(home) for home in homes]
    if named := os.environ.get("FORKYARD_TEST_MICROVMS"):
        places.insert(0, Path(named))
    found = next((place for place in places if (place / "kit.json").exists()), None)
    why = "" if found else "no microVMs here: forkyard setup --engine qemu"
    if os.geteuid() != 0:
        why = "needs root"
    marks = [pytest.mark.root, pytest.mark.slow, pytest.mark.qemu, pytest.mark.xdist_group("qemu")]
    if why:
        marks.append(pytest.mark.skip(reason=why))
    return pytest.param(Kind("qemu", missing=why, microvms=found), id="qemu", marks=marks)


@dataclass
class Home:
    """A yard's home with the template ``base`` in it."""

    kind: Kind
    path: Path
    settings: Settings
    disks: Callable[[], Any] = field(repr=False, default=lambda: None)

    @property
    def short(self) -> Path:
        return short(self.path)

    async def make_base(self) -> None:
        """Fill it once."""
        if (self.path / "templates" / "base.json").exists():
            return
        for name in ("boxes", "images"):
            (self.path / name).mkdir()
        source = self.path / "root"
        write_root(source, programs=self.kind.real)
        disks = self.disks()
        await disks.open()
        await disks.import_layer("base", source)
        await disks.close(unmount=False)
        shutil.rmtree(source)
        (self.path / "templates").mkdir(exist_ok=True)
        doc = TemplateDoc(name="base", key="test", layers=["base"], user="user", workdir="/home/user")
        Templates(_Where(self.path)).put(doc)  # type: ignore[arg-type]
        if not self.kind.real:
            self._give_home()

    def _give_home(self) -> None:
        """The fake's base: its user owns its home, which no file system without root can say."""
        from forkyard.engines.fake.tree import Tree

        tree = Tree(self.path / "store/layers/base", {})
        tree.set("/home/user", uid=1000, gid=1000)
        tree.flush()

    def leftovers(self) -> list[str]:
        """What a yard without sandboxes and snapshots should not have."""
        left = [f"box {path}" for path in (self.path / "boxes").iterdir()]
        store = self.path / "store"
        layers = {path.name.removesuffix(".json") for path in (store / "layers").iterdir()} - {"base"}
        left += [f"layer {name}" for name in layers - self.warm_layers()]
        left += [f"store box {path}" for path in (store / "boxes").iterdir()]
        images = self.path / "images"
        left += [f"image {p.name}" for p in images.iterdir() if not p.name.startswith(("warm-", "."))]
        if not self.kind.real:
            toys = [m.directory for m in WORLD.machines.values() if self._holds(m.directory)]
            return left + [f"toy machine {directory}" for directory in toys]
        left += [f"mount {path}" for path in mounts.mounts_below(self.path / "boxes")]
        return left + [f"process {pid}: {line}" for pid, line in _processes(self)]

    def warm_layers(self) -> set[str]:
        """The disks that templates' warm images go on with."""
        found = self.path.glob("images/warm-*/manifest.json")
        return {layer for path in found for layer in json.loads(path.read_bytes())["layers"]}

    def _holds(self, directory: Path) -> bool:
        return directory.is_relative_to(self.path) or directory.is_relative_to(self.short)


@dataclass
class _Where:
    home: Path


def _processes(home: Home) -> list[tuple[int, str]]:
    found = []
    marks = (f"{home.path}/".encode(), f"{home.short}/".encode())
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/cmdline", "rb") as file:
                line = file.read()
                if any(mark in line for mark in marks):
                    found.append((int(entry.name), line.replace(b"\0", b" ").decode()[:200]))
    return found


@contextlib.contextmanager
def new_home(kind: Kind, **settings: Any) -> Iterator[Home]:
    """A home of its own; afterwards nothing of it is left on the host."""
    # A toy's home holds no disk image, and what flushes it need not wait for a disk.
    where = "/dev/shm" if not kind.real and os.access("/dev/shm", os.W_OK) else "/tmp"
    path = Path(os.path.realpath(tempfile.mkdtemp(prefix="fy-", dir=where)))
    # Nothing of the machine's own configuration may reach a test.
    base = load({"home": str(path)}, env={})
    home = Home(kind, path, dataclasses.replace(base, **settings))
    home.disks = (lambda: DiskStore(path, home.settings)) if kind.real else (lambda: CopyDisks(path))
    try:
        yield home
    finally:
        left = [str(target) for target in mounts.mounts_below(path) if target not in (path / "store",)]
        left = [name for name in left if "engine/shared" not in name]
        for target in reversed(mounts.mounts_below(path)):
            mounts.unmount(target)
        shutil.rmtree(path, ignore_errors=True)
        if home.short != path:
            home.short.unlink(missing_ok=True)
        group = f"forkyard-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        left += [str(found) for where in (group, f"*/{group}") for found in _CGROUPS.glob(where)]
        assert left == [], "mounts or control groups were left behind"


class TestYard:
    """An open yard, with keyword arguments in the place of request structs."""

    __test__ = False

    def __init__(self, yard: Yard, home: Home) -> None:
        self.yard = yard
        self.home = home
        self.context = yard.context
        self.engine = yard.context.engine
        self.caller = rq.Caller(uid=0, pid=os.getpid(), start_time=process.start_time(os.getpid()))
        self._requests = 0
        self._run = secrets.token_hex(4)  # the next daemon's clients do not ask for what this one's did

    def request_id(self) -> str:
        self._requests += 1
        return f"test-{self._run}-{self._requests}"

    async def create(self, **arguments: Any) -> ty.SandboxInfo:
        return await self.yard.create_sandbox(rq.CreateSandbox(**arguments), self.caller)

    async def info(self, ref: str) -> ty.SandboxInfo:
        return await self.yard.get_sandbox(rq.SandboxRequest(sandbox=ref), self.caller)

    async def delete(self, ref: str) -> ty.SandboxInfo | None:
        return await self.yard.delete_sandbox(rq.DeleteSandbox(sandbox=ref), self.caller)

    async def shell(self, ref: str, command: str, **options: Any) -> ty.ExecResult:
        stdin = options.pop("stream", None)
        options.setdefault("request_id", self.request_id())
        request = rq.Exec(sandbox=ref, command=command, **options)
        return await self.yard.execs.run(request, self.caller, stdin)

    async def exec(self, ref: str, *argv: str, **options: Any) -> ty.ExecResult:
        request = rq.Exec(sandbox=ref, argv=list(argv), request_id=self.request_id(), **options)
        return await self.yard.execs.run(request, self.caller)

    async def out(self, ref: str, command: str, **options: Any) -> str:
        """Stdout of a command that has to succeed, without the line's end."""
        result = await self.shell(ref, command, **options)
        assert result.exit_code == 0, (command, result)
        return result.stdout.removesuffix("\n")

    def spawn(self, ref: str, command: str, **options: Any) -> AsyncIterator[rq.StreamEvent]:
        request = rq.Spawn(sandbox=ref, command=command, request_id=self.request_id(), **options)
        return self.yard.execs.spawn(request, self.caller)

    def attach(self, ref: str, pid: int, **options: Any) -> AsyncIterator[rq.StreamEvent]:
        return self.yard.execs.attach(rq.Attach(sandbox=ref, pid=pid, **options), self.caller)

    async def background(self, ref: str, command: str) -> int:
        """Start a detached command; its pid."""
        stream = self.spawn(ref, command, detach=True)
        started = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return started.pid

    async def write(self, ref: str, **files: bytes) -> None:
        await self.yard.files.write_files(rq.WriteFiles(sandbox=ref, files=files), self.caller)

    async def read(self, ref: str, path: str) -> bytes:
        """A file. A guest that was not silent at a freeze (the host is busy) is asked again."""
        request = rq.ReadFiles(sandbox=ref, paths=[path])
        while True:
            try:
                return (await self.yard.files.read_files(request, self.caller))[path]
            except UnavailableError as error:
                if not error.retryable:
                    raise

    async def snapshot(self, ref: str, name: str | None = None, **options: Any) -> ty.SnapshotInfo:
        return await self.yard.snapshot(rq.TakeSnapshot(sandbox=ref, name=name, **options), self.caller)

    async def delete_snapshot(self, ref: str) -> None:
        await self.yard.delete_snapshot(rq.DeleteSnapshot(snapshot=ref), self.caller)

    async def exported(self, ref: str, **options: Any) -> bytes:
        """A snapshot's archive."""
        request = rq.ExportSnapshot(snapshot=ref, **options)
        return b"".join([piece async for piece in self.yard.export_snapshot(request, self.caller)])

    async def imported(
        self, archive: bytes, *, ends_with: BaseException | None = None, **options: Any
    ) -> ty.SnapshotInfo:
        """A snapshot from an archive, or from its beginning and a client's going."""

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(archive), 60_000):
                yield archive[at : at + 60_000]
            if ends_with is not None:
                raise ends_with

        return await self.yard.import_snapshot(rq.ImportSnapshot(**options), chunks(), self.caller)

    async def fork(self, source: str, n: int = 1, **options: Any) -> ty.ForkResult:
        return await self.yard.fork(rq.Fork(source=source, n=n, **options), self.caller)

    async def checkpoint(self, ref: str, label: str | None = None, **options: Any) -> ty.CheckpointInfo:
        return await self.yard.checkpoint(rq.TakeCheckpoint(sandbox=ref, label=label, **options), self.caller)

    async def checkpoints(self, ref: str) -> list[ty.CheckpointInfo]:
        return await self.yard.list_checkpoints(rq.SandboxRequest(sandbox=ref), self.caller)

    async def rewind(self, ref: str, to: str | None = None, **options: Any) -> ty.SandboxInfo:
        return await self.yard.rewind(rq.Rewind(sandbox=ref, to=to, **options), self.caller)

    async def stop(self, ref: str) -> ty.SandboxInfo:
        return await self.yard.stop_sandbox(rq.StopSandbox(sandbox=ref), self.caller)

    async def start(self, ref: str, **options: Any) -> ty.SandboxInfo:
        return await self.yard.start_sandbox(rq.StartSandbox(sandbox=ref, **options), self.caller)

    def weight(self, ref: str) -> int:
        """A sandbox's weight as the kernel has it; as its record says where there are no control groups."""
        sandbox = self.context.sandboxes.get(ref)
        if sandbox.box.cgroup is None:
            return sandbox.doc.cpu_weight
        shares = Path(sandbox.box.cgroup.dirs["cpu"], "cpu.shares")
        if shares.exists():
            return int(shares.read_text()) * 100 // 1024
        return int(Path(sandbox.box.cgroup.dirs["cpu"], "cpu.weight").read_text())

    async def count(self, ref: str, path: str) -> int:
        """How far a counter is."""
        return int((await self.read(ref, path)).strip() or 0)

    async def counting(self, ref: str, path: str, above: int = 0) -> int:
        """Wait until a counter is above a number; where it is then."""

        async def look() -> int:
            with contextlib.suppress(Exception):
                found = await self.count(ref, path)
                return found if found > above else 0
            return 0

        return await until(look, f"the counter in {path} is above {above}")

    def references(self) -> dict[str, int]:
        """How often each layer is held."""
        return {layer: count for layer, count in self.yard.snapshots.holders.items() if count}

    async def empty(self) -> None:
        """Delete every sandbox and snapshot."""
        for sandbox in self.context.sandboxes:
            await self.delete(sandbox.id)
        for doc in list(self.context.snapshots.values()):
            if doc.kind == "snapshot":
                await self.delete_snapshot(doc.id)

    async def assert_clean(self) -> None:
        """Nothing may be left once all is deleted: no record, no reference, nothing on the host."""
        await until(self._nothing_left, lambda: f"nothing is left: {self._left()}")
        assert await self.context.catalog.sandboxes(SandboxDoc) == []

    def _left(self) -> list[str]:
        left = [f"snapshot {doc.id} ({doc.kind})" for doc in self.context.snapshots.values()]
        left += [f"reference to {layer}: {count}" for layer, count in self.references().items()]
        left += [f"control group {name}" for name in self.context.machines.cgroups.names()]
        return left + self.home.leftovers()

    async def _nothing_left(self) -> bool:
        # What is made ahead, a template's image behind a first start, and a deletion that an
        # expiry began, may still be on their way.
        await self.context.machines.drop_ahead()
        return not self._left()


async def until(
    condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = DEADLINE_S
) -> Any:
    """Wait until ``condition()`` (or what it awaits) is true, and return that."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what() if callable(what) else what}") from None


@contextlib.asynccontextmanager
async def opened(home: Home, engine: Engine | Sequence[Engine] | None = None) -> AsyncIterator[TestYard]:
    """The yard of a home."""
    await home.make_base()
    runs = engine or await home.kind.engine(home.short)
    async with open_yard(home.settings, engine=runs, disks=home.disks()) as yard:
        yield TestYard(yard, home)
