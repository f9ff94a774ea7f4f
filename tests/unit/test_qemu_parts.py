"""Parts of the engine qemu: memory taken from outside, the first file system, the control socket, the kit."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forkyard.engines.qemu import initramfs, memory
from forkyard.engines.qemu.kit import Kit, load_kit, write_kit
from forkyard.engines.qemu.qmp import QmpError, connected
from forkyard.errors import InternalError, UnavailableError

PAGE = 4096
# Maps a file privately, changes pages of it, says so, and waits.
GUEST = """
import mmap, sys
file = open(sys.argv[1], "r+b")
ram = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
for word in sys.argv[2:]:
    page, _, text = word.partition("=")
    at = int(page) * 4096
    ram[at:at + 4096] = text.encode().ljust(4096, b"\\0")
sum(ram[at] for at in range(0, len(ram), 4096))
print("ready", flush=True)
sys.stdin.read()
"""


def saved(ram: Path, target: Path, *changes: str) -> int:
    argv = [sys.executable, "-c", GUEST, str(ram), *changes]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guest:
        assert guest.stdout is not None and guest.stdin is not None
        assert guest.stdout.readline() == b"ready\n"
        address = memory.mapping_of(guest.pid, ram, ram.stat().st_size)
        own = memory.save_ram(guest.pid, address, ram, target)
        guest.stdin.close()
    return own


def pages(path: Path) -> dict[int, bytes]:
    """What is not zero."""
    data = path.read_bytes()
    found = {at // PAGE: data[at : at + PAGE].rstrip(b"\0") for at in range(0, len(data), PAGE)}
    return {page: text for page, text in found.items() if text}


def test_what_a_machine_has_changed_is_saved_on_what_it_began_with(tmp_path: Path) -> None:
    zero, first, second = (tmp_path / name for name in ("zero", "first", "second"))
    zero.touch()
    os.truncate(zero, 3000 * PAGE)
    assert saved(zero, first, "0=a", "7=b", "8=c", "2999=d") == 4 * PAGE
    assert pages(first) == {0: b"a", 7: b"b", 8: b"c", 2999: b"d"}
    assert first.stat().st_size == zero.stat().st_size
    assert first.stat().st_blocks * 512 < 64 * PAGE, "zeros take no room"
    # A fork's: one page is another's now, one is zero again, and the first is as it was.
    assert saved(first, second, "8=e", "7=", "1500=f") == 3 * PAGE
    assert pages(second) == {0: b"a", 8: b"e", 1500: b"f", 2999: b"d"}
    assert pages(first) == {0: b"a", 7: b"b", 8: b"c", 2999: b"d"}


def test_a_file_that_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "ram").write_bytes(b"x" * PAGE)
    with pytest.raises(OSError, match="has not mapped"):
        memory.mapping_of(os.getpid(), tmp_path / "ram", PAGE)
    with (tmp_path / "ram").open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE):
        assert memory.mapping_of(os.getpid(), tmp_path / "ram", PAGE) > 0


def test_the_first_file_system(tmp_path: Path) -> None:
    (tmp_path / "agent").write_bytes(b"an agent")
    (tmp_path / "one.ko").write_bytes(b"a module")
    archive = initramfs.build(tmp_path / "agent", [tmp_path / "one.ko"])
    found, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701" and at % 4 == 0
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        start = -(-(at + 110 + fields[11]) // 4) * 4
        found[name] = (fields[1], archive[start : start + fields[6]])
        at = -(-(start + fields[6]) // 4) * 4
        if name == "TRAILER!!!":
            break
    assert found["init"] == (0o100755, b"an agent")
    assert found["modules/0.ko"] == (0o100755, b"a module")
    assert at == len(archive)


async def _serve(path: Path, replies: list[bytes]) -> tuple[socket.socket, asyncio.Task[bytes]]:
    """Something like QEMU, for one connection: a greeting, and a reply to each line."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    listening.setblocking(False)

    async def serve() -> bytes:
        loop, seen = asyncio.get_running_loop(), b""
        peer, _ = await loop.sock_accept(listening)
        with peer:
            peer.setblocking(False)
            await loop.sock_sendall(peer, b'{"QMP": {}}\n')
            for reply in replies:
                seen += await loop.sock_recv(peer, 65536)
                await loop.sock_sendall(peer, reply)
        return seen

    return listening, asyncio.ensure_future(serve())


async def test_commands_events_and_refusals(tmp_path: Path) -> None:
    replies = [
        b'{"return": {}}\n',
        b'{"event": "STOP"}\n{"return": {"status": "paused"}}\n',
        b'{"error": {"class": "GenericError", "desc": "not now"}}\n',
    ]
    listening, served = await _serve(tmp_path / "qmp", replies)
    async with connected(tmp_path / "qmp", 5) as qmp:
        assert await qmp.call("query-status") == {"status": "paused"}
        await qmp.wait_event("STOP")
        with pytest.raises(QmpError, match="not now"):
            await qmp.call("cont")
    assert [json.loads(line)["execute"] for line in (await served).splitlines()] == [
        "qmp_capabilities",
        "query-status",
        "cont",
    ]
    listening.close()


async def test_one_that_says_nothing_or_goes(tmp_path: Path) -> None:
    listening, served = await _serve(tmp_path / "qmp", [b'{"return": {}}\n'])
    with pytest.raises(ConnectionError):
        async with connected(tmp_path / "qmp", 5) as qmp:
            await qmp.call("stop")
    await served
    with pytest.raises(InternalError, match="did not answer within"):
        async with connected(tmp_path / "qmp", 0.05):
            pass
    listening.close()


def test_a_kit_is_found_again_until_its_qemu_changes(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="not set up"):
        load_kit(tmp_path)
    qemu = Path(shutil.copy("/bin/sh", tmp_path / "qemu"))
    kit = Kit(tmp_path / "other", qemu, "7.2", "tcg", "6.1", tmp_path)
    write_kit(kit, tmp_path)
    assert load_kit(tmp_path) == kit
    qemu.write_bytes(b"newer")
    with pytest.raises(UnavailableError, match="has changed"):
        load_kit(tmp_path)
