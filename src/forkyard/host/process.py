"""Processes of the host: run one, find one again, end one; no thread per child.

Children are watched through pidfds on the event loop, so that a hundred of them cost a
hundred descriptors and nothing else. A process is named by its pid *and* its start time
(:func:`start_time`), which together never come back within one boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from forkyard.errors import DeadlineError, InternalError, UnsupportedError

__all__ = [
    "Completed",
    "Reaper",
    "TaskStarter",
    "become_subreaper",
    "boot_id",
    "find_program",
    "is_readable",
    "keep_table_large",
    "kill_pid",
    "parent",
    "reap",
    "run",
    "start_time",
    "wait_pid",
]

_PACKAGES = {
    "btrfs": "btrfs-progs",
    "buildah": "buildah",
    "gcc": "gcc",
    "ip": "iproute2",
    "losetup": "mount",
    "mkfs.btrfs": "btrfs-progs",
    "mmdebstrap": "mmdebstrap",
    "mount": "mount",
    "qemu-system-x86_64": "qemu-system-x86",
    "runsc": "runsc",
    "skopeo": "skopeo",
    "tar": "tar",
    "umount": "mount",
    "zstd": "zstd",
}
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
_PR_SET_CHILD_SUBREAPER = 36
_MAX_OUTPUT = 64 << 20


class TaskStarter(Protocol):
    """Where background work runs: a TaskGroup, or whatever else owns tasks."""

    def create_task(
        self, work: Coroutine[Any, Any, Any], /, *, name: str | None = None
    ) -> asyncio.Task[Any]: ...


@dataclass(frozen=True, slots=True)
class Completed:
    """How a child ended. ``rc`` is its exit code, or minus the signal that ended it."""

    argv: tuple[str, ...]
    rc: int
    stdout: bytes
    stderr: bytes

    @property
    def complaint(self) -> str:
        """The last lines it wrote, for an error message."""
        return (self.stderr or self.stdout).decode("utf-8", "replace").strip()[-500:]


def find_program(name: str, path: str | None = None) -> str:
    """The absolute path of ``name``, looked for in ``path`` (PATH) and the administrator's directories.

    Raises:
        UnsupportedError: it is not installed; the hint names the Debian package.
    """
    where = path if path is not None else os.environ.get("PATH", os.defpath)
    found = shutil.which(name, path=f"{where}:{_ADMIN_PATH}")
    if found is None:
        package = _PACKAGES.get(os.path.basename(name))
        hint = f"apt install {package}" if package else "install it, or correct the path"
        raise UnsupportedError(f"the program {name!r} is not on this machine", hint=hint)
    return found


class _Child:
    """A child with its pipes and its pidfd on the loop. Reaps itself even if nobody waits any more."""

    def __init__(self, popen: subprocess.Popen[bytes], input: bytes | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.popen = popen
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.out: dict[int, bytearray] = {}
        self.input = memoryview(input or b"")
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()
            popen.wait()
            raise
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self.out[pipe.fileno()] = bytearray()
                self.loop.add_reader(pipe.fileno(), self._readable, pipe.fileno())
        if popen.stdin is not None:
            os.set_blocking(popen.stdin.fileno(), False)
            self.loop.add_writer(popen.stdin.fileno(), self._writable)
        self.loop.add_reader(self.pidfd, self._exited)

    def _readable(self, fd: int) -> bool:
        """Take one chunk; True while there may be more."""
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.loop.remove_reader(fd)
            return False
        buffer = self.out[fd]
        if len(buffer) < _MAX_OUTPUT:
            buffer += chunk
        return True

    def _writable(self) -> None:
        stdin = self.popen.stdin
        assert stdin is not None
        try:
            while self.input:
                self.input = self.input[os.write(stdin.fileno(), self.input[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # it closed its stdin: it has read what it wanted
        self.loop.remove_writer(stdin.fileno())
        self._close(stdin)

    @staticmethod
    def _close(pipe: object) -> None:
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[attr-defined]

    def _exited(self) -> None:
        rc = self.popen.poll()
        if rc is None:
            return
        self.loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        popen = self.popen
        # what is in the pipes now is the child's; a grandchild that keeps them open holds nobody
        for fd in self.out:
            for _ in range(_MAX_OUTPUT >> 16):
                if not self._readable(fd):
                    break
            self.loop.remove_reader(fd)
        if popen.stdin is not None and not popen.stdin.closed:
            self.loop.remove_writer(popen.stdin.fileno())
        outputs = (popen.stdout, popen.stderr)
        self.result = [bytes(self.out[pipe.fileno()]) if pipe else b"" for pipe in outputs]
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                self._close(pipe)
        if not self.done.done():
            self.done.set_result(rc)

    async def kill(self) -> None:
        """End its process group and wait for it, for two seconds at most."""
        if self.done.done():
            return
        with contextlib.suppress(OSError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        await asyncio.wait([self.done], timeout=2)


async def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float | None = 60,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    check: bool = False,
) -> Completed:
    """Run a program of the host to its end, in a process group of its own.

    ``stdin``, ``stdout`` and ``stderr`` are descriptors to hand over; without one, stdin is
    empty (or ``input``) and the others are captured, up to 64 MiB each. The end is the child's
    own: a grandchild that keeps a pipe open does not hold the call.

    Raises:
        UnsupportedError: the program is missing; the hint names the Debian package.
        DeadlineError: it ran longer than ``timeout_s`` and its process group was killed.
        InternalError: ``check`` and it did not exit with 0; the message has what it wrote.
        Cancellation kills the process group as well.
    """
    args = tuple(os.fspath(word) for word in argv)
    program = find_program(args[0], None if env is None else env.get("PATH"))
    pipe = subprocess.PIPE
    popen = subprocess.Popen(  # noqa: ASYNC220  (a vfork and an exec: a millisecond)
        args,
        executable=program,
        stdin=(pipe if input is not None else subprocess.DEVNULL) if stdin is None else stdin,
        stdout=pipe if stdout is None else stdout,
        stderr=pipe if stderr is None else stderr,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        bufsize=0,
        process_group=0,
    )
    child = _Child(popen, input)
    _CHILDREN.add(popen.pid)
    try:
        async with asyncio.timeout(timeout_s):
            rc = await asyncio.shield(child.done)
    except TimeoutError:
        await child.kill()
        raise DeadlineError(f"{args[0]} did not end within {timeout_s} s and was killed") from None
    except BaseException:
        await child.kill()
        raise
    finally:
        _CHILDREN.discard(popen.pid)
    done = Completed(args, rc, *child.result)
    if check and rc != 0:
        raise InternalError(f"{' '.join(args)[:200]} ended with {rc}: {done.complaint}")
    return done


def start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; None if it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def parent(pid: int) -> int | None:
    """The parent of ``pid``; None if it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if len(fields) < 20 or fields[0] in (b"Z", b"X") else fields


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's id of this boot; boot-clock times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans (see :class:`Reaper`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def is_readable(fd: int) -> bool:
    """Whether ``fd`` can be read now; select() cannot say it of descriptors above 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


async def _readable(fd: int, timeout_s: float | None) -> bool:
    """Whether ``fd`` becomes readable within the time."""
    if is_readable(fd):
        return True
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def fire() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, fire)
    try:
        async with asyncio.timeout(timeout_s):
            await ready
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)


def reap(pidfd: int) -> int | None:
    """Reap the ended child behind ``pidfd``.

    Returns:
        Its exit code, or minus its signal; None if it still runs, is no child of ours or was
        reaped already.
    """
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


async def wait_pid(pid: int, timeout_s: float | None = None) -> bool:
    """Wait until ``pid`` has ended (a zombie has); False if it still runs after ``timeout_s``."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return await _readable(fd, timeout_s)
    finally:
        os.close(fd)


async def kill_pid(pid: int, start: int | None, timeout_s: float = 5) -> None:
    """End ``pid`` if it still is the process that started at ``start``, wait for it, reap it if it is ours.

    ``start=None`` means that the caller knows that the pid cannot have been reused (an unreaped child).

    Raises:
        DeadlineError: it was killed and is still there after ``timeout_s`` (stuck in the kernel).
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        now = start_time(pid)
        if now is None:  # a zombie
            reap(fd)
            return
        if start is not None and now != start:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        if not await _readable(fd, timeout_s):
            raise DeadlineError(
                f"process {pid} was killed but is still there after {timeout_s} s", retryable=True
            )
        reap(fd)
    finally:
        os.close(fd)


_CHILDREN: set[int] = set()


class Reaper:
    """Reaps adopted orphans that nobody waits for, and leaves everybody else's children alone.

    Whoever waits for a child does it through its pidfd within milliseconds; so a zombie that
    is still there after ``grace_s`` belongs to nobody.
    """

    def __init__(self, *, grace_s: float = 2.0, on_reaped: Callable[[int, int], None] | None = None) -> None:
        self._grace_s = grace_s
        self._seen: dict[int, float] = {}
        self._on_reaped = on_reaped

    def start(self, tg: TaskStarter) -> asyncio.Task[None]:
        """Poll once a second in ``tg``, until cancelled."""
        return tg.create_task(self._loop(), name="reaper")

    async def _loop(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(1)

    def poll(self) -> int:
        """One round; returns how many were reaped. Costs one system call while there is no zombie."""
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self._seen.clear()
                return 0
        except ChildProcessError:
            self._seen.clear()
            return 0
        now, reaped = time.monotonic(), 0
        seen: dict[int, float] = {}
        for pid in self._zombies():
            if pid in _CHILDREN:
                continue
            first = self._seen.get(pid, now)
            if now - first < self._grace_s:
                seen[pid] = first
                continue
            with contextlib.suppress(ChildProcessError):
                _, status = os.waitpid(pid, os.WNOHANG)
                reaped += 1
                if self._on_reaped:
                    self._on_reaped(pid, os.waitstatus_to_exitcode(status))
        self._seen = seen
        return reaped

    @staticmethod
    def _zombies() -> list[int]:
        found = []
        for task in os.listdir("/proc/self/task"):
            try:
                children = Path(f"/proc/self/task/{task}/children").read_text().split()
            except OSError:
                continue
            for pid in map(int, children):
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
                    if state == [b"Z"]:
                        found.append(pid)
        return found


def keep_table_large(size: int = 1024) -> int | None:
    """Hold a high close-on-exec descriptor, so that children's descriptor tables are born large.

    A table that has to grow in a program with threads waits for an RCU grace period (10 ms),
    and a table keeps its size across exec. Returns the descriptor, or None if the limit is too low.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    high = size - 1 if soft == resource.RLIM_INFINITY else min(size, soft) - 1
    if high < 256:
        return None
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    except OSError:
        return None
    finally:
        os.close(fd)
