"""A home of its own with its daemon, driven through the public client.

Import ``yard`` (one home for all tests of a module) or ``client`` into a test module. After each
test its sandboxes and snapshots are deleted, and nothing of them may be left on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host_state import cgroups_like, eventually, loops_below, processes_below, processes_of

from forkyard import Client
from forkyard.config import Settings
from forkyard.errors import ConflictError
from forkyard.host import mounts
from forkyard.setup import build_template, debian, quick_setup
from forkyard.setup.borrow import SYSTEM_HOME
from forkyard.setup.recipes import Recipe
from forkyard.setup.runsc import read_engine
from forkyard.setup.templates import in_place, layer_paths, read_template, write_template
from forkyard.store.disks import DiskStore

LENDER = Path(os.environ.get("FORKYARD_TEST_BASE") or SYSTEM_HOME)
GONE_S = 30


@dataclass
class YardHome:
    """A home, and a client of its daemon."""

    home: Path
    client: Client

    @property
    def pid(self) -> int:
        """The daemon's; started if it does not run."""
        return self.client.health().pid

    def rss_mb(self) -> float:
        """The daemon's resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the daemon has no VmRSS")

    def boxes(self) -> list[str]:
        """What boxes have on the host: directories, disks, mounts, groups and processes."""
        found = [str(path) for path in (self.home / "boxes").iterdir()]
        with contextlib.suppress(FileNotFoundError):  # the store, unmounted while we look
            found += [str(path) for path in (self.home / "store/boxes").glob("*")]
        found += [str(path) for path in mounts.mounts_below(self.home / "boxes")]
        found += [group for group in self.groups() if Path(group).name.startswith("b")]
        return found + [line for line in processes_of(self.home) if "runsc" in line]

    def groups(self) -> list[str]:
        """The control groups of its boxes."""
        tag = f"forkyard-{hashlib.sha256(os.path.realpath(self.home).encode()).hexdigest()[:8]}"
        found = []
        for top in cgroups_like(tag):
            with contextlib.suppress(FileNotFoundError):  # gone with its daemon, while we look
                found += [str(sub) for sub in Path(top).iterdir() if sub.is_dir()]
        return found

    def layers(self) -> list[str]:
        """The layers that are no template's, nor of a warm image of one."""
        records = [*(self.home / "templates").glob("*.json"), *self.home.glob("images/warm-*/manifest.json")]
        kept = {layer for path in records for layer in json.loads(path.read_text())["layers"]}
        found = [path.name.removesuffix(".json") for path in (self.home / "store/layers").iterdir()]
        return sorted(set(found) - kept)

    def images(self) -> list[str]:
        """Memory images other than those of templates."""
        return [path.name for path in (self.home / "images").iterdir() if not path.name.startswith("warm-")]

    def clear(self) -> None:
        """Delete all sandboxes and snapshots; none of what they stood on may be left."""
        for info in self.client.list_sandboxes():
            self.client.delete_sandbox(info.id)
        for snapshot in self.client.list_snapshots():
            self.client.delete_snapshot(snapshot.id)
        eventually(self.layers, GONE_S)
        eventually(self.images, GONE_S)

    def wait_empty(self) -> None:
        """As ``clear``, and end the daemon, so that what it made ahead for further starts is gone too."""
        self.clear()
        self.client.shutdown("delete")
        eventually(self.boxes, GONE_S)


@dataclass
class Template:
    """A template that was built elsewhere: its record and its layers, top first."""

    record: dict[str, Any]
    layers: list[Path]


@contextmanager
def built(recipe: Recipe) -> Iterator[Template]:
    """A recipe's template, from a home of its own in the machine's: the next run finds it built."""
    home = LENDER / "tests"
    home.mkdir(exist_ok=True, mode=0o700)
    settings = Settings(home=home, socket=home / "daemon.sock", base_from=LENDER, store_gb=8)
    with (home / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            record = asyncio.run(_build(settings, recipe))
            yield Template(record, layer_paths(home, record["layers"]))
        finally:
            mounts.unmount(home / "store")


async def _build(settings: Settings, recipe: Recipe) -> dict[str, Any]:
    assert await quick_setup(settings)
    disks = DiskStore(settings.home, settings)
    await disks.open()
    try:
        known = read_template(settings.home, recipe.name)
        fresh = known and known["key"] == recipe.key(system=debian.system())
        if known and fresh and in_place(settings.home, known["layers"][0]):
            return known
        return await build_template(settings.home, disks, recipe)
    finally:
        await disks.close(unmount=False)


async def _prepare(home: Path, template: Template | None) -> None:
    settings = Settings(home=home, socket=home / "daemon.sock", base_from=LENDER)
    assert await quick_setup(settings)
    if template is None:
        return
    disks = DiskStore(home, settings)
    await disks.open()
    try:
        for layer, path in zip(template.record["layers"], template.layers, strict=True):
            with contextlib.suppress(ConflictError):
                await disks.reference_layer(layer, path)
    finally:
        await disks.close(unmount=False)
    write_template(home, template.record)


@contextmanager
def open_home(runsc: Path | None = None, template: Template | None = None) -> Iterator[YardHome]:
    """A new home that borrows engine and base of the machine's.

    Args:
        runsc: Runs it instead of the one that set-up chose.
        template: One more template for it.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not read_engine(LENDER) or not read_template(LENDER, "base"):
        pytest.fail(f"{LENDER} is not set up: run `make setup` first")
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="fy-", dir="/tmp")))
    kept = ("FORKYARD_TEST_", "FORKYARD_BASE_FROM")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("FORKYARD_") and not name.startswith(kept):
                patch.delenv(name)
        asyncio.run(_prepare(home, template))
        if runsc is not None:
            (home / "config.toml").write_text(f'runsc = "{runsc}"\n')
        yard = YardHome(home, Client(home=home))
        try:
            # The first sandbox of an engine without a memory image for it has one made behind it.
            yard.client.create_sandbox()
            yard.wait_empty()
            yield yard
            pid = yard.pid
            yard.wait_empty()
            eventually(lambda: Path(f"/proc/{pid}").exists(), 20)
            yard.client.close()
            eventually(lambda: processes_below(home) + processes_of(home), GONE_S)
            eventually(lambda: mounts.mounts_below(home), GONE_S)
            # The file system is shut down behind: what was deleted last is still being freed.
            eventually(lambda: loops_below(home), 3 * GONE_S)
            eventually(yard.groups)
            assert not (home / "daemon.sock").exists() and not (home / "daemon.json").exists()
            log = (home / "daemon.log").read_text()
            assert "Traceback" not in log, log.replace("\\n", "\n")
        finally:
            _force_away(yard)


def _force_away(yard: YardHome) -> None:
    """Whatever happened before, leave nothing to the next test: not even a daemon that was
    too slow to say that it runs. Its lock says who it is."""
    try:
        pid = int((yard.home / "lock").read_text() or 0)
        lives = str(yard.home).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        lives = False
    if lives:
        yard.client.shutdown("delete")
        eventually(lambda: Path(f"/proc/{pid}").exists(), GONE_S)
    yard.client.close()
    for target in mounts.mounts_below(yard.home):
        mounts.unmount(target)
    shutil.rmtree(yard.home, ignore_errors=True)


def find_runsc(origin: str) -> Path | None:
    """A runsc that set-up knows: ``debian``'s, or the ``newest`` (``FORKYARD_TEST_NEWEST``)."""
    if origin == "newest" and (path := os.environ.get("FORKYARD_TEST_NEWEST")):
        return Path(path)
    known = (read_engine(LENDER) or {}).get("candidates", [])
    return next((Path(c["runsc"]) for c in known if c["origin"] == origin), None)


@pytest.fixture(scope="module")
def yard() -> Iterator[YardHome]:
    """One home for the tests of a module, on the runsc and the platform that set-up chose."""
    with open_home() as made:
        yield made


@pytest.fixture(scope="module")
def debian_yard() -> Iterator[YardHome]:
    """As ``yard``, on Debian 13's runsc."""
    path = find_runsc("debian")
    if path is None:
        pytest.skip("Debian's runsc is not installed")
    with open_home(path) as made:
        yield made


@pytest.fixture(scope="module")
def newest_yard() -> Iterator[YardHome]:
    """As ``yard``, on the newest runsc; mark its users ``newest``."""
    path = find_runsc("newest")
    if path is None:
        pytest.skip("no newest runsc: forkyard setup --newest builds it")
    with open_home(path) as made:
        yield made


@pytest.fixture
def client(yard: YardHome) -> Iterator[Client]:
    """The client of the module's home, which has no sandbox before and after the test."""
    yield yard.client
    yard.clear()


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.01)
