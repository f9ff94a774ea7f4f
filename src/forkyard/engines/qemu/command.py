"""QEMU's command line for one machine."""

from __future__ import annotations

import os
import zlib

from forkyard.engines.base import MachineSpec
from forkyard.engines.qemu.kit import KERNEL, Kit
from forkyard.host.tsc import tsc_khz

__all__ = ["REVISION", "command"]

# Raised when machines are built otherwise: device state of before does not fit them then.
REVISION = 1
# The translator's cache of translated code; its default is a share of the host's memory.
TRANSLATIONS_MB = 64
# Above those of people, services and containers; each box has one of its own.
FIRST_UID, UIDS = 1_900_000_000, 1 << 20

# Without the timers of 1981: the kernel waits for them where it is told nothing of the counter's speed.
MACHINE = "microvm,x-option-roms=off,rtc=on,isa-serial=off,pit=off,pic=off"
MACHINE += ",suppress-vmdesc=on,memory-backend=ram"
KERNEL_WORDS = "quiet panic=-1 reboot=t random.trust_cpu=on"
# It gives up its own privileges as it starts, so that it must be allowed to change them.
SANDBOX = "on,obsolete=deny,spawn=deny,resourcecontrol=deny"


def command(kit: Kit, spec: MachineSpec, disk: tuple[int, ...], *, boots: bool) -> list[str]:
    """The argv that starts ``spec``'s machine, which waits for a word on its control socket.

    Args:
        disk: Descriptors of its disk, for reading and for both: one that goes on where another
            stopped opens it twice, and may open nothing by then.
        boots: It boots; else its memory is that of a machine which did.
    """
    directory = spec.dir
    accel = "kvm" if kit.accel == "kvm" else f"tcg,thread=multi,tb-size={TRANSLATIONS_MB}"
    # What of a host's CPU cannot be saved is left out. The translator's own is the same on every host.
    cpu = "host,migratable=on,-arch-capabilities" if kit.accel == "kvm" else "max"
    argv = [str(kit.qemu), "-name", spec.box, *(["-S"] if boots else ["-incoming", "defer"])]
    argv += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    argv += ["-machine", MACHINE, "-accel", accel, "-cpu", cpu, "-smp", f"{spec.cpus}"]
    argv += ["-m", f"{spec.mem_mb}M"]
    argv += ["-global", "virtio-mmio.force-legacy=false", "-global", "migration.send-configuration=off"]
    backend = f"memory-backend-file,id=ram,size={spec.mem_mb}M,mem-path={directory}/ram,share=off"
    argv += ["-object", backend]
    if boots:
        words = KERNEL_WORDS
        if kit.accel == "tcg":
            # Mitigations are against leaks through a CPU that is not there. The translator shows the
            # host's counter, and has nothing to measure it by.
            words += f" mitigations=off tsc=reliable tsc_early_khz={tsc_khz()}"
        argv += ["-kernel", str(kit.dir / KERNEL), "-initrd", str(kit.initrd(spec.agent / "fy-agent"))]
        argv += ["-append", f"{words} processes={spec.processes}"]
    for fd in disk:
        argv += ["-add-fd", f"fd={fd},set=1"]
    # What it writes is made durable by who seals the disk, and means nothing before.
    drive = "id=disk,file=/dev/fdset/1,file.locking=off,format=raw,if=none,cache=unsafe,discard=unmap"
    argv += ["-drive", drive, "-device", "virtio-blk-device,drive=disk"]
    argv += ["-device", "virtio-serial-device", "-chardev", f"pipe,id=agent,path={directory}/agent"]
    argv += ["-device", "virtserialport,chardev=agent,name=agent"]
    argv += ["-chardev", f"socket,id=qmp,path={directory}/qmp,server=on,wait=off"]
    argv += ["-mon", "chardev=qmp,mode=control", "-sandbox", SANDBOX]
    if os.geteuid() == 0:
        argv += ["-chroot", f"{directory}/empty"]
        uid = FIRST_UID + zlib.crc32(spec.box.encode()) % UIDS
        if _is_mapped(uid):
            argv += ["-runas", f"{uid}:{uid}"]
    return argv


def _is_mapped(uid: int) -> bool:
    """Whether there is such a user here: in a user namespace of few users there is not."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)
