"""The QEMU engine: every sandbox is a microVM with a Linux kernel of its own; quick where KVM works."""

from forkyard.engines.qemu.engine import Qemu
from forkyard.engines.qemu.kit import Kit, load_kit

__all__ = ["Kit", "Qemu", "load_kit"]
