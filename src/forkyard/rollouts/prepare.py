"""Where episodes start: a task's ``prepare`` and ``files`` made into a snapshot, once.

A prepared snapshot is called ``rollouts/DIGEST``, of all that made it, so that later runs find it.
While one is being made, its sandbox is called ``rollouts-prepare/DIGEST``: whoever else wants the
same waits for it, in this process or another, and takes over if that process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.client.aio import AsyncClient
from forkyard.client.aio_sandbox import AsyncSandbox
from forkyard.errors import CommandFailedError, ConflictError, DeadlineError, NotFoundError
from forkyard.rollouts.keys import prepared_digest
from forkyard.rollouts.types import Commands, Dockerfile, Image, Limits, Prepare, Task

PREFIX = "rollouts/"
LABEL = {"forkyard.rollouts": "prepared"}
DISK_BUDGET_MB = 20_480
POLL_S = 0.5
# Of what a command printed, in the error that it failed.
SHOWN = 2000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A state that episodes start from: ``snapshot`` is its name or id, ``digest`` what made it."""

    snapshot: str
    digest: str


class Preparer:
    """Makes prepared states and keeps those in use, the rest within a disk budget.

    Args:
        client: Of the daemon that has them.
        disk_budget_mb: What prepared snapshots may take of the disk beyond those in use; the least
            recently used go first (those that this process has not used count as the oldest).
    """

    def __init__(self, client: AsyncClient, disk_budget_mb: int = DISK_BUDGET_MB) -> None:
        self._client = client
        self._budget_mb = disk_budget_mb
        self._locks: dict[str, asyncio.Lock] = {}
        self._bases: dict[str, str] = {}
        self._used_at: dict[str, float] = {}
        self._users: dict[str, int] = {}
        self.built = 0

    async def digest(self, task: Task) -> str:
        """The digest of the task's prepared state. Builds or pulls the image that it stands on.

        Raises:
            NotFoundError: no such template, snapshot, image or file. CommandFailedError: its build.
        """
        base, plain = await self._base(task.prepare)
        if plain and not task.files:
            return base.removeprefix("snapshot:")
        owner = task.user if task.files else None
        return prepared_digest(base, _recipe(task.prepare), task.files, task.limits, owner)

    async def get(self, task: Task) -> Prepared:
        """The task's prepared state, made if it is not there. See :meth:`holding` for its life.

        Raises:
            CommandFailedError: one of its commands failed. DeadlineError: it took longer than
                ``task.timeouts.prepare_s``. Others: what the daemon says.
        """
        try:
            async with asyncio.timeout(task.timeouts.prepare_s):
                return await self._get(task)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"task {task.id!r} was not prepared within {task.timeouts.prepare_s:g} s",
                hint="raise its timeouts.prepare_s",
            ) from None

    @contextlib.asynccontextmanager
    async def holding(self, task: Task) -> AsyncIterator[Prepared]:
        """As :meth:`get`; it is not evicted while the block runs."""
        digest = await self.digest(task)
        self._users[digest] = self._users.get(digest, 0) + 1
        try:
            yield await self.get(task)
        finally:
            self._used_at[digest] = time.time()
            self._users[digest] -= 1

    async def _get(self, task: Task) -> Prepared:
        digest = await self.digest(task)
        base, plain = await self._base(task.prepare)
        self._used_at[digest] = time.time()
        if plain and not task.files:
            return Prepared(base.removeprefix("snapshot:"), digest)
        name = f"{PREFIX}{digest[:32]}"
        async with self._locks.setdefault(digest, asyncio.Lock()):
            while not await self._there(name):
                try:
                    await self._make(name, task)
                except ConflictError:
                    # Somebody else makes it: their sandbox has the name, or their snapshot now.
                    await asyncio.sleep(POLL_S)
        return Prepared(name, digest)

    async def _there(self, name: str) -> bool:
        try:
            await self._client.get_snapshot(name)
        except NotFoundError:
            return False
        return True

    async def _base(self, prepare: Prepare) -> tuple[str, bool]:
        """The key of what it stands on, and whether that is a snapshot which can be used as it is."""
        if isinstance(prepare, Commands):
            return (await self._base(prepare.source))[0], False
        if not isinstance(prepare, str):
            return (await self._template(prepare))[1], False
        if prepare not in self._bases:
            self._bases[prepare] = await self._named(prepare)
        base = self._bases[prepare]
        return base, base.startswith("snapshot:")

    async def _named(self, name: str) -> str:
        try:
            return f"snapshot:{(await self._client.get_snapshot(name)).id}"
        except NotFoundError:
            for template in await self._client.list_templates():
                if template.name == name:
                    return f"template:{template.key}"
        raise NotFoundError(
            f"there is no template or snapshot {name!r} to prepare from",
            hint="forkyard template ls and forkyard snapshots ls show what there is",
        )

    async def _template(self, prepare: Image | Dockerfile) -> tuple[str, str]:
        """Name and key of the template that is built or pulled, once in this process."""
        if isinstance(prepare, Image):
            said = f"image\0{prepare.reference}"
        else:
            args = sorted(prepare.args.items())
            said = f"build\0{Path(prepare.context).resolve()}\0{prepare.dockerfile}\0{args}\0{prepare.warm}"
        name = f"rollouts-{hashlib.sha256(said.encode()).hexdigest()[:20]}"
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._bases:
                if isinstance(prepare, Image):
                    made = await self._client.pull_template(name, prepare.reference)
                else:
                    made = await self._client.build_template(
                        name, prepare.context, prepare.dockerfile, dict(prepare.args), prepare.warm
                    )
                self._bases[name] = f"template:{made.key}"
        return name, self._bases[name]

    async def _source(self, prepare: Prepare) -> dict[str, str]:
        """What ``create_sandbox`` starts from."""
        if isinstance(prepare, Commands):
            return await self._source(prepare.source)
        if isinstance(prepare, str):
            kind = (await self._base(prepare))[0].partition(":")[0]
            return {kind: prepare}
        return {"template": (await self._template(prepare))[0]}

    async def _make(self, name: str, task: Task) -> None:
        """Raises ConflictError if another process makes, or has made, the same."""
        client, limits, commands = self._client, task.limits, task.prepare
        source = await self._source(task.prepare)
        await self._make_room()
        allow = list(commands.egress_allow) if isinstance(commands, Commands) else []
        info = await client.create_sandbox(
            name.replace(PREFIX, "rollouts-prepare/"),
            template=source.get("template"),
            snapshot=source.get("snapshot"),
            **({} if "snapshot" in source and limits == Limits() else limit_fields(limits)),
            egress=None if allow else "deny",
            egress_allow=allow or None,
            ephemeral=True,
            wait_s=task.timeouts.prepare_s,
        )
        try:
            if isinstance(commands, Commands):
                await _run_all(client.sandbox(info.id), task.id, commands)
            if allow:
                await client.set_egress(info.id, "deny")
            await put_files(client.sandbox(info.id), task.files, task.user)
            await client.snapshot(info.id, name, LABEL)
            self.built += 1
        finally:
            await client.delete_sandbox(info.id)

    async def _make_room(self) -> None:
        """Delete what is least recently used until what is left fits the budget."""
        found = await self._client.list_snapshots(LABEL)
        in_use = {f"{PREFIX}{digest[:32]}" for digest, users in self._users.items() if users}
        used = {f"{PREFIX}{digest[:32]}": at for digest, at in self._used_at.items()}
        left_mb = sum(kept.exclusive_bytes for kept in found) / (1 << 20)
        for kept in sorted(found, key=lambda kept: (used.get(kept.name or "", 0.0), kept.created_at)):
            if left_mb <= self._budget_mb:
                return
            if kept.name in in_use:
                continue
            # Another run's sandboxes may need it: then it stays.
            with contextlib.suppress(ConflictError, NotFoundError):
                await self._client.delete_snapshot(kept.id)
                left_mb -= kept.exclusive_bytes / (1 << 20)


async def _run_all(sandbox: AsyncSandbox, task: str, commands: Commands) -> None:
    """Raises CommandFailedError, which says which command of the task's it was and what that printed."""
    for number, command in enumerate(commands.run, 1):
        done = await sandbox.shell(command, user=commands.user, timeout_s=commands.timeout_s)
        if done.ok:
            continue
        which = f"its command {number} of {len(commands.run)}, {command[:200]!r},"
        how = "timed out" if done.timed_out else "ran out of memory" if done.oom else ""
        how = how or f"exited with {done.exit_code}"
        printed = (done.stderr.strip() or done.stdout.strip())[-SHOWN:]
        refused = [record.data["name"] for record in await sandbox.audit() if record.kind == "egress.denied"]
        raise CommandFailedError(
            f"task {task!r} cannot be prepared: {which} {how}" + (f":\n{printed}" if printed else ""),
            hint=f"it may not reach {refused[0]}: see egress_allow of Commands" if refused else "",
            result=done,
        )


async def put_files(
    sandbox: AsyncSandbox, files: Mapping[str, str | bytes | Path], user: str | None = None
) -> None:
    """Write a task's files, those given as a ``Path`` with their mode; a directory with all in it."""
    inline = {path: _bytes(data) for path, data in files.items() if not isinstance(data, Path)}
    if inline:
        await sandbox.write_files(inline, user=user)
    for path, local in files.items():
        if isinstance(local, Path) and local.is_dir():
            await sandbox.upload(local, path, user)
        elif isinstance(local, Path):
            data = await asyncio.to_thread(local.read_bytes)
            await sandbox.write_file(path, data, local.stat().st_mode & 0o777, user)


def limit_fields(limits: Limits) -> dict[str, Any]:
    """Limits as ``create_sandbox`` and ``fork`` take them, those that are given."""
    given = {"type": limits.type, "cpus": limits.cpus, "mem_mb": limits.mem_mb, "disk_mb": limits.disk_mb}
    return {name: value for name, value in given.items() if value is not None}


def _recipe(prepare: Prepare) -> Prepare | None:
    """What of ``prepare`` is not in the key of what it stands on already."""
    return prepare if isinstance(prepare, Commands) else None


def _bytes(data: str | bytes | Path) -> bytes:
    assert not isinstance(data, Path)
    return data.encode() if isinstance(data, str) else data
