"""The file that a snapshot travels in: a manifest, then each part in pieces, each with a checksum.

::

    "fysnap\\r\\n"  format (4 bytes)  record*
    record: kind (1)  length (4)  CRC-32 of kind and payload (4)  payload

    M   the :class:`Manifest`, in JSON; first
    D   up to 1 MiB of the present part, one zstd frame
    E   the part is complete
    F   the archive is complete; last

Numbers are big-endian. Parts come in the manifest's order, which has the SHA-256 of each. Whoever
reads holds one piece at a time, and believes nothing before it is checked. The checksums find damage;
who wrote an archive they do not say.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from forkyard.errors import CorruptSnapshotError, InvalidRequestError, UnsupportedError
from forkyard.host.threads import in_thread
from forkyard.requests import Labels
from forkyard.store.images import MANIFEST
from forkyard.store.layerstream import BLOCK

__all__ = ["DISK_FORMAT", "FORMAT", "Manifest", "Part", "Reader", "write"]

MAGIC = b"fysnap\r\n"
# What an archive says that needs no more: one with a disk needs the second.
FORMAT, DISK_FORMAT = 1, 2
_LEVEL = 1
_MAX_MANIFEST = 8 << 20
_MAX_PIECE = BLOCK + (64 << 10)
_HEAD = 9
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_BYTES = 1 << 50
_WINDOW_LOG = 21

T = TypeVar("T")


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One part: the guest's ``agent``, a ``layer`` (see :mod:`forkyard.store.layerstream`), a file of the
    memory ``image``, or in the layers' place the ``disk`` that a machine with its own kernel has mounted.

    ``bytes`` and ``sha256`` are of its content; ``template``: it came from a template; ``present``:
    it is in this archive, and not only named; ``stored``: of a disk, the bytes that are not empty.
    """

    kind: Literal["agent", "layer", "image", "disk"]
    name: str = ""
    bytes: int
    sha256: str
    template: bool = False
    present: bool = True
    stored: int = 0


class Manifest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an archive holds: the snapshot's own record, and its parts (layers from the lowest up)."""

    id: str
    name: str | None = None
    sandbox: str
    labels: Labels = {}
    engine: str
    fingerprint: str = ""
    agent: str = ""
    memory_bytes: int = 0
    quiesced: bool = True
    created_at: float
    inherits: dict[str, Any]
    parts: list[Part]

    @property
    def memory(self) -> bool:
        return any(part.kind == "image" for part in self.parts)

    @property
    def disk(self) -> bool:
        return any(part.kind == "disk" for part in self.parts)


def _zstd() -> Any:
    """The compressor: in the standard library from Python 3.14 on."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UnsupportedError(
            "snapshots cannot be exported and imported here: the daemon's Python has no zstd",
            hint="pip install 'forkyard[host]' where the daemon runs, then: forkyard daemon restart",
        ) from None
    return zstd


# -- out


def _record(kind: bytes, payload: bytes) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(kind))
    return b"".join((kind, len(payload).to_bytes(4, "big"), crc.to_bytes(4, "big"), payload))


def write(manifest: Manifest, content: Callable[[Part], Iterator[bytes]]) -> Iterator[bytes]:
    """The archive, piece by piece. Blocks.

    Args:
        content: What a part consists of, in pieces of up to :data:`BLOCK` bytes.

    Raises:
        CorruptSnapshotError: a part is not what the manifest says.
    """
    compress = _zstd().compress
    yield MAGIC + (DISK_FORMAT if manifest.disk else FORMAT).to_bytes(4, "big")
    yield _record(b"M", msgspec.json.encode(manifest))
    for part in manifest.parts:
        if not part.present:
            continue
        digest = hashlib.sha256()
        for piece in content(part):
            digest.update(piece)
            yield _record(b"D", compress(piece, _LEVEL))
        if digest.hexdigest() != part.sha256:
            raise CorruptSnapshotError(
                f"snapshot {manifest.id} cannot be exported: its {part.kind} {part.name} is not as written",
                hint="forkyard doctor --store says what is damaged",
            )
        yield _record(b"E", b"")
    yield _record(b"F", b"")


# -- in


class Reader:
    """Takes an archive apart as it comes: :meth:`manifest` first, then :meth:`content` or :meth:`skip` of
    each present part in order, then :meth:`end`.

    Raises (every method):
        CorruptSnapshotError: it is damaged or ends early. InvalidRequestError: it is no archive,
        or one that nothing here would write. UnsupportedError: a newer forkyard wrote it.
        Whatever ``chunks`` raises.
    """

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = bytearray()

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                self._buffer += await anext(self._chunks)
            except StopAsyncIteration:
                raise CorruptSnapshotError(
                    "the archive ends early: it was not written or not read whole", hint="export it again"
                ) from None
        data = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return data

    async def _next(self, longest: int) -> tuple[bytes, bytes]:
        head = await self._exactly(_HEAD)
        kind, length, crc = head[:1], int.from_bytes(head[1:5], "big"), int.from_bytes(head[5:], "big")
        if kind not in b"MDEF" or length > longest:
            raise _damaged("a record's head makes no sense")
        payload = await self._exactly(length)
        if zlib.crc32(payload, zlib.crc32(kind)) != crc:
            raise _damaged("a checksum is wrong")
        return kind, payload

    async def manifest(self) -> Manifest:
        """What it holds, checked for sense."""
        head = await self._exactly(len(MAGIC) + 4)
        if not head.startswith(MAGIC):
            raise InvalidRequestError(
                "this is no archive of a snapshot", hint="forkyard export SNAPSHOT URL writes one"
            )
        version = int.from_bytes(head[len(MAGIC) :], "big")
        if version not in (FORMAT, DISK_FORMAT):
            raise UnsupportedError(
                f"the archive is of format {version}, this forkyard reads up to {DISK_FORMAT}",
                hint="upgrade forkyard",
            )
        kind, payload = await self._next(_MAX_MANIFEST)
        if kind != b"M":
            raise _damaged("it does not begin with its manifest")
        try:
            manifest = msgspec.json.decode(payload, type=Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"the archive's manifest is malformed: {error}") from None
        _check_parts(manifest)
        return manifest

    async def content(self, part: Part) -> AsyncIterator[bytes]:
        """A part's bytes, in pieces of up to :data:`BLOCK`. They are what was written only when it ends."""
        digest, left = hashlib.sha256(), part.bytes
        while (payload := await self._piece()) is not None:
            piece = await in_thread(_decompress, payload)
            left -= len(piece)
            if left < 0:
                raise InvalidRequestError(f"the archive's {part.kind} is longer than its manifest says")
            digest.update(piece)
            yield piece
        if left or digest.hexdigest() != part.sha256:
            raise _damaged(f"its {part.kind} is not what was exported")

    async def skip(self) -> None:
        """Pass over a part that is not needed."""
        while await self._piece() is not None:
            pass

    async def _piece(self) -> bytes | None:
        kind, payload = await self._next(_MAX_PIECE)
        if kind == b"E":
            return None
        if kind != b"D":
            raise _damaged("its records are out of order")
        return payload

    async def end(self) -> None:
        """Nothing may follow but the end."""
        kind, _ = await self._next(0)
        if kind != b"F":
            raise _damaged("its records are out of order")
        async for more in self._chunks:
            self._buffer += more
            if self._buffer:
                break
        if self._buffer:
            raise _damaged("it goes on after its end")


def _decompress(payload: bytes) -> bytes:
    zstd = _zstd()
    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
    try:
        piece: bytes = decompressor.decompress(payload, BLOCK)
    except zstd.ZstdError as error:
        raise _damaged(str(error)) from None
    if not decompressor.eof or decompressor.unused_data:
        raise _damaged("a piece is longer than any that is written")
    return piece


def _check_parts(manifest: Manifest) -> None:
    """Raises InvalidRequestError for parts that make no snapshot."""
    files = [part.name for part in manifest.parts if part.kind == "image"]
    agents = [part for part in manifest.parts if part.kind == "agent"]
    layers = [part for part in manifest.parts if part.kind in ("layer", "disk")]
    wrong = ""
    if not 0 < len(layers) < 500:
        wrong = f"it has {len(layers)} layers"
    elif manifest.disk and (len(layers) > 1 or layers[0].template or not files):
        wrong = "it has a disk beside layers, or without memory"
    elif any(not 0 <= part.stored <= max(part.bytes, 0) for part in manifest.parts):
        wrong = "a part holds more than it is long"
    elif any(
        not _SHA256.fullmatch(part.sha256) or not 0 <= part.bytes < _MAX_BYTES for part in manifest.parts
    ):
        wrong = "a part has no size or checksum"
    elif any(not part.present for part in manifest.parts if not part.template):
        wrong = "a part is missing that no template has"
    elif len(set(files)) != len(files) or len(files) > 16 or not all(map(_is_file, files)):
        wrong = "its memory image has files that none can have"
    elif len(agents) != bool(files) or any(part.sha256[:16] != manifest.agent for part in agents):
        wrong = "its memory image has not the one agent that it names"
    if wrong:
        raise InvalidRequestError(f"the archive is malformed: {wrong}")


def _is_file(name: str) -> bool:
    return bool(_FILE.fullmatch(name)) and name != MANIFEST


def _damaged(why: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"the archive is damaged: {why}", hint="copy it again, or export it again")
