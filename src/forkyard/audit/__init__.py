"""The audit log, and what can be done with a copy of it."""

from forkyard.audit.check import Verdict, export, newest, verify
from forkyard.audit.log import GENESIS, AuditLog

__all__ = ["GENESIS", "AuditLog", "Verdict", "export", "newest", "verify"]
