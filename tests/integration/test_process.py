from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from forkyard.errors import DeadlineError, InternalError, UnsupportedError
from forkyard.host import process


async def test_output_and_exit_code():
    done = await process.run(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"hello" * 100_000)
    assert (done.rc, done.stdout, done.stderr) == (3, b"hello" * 100_000, b"err\n")
    assert (await process.run(["sh", "-c", "kill -9 $$"])).rc == -9


async def test_a_child_that_ignores_its_input():
    assert (await process.run(["true"], input=b"x" * 1_000_000)).rc == 0


async def test_missing_program_names_the_package(monkeypatch):
    with pytest.raises(UnsupportedError) as caught:
        await process.run(["no-such-program-here"])
    assert caught.value.hint
    monkeypatch.setattr(process, "_ADMIN_PATH", "/nonexistent")
    with pytest.raises(UnsupportedError) as caught:
        await process.run(["mkfs.btrfs"], env={"PATH": "/nonexistent"})
    assert "btrfs-progs" in caught.value.hint


def _running() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


async def test_check_carries_what_it_wrote():
    with pytest.raises(InternalError, match="no way"):
        await process.run(["sh", "-c", "echo no way >&2; exit 1"], check=True)


async def test_grandchild_with_the_pipe_does_not_hold_the_call():
    begin = time.monotonic()
    done = await process.run(["sh", "-c", "sleep 30 & echo $!"])
    assert time.monotonic() - begin < 5
    os.kill(int(done.stdout), signal.SIGKILL)


async def test_timeout_kills_the_group():
    with pytest.raises(DeadlineError):
        await process.run(["sh", "-c", "echo $$ > /dev/stderr; sleep 61.5 & wait"], timeout_s=0.2)
    assert "sleep 61.5" not in _running()


async def test_cancel_kills():
    async def body() -> None:
        await process.run(["sleep", "62.5"])

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(body())
        await asyncio.sleep(0.1)
        task.cancel()
    assert "sleep 62.5" not in _running()


async def test_many_at_once_leave_no_descriptor():
    gc.collect()  # what earlier tests left for it to close
    before = len(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as tg:
        tasks = [tg.create_task(process.run(["sh", "-c", f"echo {n}"])) for n in range(30)]
    assert [int(t.result().stdout) for t in tasks] == list(range(30))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_descriptors_are_handed_over(tmp_path):
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    await process.run(["sh", "-c", "echo there"], stdout=fd)
    os.close(fd)
    assert (tmp_path / "out").read_text() == "there\n"


def _start(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv)


async def test_wait_and_kill_by_start_time():
    child = _start("sleep", "60")
    start = process.start_time(child.pid)
    assert start and not await process.wait_pid(child.pid, 0.05)
    await process.kill_pid(child.pid, start + 1)  # another process by that pid: untouched
    assert process.start_time(child.pid) == start
    await process.kill_pid(child.pid, start)
    assert process.start_time(child.pid) is None
    assert str(child.pid) not in os.listdir("/proc")  # reaped
    child.returncode = -9
    assert await process.wait_pid(child.pid, 1)
    await process.kill_pid(child.pid, start)


def test_start_time_of_a_zombie_and_of_nobody():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.start_time(child.pid) is None
    assert child.wait() == 0
    assert process.start_time(2**22 - 1) is None
    assert len(process.boot_id()) == 36


_ADOPT = """
import os, subprocess, sys, time, asyncio
from forkyard.host import process
process.become_subreaper()
subprocess.run(["sh", "-c", "sleep 0.05 & sleep 0.05 & exit 0"])
async def main():
    reaper = process.Reaper(grace_s=0.1)
    end = time.monotonic() + 10
    total = 0
    while total < 2 and time.monotonic() < end:
        total += reaper.poll()
        assert (await process.run(["sh", "-c", "exit 7"])).rc == 7
    mine = subprocess.Popen(["sh", "-c", "exit 5"])
    os.waitid(os.P_PID, mine.pid, os.WEXITED | os.WNOWAIT)
    reaper.poll()
    assert mine.wait() == 5
    print(total)
asyncio.run(main())
"""


def test_reaper_takes_orphans_only():
    out = subprocess.run([sys.executable, "-c", _ADOPT], capture_output=True, text=True, timeout=30)
    assert out.stdout == "2\n", out.stderr


def test_children_are_born_with_large_tables():
    fd = process.keep_table_large()
    assert fd is not None
    try:
        out = subprocess.run(["grep", "FDSize", "/proc/self/status"], capture_output=True, text=True).stdout
        assert int(out.split()[1]) >= fd
    finally:
        os.close(fd)


@pytest.mark.root
def test_one_thread_goes_first_and_nothing_that_it_starts():
    code = """
import os, subprocess, sys, threading
from forkyard.host.priority import NICE, go_first
os.setsid()
go_first()
inherited = []
def look():
    inherited.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
thread = threading.Thread(target=look)
thread.start(); thread.join()
inherited.append(int(subprocess.check_output(["nice"])))
assert os.getpriority(os.PRIO_PROCESS, 0) == NICE, os.getpriority(os.PRIO_PROCESS, 0)
assert inherited == [0, 0], inherited
try:
    group = open("/proc/self/autogroup").read()
except OSError:
    group = ""
assert not group or group.split()[-1] == str(NICE), group
"""
    subprocess.run([sys.executable, "-c", code], check=True)
