from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from forkyard.errors import DeadlineError, InternalError
from forkyard.host import memwatch, process
from forkyard.host.cgroup import CgroupBox, Cgroups, _V2Box

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("clean_host")]


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    opened = Cgroups(f"forkyard-test{os.getpid()}v1")
    if not opened.available:
        pytest.skip(opened.reason)
    yield opened
    opened.close()


@pytest_asyncio.fixture
async def box(groups):
    made = groups.create("bx1", mem_mb=256, mem_reserve_mb=128, cpus=0.5, pids=64)
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)
    await made.delete()


@contextlib.contextmanager
def _running(box: CgroupBox, code: str) -> Iterator[subprocess.Popen]:
    argv = box.join_argv([sys.executable, "-c", code])
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        # with what it started: that has its standard output too
        for pid in {child.pid, *box.pids()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.communicate()


async def test_limits_and_usage(groups, box):
    done = await process.run(box.join_argv(["cat", "/proc/self/cgroup"]))
    assert b"/bx1" in done.stdout
    with _running(
        box, "b'x'; print(1, flush=True); x = bytearray(40 << 20); print(2, flush=True); input()"
    ) as child:
        assert child.stdout.readline() and child.stdout.readline()
        usage = box.usage()
        assert box.pids() == [child.pid] and usage.processes == 1
        assert 40 <= usage.mem_mb < 80 and usage.cpu_ms > 1
        with pytest.raises(DeadlineError, match=str(child.pid)):
            await box.delete(deadline_s=0.05)
    assert box.oom_kills() == 0 and box.dirty_mb() >= 0


async def test_the_cpu_is_shared_out(box):
    code = "import time; t = time.process_time\nwhile t() < 0.3: pass"
    begin = time.monotonic()
    assert (await process.run(box.join_argv([sys.executable, "-c", code]))).rc == 0
    assert time.monotonic() - begin > 0.45  # half a CPU; shared with others it only takes longer


async def test_a_weight_counts_against_the_other_boxes(groups):
    """Of one CPU that ten processes of one box and one of another want, by their weights and not by
    their number."""
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{cpu}]); print(1, flush=True)\nwhile True: pass"
    light, heavy = groups.create("bx3"), groups.create("bx4", cpu_weight=10_000)
    first = groups.version == 1
    name, values = ("cpu.shares", ("1024", "102400")) if first else ("cpu.weight", ("100", "10000"))
    try:
        weights = tuple(Path(one.dirs["cpu"], name).read_text().strip() for one in (light, heavy))
        assert weights == values
        if first:  # all boxes together weigh as a process on each CPU, which is how version 1 counts others
            together = int(Path(light.dirs["cpu"]).parent.joinpath(name).read_text())
            assert together == 1024 * (os.cpu_count() or 1)
        with contextlib.ExitStack() as stack:
            spinning = [stack.enter_context(_running(box, spin)) for box in (*[light] * 10, heavy)]
            for child in spinning:
                child.stdout.readline()  # pinned: until then it may have had the other CPU, or none
            before = light.usage().cpu_ms, heavy.usage().cpu_ms
            async with asyncio.timeout(60):
                while heavy.usage().cpu_ms - before[1] < 500:  # noqa: ASYNC110 - half a second of its own
                    await asyncio.sleep(0.05)
            # By number it would be a tenth.
            assert heavy.usage().cpu_ms - before[1] > 3 * (light.usage().cpu_ms - before[0])
        heavy.update(cpu_weight=1)
        assert int(Path(heavy.dirs["cpu"], name).read_text()) <= 10
    finally:
        await light.delete()
        await heavy.delete()


async def test_pids(box):
    code = (
        "import os, sys\nfor n in range(100):\n  if os.fork() == 0: import time; time.sleep(9); os._exit(0)"
    )
    done = await process.run(box.join_argv([sys.executable, "-c", code]))
    assert done.rc != 0 and b"Resource temporarily unavailable" in done.stderr


async def test_what_is_set_apart_gets_no_more_than_one_thread(box):
    """Ten busy processes set apart, and one thread beside them: half of the group's CPU each, where
    they share one."""
    here = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\n"
    spin = f"{here}while True: pass"
    starter = (
        "import subprocess, sys\nprint(0, flush=True); sys.stdin.readline()\n"
        f"crowd = [subprocess.Popen([sys.executable, '-c', {spin!r}]) for _ in range(10)]\n"
        "print(1, flush=True); sys.stdin.readline()"
    )
    with _running(box, starter) as source, _running(box, spin) as beside:
        assert source.stdout.readline() == b"0\n"  # in the group by now: joining it would undo the next
        box.set_apart(source.pid)
        box.set_apart(source.pid)
        source.stdin.write(b"\n")
        source.stdin.flush()
        assert source.stdout.readline() == b"1\n"
        assert len(box.pids()) == 12 and box.threads() == 12
        crowd = set(box.pids()) - {source.pid, beside.pid}

        def spent(pids: set[int]) -> int:
            fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
            return sum(int(one[11]) for one in fields)

        before = spent(crowd), spent({beside.pid})
        async with asyncio.timeout(60):
            while spent({beside.pid}) - before[1] < 50:  # noqa: ASYNC110 - half a second of its own
                await asyncio.sleep(0.05)
        # By number it would be ten times as much.
        took = spent(crowd) - before[0], spent({beside.pid}) - before[1]
        assert took[0] < 4 * took[1], took


async def test_freezing(box):
    code = "import time\nwhile True:\n  print(1, flush=True); time.sleep(0.005)"
    with _running(box, code) as child:
        child.stdout.readline()
        box.freeze(True)
        os.set_blocking(child.stdout.fileno(), False)
        await asyncio.sleep(0.05)
        while child.stdout.read(1 << 16):
            pass
        assert not select.select([child.stdout], [], [], 0.1)[0]
        box.freeze(False)
        assert select.select([child.stdout], [], [], 5)[0]


async def test_found_again_with_its_limits(groups, box):
    again = Cgroups(groups.root_name)
    found = again.find("bx1")
    assert found is not None and (found.mem_mb, found.mem_reserve_mb) == (256, 128)
    assert again.names() == ["bx1"] and again.find("bx2") is None
    box.update(mem_mb=512)
    assert again.find("bx1").mem_mb == 512
    with pytest.raises(InternalError):
        groups.find("../bx1")


async def test_a_failed_creation_leaves_nothing(groups):
    with pytest.raises(OSError):
        groups.create("bx2", mem_mb=256, mem_reserve_mb=0, cpus=1, pids="no number")  # type: ignore[arg-type]
    assert groups.names() == []
    groups.close()
    made = groups.create("bx2", mem_mb=64, mem_reserve_mb=0, cpus=1, pids=9)  # the root came back
    await made.delete()
    await made.delete()
    assert groups.find("bx2") is None


_HOG = """
import ctypes, mmap, sys
print(1, flush=True)
sys.stdin.readline()
size = {mb} << 20
m = mmap.mmap(-1, size, flags={flags})
step = 1 << 20
for at in range(0, size, step):
    m[at:at + step] = b'x' * step
print("survived", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["anonymous", "shared"])
async def test_a_hog_is_seen_before_the_kernel_acts(box, kind):
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS" if kind == "anonymous" else "mmap.MAP_SHARED"
    loop = asyncio.get_running_loop()
    called: asyncio.Future[tuple[float, float]] = loop.create_future()
    with _running(box, _HOG.format(mb=2000, flags=flags)) as child:
        child.stdout.readline()

        def callback(used: float, limit: float) -> None:
            if not called.done():
                child.kill()
                called.set_result((used, limit))

        watch = box.watch_memory(loop, callback)
        try:
            child.stdin.write(b"\n")
            child.stdin.flush()
            async with asyncio.timeout(20):
                used, limit = await called
        finally:
            watch.close()
        assert limit == 256 and 256 < used < 256 + 128 * 2
        assert box.oom_kills() == 0
        assert child.wait() == -9


async def test_thirty_small_hogs_are_seen(box):
    code = """
import os, sys
print(1, flush=True)
sys.stdin.readline()
for n in range(30):
    if os.fork() == 0:
        x = bytearray(20 << 20)
        for at in range(0, len(x), 4096): x[at] = 1
        sys.stdin.readline()
        os._exit(0)
sys.stdin.readline()
"""
    called = asyncio.Event()
    with _running(box, code) as child:
        child.stdout.readline()
        watch = box.watch_memory(asyncio.get_running_loop(), lambda used, limit: called.set())
        try:
            child.stdin.write(b"\n")
            child.stdin.flush()
            async with asyncio.timeout(20):
                await called.wait()
        finally:
            watch.close()
        assert box.oom_kills() == 0
        for pid in box.pids():
            os.kill(pid, signal.SIGKILL)


async def test_room_is_made_before_a_fork_would_fail(box):
    """Near the kernel's limit a page fault can wait for more of it; a fork cannot."""
    code = "import sys; x = bytearray(b'x' * (330 << 20)); print(1, flush=True); sys.stdin.readline()"
    limit = Path(box.dirs["memory"]) / "memory.limit_in_bytes"
    if not limit.exists():
        pytest.skip("version 1 only")
    with _running(box, code) as child:
        watch = box.watch_memory(asyncio.get_running_loop(), lambda used, limit: None)
        try:
            assert (await asyncio.to_thread(child.stdout.readline)) == b"1\n"
            async with asyncio.timeout(20):
                while int(limit.read_text()) <= (256 + 128) << 20:  # noqa: ASYNC110 - a file of the kernel's
                    await asyncio.sleep(0.01)
        finally:
            watch.close()
    assert box.oom_kills() == 0


async def test_one_that_nobody_stops_is_left_to_the_kernel(box, monkeypatch):
    monkeypatch.setattr(memwatch, "_RAISES_WITH_ROOM", 3)  # as on a host without room
    calls: list[float] = []
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS"
    with _running(box, _HOG.format(mb=2000, flags=flags)) as child:
        child.stdout.readline()
        watch = box.watch_memory(
            asyncio.get_running_loop(), lambda used, limit: calls.append(time.monotonic())
        )
        try:
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert await process.wait_pid(child.pid, 30)
        finally:
            watch.close()
        assert child.wait() == -9 and box.oom_kills() == 1 and calls
        gaps = [b - a for a, b in itertools.pairwise(calls)]
        assert all(gap > 0.015 for gap in gaps)


async def test_page_cache_is_no_alarm(box, tmp_home):
    calls: list[float] = []
    code = f"""
block = b'x' * (1 << 20)
with open('{tmp_home}/f', 'wb') as f:
    for n in range(600): f.write(block)
with open('{tmp_home}/f', 'rb') as f:
    while f.read(1 << 20): pass
"""
    watch = box.watch_memory(asyncio.get_running_loop(), lambda used, limit: calls.append(used))
    try:
        assert (await process.run(box.join_argv([sys.executable, "-c", code]))).rc == 0
    finally:
        watch.close()
    assert calls == [] and box.oom_kills() == 0


def _v2_mount() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return Path(line.split()[1])
    return None


async def test_the_parts_of_a_version_2_group(tmp_path):
    """Where no controller is: only which process is where."""
    mount = _v2_mount()
    if mount is None:
        pytest.skip("no cgroup2 mount")
    group = mount / f"forkyard-test{os.getpid()}v2"
    group.mkdir()
    box = _V2Box("v2", {"memory": str(group)})
    try:
        assert box.divide() == [str(group / "kernel")]
        with _running(box, "print(1, flush=True); input()") as child:
            child.stdout.readline()
            assert (group / "kernel/cgroup.procs").read_text().split() == [str(child.pid)]
            box.set_apart(child.pid)
            assert (group / "guest/cgroup.procs").read_text().split() == [str(child.pid)]
            assert box.pids() == [child.pid]
    finally:
        await box.delete()
    assert not group.exists()


async def test_changes_of_a_version_2_file_are_heard(tmp_path):
    """The mechanism of the version 2 watch, where no memory controller is: on cgroup.events."""
    mount = _v2_mount()
    if mount is None:
        pytest.skip("no cgroup2 mount")
    group = mount / f"forkyard-test{os.getpid()}v2"
    group.mkdir()
    try:
        found = _V2Box("v2", {"memory": str(group)})
        found.divide()
        changed = asyncio.Event()
        fd = os.open(group / "cgroup.events", os.O_RDONLY)
        epoll = select.epoll()
        epoll.register(fd, select.EPOLLPRI | select.EPOLLET)
        os.read(fd, 4096)
        loop = asyncio.get_running_loop()
        loop.add_reader(epoll.fileno(), changed.set)
        try:
            assert (await process.run(found.join_argv(["true"]))).rc == 0
            async with asyncio.timeout(5):
                await changed.wait()
        finally:
            loop.remove_reader(epoll.fileno())
            epoll.close()
            os.close(fd)
    finally:
        await found.delete()


async def test_version_2_watch_over_files(tmp_path):
    """The version 2 watch's decisions, over plain files with a real group's names and formats."""

    mib = 1 << 20
    for name, text in (("memory.events", "high 0\n"), ("memory.high", "max"), ("memory.current", "0")):
        (tmp_path / name).write_text(text)
    used = 10 * mib
    calls: list[tuple[float, float]] = []

    class Watch(memwatch.V2Watch):
        def _open(self) -> None:
            self._armed = False
            self._high_path = f"{self.directory}/memory.high"

    watch = Watch(
        asyncio.get_running_loop(),
        lambda *a: calls.append(a),
        lambda: used,
        str(tmp_path),
        256 * mib,
        64 * mib,
    )
    try:
        assert (tmp_path / "memory.high").read_text() == str(256 * mib)
        (tmp_path / "memory.current").write_text(str(300 * mib))  # page cache
        watch._look()
        assert (tmp_path / "memory.high").read_text().startswith("max") and calls == []
        used = 260 * mib
        watch._look()
        assert calls == [(260.0, 256.0)]
        used = 10 * mib
        (tmp_path / "memory.current").write_text(str(20 * mib))
        watch._look()
        assert watch._timer is None
    finally:
        watch.close()
