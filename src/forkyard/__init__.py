"""forkyard: sandboxes that fork, checkpoint and rewind with their memory.

from forkyard import Client

with Client() as client:
    base = client.create_sandbox()
    client.shell(base.id, "pip install -q pytest")
    for copy in client.fork(base.id, 8).forks:
        print(client.shell(copy.id, "hostname").stdout)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkyard.errors import (
    AccessDeniedError,
    CapacityError,
    CommandFailedError,
    ConflictError,
    CorruptSnapshotError,
    DeadlineError,
    ForkError,
    ForkyardError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    SandboxLostError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from forkyard.client.aio import AsyncClient
    from forkyard.client.aio_process import AsyncProcess
    from forkyard.client.aio_sandbox import AsyncSandbox
    from forkyard.client.pools import AsyncPool, Pool
    from forkyard.client.sync import Client
    from forkyard.client.sync_process import Process
    from forkyard.client.sync_sandbox import Sandbox
    from forkyard.types import (
        Artifact,
        AuditRecord,
        AuditVerdict,
        Capacity,
        Change,
        CheckpointInfo,
        CodeError,
        CodeResult,
        Diff,
        Event,
        ExecResult,
        ExploreResult,
        FileInfo,
        ForkResult,
        Health,
        ProcessInfo,
        SandboxInfo,
        SnapshotInfo,
        TemplateInfo,
        Transfer,
        TreeNode,
        Usage,
        VariantResult,
        VersionInfo,
    )

__version__ = "0.1.0"

# Looked up when first used: the daemon and the command line need not load the client.
_HOMES = {
    "AsyncClient": "forkyard.client.aio",
    "AsyncPool": "forkyard.client.pools",
    "AsyncProcess": "forkyard.client.aio_process",
    "AsyncSandbox": "forkyard.client.aio_sandbox",
    "Client": "forkyard.client.sync",
    "Pool": "forkyard.client.pools",
    "Process": "forkyard.client.sync_process",
    "Sandbox": "forkyard.client.sync_sandbox",
    "Artifact": "forkyard.types",
    "AuditRecord": "forkyard.types",
    "AuditVerdict": "forkyard.types",
    "Capacity": "forkyard.types",
    "Change": "forkyard.types",
    "CheckpointInfo": "forkyard.types",
    "CodeError": "forkyard.types",
    "CodeResult": "forkyard.types",
    "Diff": "forkyard.types",
    "Event": "forkyard.types",
    "ExecResult": "forkyard.types",
    "ExploreResult": "forkyard.types",
    "FileInfo": "forkyard.types",
    "ForkResult": "forkyard.types",
    "Health": "forkyard.types",
    "ProcessInfo": "forkyard.types",
    "SandboxInfo": "forkyard.types",
    "SnapshotInfo": "forkyard.types",
    "TemplateInfo": "forkyard.types",
    "Transfer": "forkyard.types",
    "TreeNode": "forkyard.types",
    "Usage": "forkyard.types",
    "VariantResult": "forkyard.types",
    "VersionInfo": "forkyard.types",
}

__all__ = [
    "AccessDeniedError",
    "Artifact",
    "AsyncClient",
    "AsyncPool",
    "AsyncProcess",
    "AsyncSandbox",
    "AuditRecord",
    "AuditVerdict",
    "Capacity",
    "CapacityError",
    "Change",
    "CheckpointInfo",
    "Client",
    "CodeError",
    "CodeResult",
    "CommandFailedError",
    "ConflictError",
    "CorruptSnapshotError",
    "DeadlineError",
    "Diff",
    "Event",
    "ExecResult",
    "ExploreResult",
    "FileInfo",
    "ForkError",
    "ForkResult",
    "ForkyardError",
    "Health",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "Pool",
    "Process",
    "ProcessInfo",
    "Sandbox",
    "SandboxInfo",
    "SandboxLostError",
    "SnapshotInfo",
    "TemplateInfo",
    "Transfer",
    "TreeNode",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
    "VariantResult",
    "VersionInfo",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
