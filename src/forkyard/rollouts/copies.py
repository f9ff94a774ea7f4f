"""The copies that grading makes, and what runs in them."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forkyard import errors
from forkyard.client.aio import AsyncClient
from forkyard.rollouts.types import Grader, Task
from forkyard.types import ProcessInfo, SandboxInfo

# A process that starts others while it is being killed is gone after a few rounds.
ROUNDS = 10
CLEAN_UP_S = 30.0
WAIT_S = 600.0
# So much more than an episode has that episodes which burn every CPU leave a grader its own: its limits of
# time then speak of the work and not of its neighbours.
CPU_WEIGHT = 10_000


class UnfitError(Exception):
    """What an agent left cannot be brought into a copy and made ready there: that is its failure, and no
    error of the grader's, which would leave the sample out."""


@contextlib.contextmanager
def its_own_doing() -> Iterator[None]:
    """What goes wrong in the block for what the agent left is its doing.

    Raises:
        UnfitError: in place of what says so.
    """
    try:
        yield
    except (
        errors.CommandFailedError,
        errors.ConflictError,
        errors.InvalidRequestError,
        errors.NotFoundError,
    ) as error:
        raise UnfitError(f"what was left cannot be graded: {error}") from error


@contextlib.asynccontextmanager
async def clean_copy(client: AsyncClient, task: Task, prepared: str) -> AsyncIterator[SandboxInfo]:
    """A fork of the prepared state, without a network, deleted afterwards."""
    limits = task.limits
    made = await client.fork(
        prepared,
        env=dict(task.env),
        **_network(task.grader),
        ephemeral=True,
        cpus=limits.cpus,
        cpu_weight=CPU_WEIGHT,
        mem_mb=limits.mem_mb,
        disk_mb=limits.disk_mb,
        labels={"forkyard.rollouts": "grading"},
        wait_s=WAIT_S,
    )
    async with _deleted(client, made.forks[0]) as info:
        yield info


@contextlib.asynccontextmanager
async def own_copy(
    client: AsyncClient,
    final: str,
    keep: Sequence[str] = (),
    *,
    kill_others: bool = True,
    grader: Grader | None = None,
) -> AsyncIterator[SandboxInfo]:
    """A fork of the agent's machine in which only processes with a name in ``keep`` go on.

    Where its memory cannot be saved, the copy boots anew from its disk: nothing is kept then.
    """
    given = {
        **_network(grader),
        "ephemeral": True,
        "cpu_weight": CPU_WEIGHT,
        "labels": {"forkyard.rollouts": "grading"},
        "wait_s": WAIT_S,
    }
    try:
        made = await client.fork(final, **given)
    except (errors.ForkError, errors.UnsupportedError):
        made = await client.fork(final, memory=False, **given)
    async with _deleted(client, made.forks[0]) as info:
        if kill_others:
            await kill(client, info.id, lambda one: _name(one) in keep)
        yield info


@contextlib.asynccontextmanager
async def _deleted(client: AsyncClient, info: SandboxInfo) -> AsyncIterator[SandboxInfo]:
    try:
        yield info
    finally:
        # It is ephemeral: what cannot be deleted now goes with this process.
        with contextlib.suppress(errors.ForkyardError, TimeoutError):
            async with asyncio.timeout(CLEAN_UP_S):
                await client.delete_sandbox(info.id)


def _network(grader: Grader | None) -> dict[str, Any]:
    """What a grading copy reaches: nothing, but for what its grader asks for."""
    allowed = list(getattr(grader, "egress", ()))
    return {"egress_allow": allowed} if allowed else {"egress": "deny", "egress_allow": []}


def _name(process: ProcessInfo) -> str:
    """The program's name, without its directory and arguments."""
    return posixpath.basename(process.command.partition(" ")[0].rstrip(":"))


async def kill(client: AsyncClient, sandbox: str, spared: Callable[[ProcessInfo], bool]) -> None:
    """End every process but the machine's first and those that are spared.

    Raises:
        UnfitError: they make new ones faster than they are killed.
    """
    for _ in range(ROUNDS):
        found = [one for one in await client.processes(sandbox) if one.pid != 1 and not spared(one)]
        if not found:
            return
        pids = [str(one.pid) for one in found if one.state != "Z"]
        if not pids:
            return
        await client.exec(sandbox, ["/bin/sh", "-c", 'kill -9 "$@" 2>/dev/null', "kill", *pids], user="root")
    raise UnfitError("processes come back as often as they are killed")


async def real_path(client: AsyncClient, sandbox: str, path: str, *, follow: bool = False) -> str:
    """``path`` with the links among its directories followed, as the machine says: ask one that no
    agent had. The last part need not exist; it is followed with ``follow``."""
    for _ in range(40):
        head, done = "", True
        parts = [part for part in posixpath.normpath(path).split("/") if part]
        for index, part in enumerate(parts):
            head += f"/{part}"
            try:
                info = await client.stat(sandbox, head, user="root")
            except errors.NotFoundError:
                break
            if info.type == "link" and (follow or index < len(parts) - 1):
                rest = "/".join(parts[index + 1 :])
                path = posixpath.join(posixpath.dirname(head), info.target or "", rest)
                done = False
                break
        if done:
            return "/" + "/".join(parts)
    raise errors.InvalidRequestError(f"{path} leads through more than 40 links")


async def put_files(client: AsyncClient, sandbox: str, files: Mapping[str, str | bytes | Path]) -> None:
    """Write a grader's files as root; a ``Path`` may be a directory, whose content goes there."""
    inline = {path: content(data) for path, data in files.items() if not isinstance(data, Path)}
    if inline:
        await client.write_files(sandbox, inline, mode=0o644, user="root")
    for path, local in files.items():
        if isinstance(local, Path):
            await client.upload(sandbox, local, path, user="root")


def content(data: str | bytes | Path) -> bytes:
    """A file's content; of a ``Path``, what this machine has there."""
    if isinstance(data, Path):
        return data.read_bytes()
    return data.encode() if isinstance(data, str) else data
