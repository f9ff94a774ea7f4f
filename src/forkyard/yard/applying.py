"""The changes of a diff, made in another sandbox by its agent with a user's rights."""

from __future__ import annotations

import contextlib
import os
import posixpath

from forkyard.errors import AccessDeniedError, ConflictError, InvalidRequestError, NotFoundError
from forkyard.guest import Guest
from forkyard.requests import Apply, Caller
from forkyard.types import Change, FileInfo, Transfer
from forkyard.yard.commands import is_root
from forkyard.yard.files import Files

KINDS = ("file", "dir", "link")


class Applying:
    """The verb ``apply``."""

    def __init__(self, files: Files) -> None:
        self.files = files

    async def apply(self, request: Apply, caller: Caller) -> Transfer:
        """See API: ``apply``. What was deleted goes first, directories get their modes last.

        Raises:
            InvalidRequestError: the diff does not hold all the content it takes. Nothing is changed.
            ConflictError: a directory that the diff knows nothing of is in the way.
            AccessDeniedError: the user may not; what came before is done.
        """
        async with self.files._at(request.sandbox, ".", request.user) as (sandbox, guest, here, user):
            wanted = _chosen(request.changes, request.paths, posixpath.normpath(here))
            missing = [change.path for change in wanted if change.omitted]
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                listed = ", ".join(missing[:5]) + more
                raise InvalidRequestError(
                    f"the diff does not hold the content of {listed}: too large",
                    hint="copy those with download and upload, and pass paths= for the rest",
                )
            for change in wanted:
                if not (0 <= change.uid < 1 << 32 and 0 <= change.gid < 1 << 32):
                    raise InvalidRequestError(
                        f"{change.path}: {change.uid}:{change.gid} is no owner", hint="give numbers of users"
                    )
            run = _Run(guest, user)
            try:
                await run.all(wanted)
            except AccessDeniedError as error:
                raise AccessDeniedError(
                    f"{error.message} (as {user})", hint="pass user='root', or paths= for a part of it"
                ) from None
            self.files._audit(
                "diff.applied", sandbox, caller, here, user, changes=len(wanted), bytes=run.size_bytes
            )
            return Transfer(files=run.done, size_bytes=run.size_bytes, skipped=run.skipped)


class _Run:
    def __init__(self, guest: Guest, user: str) -> None:
        self.guest = guest
        self.user = user
        self.root = is_root(user)
        self.done = 0
        self.size_bytes = 0
        self.skipped: list[str] = []

    async def all(self, changes: list[Change]) -> None:
        in_order = sorted(changes, key=_name)
        for change in reversed(in_order):  # what is in a directory before the directory
            if change.mode is None:
                await self._delete(change)
        here = [change for change in in_order if change.mode is not None]
        for change in here:
            if change.kind in KINDS:
                await self._put(change)
            else:
                self.skipped.append(change.path)
        for change in reversed(here):
            if change.kind == "dir":
                await self._finish(change)

    async def _delete(self, change: Change) -> None:
        try:
            await self.guest.remove(_name(change), user=self.user)
            self.done += 1
        except NotFoundError:
            pass
        except ConflictError:
            self.skipped.append(change.path)  # a directory that holds more than the diff knows

    async def _put(self, change: Change) -> None:
        there = await self._clear(change)
        name = _name(change)
        if change.kind == "dir":
            if there is None:
                # Whatever its mode will be, it has to be filled first.
                await self.guest.mkdir(name, mode=0o755, user=self.user)
            self.done += 1
            return
        if change.kind == "link":
            if there is not None:
                await self.guest.remove(name, user=self.user)
            target = change.raw_target or (change.target or "").encode()
            await self._make_parent(name)
            await self.guest.symlink(name, target, user=self.user)
            await self._own(change)
        elif change.data is not None:
            await self.guest.write_file(name, change.data, mode=change.mode, user=self.user)
            self.size_bytes += len(change.data)
            await self._finish(change, chmod=False)
        else:
            await self._finish(change)
        self.done += 1

    async def _clear(self, change: Change) -> FileInfo | None:
        """What is at the path, if it is of the kind that will be; anything else is removed."""
        name = _name(change)
        try:
            there = await self.guest.stat(name, user=self.user, follow=False)
        except NotFoundError:
            return None
        if there.type == change.kind:
            return there
        if there.type == "dir" and change.old_kind != "dir":
            raise ConflictError(
                f"{change.path} is a directory there", hint="remove it first, or leave it out with paths="
            )
        await self.guest.remove(name, user=self.user, recursive=True)
        return None

    async def _make_parent(self, name: bytes) -> None:
        parent = posixpath.dirname(name)
        with contextlib.suppress(ConflictError):
            await self.guest.mkdir(parent, mode=0o755, user=self.user)

    async def _own(self, change: Change) -> None:
        if self.root:
            await self.guest.chown(_name(change), change.uid, change.gid, user=self.user)

    async def _finish(self, change: Change, *, chmod: bool = True) -> None:
        """Owner first: changing it takes set-user-id bits away."""
        await self._own(change)
        if change.mode is not None and (chmod or (self.root and change.mode & 0o6000)):
            await self.guest.chmod(_name(change), change.mode, user=self.user)


def _name(change: Change) -> bytes:
    return change.raw_path or change.path.encode("utf-8", "surrogateescape")


def _chosen(changes: list[Change], paths: list[str] | None, here: str) -> list[Change]:
    for change in changes:
        parts = _name(change).split(b"/")
        if parts[0] or len(parts) < 2 or not all(parts[1:]) or b".." in parts or b"." in parts:
            raise InvalidRequestError(f"{change.path[:100]!r} is no full path")
    if paths is None:
        return list(changes)
    tops = [os.fsencode(posixpath.normpath(posixpath.join(here, path))).rstrip(b"/") for path in paths]
    return [
        change
        for change in changes
        if any(_name(change) == top or _name(change).startswith(top + b"/") for top in tops)
    ]
