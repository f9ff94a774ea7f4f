"""The OCI specification of one box."""

from __future__ import annotations

from typing import Any

from forkyard.engines.base import MachineSpec

AGENT_DIR = "/.forkyard"
AGENT = f"{AGENT_DIR}/fy-agent"

# What the agent holds. Its commands have no SYS_ADMIN (host name), SYS_RESOURCE (a full
# process table) and SYS_PTRACE (whose files are open, whose child a process is).
CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "SETPCAP", "SETFCAP", "KILL"),
        *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", "SYS_ADMIN", "SYS_RESOURCE", "SYS_PTRACE"),
    )
]

# Directories where programs delete files that they still hold open. As a tmpfs those
# survive in every image; backed by a file on the host's disk, their content costs no
# memory, so that unpacking something large in /tmp works in a small sandbox.
DISK_BACKED = {"tmp": "/tmp", "vartmp": "/var/tmp"}


def oci_spec(spec: MachineSpec) -> dict[str, Any]:
    """The content of the bundle's ``config.json``."""
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=16m"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "shm",
            "options": ["nosuid", "nodev", "mode=1777", f"size={max(16, spec.mem_mb // 2)}m"],
        },
        {
            "destination": AGENT_DIR,
            "type": "bind",
            "source": str(spec.agent),
            "options": ["bind", "ro"],
        },
    ]
    annotations: dict[str, str] = {}
    for name, destination in DISK_BACKED.items():
        source = str(spec.dir / "fs" / name)
        options = f"rw,mode=1777,size={spec.disk_mb}m"
        mounts.append(
            {"destination": destination, "type": "bind", "source": source, "options": options.split(",")}
        )
        hint = f"dev.gvisor.spec.mount.{name}"
        annotations |= {
            f"{hint}.source": source,
            f"{hint}.type": "tmpfs",
            f"{hint}.share": "container",
            f"{hint}.options": options,
        }
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {name: CAPABILITIES for name in sets} | {"inheritable": []},
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 65536},
                {"type": "RLIMIT_NPROC", "soft": spec.processes, "hard": spec.processes},
            ],
        },
        "root": {"path": str(spec.rootfs)},
        "hostname": "sandbox",
        "mounts": mounts,
        "annotations": annotations,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network")]},
    }
