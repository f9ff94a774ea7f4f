"""The gVisor engine: every sandbox has its own kernel, written in Go; no KVM needed."""

from forkyard.engines.gvisor.engine import GVisor
from forkyard.engines.gvisor.runsc import Runsc

__all__ = ["GVisor", "Runsc"]
