"""Frames: what is cut how, and what is refused."""

from __future__ import annotations

import random

import pytest

from forkyard import wire
from forkyard.wire import (
    Decoder,
    Frame,
    Packer,
    Type,
    Unpacker,
    WireError,
    encode,
    encode_attach,
    encode_data,
)


def frames(decoder: Decoder, data: bytes, piece: int = 1 << 20) -> list[Frame]:
    return [f for i in range(0, len(data), piece) for f in decoder.feed(data[i : i + piece])]


@pytest.mark.parametrize("piece", [1, 7, 23, 24, 25, 4096, 1 << 20])
def test_frames_survive_any_cut(piece: int) -> None:
    sent = [
        encode(Type.PING, 1, 9),
        encode(Type.OPEN, 3, 9, b"x" * 4000, chan=1),
        encode_data(3, 9, 1, 5, bytes(20_000)),
        encode(Type.PONG, 1, 9, b"abc"),
    ]
    got = frames(Decoder(), b"".join(sent), piece)
    assert [(f.type, f.stream, len(f.payload), f.intact) for f in got] == [
        (Type.PING, 1, 0, True),
        (Type.OPEN, 3, 4000, True),
        (Type.DATA, 3, 20_008, True),
        (Type.PONG, 1, 3, True),
    ]


def test_largest_frame_and_no_larger() -> None:
    assert len(encode_data(1, 1, 1, 0, bytes(wire.MAX_DATA))) == wire.MAX_FRAME
    with pytest.raises(WireError):
        encode(Type.DATA, 1, 1, bytes(wire.MAX_PAYLOAD + 1))


@pytest.mark.parametrize("at", [4, 6, 8, 16, 20, 24, 30])
def test_a_changed_bit_is_never_intact(at: int) -> None:
    data = bytearray(encode_data(1, 1, 1, 0, b"hello world"))
    data[at] ^= 1
    try:
        got = frames(Decoder(), bytes(data))
    except WireError:
        return
    assert not any(f.intact for f in got)


def test_a_length_over_the_limit_is_refused_before_anything_is_kept() -> None:
    head = wire.HEADER.pack(wire.MAGIC, Type.DATA, 0, 1, 1, 0xFFFFFFF0, 1, 0)
    with pytest.raises(WireError):
        frames(Decoder(), head)


def test_noise_is_refused() -> None:
    with pytest.raises(WireError):
        frames(Decoder(), random.Random(1).randbytes(100_000))


@pytest.mark.parametrize("piece", [1, 13, 5000, 1 << 20])
def test_hunt_finds_the_greeting_behind_any_rubbish(piece: int) -> None:
    nonce = bytes(range(16))
    half = encode_data(1, 7, 1, 0, bytes(5000))[:3000]
    decoder = Decoder()
    decoder.hunt(nonce)
    stream = half + nonce + b"FYW1" * 9 + encode(Type.HELLO, 0, 8, nonce + b"rest") + encode(Type.PING, 1, 8)
    got = frames(decoder, stream, piece)
    assert [(f.type, f.payload) for f in got] == [(Type.HELLO, nonce + b"rest"), (Type.PING, b"")]
    assert not decoder.hunting


def test_hunt_may_begin_inside_a_feed() -> None:
    decoder = Decoder()
    got = []
    for f in decoder.feed(encode(Type.PING, 1, 1) + encode(Type.PONG, 1, 1)):
        got.append(f.type)
        decoder.hunt(bytes(16))
    assert got == [Type.PING]


def test_an_attach_begins_with_as_many_zeros_as_a_frame_may_have() -> None:
    data = encode_attach(5, bytes(range(16)))
    assert data[: wire.MAX_FRAME] == bytes(wire.MAX_FRAME)
    (frame,) = frames(Decoder(), data[wire.MAX_FRAME :])
    assert (frame.type, frame.epoch) == (Type.ATTACH, 5)
    assert len(data) - wire.MAX_FRAME <= 4096


def test_long_requests_travel_in_parts() -> None:
    payload = random.Random(2).randbytes(200_000)
    got = frames(Decoder(), b"".join(wire.encode_request(wire.Op.SPAWN, 3, 1, payload)))
    assert b"".join(f.payload for f in got) == payload
    assert [bool(f.flags & wire.MORE) for f in got] == [True] * (len(got) - 1) + [False]
    with pytest.raises(WireError):
        wire.encode_request(wire.Op.SPAWN, 3, 1, bytes(wire.MAX_REQUEST + 1))


def test_payloads() -> None:
    data = Packer().u8(1).u16(2).u32(3).u64(1 << 60).str(b"name").raw(b"!").done()
    u = Unpacker(data)
    assert (u.u8(), u.u16(), u.u32(), u.u64(), u.str(), u.raw(1), u.left) == (
        1,
        2,
        3,
        1 << 60,
        b"name",
        b"!",
        0,
    )
    with pytest.raises(WireError):
        u.u8()
    with pytest.raises(WireError):
        Unpacker(Packer().str(b"x" * 10).done()).str(9)
    with pytest.raises(WireError):
        Unpacker((1000).to_bytes(4, "little") + b"short").str()
