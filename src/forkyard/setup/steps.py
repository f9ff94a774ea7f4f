"""Set-up: everything between ``pip install`` and the first sandbox, each step repeatable.

await run_setup(settings)          # forkyard setup
await quick_setup(settings)        # the daemon, before it opens its yard
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard import config
from forkyard.config import Settings
from forkyard.engines.gvisor import Runsc
from forkyard.errors import ConflictError, ForkyardError, UnsupportedError
from forkyard.host import probe
from forkyard.host.files import write_atomic
from forkyard.oci.tools import PACKAGES as IMAGE_PROGRAMS
from forkyard.setup import apt, debian, runsc
from forkyard.setup.borrow import find_lender, quick_setup
from forkyard.setup.microvms import set_up_microvms
from forkyard.setup.newest import build_newest
from forkyard.setup.progress import Progress, progress_for, step
from forkyard.setup.recipes import BASE
from forkyard.setup.templates import build_template, in_place, layer_paths, read_template
from forkyard.setup.trial import choose_platform, open_trial
from forkyard.store.disks import DiskStore

__all__ = ["Report", "run_setup"]

# {program: Debian package}, of what set-up and the daemon call.
PROGRAMS = {
    "mkfs.btrfs": "btrfs-progs",
    "mmdebstrap": "mmdebstrap",
    "dpkg-deb": "dpkg",
    "mount": "mount",
}
UBUNTU_KEYS = {"/usr/share/keyrings/ubuntu-archive-keyring.gpg": "ubuntu-keyring"}


@dataclass(slots=True)
class Report:
    """What set-up found or made. ``ms`` is how long it took in all."""

    home: Path
    runsc: str = ""
    version: str = ""
    platform: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    ms: float = 0.0


async def run_setup(
    settings: Settings,
    *,
    progress: Progress | None = None,
    newest: bool = False,
    tune: bool | None = None,
    images: bool = False,
    microvms: bool = False,
) -> Report:
    """Make ``settings.home`` ready to run sandboxes. What is there already is left alone.

    Args:
        progress: Where steps are shown; by default stdout.
        newest: Build the newest runsc from source (needs Go) and use it.
        tune: True sets the host-wide ``rcu_expedited``, False takes it back, None leaves it.
        images: Install what building and pulling images needs.
        microvms: Get what the engine qemu needs.

    Raises:
        UnsupportedError: something that this host lacks, with what to do.
        ConflictError: a daemon has this home and set-up has something to change in it.
        CapacityError: not enough disk.
    """
    started = time.monotonic()
    show = progress or progress_for(sys.stdout)
    home = settings.home
    if sys.platform != "linux":
        raise UnsupportedError("sandboxes need Linux", hint="use the client with a FORKYARD_URL here")
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except PermissionError:
        raise UnsupportedError(f"{home} cannot be made", hint="run as root, or set FORKYARD_HOME") from None
    report = Report(home)
    with _alone(home):
        borrowed = await _borrow(settings, show)
        if not borrowed:
            await _host_packages(settings, show)
            await _engine_and_base(settings, newest, show)
        await _platform(settings, show)
        await _warm(settings, show, report)
        if images:
            await _images(show)
        if microvms:
            await set_up_microvms(settings, show)
        if tune is not None:
            _tune(tune, show)
    engine = runsc.read_engine(home) or {}
    report.runsc = engine.get("runsc", "")
    report.version = engine.get("version", "")
    report.platform = engine.get("platform", "")
    report.template = read_template(home, "base") or {}
    report.ms = (time.monotonic() - started) * 1000
    return report


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One set-up at a time; a second waits for the first and then finds everything there."""
    fd = os.open(home / "setup.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _as_daemon(home: Path) -> Iterator[bool]:
    """Hold the home's lock as a daemon does; yields False if a daemon has it."""
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield True
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator[DiskStore]:
    """The home's disk store, opened under its lock; it stays mounted."""
    with _as_daemon(settings.home) as mine:
        if not mine:
            raise ConflictError(
                f"a daemon is running in {settings.home}, and set-up has something to change there",
                hint="forkyard daemon stop, then forkyard setup again",
            )
        disks = DiskStore(settings.home, settings)
        await disks.open()
        try:
            yield disks
        finally:
            await disks.close(unmount=False)


async def _host_packages(settings: Settings, show: Progress) -> None:
    with step(show, "packages") as it:
        wanted = dict(PROGRAMS)
        if apt.host_release().id == "ubuntu":
            wanted |= UBUNTU_KEYS
        lacking = apt.missing(wanted)
        if lacking:
            it.doing(f"installing {', '.join(lacking)} with apt")
            await apt.install(lacking)
            it.result = f"installed {', '.join(lacking)}"


async def _images(show: Progress) -> None:
    with step(show, "images") as it:
        lacking = apt.missing(IMAGE_PROGRAMS)
        if lacking:
            it.doing(f"installing {', '.join(lacking)} with apt")
            await apt.install(lacking)
            it.result = f"installed {', '.join(lacking)}"


async def _engine_and_base(settings: Settings, newest: bool, show: Progress) -> None:
    """Side by side: one is a download, the other mostly unpacking."""
    try:
        async with asyncio.TaskGroup() as tg:
            tg.create_task(_engine(settings, newest, show))
            tg.create_task(_base(settings, show))
    except* ForkyardError as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _engine(settings: Settings, newest: bool, show: Progress) -> None:
    home = settings.home
    with step(show, "runsc") as it:
        known = runsc.read_engine(home)
        built = (home / "engine" / "newest" / "runsc").exists()
        if known and not (newest and not built) and settings.runsc in (None, known["runsc"]):
            it.result = f"already there: {known['version']} at {known['runsc']}"
            return

        async def boots(candidate: Runsc) -> None:
            async with open_trial(candidate, "systrap", home) as trial:
                await trial.boot()

        if newest and not built:
            it.doing("building the newest runsc from source (a minute or two)")
            await build_newest(home)
        chosen, why = await runsc.find(settings, boots)
        if chosen is None:
            it.doing("downloading runsc")
            await runsc.fetch(home)
            chosen, why = await runsc.find(settings, boots)
        if chosen is None:
            raise UnsupportedError(
                f"no usable runsc: {why}", hint="set FORKYARD_RUNSC to a runsc from 2024 or later"
            )
        others = [{"runsc": str(c.path), "origin": c.origin} for c in runsc.candidates(settings)]
        runsc.write_engine(home, chosen, "", others)
        it.result = f"{chosen.version} ({why}), boots"


async def _base(settings: Settings, show: Progress) -> None:
    with step(show, "base") as it:
        record = read_template(settings.home, BASE.name)
        fresh = record is not None and record["key"] == BASE.key(system=debian.system())
        if record is not None and fresh and all(in_place(settings.home, x) for x in record["layers"]):
            it.result = f"already there: {record['size_bytes'] >> 20} MiB"
            return
        async with _store(settings) as disks:
            if record is not None and fresh and all(in_place(settings.home, x) for x in record["layers"]):
                it.result = f"already there, its store mounted: {record['size_bytes'] >> 20} MiB"
                return
            it.doing("building the base template from Debian packages (a minute)")
            record = await build_template(settings.home, disks, BASE)
            it.result = f"built: {record['size_bytes'] >> 20} MiB"


async def _platform(settings: Settings, show: Progress) -> None:
    home = settings.home
    with step(show, "platform") as it:
        record = runsc.read_engine(home)
        if record is None:
            it.result = "left open"
            return
        if record.get("platform"):
            it.result = f"already chosen: {record['platform']}"
            return
        it.doing("measuring how quickly commands start")
        binary = await Runsc.probe(Path(record["runsc"]))
        template = read_template(home, "base")
        assert template is not None
        lowers = layer_paths(home, template["layers"])
        chosen, figures = await choose_platform(binary, home, lowers)
        record["platform"] = chosen
        record["measured"] = [
            {"platform": t.platform, "boot_ms": round(t.boot_ms), "command_ms": round(t.command_ms, 1)}
            for t in figures
        ]
        write_atomic(runsc.engine_file(home), json.dumps(record, indent=1) + "\n", mode=0o644)
        told = ", ".join(f"{t.platform} {t.command_ms:.0f} ms" for t in figures)
        it.result = f"{chosen} (a command after a pause: {told})"


async def _warm(settings: Settings, show: Progress, report: Report) -> None:
    """Make the memory image from which sandboxes of ``base`` start."""
    from forkyard.requests import Caller, WarmTemplate
    from forkyard.yard.templates import WARM_REVISION
    from forkyard.yard.yard import open_yard

    home = settings.home
    engine = runsc.read_engine(home) or {}
    template = read_template(home, "base") or {}
    mark = home / "engine" / "warm.json"
    agent = (Path(config.__file__).parent / "agent" / "fy-agent").stat()
    wanted = [
        engine.get("digest"),
        engine.get("platform"),
        template.get("key"),
        agent.st_size,
        agent.st_mtime,
        WARM_REVISION,
    ]
    with step(show, "warm image") as it:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(mark.read_text()) == wanted:
                report.warm = True
                return
        with _as_daemon(home) as mine:
            if not mine:
                it.result = "left to the running daemon"
                return
            it.doing("booting base once and saving its memory")
            async with open_yard(settings) as yard:
                caller = Caller(uid=os.getuid(), pid=os.getpid())
                await yard.warm_template(WarmTemplate(name="base"), caller)
            write_atomic(mark, json.dumps(wanted))
            report.warm = True


def _tune(on: bool, show: Progress) -> None:
    with step(show, "tune") as it:
        if probe.rcu_expedited() is on:
            it.result = f"rcu_expedited is {int(on)} already"
            return
        before = probe.grace_period_ms()
        try:
            probe.set_rcu_expedited(on)
        except OSError as error:
            raise UnsupportedError(
                f"rcu_expedited cannot be set: {error.strerror}",
                hint="it needs root and a kernel that has it",
            ) from None
        after = probe.grace_period_ms()
        figures = f": a wait for RCU took {before:.1f} ms, now {after:.1f} ms" if before and after else ""
        it.result = f"rcu_expedited set to {int(on)} until the next boot{figures}"


async def _borrow(settings: Settings, show: Progress) -> bool:
    if find_lender(settings) is None:
        return False
    with step(show, "borrow") as it:
        done = await quick_setup(settings)
        it.result = f"engine and base of {find_lender(settings)}"
        return done
