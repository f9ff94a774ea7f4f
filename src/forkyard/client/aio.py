"""The client. Asynchronous by hand; ``sync.py`` and its neighbours are generated from this."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forkyard import config, errors
from forkyard import requests as rq
from forkyard import types as ty
from forkyard.client import _protocol as protocol
from forkyard.client import holding
from forkyard.client.aio_access import AsyncAccess
from forkyard.client.aio_branching import AsyncBranching
from forkyard.client.aio_files import AsyncFiles
from forkyard.client.aio_moving import AsyncMoving
from forkyard.client.aio_running import AsyncRunning
from forkyard.client.aio_sandbox import AsyncSandbox
from forkyard.client.aio_templates import AsyncTemplates
from forkyard.client.aio_transport import AsyncTransport
from forkyard.client.remote import Remote, ca_of


class AsyncClient(AsyncRunning, AsyncFiles, AsyncBranching, AsyncMoving, AsyncTemplates, AsyncAccess):
    """Talks to this machine's daemon, and starts it when none runs; or to another machine's, over HTTPS.

    It may be shared between threads, pickled (the copy connects again) and used after
    ``os.fork``. It has no time limit and no limit of connections of its own.

    Args:
        url: The URL of another machine's daemon (default ``FORKYARD_URL``). ``#sha256:...`` at its end
            is the fingerprint of the only certificate that is accepted.
        token: What that daemon wants to be shown (default ``FORKYARD_TOKEN``). One that is given here is
            in the pickles of this client; one from the environment or a file is not.
        ca: Such a fingerprint, or a PEM file with the authorities to trust (default: this machine's).
        home: The daemon's home (default ``FORKYARD_HOME``, else ``/var/lib/forkyard`` as root).
        socket: Where it listens (default: in its home).
        start: Start a daemon when none answers.

    Raises:
        InvalidRequestError: the URL is none, or not an https one.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        home: str | os.PathLike[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        start: bool = True,
    ) -> None:
        given = {"home": home and Path(home), "socket": socket and Path(socket)}
        settings = config.load({"url": url, **given})
        self._token = token
        remote = Remote.of(settings.url, token or settings.token, ca_of(ca)) if settings.url else None
        self._transport = AsyncTransport(settings.home, settings.socket, start=start, remote=remote)
        self._leased: dict[str, int] = {}
        self._pools = set()

    def __getstate__(self) -> dict[str, Any]:
        transport = self._transport
        state = {"home": transport.home, "socket": transport.socket, "start": transport.start}
        if transport.remote is not None:
            state |= {"url": transport.remote.url, "ca": transport.remote.trust, "token": self._token}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._token = state.get("token")
        remote = None
        if "url" in state:
            # The token that its owner did not say in the program is looked for again, where it is now.
            remote = Remote.of(state["url"], self._token or config.load().token, state["ca"])
        self._transport = AsyncTransport(
            state["home"], state["socket"], start=state["start"], remote=remote
        )
        self._leased = {}
        self._pools = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the leases taken through this client (its ephemeral sandboxes go), its pools and its
        connections."""
        while self._pools:
            await self._pools.pop().close()
        mine = [sandbox for sandbox, pid in list(self._leased.items()) if pid == os.getpid()]
        self._leased.clear()
        if mine:
            lease = holding.lease_of(self._transport.remote, None)
            # Whether or not a daemon runs now: the next one asks after this process itself.
            start, self._transport.start = self._transport.start, False
            try:
                await self._transport.call(
                    "release_lease",
                    rq.ReleaseLease(lease=lease, sandboxes=mine, request_id=protocol.new_request_id()),
                )
            except errors.UnavailableError:
                pass
            finally:
                self._transport.start = start
                holding.let_go(self._transport.remote, *mine)
        await self._transport.close()

    def sandbox(self, sandbox: str) -> AsyncSandbox:
        """A handle on a sandbox by id or name: every method without its first argument. It asks
        nothing, holds nothing and keeps nothing alive."""
        return AsyncSandbox(self, sandbox)

    def _took(self, lease: rq.Lease, *sandboxes: ty.SandboxInfo) -> None:
        if lease.run is None:
            taken = [info.id for info in sandboxes if info.ephemeral]
            self._leased |= dict.fromkeys(taken, os.getpid())
            holding.keep(self._transport.remote, *taken)

    # The daemon.

    async def version(self) -> ty.VersionInfo:
        """The daemon's version; ``str()`` of it is the number alone."""
        return await self._transport.call("version", rq.Empty())

    async def health(self) -> ty.Health:
        """How the daemon is, and what is wrong with the host."""
        return await self._transport.call("health", rq.Empty())

    async def capacity(self, source: str | None = None) -> ty.Capacity:
        """How many more sandboxes like ``source`` (default: a small one of ``base``) fit."""
        return await self._transport.call("capacity", protocol.made(rq.CapacityRequest, source=source))

    async def shutdown(self, sandboxes: str = "keep") -> None:
        """Stop the daemon; ``keep``, ``stop`` or ``delete`` the sandboxes."""
        request = protocol.made(rq.Shutdown, sandboxes=sandboxes, request_id=protocol.new_request_id())
        await self._transport.call("shutdown", request)

    # Sandboxes.

    async def create_sandbox(
        self,
        name: str | None = None,
        *,
        template: str | None = None,
        image: str | None = None,
        snapshot: str | None = None,
        type: str | None = None,
        cpus: float | None = None,
        cpu_weight: int | None = None,
        mem_mb: int | None = None,
        disk_mb: int | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        egress: str | None = None,
        egress_allow: Sequence[str] | None = None,
        ttl_min: float | None = None,
        auto_stop_min: float | None = None,
        ephemeral: bool = False,
        labels: Mapping[str, str] | None = None,
        engine: str | None = None,
        memory: bool = True,
        wait: bool = True,
        wait_s: float = 0,
        lease: str | None = None,
        request_id: str | None = None,
    ) -> ty.SandboxInfo:
        """Make a sandbox; it is ready for commands when this returns.

        Args:
            name: Unique among live ones; made up if absent.
            template, image, snapshot: What it starts from, one of them; ``base`` if none. An image
                is pulled if it is not here, as :meth:`pull_template` does.
            type: ``small``, ``medium`` or ``large``; explicit cpus, mem_mb and disk_mb beat it.
            cpu_weight: Its share of CPUs that others want too, 1 to 10000; 100 if not given.
            egress: ``deny`` or ``any``; with ``egress_allow`` the hosts that may be reached.
            ttl_min: After so long it is deleted.
            auto_stop_min: After so long without use it is stopped.
            ephemeral: Deleted when it stops, and when this process ends, however it does.
            memory: False: with ``snapshot``, a fresh boot from its disk.
            wait: False: return while it is being created (see ``wait_sandbox``).
            wait_s: Queue so long for capacity.
            lease: ``run:<id>`` ties an ephemeral one to a run instead of this process.

        Raises:
            InvalidRequestError, NotFoundError, ConflictError (the name), CapacityError.
        """
        holder = holding.lease_of(self._transport.remote, lease)
        given = {
            "template": template,
            "image": image,
            "snapshot": snapshot,
            "type": type,
            "cpus": cpus,
            "cpu_weight": cpu_weight,
            "mem_mb": mem_mb,
            "disk_mb": disk_mb,
            "user": user,
            "egress": egress,
            "egress_allow": protocol.rules(egress_allow),
            "ttl_min": ttl_min,
            "auto_stop_min": auto_stop_min,
        }
        given = protocol.env_defaults(given)
        request = protocol.made(
            rq.CreateSandbox,
            name=name,
            **given | await self._image_fields(image),
            env=dict(env or {}),
            ephemeral=ephemeral,
            labels=dict(labels or {}),
            engine=engine,
            memory=memory,
            wait=wait,
            wait_s=wait_s,
            lease=holder,
            request_id=request_id or protocol.new_request_id(),
        )
        info: ty.SandboxInfo = await self._transport.call("create_sandbox", request)
        self._took(holder, info)
        return info

    async def get_sandbox(self, sandbox: str) -> ty.SandboxInfo:
        """Raises NotFoundError."""
        return await self._transport.call("get_sandbox", rq.SandboxRequest(sandbox=sandbox))

    async def list_sandboxes(
        self, labels: Mapping[str, str] | None = None, state: str | None = None
    ) -> list[ty.SandboxInfo]:
        """Those with all of ``labels`` and in ``state``, where given."""
        request = protocol.made(
            rq.ListSandboxes, labels=None if labels is None else dict(labels), state=state
        )
        return await self._transport.call("list_sandboxes", request)

    async def rename_sandbox(
        self, sandbox: str, name: str, *, request_id: str | None = None
    ) -> ty.SandboxInfo:
        """Raises ConflictError if a live sandbox has the name."""
        return await self._change("rename_sandbox", rq.RenameSandbox, request_id, sandbox=sandbox, name=name)

    async def set_ttl(
        self, sandbox: str, ttl_min: float | None = None, *, request_id: str | None = None
    ) -> ty.SandboxInfo:
        """Delete it so many minutes from now; None: never."""
        return await self._change("set_ttl", rq.SetTtl, request_id, sandbox=sandbox, ttl_min=ttl_min)

    async def set_egress(
        self,
        sandbox: str,
        egress: str | None = None,
        egress_allow: Sequence[str] | None = None,
        *,
        request_id: str | None = None,
    ) -> ty.SandboxInfo:
        """Change what it may reach, from now on; connections that are no longer allowed are cut."""
        allow = protocol.rules(egress_allow)
        return await self._change(
            "set_egress", rq.SetEgress, request_id, sandbox=sandbox, egress=egress, egress_allow=allow
        )

    async def expose(self, sandbox: str, port: int, *, request_id: str | None = None) -> str:
        """A URL on the daemon's host that leads to a port inside: HTTP, WebSocket or any TCP.

        It holds through rewinds, stops and starts, until the sandbox is deleted. It is on the loopback of
        the daemon's host: a client on another machine is refused, since there the URL would lead elsewhere.
        """
        if self._transport.remote is not None:
            raise errors.UnsupportedError(
                "expose() listens on the loopback of the daemon's machine, which is another one",
                hint=f"on it: forkyard expose SANDBOX {port}; and from here: ssh -L PORT:127.0.0.1:PORT",
            )
        url: str = await self._change("expose", rq.Expose, request_id, sandbox=sandbox, port=port)
        return url

    async def adopt(
        self, sandbox: str, *, lease: str | None = None, request_id: str | None = None
    ) -> ty.SandboxInfo:
        """From now on this process (or a run) holds its lease."""
        holder = holding.lease_of(self._transport.remote, lease)
        info: ty.SandboxInfo = await self._change(
            "adopt", rq.Adopt, request_id, sandbox=sandbox, lease=holder
        )
        self._took(holder, info)
        return info

    async def wait_sandbox(
        self, sandbox: str, state: str = "running", timeout_s: float | None = None
    ) -> ty.SandboxInfo:
        """Wait until it is in ``state``. Raises DeadlineError after ``timeout_s``, and
        ConflictError or SandboxLostError where it cannot get there any more."""
        request = protocol.made(rq.WaitSandbox, sandbox=sandbox, state=state, timeout_s=timeout_s)
        return await self._transport.call("wait_sandbox", request)

    async def usage(self, sandbox: str) -> ty.Usage:
        """What it uses now."""
        return await self._transport.call("usage", rq.SandboxRequest(sandbox=sandbox))

    async def stop_sandbox(self, sandbox: str, *, request_id: str | None = None) -> ty.SandboxInfo:
        """Keep its memory and disk, and no process."""
        return await self._change("stop_sandbox", rq.StopSandbox, request_id, sandbox=sandbox)

    async def start_sandbox(
        self,
        sandbox: str,
        *,
        memory: bool = True,
        lease: str | None = None,
        request_id: str | None = None,
    ) -> ty.SandboxInfo:
        """Go on where it stopped; with ``memory=False`` on its disk, freshly booted."""
        holder = holding.lease_of(self._transport.remote, lease)
        info: ty.SandboxInfo = await self._change(
            "start_sandbox", rq.StartSandbox, request_id, sandbox=sandbox, lease=holder, memory=memory
        )
        self._took(holder, info)
        return info

    async def delete_sandbox(self, sandbox: str, *, request_id: str | None = None) -> ty.SandboxInfo | None:
        """Delete it; one that is being created too. What is deleted already stays so: None."""
        info: ty.SandboxInfo | None = await self._change(
            "delete_sandbox", rq.DeleteSandbox, request_id, sandbox=sandbox
        )
        if info is not None:
            self._leased.pop(info.id, None)
            holding.let_go(self._transport.remote, info.id)
        return info

    async def delete_sandboxes(
        self, labels: Mapping[str, str], *, request_id: str | None = None
    ) -> list[ty.SandboxInfo]:
        """Delete those with all of ``labels``."""
        return await self._change("delete_sandboxes", rq.DeleteSandboxes, request_id, labels=dict(labels))

    # Snapshots, forks, checkpoints.

    async def snapshot(
        self,
        sandbox: str,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        memory: bool = True,
        *,
        request_id: str | None = None,
    ) -> ty.SnapshotInfo:
        """Keep its disk and memory as of now; it runs on."""
        return await self._change(
            "snapshot",
            rq.TakeSnapshot,
            request_id,
            sandbox=sandbox,
            name=name,
            labels=dict(labels or {}),
            memory=memory,
        )

    async def list_snapshots(self, labels: Mapping[str, str] | None = None) -> list[ty.SnapshotInfo]:
        """Those that were asked for, with all of ``labels``."""
        request = protocol.made(rq.ListSnapshots, labels=None if labels is None else dict(labels))
        return await self._transport.call("list_snapshots", request)

    async def get_snapshot(self, snapshot: str) -> ty.SnapshotInfo:
        """By id or name. Raises NotFoundError."""
        return await self._transport.call("get_snapshot", rq.SnapshotRequest(snapshot=snapshot))

    async def delete_snapshot(self, snapshot: str, *, request_id: str | None = None) -> None:
        """Raises ConflictError, which names them, while sandboxes need it."""
        await self._change("delete_snapshot", rq.DeleteSnapshot, request_id, snapshot=snapshot)

    async def fork(
        self,
        source: str,
        n: int = 1,
        *,
        prefix: str | None = None,
        names: Sequence[str] | None = None,
        memory: bool = True,
        wait_s: float = 0,
        type: str | None = None,
        cpus: float | None = None,
        cpu_weight: int | None = None,
        mem_mb: int | None = None,
        disk_mb: int | None = None,
        env: Mapping[str, str] | None = None,
        egress: str | None = None,
        egress_allow: Sequence[str] | None = None,
        ttl_min: float | None = None,
        auto_stop_min: float | None = None,
        ephemeral: bool | None = None,
        labels: Mapping[str, str] | None = None,
        lease: str | None = None,
        request_id: str | None = None,
    ) -> ty.ForkResult:
        """``n`` running copies of a sandbox, snapshot, checkpoint or template: all or none.

        Args:
            prefix: They are called ``prefix1`` to ``prefixN``; or give ``names``.
            memory: False: fresh boots from the disk.
            wait_s: Queue so long for capacity.
            type ... labels: Where not given, as the source.

        Raises:
            CapacityError: with the figures. ForkError: it was undone; the source is unharmed.
        """
        holder = holding.lease_of(self._transport.remote, lease)
        result: ty.ForkResult = await self._change(
            "fork",
            rq.Fork,
            request_id,
            source=source,
            n=n,
            prefix=prefix,
            names=None if names is None else list(names),
            memory=memory,
            wait_s=wait_s,
            type=type,
            cpus=cpus,
            cpu_weight=cpu_weight,
            mem_mb=mem_mb,
            disk_mb=disk_mb,
            env=dict(env or {}),
            egress=egress,
            egress_allow=protocol.rules(egress_allow),
            ttl_min=ttl_min,
            auto_stop_min=auto_stop_min,
            ephemeral=ephemeral,
            labels=None if labels is None else dict(labels),
            lease=holder,
        )
        self._took(holder, *result.forks)
        return result

    async def checkpoint(
        self,
        sandbox: str,
        label: str | None = None,
        keep_last: int | None = None,
        *,
        memory: bool = True,
        request_id: str | None = None,
    ) -> ty.CheckpointInfo:
        """A snapshot in the sandbox's own line, for ``rewind``; only the ``keep_last`` newest are kept."""
        return await self._change(
            "checkpoint",
            rq.TakeCheckpoint,
            request_id,
            sandbox=sandbox,
            label=label,
            keep_last=keep_last,
            memory=memory,
        )

    async def list_checkpoints(self, sandbox: str) -> list[ty.CheckpointInfo]:
        """Its checkpoints, oldest first."""
        return await self._transport.call("list_checkpoints", rq.SandboxRequest(sandbox=sandbox))

    async def delete_checkpoint(
        self, sandbox: str, checkpoint: str, *, request_id: str | None = None
    ) -> None:
        """By id or label."""
        await self._change(
            "delete_checkpoint", rq.DeleteCheckpoint, request_id, sandbox=sandbox, checkpoint=checkpoint
        )

    async def rewind(
        self, sandbox: str, to: str | None = None, *, memory: bool = True, request_id: str | None = None
    ) -> ty.SandboxInfo:
        """Back to a checkpoint (id or label; default: the newest among the present state's
        ancestors), disk and (unless ``memory=False``) memory; egress, ttl and labels stay."""
        return await self._change("rewind", rq.Rewind, request_id, sandbox=sandbox, to=to, memory=memory)

    async def tree(self, root: str | None = None) -> list[ty.TreeNode]:
        """Who came from what, all of it or below ``root``; parents come first."""
        return await self._transport.call("tree", protocol.made(rq.Tree, root=root))

    # Templates, watching.

    async def list_templates(self) -> list[ty.TemplateInfo]:
        """The templates of this host."""
        return await self._transport.call("list_templates", rq.Empty())

    async def delete_template(self, name: str, *, request_id: str | None = None) -> None:
        """Sandboxes made from it live on; its disk goes with the last of them."""
        await self._change("delete_template", rq.DeleteTemplate, request_id, name=name)

    async def audit(
        self,
        sandbox: str | None = None,
        since: float | None = None,
        *,
        limit: int = 10_000,
        seq: int | None = None,
    ) -> list[ty.AuditRecord]:
        """What was done, to one sandbox or to all, since a time; or the one record ``seq``."""
        return await self._transport.call(
            "audit", protocol.made(rq.Audit, sandbox=sandbox, since=since, limit=limit, seq=seq)
        )

    async def verify_audit(self, head: tuple[int, str] | None = None) -> ty.AuditVerdict:
        """Check the audit log's whole chain, and that the record ``head`` (number and hash, kept
        elsewhere) is still in it."""
        return await self._transport.call("verify_audit", protocol.made(rq.VerifyAudit, head=head))

    async def events(self, sandbox: str | None = None) -> AsyncIterator[ty.Event]:
        """What happens from now on, as it happens. Ends only with the daemon (UnavailableError)."""
        stream = await self._transport.open("events", protocol.made(rq.Events, sandbox=sandbox))
        try:
            while frames := await stream.read():
                for frame in frames:
                    yield protocol.decode("events", frame)
        finally:
            await stream.close()

    async def _change(self, verb: str, kind: Any, request_id: str | None, **fields: Any) -> Any:
        request = protocol.made(kind, **fields, request_id=request_id or protocol.new_request_id())
        return await self._transport.call(verb, request)
