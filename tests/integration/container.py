"""A container by hand, for a sandbox's root: namespaces and a root of its own, limits by a control group."""

import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
# mount, cgroup, uts, ipc, pid, net
NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
BIND, PRIVATE = 0x1000, 0x4000 | 0x40000
GROUP = "/sys/fs/cgroup/inner"
INSIDE = """
echo pid=$$ first=$(cat /proc/1/comm) host=$(uname -n) interfaces=$(grep -c : /proc/net/dev)
sh -c 'x=x; while :; do x=$x$x; done' 2> /dev/null
echo hog=$?
"""


def call(name: str, *arguments: object) -> int:
    result = getattr(libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def contain() -> None:
    write(f"{GROUP}/cgroup.procs", str(os.getpid()))
    call("unshare", NAMESPACES)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    mount("none", "/", "", PRIVATE)
    mount("/usr", "/box/usr", "", BIND)
    mount("proc", "/box/proc", "proc")
    os.chroot("/box")
    os.chdir("/")
    call("sethostname", b"inner", 5)
    os.execv("/bin/sh", ["sh", "-c", INSIDE])


for name in ("usr", "proc", "dev"):
    os.makedirs(f"/box/{name}", exist_ok=True)
open("/box/dev/null", "w").close()
for name in ("bin", "lib", "lib64", "sbin"):
    os.symlink(f"usr/{name}", f"/box/{name}")
write("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids")
os.mkdir(GROUP)
write(f"{GROUP}/memory.max", "64M")
write(f"{GROUP}/pids.max", "20")
if (container := os.fork()) == 0:
    contain()
os.waitpid(container, 0)
with open(f"{GROUP}/memory.events") as file:
    events = dict(line.split() for line in file)
print("killed" if int(events["oom_kill"]) else "spared", os.uname().nodename)
# An eBPF map: an array of one number.
print("ebpf", call("syscall", 321, 0, struct.pack("<5I", 2, 4, 8, 1, 0) + bytes(100), 120) > 0)
