"""A guest that lies: what a real agent says is changed on its way, and the daemon's side has to bear it.

Frames keep a right checksum, so that what is wrong in them gets as far as it can. Whatever comes, a
call ends with a result, one of our errors or its time; nothing else is raised anywhere, no memory is
kept, and a command through an honest agent beside it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import secrets
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from plain_agent import ME, Wire, attached, build, running, sh

from forkyard.errors import ForkyardError
from forkyard.guest import Guest, SpawnSpec
from forkyard.wire import HEADER, MAGIC, MAX_PAYLOAD, Frame, Type, encode

SECONDS = float(os.environ.get("FORKYARD_FUZZ_S", "8"))
CALL_S = 1.0
AT_ONCE = 4
START = MAGIC.to_bytes(4, "little")
GROWTH_MB = 200

pytestmark = pytest.mark.slow


class Liar:
    """Between an agent and the daemon's side: changes one frame in ``rarity``."""

    def __init__(self, wire: Wire, rnd: random.Random, rarity: int) -> None:
        self.rnd, self.rarity = rnd, rarity
        self.source = os.open(wire.dir / "out", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        taken, self.sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.to = os.open(wire.dir / "in", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.taken = taken
        self.rest = bytearray()
        self.waiting = bytearray()
        self.lies = 0
        self.again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self.source, self._pass)

    def _pass(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.source, 1 << 16)
        for frame in self._frames(data):
            self.waiting += b"".join(self._told(frame))
        try:
            while self.waiting:
                del self.waiting[: os.write(self.sink, self.waiting)]
        except BlockingIOError:
            self.again = asyncio.get_running_loop().call_later(0.005, self._pass)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        """Whole frames. One that a new epoch cut off is passed over."""
        self.rest += data
        while (at := self.rest.find(START)) >= 0 and len(self.rest) - at >= HEADER.size:
            _, type_, flags, chan, stream, length, epoch, crc = HEADER.unpack_from(self.rest, at)
            end = at + HEADER.size + length
            if length <= MAX_PAYLOAD and end > len(self.rest):
                break
            payload = bytes(self.rest[at + HEADER.size : end])
            if zlib.crc32(payload, zlib.crc32(self.rest[at : at + 20])) == crc:
                del self.rest[:end]
                yield Frame(type_, flags, chan, stream, epoch, payload)
            else:
                del self.rest[: at + 1]

    def _told(self, frame: Frame) -> list[bytes]:
        rnd = self.rnd
        honest = encode(
            frame.type, frame.stream, frame.epoch, frame.payload, chan=frame.chan, flags=frame.flags
        )
        if rnd.randrange(self.rarity):
            return [honest]
        self.lies += 1
        type_, flags, chan, stream, epoch, payload = frame[:6]
        match rnd.randrange(10):
            case 0:
                return []
            case 1:
                return [honest] * rnd.choice([2, 2, 500])
            case 2:
                type_ = rnd.choice([*Type, rnd.randrange(256)])
            case 3:
                stream = rnd.choice([0, 1, 2, 4, stream + 2, stream + 1, 0xFFFFFFFF])
            case 4:
                chan, flags = rnd.randrange(1 << 16), rnd.choice([flags, 1, 255])
            case 5:
                payload = payload[: rnd.randrange(len(payload) + 1)]
            case 6:
                payload += rnd.randbytes(rnd.choice([1, 8, 60_000]))
            case 7:
                epoch = rnd.choice([0, epoch - 1, epoch + 1]) & 0xFFFFFFFF
            case 8:
                honest = bytearray(honest)
                honest[rnd.randrange(len(honest))] ^= 1 << rnd.randrange(8)
                return [bytes(honest)]
            case _:
                changed = bytearray(payload)
                for _ in range(rnd.choice([1, 2, 8])):
                    if changed:
                        changed[rnd.randrange(len(changed))] = rnd.choice([0, 1, 0x7F, 0x80, 0xFF])
                payload = bytes(changed)
        return [encode(type_, stream, epoch, payload[:MAX_PAYLOAD], chan=chan, flags=flags)]

    def close(self) -> None:
        if self.again is not None:
            self.again.cancel()
        asyncio.get_running_loop().remove_reader(self.source)
        for fd in (self.source, self.sink):
            os.close(fd)


async def _all(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def _command(guest: Guest) -> None:
    process = await guest.spawn(
        SpawnSpec(["/bin/sh", "-c", "head -c 200000 /dev/zero; cat"], {}, user=ME, stdin="pipe")
    )
    try:
        await process.write(b"x" * 50_000)
        process.close_stdin()
        await _all(process.output())
        await process.wait()
    finally:
        process.abandon()


async def _pause(guest: Guest) -> None:
    await guest.quiesce(0.2)
    await guest.unquiesce()


def _calls(guest: Guest, at: Path) -> list[Callable[[], Awaitable[object]]]:
    file = str(at / "file")
    return [
        lambda: _command(guest),
        lambda: sh(guest, "echo out; echo err >&2; exit 3"),
        lambda: guest.write_file(file, b"y" * 100_000, user=ME),
        lambda: guest.read_bytes(file, user=ME),
        lambda: guest.list_dir(str(at), user=ME),
        lambda: guest.stat(file, user=ME),
        lambda: guest.readlink(file, user=ME),
        lambda: guest.processes(),
        lambda: guest.activity(),
        lambda: guest.deleted_files(),
        lambda: guest.lookup_user("root"),
        lambda: guest.kill_largest(),
        lambda: guest.connect(1),
        lambda: guest.ping(0.5),
        lambda: _pause(guest),
    ]


async def _one(call: Callable[[], Awaitable[object]]) -> str:
    try:
        async with asyncio.timeout(CALL_S):
            await call()
        return "ok"
    except ForkyardError as error:
        return error.code
    except TimeoutError:
        return "timeout"
    except ConnectionError:
        return "refused"
    except ExceptionGroup as group:
        # A command's streams, read side by side.
        ours, others = group.split(ForkyardError)
        if ours is None or others is not None:
            raise
        return "group"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("agent"))


async def _liar(agent: Path, here: Path, rnd: random.Random) -> tuple[int, list[str]]:
    """One life of a guest that lies: how often it did, and how each call ended."""
    here.mkdir()
    with running(agent, here) as wire:
        liar = Liar(wire, rnd, rnd.choice([5, 20, 60]))
        liar.start()
        async with asyncio.TaskGroup() as tg:
            guest = Guest(liar.to, liar.taken, box="liar")
            outcomes = [await _one(lambda: guest.attach(tg, timeout_s=CALL_S))]
            for _ in range(6):
                outcomes += await asyncio.gather(*map(_one, rnd.sample(_calls(guest, here), 4)))
                if guest.error is not None:
                    break
            async with asyncio.timeout(5):
                await guest.close()
        liar.close()
        return liar.lies, outcomes


async def test_a_guest_that_lies_harms_itself_only_whatever_it_says(agent: Path, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    rnd = random.Random(seed)
    unexpected: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
    (tmp_path / "honest").mkdir()
    counts: Counter[str] = Counter()
    lies = rounds = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with running(agent, tmp_path / "honest") as honest:
        async with attached(honest) as neighbour:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until or not rounds:
                lives = [_liar(agent, tmp_path / f"{rounds}-{n}", rnd) for n in range(AT_ONCE)]
                for told, outcomes in await asyncio.gather(*lives):
                    lies += told
                    counts.update(outcomes)
                async with asyncio.timeout(5):
                    assert (await sh(neighbour, "echo fine"))[0] == b"fine\n"
                rounds += 1
    print(f"{AT_ONCE * rounds} guests told {lies} lies: {dict(counts)}")
    assert not unexpected, (seed, unexpected)
    assert not counts["internal"], (seed, counts)  # nobody's fault but the guest's
    assert lies >= AT_ONCE and counts["ok"] > 10, (seed, counts)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < GROWTH_MB, (seed, grown)
