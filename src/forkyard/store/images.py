"""Memory images: directories that appear whole, with a manifest that says what belongs in them.

An image is written into ``<name>.tmp`` and published by one rename, its manifest inside. It is
*settled* a little later, behind everybody's back: flushed to disk, its checksums added. An image
that was not settled when the host went down is refused, since nobody can say what of it
arrived. Short-lived images (a fork's) are mostly gone before, which spares the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from forkyard.errors import CorruptSnapshotError, InternalError, NotFoundError, UnsupportedError
from forkyard.host import files, process
from forkyard.host.failpoint import failpoint
from forkyard.wire import VERSION as WIRE_VERSION

__all__ = ["Images", "Manifest"]

FORMAT = 1
MANIFEST = "manifest.json"
_TMP = ".tmp"
_GONE = f".gone{_TMP}"
_SETTLE_AFTER_S = 5.0
_NICE = 15


class FileEntry(msgspec.Struct, frozen=True):
    """``sha256`` is None until the image is settled."""

    size: int
    sha256: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an image consists of, what made it, and what can restore it.

    ``boot_id`` is the boot in which it was written, for as long as it is not settled.
    """

    format: int = FORMAT
    fingerprint: str
    agent: str
    wire: int
    layers: list[str]
    created_at: float
    bytes: int
    boot_id: str | None = None
    files: dict[str, FileEntry]

    @property
    def settled(self) -> bool:
        return self.boot_id is None


class Images:
    """The images in one directory. Names are ids that the caller made; methods that are not
    async take microseconds, but for :meth:`delete`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests: dict[str, Manifest] = {}
        self._settling: dict[str, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._due: dict[str, float] = {}
        # Written or read whole in this life of the daemon: {name: the times its files were written}.
        self._sound: dict[str, list[int]] = {}

    def start(self, tg: process.TaskStarter) -> None:
        """Remove what a crash left half-written, and settle images in the background until cancelled."""
        gone = []
        for path in list(self.root.iterdir()) if self.root.is_dir() else []:
            if path.name.endswith(_TMP):
                # out of the way of whoever writes an image by that name from now on
                gone.append(path.with_name(f".{os.urandom(8).hex()}{_GONE}"))
                os.rename(path, gone[-1])
        tg.create_task(self._settle_all(gone), name="images")

    def _dir(self, name: str) -> Path:
        if not name or "/" in name or name.startswith(".") or name.endswith(_TMP):
            raise InternalError(f"not a name for an image: {name!r}")
        return self.root / name

    # -- what there is

    def path(self, name: str) -> Path:
        """The directory of an image."""
        return self._dir(name)

    def exists(self, name: str) -> bool:
        """Whether the image was published."""
        return bool(name) and self._dir(name).is_dir()

    def names(self) -> list[str]:
        """All published images."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.endswith(_TMP))
        return []

    def manifest(self, name: str) -> Manifest:
        """What an image consists of.

        Raises:
            NotFoundError: there is no such image. CorruptSnapshotError: its manifest is damaged.
            UnsupportedError: a newer forkyard wrote it.
        """
        known = self._manifests.get(name)
        if known is not None:
            return known
        directory = self._dir(name)
        try:
            raw = (directory / MANIFEST).read_bytes()
        except FileNotFoundError:
            if directory.is_dir():
                raise CorruptSnapshotError(f"image {name} has no {MANIFEST}", hint="delete it") from None
            raise NotFoundError(f"no memory image {name}") from None
        try:
            if msgspec.json.decode(raw, type=_Format).format > FORMAT:
                raise UnsupportedError(
                    f"a newer forkyard wrote image {name}",
                    hint="upgrade forkyard, or start the snapshot with memory=False: its disk is whole",
                )
            known = msgspec.json.decode(raw, type=Manifest)
        except msgspec.MsgspecError as error:
            raise CorruptSnapshotError(
                f"{MANIFEST} of image {name} is damaged: {error}", hint="delete the snapshot"
            ) from error
        self._manifests[name] = known
        return known

    def size(self, name: str) -> int:
        """Bytes of memory in the image, as it lies on disk."""
        return self.manifest(name).bytes

    # -- making

    def temporary(self, name: str) -> Path:
        """Where to write the new image ``name``: a directory that does not exist yet."""
        path = self._dir(name).with_name(f"{name}{_TMP}")
        files.rmtree(path)  # a crash's
        self.root.mkdir(mode=0o700, exist_ok=True)
        return path

    async def publish(self, name: str, *, fingerprint: str, agent: str, layers: list[str]) -> Manifest:
        """Make what was written to :meth:`temporary` the image ``name``, or nothing.

        Args:
            fingerprint: What can restore it (the engine's word).
            agent: Digest of the agent inside it.
            layers: The disk that belongs to it, top first.
        """
        directory, temporary = self._dir(name), self._dir(name).with_name(f"{name}{_TMP}")
        entries: dict[str, FileEntry] = {}
        blocks = 0
        for path in sorted(temporary.iterdir()):
            info = path.stat()
            entries[path.name] = FileEntry(info.st_size)
            blocks += info.st_blocks * 512
        manifest = Manifest(
            fingerprint=fingerprint,
            agent=agent,
            wire=WIRE_VERSION,
            layers=layers,
            created_at=time.time(),
            bytes=blocks or sum(entry.size for entry in entries.values()),
            boot_id=process.boot_id(),
            files=entries,
        )
        files.write_atomic(temporary / MANIFEST, msgspec.json.encode(manifest), durable=False)
        await failpoint("image.manifest")
        os.rename(temporary, directory)
        self._manifests[name] = manifest
        self._sound[name] = _written(directory, manifest)
        self._due[name] = time.monotonic() + _SETTLE_AFTER_S
        self._wake.set()
        return manifest

    async def link(self, name: str, new: str) -> Manifest:
        """Make ``new`` an image with the content of ``name``, sharing its files."""
        manifest = self.manifest(name)
        source, temporary = self._dir(name), self.temporary(new)
        temporary.mkdir(mode=0o700)
        try:
            for entry in manifest.files:
                os.link(source / entry, temporary / entry)
            await failpoint("image.linked")
            files.write_atomic(temporary / MANIFEST, msgspec.json.encode(manifest), durable=False)
            os.rename(temporary, self._dir(new))
        except BaseException:
            files.rmtree(temporary)
            raise
        self._manifests[new] = manifest
        if name in self._sound:
            self._sound[new] = self._sound[name]
        if not manifest.settled:
            self._due[new] = time.monotonic() + _SETTLE_AFTER_S
            self._wake.set()
        return manifest

    # -- settling

    async def settled(self, name: str) -> None:
        """Wait until an image will survive a power cut, hurrying that; needs :meth:`start`."""
        if self.manifest(name).settled:
            return
        event = self._settling.setdefault(name, asyncio.Event())
        self._due[name] = 0.0
        self._wake.set()
        await event.wait()

    async def _settle_all(self, gone: list[Path]) -> None:
        pool = ThreadPoolExecutor(1, "images", initializer=_give_way)
        try:
            await self._settle_each(pool, gone)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _settle_each(self, pool: ThreadPoolExecutor, gone: list[Path]) -> None:
        loop = asyncio.get_running_loop()
        for path in gone:
            await loop.run_in_executor(pool, files.rmtree, path)
        for found in await asyncio.to_thread(self.names):
            with contextlib.suppress(NotFoundError, CorruptSnapshotError, UnsupportedError):
                manifest = self.manifest(found)
                if not manifest.settled and manifest.boot_id == process.boot_id():
                    self._due.setdefault(found, time.monotonic() + _SETTLE_AFTER_S)
        while True:
            self._wake.clear()
            due = min(((at, name) for name, at in self._due.items()), default=None)
            wait = None if due is None else due[0] - time.monotonic()
            if due is None or (wait is not None and wait > 0):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
                continue
            name = due[1]
            del self._due[name]
            stop = threading.Event()
            try:
                settled = await loop.run_in_executor(pool, self._settle, name, stop)
                if settled is not None and name in self._manifests:
                    self._manifests[name] = settled
            except asyncio.CancelledError:
                stop.set()
                raise
            finally:
                self._tell(name)

    def _tell(self, name: str) -> None:
        event = self._settling.pop(name, None)
        if event is not None:
            event.set()

    def _settle(self, name: str, stop: threading.Event) -> Manifest | None:
        """Flush an image, add its checksums; None if it went away meanwhile, or was written into."""
        try:
            manifest, directory = self.manifest(name), self._dir(name)
            if manifest.settled:
                return manifest
            sound = self._sound.get(name)
            entries = {}
            for entry, known in manifest.files.items():
                _flush(directory / entry)
                digest = files.sha256_file(directory / entry, cancelled=stop.is_set)
                entries[entry] = FileEntry(known.size, digest)
            if self._manifests.get(name) is not manifest:  # replaced meanwhile
                return None
            if sound is not None and sound != _written(directory, manifest):
                return None  # a checksum would vouch for the damage
            settled = msgspec.structs.replace(manifest, files=entries, boot_id=None)
            files.write_atomic(directory / MANIFEST, msgspec.json.encode(settled))
            files.fsync_dir(self.root)
            return settled
        except (OSError, NotFoundError, CorruptSnapshotError):  # deleted, or cancelled
            return None

    # -- checking

    def verify_quick(self, name: str) -> Manifest:
        """Check that every file is there in its size.

        Raises:
            CorruptSnapshotError: one is not; the message names it.
        """
        manifest, directory = self.manifest(name), self._dir(name)
        if not manifest.settled and manifest.boot_id != process.boot_id():
            raise CorruptSnapshotError(
                f"image {name} was not yet on disk when the host went down",
                hint="start the snapshot with memory=False: its disk is whole",
            )
        for entry, known in manifest.files.items():
            try:
                size = os.stat(directory / entry).st_size
            except FileNotFoundError:
                raise _damaged(name, f"{entry} is missing") from None
            if size != known.size:
                raise _damaged(name, f"{entry} has {size} bytes, not {known.size}")
        return manifest

    async def verify(self, name: str) -> None:
        """Check an image before it is used: its content once in the life of a daemon that did not
        write it (a flipped bit in the guest's memory would otherwise be restored) and whenever a
        file was written since, its files' presence and sizes always.

        Raises:
            CorruptSnapshotError: see :meth:`verify_quick`.
        """
        manifest = self.verify_quick(name)
        written = _written(self._dir(name), manifest)
        sound = self._sound.get(name)
        if sound != written:
            if sound is not None and not manifest.settled:
                raise _damaged(name, "it was written into")
            await self.verify_full(name)
            self._sound[name] = written

    async def verify_full(self, name: str) -> Manifest:
        """Check every file's content as well, as far as there are checksums.

        Raises:
            CorruptSnapshotError: see :meth:`verify_quick`.
        """
        manifest, directory = self.verify_quick(name), self._dir(name)
        stop = threading.Event()
        try:
            for entry, known in manifest.files.items():
                if known.sha256 is None:
                    continue
                digest = await asyncio.to_thread(files.sha256_file, directory / entry, cancelled=stop.is_set)
                if digest != known.sha256:
                    raise _damaged(name, f"{entry} is not what was written")
        except asyncio.CancelledError:
            stop.set()
            raise
        return manifest

    # -- removing

    def delete(self, name: str) -> None:
        """Remove an image; its name goes first, at once. Idempotent."""
        gone = self._unname(name)
        if gone is not None:
            files.rmtree(gone)

    async def delete_async(self, name: str) -> None:
        """As :meth:`delete`, with the files removed in a thread."""
        gone = self._unname(name)
        if gone is not None:
            await asyncio.to_thread(files.rmtree, gone)

    def _unname(self, name: str) -> Path | None:
        self._manifests.pop(name, None)
        self._sound.pop(name, None)
        self._due.pop(name, None)
        self._tell(name)
        directory = self._dir(name)
        gone = directory.with_name(f".{os.urandom(8).hex()}{_GONE}")
        try:
            os.rename(directory, gone)
        except FileNotFoundError:
            return None
        return gone


def _give_way() -> None:
    """Let this thread (on Linux, it alone) run when nobody else wants the CPU."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Format(msgspec.Struct):
    format: int


def _damaged(name: str, why: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"the memory image {name} is damaged: {why}",
        hint="start the snapshot with memory=False: its disk is whole",
    )


def _written(directory: Path, manifest: Manifest) -> list[int]:
    """When each file was last written, in nanoseconds. (The time of its inode would change with a link.)"""
    return [os.stat(directory / entry).st_mtime_ns for entry in manifest.files]


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
