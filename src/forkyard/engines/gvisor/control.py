"""runsc's control socket: the calls that its own command line makes, without its start time.

The sentry answers JSON requests on a stream socket; files travel beside the request as
SCM_RIGHTS. ``runsc checkpoint`` costs about 20 ms of process start per call, a call here
0.2 ms. It is a private interface: each call is the one form that both the 2024 and the
2026 builds take (unknown fields are ignored by either).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkyard.errors import InternalError

MAX_REPLY = 1 << 20

# What runsc itself sends for --network=none (boot.DefaultLoopbackLink).
LOOPBACK = [
    {
        "Name": "lo",
        "Addresses": [
            {"Address": "127.0.0.1", "PrefixLen": 8},
            {"Address": "::1", "PrefixLen": 128},
        ],
        "Routes": [{"Destination": {"IP": "127.0.0.0", "Mask": "/wAAAA=="}}],
    }
]


class ControlError(InternalError):
    """The sentry refused a call; the message is its own."""


async def call(path: Path, method: str, arg: Any = None, files: Sequence[int] = ()) -> Any:
    """Call ``<object>.<method>`` on the sentry that listens at ``path``.

    Args:
        path: The socket, at most 107 bytes long.
        files: Open descriptors to send along; they stay the caller's.

    Raises:
        ControlError: the sentry answered with an error.
        OSError: nothing listens, or the sentry died meanwhile.
    """
    loop = asyncio.get_running_loop()
    request = json.dumps({"method": method, "arg": arg}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, str(path))
        # A request of a few hundred bytes always fits a fresh socket's buffer.
        socket.send_fds(sock, [request], list(files))
        reply = bytearray()
        while True:
            part = await loop.sock_recv(sock, 1 << 16)
            if not part:
                raise ConnectionResetError(f"the sentry closed the connection during {method}")
            reply += part
            try:
                answer = json.loads(reply)
                break
            except ValueError:
                if len(reply) > MAX_REPLY:
                    raise ControlError(f"{method}: the sentry's reply has no end") from None
    if not answer.get("success"):
        raise ControlError(f"{method}: {str(answer.get('err'))[:500]}")
    return answer.get("result")


async def pause(path: Path) -> None:
    """Stop the guest."""
    await call(path, "containerManager.Pause")


async def resume(path: Path) -> None:
    """Let the guest go on."""
    await call(path, "containerManager.Resume")


async def checkpoint(path: Path, files: Sequence[int]) -> None:
    """Write state, page metadata and pages of a paused guest to the three ``files``; it stays paused.

    Always the form that leaves the source alive: the other one kills it when the disk is full.
    """
    arg = {
        "metadata": {"compression": "none"},
        "have_pages_file": True,
        "Resume": True,
        "MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": False},
        "app_mf_exclude_committed_zero_pages": False,
    }
    await call(path, "containerManager.Checkpoint", arg, files)


async def restore(path: Path, files: Sequence[int], *, describes_network: bool) -> None:
    """Load an image into a created container and run it.

    Args:
        describes_network: The build makes the loopback from a description while it restores; older
            ones have it made first, and restore onto it. Without either there is no 127.0.0.1.
    """
    if describes_network:
        network = {"LoopbackLinks": LOOPBACK, "IsRestore": True}
        await call(path, "containerManager.SetNetworkArgs", network)
    else:
        await call(path, "Network.CreateLinksAndRoutes", {"LoopbackLinks": LOOPBACK})
    await call(path, "containerManager.Restore", {"HavePagesFile": True, "HaveDeviceFile": False}, files)
