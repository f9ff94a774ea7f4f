"""The wire between the daemon and a guest's agent: frames and payloads, without any I/O.

``docs/wire.md`` is the specification and ``agent/wire.c`` the other implementation. All
integers are little-endian. Everything that comes from a guest is hostile: a decoder never
allocates by what a length says, and never returns a frame whose checksum is wrong as good.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

VERSION = 1
VERSION_MIN = 1
MAGIC = 0x31575946
HEADER = struct.Struct("<IBBHIIII")
MAX_DATA = 65536
MAX_PAYLOAD = MAX_DATA + 8
MAX_FRAME = HEADER.size + MAX_PAYLOAD
MAX_CONTROL = 4096 - HEADER.size
MAX_REQUEST = 4 << 20
WINDOW = 256 << 10
MORE = 1
NONCE_BYTES = 16

STDIN, STDOUT, STDERR = 0, 1, 2


class Type(IntEnum):
    ATTACH = 1
    HELLO = 2
    PING = 3
    PONG = 4
    QUIESCE = 5
    QUIESCED = 6
    UNQUIESCE = 7
    ERROR = 8
    OPEN = 16
    OPENED = 17
    END = 18
    RESET = 19
    DATA = 20
    EOF = 21
    ACK = 22
    EXIT = 23
    RELEASE = 24
    SIGNAL = 25
    RESIZE = 26


class Op(IntEnum):
    """What an OPEN frame asks for, in its ``chan`` field. RESOLVE is the agent's to ask, CONNECT either's."""

    SPAWN = 1
    ADOPT = 2
    IDENTIFY = 3
    PROCS = 4
    KILL_LARGEST = 5
    ACTIVITY = 6
    LOOKUP = 7
    KILL = 8
    DELETED = 9
    STAT = 32
    LIST = 33
    READ = 34
    WRITE = 35
    MKDIR = 36
    RENAME = 37
    REMOVE = 38
    SYMLINK = 39
    READLINK = 40
    CHMOD = 41
    CHOWN = 42
    UTIME = 43
    RESOLVE = 64
    CONNECT = 65
    EGRESS = 66


class Feature(IntFlag):
    """What an agent says in its HELLO that it can do."""

    NETWORK = 1
    CROWDS = 2


class NetFlag(IntFlag):
    """How the guest's network is to be, in IDENTIFY and EGRESS."""

    PROXY = 1


class Via(IntEnum):
    """How a program asked for a connection: by the address of a name, or through a proxy."""

    NAME = 0
    HTTP = 1
    SOCKS = 2


class Scope(IntEnum):
    """What a signal goes to."""

    PROCESS = 0
    GROUP = 1
    TREE = 3


class SpawnFlag(IntEnum):
    PTY = 1
    MERGE = 2
    STDIN = 4
    DETACHED = 8
    EXITED = 256
    OOM = 512
    LOST = 1024


class WireError(ValueError):
    """The other side broke the protocol."""


class Frame(NamedTuple):
    """``intact`` is False if the checksum was wrong: then nothing in it may be believed."""

    type: int
    flags: int
    chan: int
    stream: int
    epoch: int
    payload: bytes
    intact: bool = True


def encode(
    type_: int, stream: int, epoch: int, payload: bytes = b"", *, chan: int = 0, flags: int = 0
) -> bytes:
    """One frame. Control frames (all but DATA) should stay under :data:`MAX_CONTROL`."""
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"payload of {len(payload)} bytes")
    head = HEADER.pack(MAGIC, type_, flags, chan, stream, len(payload), epoch, 0)
    crc = zlib.crc32(payload, zlib.crc32(head[:20]))
    return b"".join((head[:20], crc.to_bytes(4, "little"), payload))


def encode_request(op: int, stream: int, epoch: int, payload: bytes) -> list[bytes]:
    """An OPEN, in as many frames as its payload needs."""
    if len(payload) > MAX_REQUEST:
        raise WireError(f"request of {len(payload)} bytes, {MAX_REQUEST} are allowed")
    parts = [payload[i : i + MAX_DATA] for i in range(0, len(payload), MAX_DATA)] or [b""]
    last = len(parts) - 1
    return [
        encode(Type.OPEN, stream, epoch, part, chan=op, flags=MORE if i < last else 0)
        for i, part in enumerate(parts)
    ]


def encode_data(stream: int, epoch: int, chan: int, offset: int, data: bytes | memoryview) -> bytes:
    payload = b"".join((offset.to_bytes(8, "little"), data))
    return encode(Type.DATA, stream, epoch, payload, chan=chan)


def encode_attach(epoch: int, nonce: bytes, features: int = 0) -> bytes:
    """The start of an epoch: zeros that end whatever frame the agent is in, then the nonce."""
    payload = struct.pack("<HH", VERSION_MIN, VERSION) + nonce + features.to_bytes(8, "little")
    return bytes(MAX_FRAME) + encode(Type.ATTACH, 0, epoch, payload)


class Decoder:
    """Cuts a byte stream into frames.

    After :meth:`hunt` everything up to the HELLO with the given nonce is thrown away, in
    whatever state the bytes before it are: half-written frames of an older epoch, or noise.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._nonce: bytes | None = None

    def hunt(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._rest = b""

    @property
    def hunting(self) -> bool:
        return self._nonce is not None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The whole frames in what came so far.

        Raises:
            WireError: the bytes are no frame.
        """
        buffer = self._rest + data if self._rest else data
        self._rest = b""
        if self._nonce is not None:
            at = self._find(buffer)
            if at < 0:
                return
            buffer = buffer[at:]
        pos, size, total = 0, HEADER.size, len(buffer)
        try:
            while total - pos >= size:
                magic, type_, flags, chan, stream, length, epoch, crc = HEADER.unpack_from(buffer, pos)
                if magic != MAGIC or length > MAX_PAYLOAD:
                    pos = total
                    raise WireError("bytes that are no frame")
                end = pos + size + length
                if end > total:
                    break
                payload = buffer[pos + size : end]
                intact = zlib.crc32(payload, zlib.crc32(buffer[pos : pos + 20])) == crc
                pos = end
                yield Frame(type_, flags, chan, stream, epoch, payload, intact)
                if self._nonce is not None:  # the consumer began to hunt: what follows is older
                    rest, pos = buffer[pos:], total
                    yield from self.feed(rest)
                    return
        finally:
            if pos < total:
                self._rest = buffer[pos:]

    def _find(self, buffer: bytes) -> int:
        """Where the wanted HELLO's frame begins, or -1 and what must be kept is kept."""
        assert self._nonce is not None
        start = 0
        while (at := buffer.find(self._nonce, start)) >= 0:
            head = at - HEADER.size
            if head >= 0:
                magic, type_, *_ = HEADER.unpack_from(buffer, head)
                if magic == MAGIC and type_ == Type.HELLO:
                    self._nonce = None
                    return head
            start = at + 1
        self._rest = buffer[-(HEADER.size + NONCE_BYTES) :]
        return -1


class Packer:
    """Builds a payload; every method returns self."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u8(self, value: int) -> Packer:
        self._parts.append(value.to_bytes(1, "little"))
        return self

    def u16(self, value: int) -> Packer:
        self._parts.append(value.to_bytes(2, "little"))
        return self

    def u32(self, value: int) -> Packer:
        self._parts.append(value.to_bytes(4, "little"))
        return self

    def u64(self, value: int) -> Packer:
        self._parts.append(value.to_bytes(8, "little"))
        return self

    def raw(self, value: bytes) -> Packer:
        self._parts.append(value)
        return self

    def str(self, value: bytes) -> Packer:
        self._parts.append(len(value).to_bytes(4, "little"))
        self._parts.append(value)
        return self

    def done(self) -> bytes:
        return b"".join(self._parts)


class Unpacker:
    """Reads a payload.

    Raises:
        WireError: by every method, if the payload is shorter than it claims.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._pos = 0

    def raw(self, n: int) -> bytes:
        end = self._pos + n
        if end > len(self._payload):
            raise WireError("a payload is shorter than it says")
        value = self._payload[self._pos : end]
        self._pos = end
        return value

    def _int(self, n: int) -> int:
        return int.from_bytes(self.raw(n), "little")

    def u8(self) -> int:
        return self._int(1)

    def u16(self) -> int:
        return self._int(2)

    def u32(self) -> int:
        return self._int(4)

    def u64(self) -> int:
        return self._int(8)

    def str(self, limit: int = 4096) -> bytes:
        n = self._int(4)
        if n > limit:
            raise WireError(f"a string of {n} bytes, {limit} are allowed")
        return self.raw(n)

    @property
    def left(self) -> int:
        return len(self._payload) - self._pos
