"""What of a store is damaged, what depends on it, and making the rest usable again.

Looked at from outside: no daemon is needed, and one that runs is not disturbed. Repairing wants
the home for itself. Nothing is guessed: what cannot be used is taken out of the records, and what
can be used without it (a snapshot's disk without its memory) stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from forkyard.errors import (
    CorruptSnapshotError,
    ForkyardError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from forkyard.store.catalog import Catalog
from forkyard.store.disks import Stray
from forkyard.store.images import Images
from forkyard.store.schema import MIGRATIONS
from forkyard.yard.model import SandboxDoc, SnapshotDoc
from forkyard.yard.templates import TemplateDoc

__all__ = ["Damage", "Disks", "StoreCheck"]

T = TypeVar("T")
_READ = 1 << 20
_ONE = {"sandboxes": "sandbox", "snapshots": "snapshot"}


class Disks(Protocol):
    """The part of :class:`forkyard.store.disks.DiskStore` that is needed here."""

    def layer_path(self, layer: str) -> Path: ...
    def image_of(self, layer: str) -> Path | None: ...
    def stray(self, known_boxes: Iterable[str], known_layers: Iterable[str]) -> list[Stray]: ...
    async def drop_layer(self, layer: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it must be.

    Attributes:
        needed_by: Names of the sandboxes, snapshots and templates that depend on it.
        repair: What :meth:`StoreCheck.repair` does about it; empty if nothing.
    """

    kind: Literal["catalog", "record", "image", "layer", "template", "newer"]
    name: str
    why: str
    needed_by: tuple[str, ...] = ()
    repair: str = ""


@dataclass(slots=True)
class _Records:
    sandboxes: list[SandboxDoc] = field(default_factory=list)
    snapshots: list[SnapshotDoc] = field(default_factory=list)
    templates: list[TemplateDoc] = field(default_factory=list)
    # Table and id of rows that cannot be decoded.
    unreadable: list[tuple[str, str]] = field(default_factory=list)


class StoreCheck:
    """One look at the store of ``home``; ``disks`` is open."""

    def __init__(self, home: Path, disks: Disks) -> None:
        self.home = home
        self.disks = disks
        self.images = Images(home / "images")
        self.records = _Records()
        self.damages: list[Damage] = []

    @property
    def _catalog(self) -> Path:
        return self.home / "catalog.db"

    async def run(self) -> list[Damage]:
        """Everything that is damaged. Reads all of it: seconds for each GiB."""
        self.damages = []
        self.records = _Records()
        await asyncio.to_thread(self._check_catalog)
        await asyncio.to_thread(self._read_templates)
        await self._check_images()
        await asyncio.to_thread(self._check_layers)
        return self.damages

    # -- looking

    def _check_catalog(self) -> None:
        if not self._catalog.exists():
            return
        try:
            with contextlib.closing(_read_only(self._catalog)) as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version > len(MIGRATIONS):
                    why = f"a newer forkyard wrote it (schema {version}, this knows {len(MIGRATIONS)})"
                    self.damages.append(Damage("newer", self._catalog.name, why))
                    return
                said = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
                if said != ["ok"]:
                    self._damaged_catalog("; ".join(said))
                self._read_rows(connection)
        except sqlite3.DatabaseError as error:
            self._damaged_catalog(str(error))

    def _damaged_catalog(self, why: str) -> None:
        if not any(damage.kind == "catalog" for damage in self.damages):
            repair = "its readable rows go into a new one, the old one is kept beside it"
            self.damages.append(Damage("catalog", self._catalog.name, why, (), repair))

    def _read_rows(self, connection: sqlite3.Connection) -> None:
        self._decode(connection, "sandboxes WHERE state <> 'deleted'", SandboxDoc, self.records.sandboxes)
        self._decode(connection, "snapshots", SnapshotDoc, self.records.snapshots)

    def _decode(self, connection: sqlite3.Connection, of: str, type_: type[T], into: list[T]) -> None:
        table = of.split()[0]
        for id_, doc in connection.execute(f"SELECT id, doc FROM {of}"):
            try:
                into.append(msgspec.json.decode(doc, type=type_))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self.records.unreadable.append((table, id_))
                what = f"{_ONE[table]} {id_}"
                self.damages.append(Damage("record", what, str(error), (what,), "the record is removed"))

    def _read_templates(self) -> None:
        for path in sorted((self.home / "templates").glob("*.json")):
            try:
                self.records.templates.append(msgspec.json.decode(path.read_bytes(), type=TemplateDoc))
            except (OSError, msgspec.MsgspecError) as error:
                repair = f"it becomes {path.name}.damaged"
                self.damages.append(Damage("template", path.stem, str(error), (path.stem,), repair))

    async def _check_images(self) -> None:
        needed: dict[str, list[str]] = {}
        for doc in self.records.snapshots:
            if doc.image is not None:
                needed.setdefault(doc.image, []).extend(self._users(doc))
        for name in sorted({*needed, *self.images.names()}):
            try:
                await self.images.verify_full(name)
            except UnsupportedError as error:
                self.damages.append(Damage("newer", name, error.message, tuple(needed.get(name, ()))))
            except (CorruptSnapshotError, NotFoundError, OSError) as error:
                why = error.message if isinstance(error, ForkyardError) else str(error)
                repair = "the image is removed, the snapshot's disk stays"
                if name not in needed:
                    repair = "the image is removed: it is made anew when it is needed"
                self.damages.append(Damage("image", name, why, tuple(needed.get(name, ())), repair))

    def _users(self, doc: SnapshotDoc) -> Iterator[str]:
        """A snapshot, and the sandboxes that would be started from it."""
        yield f"{doc.kind} {doc.name or doc.id}"
        for sandbox in self.records.sandboxes:
            if doc.id in (sandbox.resume, sandbox.checkpoint):
                yield f"sandbox {sandbox.name}"

    def _check_layers(self) -> None:
        needed: dict[str, list[str]] = {}
        for holder, layers in self._holders():
            for layer in dict.fromkeys(layers):
                needed.setdefault(layer, []).append(holder)
        for layer, holders in sorted(needed.items()):
            why = self._wrong_with(layer)
            if why is not None:
                repair = "what needs it is taken out of the records"
                self.damages.append(Damage("layer", layer, why, tuple(holders), repair))

    def _holders(self) -> Iterator[tuple[str, list[str]]]:
        for sandbox in self.records.sandboxes:
            yield f"sandbox {sandbox.name}", sandbox.held()
        for snapshot in self.records.snapshots:
            yield f"{snapshot.kind} {snapshot.name or snapshot.id}", snapshot.layers
        for template in self.records.templates:
            yield f"template {template.name}", template.layers

    def _wrong_with(self, layer: str) -> str | None:
        """What is wrong with a layer: it is gone, or something in it cannot be read."""
        try:
            image = self.disks.image_of(layer)
            top = self.disks.layer_path(layer) if image is None else None
        except (NotFoundError, CorruptSnapshotError) as error:
            return error.message
        try:
            if top is not None:
                _read_tree(top)
            elif image is not None:
                _read_file(image)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None

    # -- repairing

    async def repair(self) -> None:
        """Do what each damage of :meth:`run` says. The home's lock is held.

        Raises:
            UnavailableError: a newer forkyard wrote the store: it is left alone.
        """
        newer = [damage for damage in self.damages if damage.kind == "newer"]
        if any(damage.name == self._catalog.name for damage in newer):
            raise UnavailableError(f"{self._catalog}: {newer[0].why}", hint="upgrade forkyard")
        if any(damage.kind == "catalog" for damage in self.damages):
            await self._new_catalog()
        for damage in self.damages:
            if damage.kind == "template":
                path = self.home / "templates" / f"{damage.name}.json"
                path.rename(path.with_name(f"{path.name}.damaged"))
        lost = {damage.name for damage in self.damages if damage.kind == "layer"}
        images = {damage.name for damage in self.damages if damage.kind == "image"}
        if self._catalog.exists():
            catalog = await Catalog.open(self._catalog, check=False)
            try:
                await self._mend(catalog, lost, images)
            finally:
                await catalog.close()
        for name in images:
            await self.images.delete_async(name)
        for template in self.records.templates:
            if lost & set(template.layers):
                for path in (self.home / "templates").glob("*.json"):
                    with contextlib.suppress(msgspec.MsgspecError):
                        if msgspec.json.decode(path.read_bytes(), type=TemplateDoc).name == template.name:
                            path.rename(path.with_name(f"{path.name}.damaged"))

    async def _mend(self, catalog: Catalog, lost: set[str], images: set[str]) -> None:
        """Take what cannot be used out of the records."""
        unreadable = self.records.unreadable
        gone = {doc.id: doc for doc in self.records.snapshots if lost & set(doc.layers)}

        def ancestor(id_: str | None) -> str | None:
            """The newest one that is left."""
            while id_ in gone:
                id_ = gone[id_].parent
            return id_

        kept = [doc for doc in self.records.snapshots if doc.id not in gone]
        live = {sandbox.id for sandbox in self.records.sandboxes}
        for doc in kept:
            doc.parent = ancestor(doc.parent)
            if doc.kind in ("checkpoint", "stop") and doc.sandbox not in live:
                # All that is left of a sandbox whose record could not be read.
                doc.labels = {**doc.labels, "recovered": doc.sandbox}
                doc.kind, doc.name = "snapshot", None
            if doc.image in images:
                doc.size_bytes -= doc.memory_bytes
                doc.image, doc.memory_bytes, doc.verified = None, 0, False
        for sandbox in self.records.sandboxes:
            sandbox.checkpoint = ancestor(sandbox.checkpoint)
            if sandbox.state == "running":
                continue  # what it has open, it has
            why = "the layers under its disk are damaged" if lost & set(sandbox.held()) else None
            if sandbox.resume in gone:
                sandbox.resume, why = None, "what it was to start from is damaged"
            sandbox.layers = [layer for layer in sandbox.layers if layer not in lost]
            sandbox.origin = [layer for layer in sandbox.origin if layer not in lost]
            if why is not None and sandbox.resume is None:
                sandbox.state, sandbox.napping = "failed", False
                sandbox.failure = {"code": CorruptSnapshotError.code, "message": why, "cause": "host"}

        def remove(connection: sqlite3.Connection) -> None:
            for table, id_ in unreadable:
                connection.execute(f"DELETE FROM {table} WHERE id = ?", (id_,))

        await catalog.tx(remove)
        await catalog.save(sandboxes=self.records.sandboxes, snapshots=kept, gone=list(gone))

    async def _new_catalog(self) -> None:
        """A catalog of what can be read of the damaged one, in its place."""
        fresh = self._catalog.with_name("catalog.new")
        _forget(fresh)
        kept = await asyncio.to_thread(_salvage, self._catalog)
        catalog = await Catalog.open(fresh)

        def fill(connection: sqlite3.Connection) -> None:
            for table, rows in kept.items():
                for row in rows:
                    names, marks = ", ".join(row), ", ".join("?" * len(row))
                    with contextlib.suppress(sqlite3.IntegrityError):
                        connection.execute(
                            f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values())
                        )

        try:
            await catalog.tx(fill)
        finally:
            await catalog.close()
        old = self._catalog.with_name(f"catalog.damaged-{int(time.time())}")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self._catalog}{suffix}", f"{old}{suffix}")
        os.rename(fresh, self._catalog)
        self.records = _Records(templates=self.records.templates)
        with contextlib.closing(_read_only(self._catalog)) as connection:
            self._read_rows(connection)


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def _forget(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _salvage(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table that can be read, from its beginning on and from its end back."""
    found: dict[str, list[dict[str, Any]]] = {"sandboxes": [], "snapshots": [], "replies": []}
    for table, rows in found.items():
        seen: set[Any] = set()
        for order in ("ASC", "DESC"):
            with (
                contextlib.suppress(sqlite3.DatabaseError),
                contextlib.closing(_read_only(path)) as connection,
            ):
                connection.row_factory = sqlite3.Row
                key = "request_id" if table == "replies" else "id"
                for row in connection.execute(f"SELECT * FROM {table} ORDER BY {key} {order}"):
                    if row[key] not in seen:
                        seen.add(row[key])
                        rows.append(dict(row))
    return found


def _read_tree(top: Path) -> None:
    """Read every file below ``top``, so that a bad block or checksum shows.

    Raises:
        OSError: the first that cannot be read.
    """

    def failed(error: OSError) -> None:
        raise error

    for directory, _, names in os.walk(top, onerror=failed):
        for name in names:
            path = os.path.join(directory, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                _read_file(path)


def _read_file(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME)
    try:
        while os.read(fd, _READ):
            pass
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(fd)
