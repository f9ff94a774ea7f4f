"""How the daemon divides its one thread among the wires of its guests."""

from __future__ import annotations

import asyncio
import os

import pytest

from forkyard import wire
from forkyard.guest import channel as channels
from forkyard.guest.channel import Channel
from forkyard.wire import NONCE_BYTES, Frame, Type


class Seen:
    """A stream that notes its frames."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def on_frame(self, frame: Frame) -> None:
        self.order.append("frame")

    def fail(self, error: Exception) -> None:
        self.order.append("failed")


async def test_many_small_frames_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "TURN_S", 0.0)
    ours, guests = os.pipe()
    sink, to = os.pipe()
    lost: list[Exception] = []
    channel = Channel(to, ours, box="b", on_violation=lambda why: None, on_lost=lost.append)
    order: list[str] = []
    try:
        attached = asyncio.create_task(channel.attach(5))
        await asyncio.sleep(0)
        asked = b""
        while len(asked) < len(wire.encode_attach(0, bytes(NONCE_BYTES))):
            asked += os.read(sink, 1 << 20)
            await asyncio.sleep(0)
        nonce = asked[-NONCE_BYTES - 8 : -8]
        os.write(guests, wire.encode(Type.HELLO, 0, channel.epoch, nonce))
        await attached
        stream = channel.open(Seen(order))
        os.write(guests, wire.encode(Type.ACK, stream, channel.epoch) * 20)

        async def another() -> None:
            while order.count("frame") < 20:
                order.append("other")
                await asyncio.sleep(0)

        async with asyncio.timeout(5):
            await another()
        # With turns without an end all twenty come at once.
        assert "".join("f" if one == "frame" else "o" for one in order).count("of") == 20
        os.write(guests, b"\0" * 100)
        async with asyncio.timeout(5):
            # What comes after a pause is looked at as before.
            while not channel._decoder.hunting:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not lost
    finally:
        channel.close()
        for fd in (ours, guests, sink, to):
            os.close(fd)
