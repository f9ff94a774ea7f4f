"""The client's verbs that carry snapshots from one yard to another."""

from __future__ import annotations

import os

from forkyard import requests as rq
from forkyard import types as ty
from forkyard.client import _protocol as protocol
from forkyard.client import places
from forkyard.client._protocol import to_thread
from forkyard.client.aio_transport import AsyncTransport
from forkyard.client.places import OnBytes


class AsyncMoving:
    _transport: AsyncTransport

    async def export_snapshot(
        self,
        snapshot: str,
        url: str | os.PathLike[str],
        *,
        memory: bool = True,
        template: bool = True,
        on_progress: OnBytes | None = None,
    ) -> ty.SnapshotInfo:
        """Write a snapshot or checkpoint, memory included, to one file that :meth:`import_snapshot` reads.

        Args:
            url: A path, or any URL that fsspec knows (``pip install 'forkyard[fsspec]'``), reached from
                here and with this process's credentials. It appears when it is whole; what was there
                before is replaced.
            memory: False: the disk only.
            template: False: without the layers of its template, for a yard that has the very same
                template. An import where it is missing fails.
            on_progress: Called with the number of bytes written so far; not always in this thread.

        Raises:
            NotFoundError: no such snapshot, or no such directory. CorruptSnapshotError: it is damaged.
            UnsupportedError: what the URL needs is not installed. AccessDeniedError, CapacityError,
            UnavailableError: as the place says. Nothing of the file is left then.
        """
        request = protocol.made(rq.ExportSnapshot, snapshot=snapshot, memory=memory, template=template)
        info = await self._transport.call("get_snapshot", rq.SnapshotRequest(snapshot=snapshot))
        target = places.Target(url, on_progress)
        try:
            await to_thread(target.open)
            stream = await self._transport.open("export_snapshot", request, partial=True)
            try:
                while pieces := await stream.read():
                    for piece in pieces:
                        target.gather(piece)
                    if target.is_due:
                        await to_thread(target.flush)
            finally:
                await stream.close()
            await to_thread(target.commit)
        except BaseException:
            await to_thread(target.discard)
            raise
        return info

    async def import_snapshot(
        self,
        url: str | os.PathLike[str],
        name: str | None = None,
        *,
        on_progress: OnBytes | None = None,
        request_id: str | None = None,
    ) -> ty.SnapshotInfo:
        """Make a snapshot of what :meth:`export_snapshot` wrote: under a new id, with its labels.

        Import what you trust: who wrote the archive decides what runs in its sandboxes, and its
        memory is read by the engine.

        Args:
            url: As :meth:`export_snapshot`.
            name: Its name here; by default the one that it had, where that is free, else none.
            on_progress: Called with the number of bytes read so far; not always in this thread.

        Raises:
            NotFoundError: there is no such file. CorruptSnapshotError: it is damaged or cut short.
            InvalidRequestError: it is no archive. UnsupportedError: a newer forkyard wrote it, or it
            was made without its template, which is not here. ConflictError: the name is taken.
            CapacityError: it does not fit. Nothing of it is left then.
        """
        request = protocol.made(
            rq.ImportSnapshot, name=name, request_id=request_id or protocol.new_request_id()
        )
        again = places.is_repeatable(url)
        return await self._transport.send(
            "import_snapshot", request, lambda: places.pieces(url, on_progress), repeatable=again
        )
