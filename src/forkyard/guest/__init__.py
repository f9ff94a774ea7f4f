"""The guest agent's other end: commands, files and identity of one machine, over its wire."""

from forkyard.guest.guest import Activity, AgentInfo, Guest, Identity, Killed, User
from forkyard.guest.process import ExitStatus, GuestProcess, KnownProcess, Output, SpawnSpec
from forkyard.wire import Scope

__all__ = [
    "Activity",
    "AgentInfo",
    "ExitStatus",
    "Guest",
    "GuestProcess",
    "Identity",
    "Killed",
    "KnownProcess",
    "Output",
    "Scope",
    "SpawnSpec",
    "User",
]
