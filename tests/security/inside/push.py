"""Tries what only the host's root may, and prints what was let: never to be run on a host."""

import ctypes
import fcntl
import os
import socket
import stat
import struct

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000


def called(*args):
    ctypes.set_errno(0)
    return libc.syscall(*args) >= 0


def written(path, text):
    try:
        with open(path, "w") as file:
            file.write(text)
        return True
    except OSError:
        return False


def opened(path):
    try:
        os.close(os.open(path, os.O_RDWR))
        return True
    except OSError:
        return False


def made(path, kind, device):
    try:
        os.mknod(path, kind | 0o666, device)
        os.close(os.open(path, os.O_RDONLY))
        return True
    except OSError:
        return False


def socketed(*args):
    try:
        socket.socket(*args).close()
        return True
    except OSError:
        return False


def mounted(kind, source=b"none", flags=0, data=None):
    os.makedirs("/run/there", exist_ok=True)
    return libc.mount(source, b"/run/there", kind, flags, data) == 0


def tunnelled():
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22s", b"tun0", 0x1001, b""))
    return True


def joined():
    fd = os.open("/proc/1/ns/net", os.O_RDONLY)
    return libc.setns(fd, 0) == 0 and len(os.listdir("/sys/class/net")) > 1


if os.geteuid() == 0:  # (paths only root may make)
    tries = {
        "mount a tmpfs": lambda: mounted(b"tmpfs"),
        "mount /proc": lambda: mounted(b"proc"),
        "bind the root": lambda: mounted(b"", b"/", 4096),
        "mount an overlay": lambda: mounted(b"overlay", b"x", 0, b"lowerdir=/"),
        "mount the host by 9p": lambda: mounted(b"9p", b"/", 0, b"trans=fd,rfdno=0,wfdno=1"),
        "mount a disk": lambda: mounted(b"ext4", b"/dev/vda") or mounted(b"btrfs", b"/dev/loop0"),
        "remount the agent": lambda: libc.mount(b"", b"/.forkyard", b"", 4096 | 32, None) == 0,
        "unmount /proc": lambda: libc.umount2(b"/proc", 2) == 0,
        "mount by fuse": lambda: mounted(b"fuse", b"none", 0, b"fd=0,rootmode=40000,user_id=0,group_id=0"),
        "pivot the root": lambda: called(155, b"/run", b"/run"),
        "make /dev/mem": lambda: made("/run/mem", stat.S_IFCHR, os.makedev(1, 1)),
        "make a disk": lambda: made("/run/disk", stat.S_IFBLK, os.makedev(254, 0)),
        "make a loop device": lambda: made("/run/loop", stat.S_IFBLK, os.makedev(7, 0)),
    }
else:
    tries = {}
tries |= {
    **{
        "open " + path: lambda path=path: opened(path)
        for path in (
            *(
                "/dev/mem",
                "/dev/kmem",
                "/dev/kmsg",
                "/dev/port",
                "/dev/kvm",
                "/dev/loop0",
                "/dev/loop-control",
            ),
            *("/dev/vda", "/dev/sda", "/dev/nvme0", "/dev/mapper/control", "/dev/vhost-net", "/proc/kcore"),
        )
    },
    **{
        "write " + path: lambda path=path: written(path, "x")
        for path in (
            *("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger"),
            *("/proc/sys/vm/drop_caches", "/sys/kernel/uevent_helper", "/sys/power/state"),
            *("/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent", "/proc/1/oom_score_adj"),
        )
    },
    "a raw socket": lambda: socketed(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "a packet socket": lambda: socketed(socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
    "a tun": lambda: tunnelled(),
    "a vsock": lambda: socketed(40, socket.SOCK_STREAM),
    "a socket of the kernel's crypto": lambda: socketed(38, 5, 0),
    "load a module": lambda: called(175, b"", 0, b"") or called(313, 0, b"", 0),
    "load a kernel": lambda: called(246, 0, 0, None, 0) or called(320, 0, 0, 0, None, 0),
    "bpf": lambda: called(321, 0, b"\0" * 120, 120),
    "perf_event_open": lambda: called(298, b"\0" * 120, 0, -1, -1, 0),
    "userfaultfd": lambda: called(323, 0),
    "io_uring": lambda: called(425, 8, ctypes.create_string_buffer(120)),
    "iopl": lambda: called(172, 3),
    "swapon": lambda: called(167, b"/run/x", 0),
    "set the clock": lambda: called(227, 0, ctypes.create_string_buffer(16)),
    "trace pid 1": lambda: called(101, 16, 1, 0, 0),
    "kexec or reboot": lambda: called(169, 0, 0, 0, None),
    "join another network": joined,
}
for name, attempt in tries.items():
    try:
        let = attempt()
    except OSError:
        let = False
    if let:
        print(name)
print("devices", *sorted(os.listdir("/dev")))
print("networks", *sorted(os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ["lo"]))
print("tried", len(tries))
