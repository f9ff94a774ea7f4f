"""Set-up for microVMs: QEMU, a kernel and its modules from the machine's own packages, and the proof.

The kernel is unpacked in the home and never installed. Whether KVM works is found out by booting on
it: the device may be there and run no kernel that anybody uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import lzma
import re
import shutil
import tempfile
import time
from pathlib import Path

from forkyard.config import Settings, short
from forkyard.engines.base import MachineSpec
from forkyard.engines.qemu import Kit, Qemu, initramfs, load_kit
from forkyard.engines.qemu.kit import KERNEL, probe_version, write_kit
from forkyard.errors import ForkyardError, UnavailableError, UnsupportedError
from forkyard.guest import Guest
from forkyard.host import process
from forkyard.host.files import rmtree
from forkyard.setup import apt
from forkyard.setup.progress import Progress, step
from forkyard.setup.trial import agent_dir

__all__ = ["boot_ms", "kit_dir", "set_up_microvms"]

# {program: Debian package}
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "dpkg-deb": "dpkg"}
# Debian's kernel for machines without hardware of their own: small, and quick to boot.
KERNEL_PACKAGE = "linux-image-cloud-amd64"
# A stock kernel boots in one on KVM; where KVM only emulates, it never does.
KVM_TIMEOUT_S = 10.0
TCG_TIMEOUT_S = 120.0


def kit_dir(home: Path) -> Path:
    """Where a home keeps what its microVMs are made with."""
    return home / "engine" / "qemu"


async def set_up_microvms(settings: Settings, show: Progress) -> Kit:
    """Make the home ready for microVMs; what is there already is left alone.

    Raises:
        UnsupportedError: something that this machine lacks, with what to do.
    """
    directory = kit_dir(settings.home)
    with step(show, "microVMs") as it:
        try:
            kit = load_kit(directory)
            it.result = f"already there: {_words(kit)}"
            return kit
        except UnavailableError:
            pass
        lacking = apt.missing(PROGRAMS)
        if lacking:
            it.doing(f"installing {', '.join(lacking)} with apt")
            await apt.install(lacking)
        qemu = Path(process.find_program("qemu-system-x86_64"))
        version = await probe_version(qemu)
        it.doing("downloading a kernel")
        release = await _fetch_kernel(directory)
        kit = Kit(directory, qemu, version, "tcg", release, directory)
        it.doing("booting")
        kit, took_ms = await _prove(kit, settings.home)
        write_kit(kit, directory)
        it.result = f"{_words(kit)}, boots in {took_ms / 1000:.1f} s"
        return kit


def _words(kit: Kit) -> str:
    how = "on KVM" if kit.accel == "kvm" else "translated (no usable KVM: slow)"
    return f"QEMU {kit.version}, Linux {kit.kernel}, {how}"


async def _prove(kit: Kit, home: Path) -> tuple[Kit, float]:
    """The kit with what runs its machines here, and how long one took to boot, in ms."""
    if Path("/dev/kvm").exists():
        try:
            quick = dataclasses.replace(kit, accel="kvm")
            return quick, await boot_ms(quick, home, KVM_TIMEOUT_S)
        except (ForkyardError, OSError):
            pass  # the translator runs everywhere
    return kit, await boot_ms(kit, home, TCG_TIMEOUT_S)


async def boot_ms(kit: Kit, home: Path, timeout_s: float = TCG_TIMEOUT_S) -> float:
    """Boot a machine with an empty disk, hear its agent and end it; how long that took, in ms.

    Raises:
        ForkyardError, OSError: it did not boot in time.
    """
    directory = Path(tempfile.mkdtemp(prefix="try-", dir=short(home)))
    engine = Qemu(kit)
    disk = directory / "disk.img"
    spec = MachineSpec("try", directory, disk, agent_dir(), mem_mb=256, disk_mb=64, processes=64)
    try:
        await process.run(["mke2fs", "-q", "-t", "ext4", f"{disk}", "64M"], timeout_s=60, check=True)
        begun = time.perf_counter()
        machine = await engine.boot(spec)
        guest = Guest(machine.to_guest, machine.from_guest, box="try")
        try:
            async with asyncio.TaskGroup() as tg:
                await guest.attach(tg, timeout_s=timeout_s)
                took = time.perf_counter() - begun
                await guest.close()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await guest.close()
            await engine.kill(machine)
        return took * 1000
    finally:
        rmtree(directory)


async def _fetch_kernel(directory: Path) -> str:
    """Unpack this distribution's kernel into ``directory``; its release."""
    release = apt.host_release()
    if release.id != "debian":
        raise UnsupportedError(
            f"microVMs use Debian's kernel, and this is {release.id or 'another system'}",
            hint="use gVisor here, or a Debian machine",
        )
    scratch = directory.with_name(".qemu.apt")
    rmtree(scratch)
    scratch.mkdir(parents=True)
    try:
        package = await _kernel_package()
        if not package:
            await process.run(["apt-get", *apt.QUIET, "update"], timeout_s=apt.APT_TIMEOUT_S)
            package = await _kernel_package()
        if not package:
            raise UnsupportedError(f"apt knows no {KERNEL_PACKAGE}", hint="see that apt-get update works")
        # apt's own user may not enter a home of mode 0700.
        argv = ["apt-get", *apt.QUIET, "-o", "APT::Sandbox::User=root", "download", package]
        done = await process.run(argv, timeout_s=apt.APT_TIMEOUT_S, cwd=scratch)
        if done.rc:
            raise UnsupportedError(f"apt could not download {package}: {done.complaint}")
        archive = next(scratch.glob("*.deb"))
        await process.run(["dpkg-deb", "-x", archive, scratch / "root"], timeout_s=120, check=True)
        return await asyncio.to_thread(_take, scratch / "root", directory)
    finally:
        rmtree(scratch)


async def _kernel_package() -> str:
    """The package with the present version of the kernel, or nothing."""
    shown = await process.run(["apt-cache", "depends", KERNEL_PACKAGE], timeout_s=60)
    match = re.search(r"Depends: (linux-image-\S+)", shown.stdout.decode(errors="replace"))
    return match[1] if match else ""


def _take(root: Path, directory: Path) -> str:
    """Keep the kernel and its modules of an unpacked package."""
    kernel = next((root / "boot").glob("vmlinuz-*"))
    rmtree(directory)
    (directory / "modules").mkdir(parents=True)
    shutil.copy(kernel, directory / KERNEL)
    for name in initramfs.MODULES:
        # Debian 13's are compressed. One that is not there is built in.
        for path in root.glob(f"**/{name}.ko*"):
            data = path.read_bytes()
            (directory / "modules" / f"{name}.ko").write_bytes(
                lzma.decompress(data) if path.suffix == ".xz" else data
            )
    return kernel.name.removeprefix("vmlinuz-")
