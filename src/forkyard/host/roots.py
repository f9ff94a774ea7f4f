"""Another root directory for a process that runs already.

``pivot_root`` changes the root of every process of its mount namespace that has the old one as
its root. So a thread of ours that enters the namespace and takes that same root can exchange it
for all of them. The process keeps what it has open: only what it looks up from now on is in
the new tree.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from pathlib import Path

from forkyard.host.mounts import clone_tree, move_tree

__all__ = ["PLACE", "replace_root"]

# Where the new root is mounted for a moment: a directory that the old root must have.
PLACE = ".new"

_CLONE_FS, _CLONE_NEWNS, _MNT_DETACH = 0x200, 0x20000, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine(), -1)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def replace_root(pid: int, tree: Path) -> None:
    """Make what is mounted on ``tree`` the root of process ``pid``, with the mounts that its old
    root had below it; each must have a directory of its name in the new one.

    Blocks for about a millisecond. It must not be called with the process' own root in use for
    anything but being looked up from: mounts on it go with it.

    Raises:
        OSError: the process is gone, the new root lacks a directory, EPERM. The old root is
            still there then, and the process is of no use any more.
    """
    failed: list[OSError] = []

    def work() -> None:
        try:
            _replace(pid, tree)
        except OSError as error:
            failed.append(error)

    # The namespace and the root of a thread are its own from here on, so nothing else may run in it.
    thread = threading.Thread(target=work, name="replace_root")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _replace(pid: int, tree: Path) -> None:
    fds: list[int] = []
    try:
        new = clone_tree(tree)
        fds.append(new)
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        fds.append(namespace)
        root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fds.append(root)
        below = _mounts_of(pid)
        _check("unshare", _libc.unshare(_CLONE_FS))
        _check("setns", _libc.setns(namespace, _CLONE_NEWNS))
        os.fchdir(root)
        os.chroot(".")
        move_tree(new, Path(f"/{PLACE}"))
        for target in below:
            copy = clone_tree(Path(target))
            fds.append(copy)
            # Names in the new tree are a guest's: a link there must not lead this anywhere.
            place = os.open(f"/{PLACE}{target}", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            fds.append(place)
            move_tree(copy, place)
        os.chdir(f"/{PLACE}")
        # The old root ends up on top of the new one, where it is let go of.
        _check("pivot_root", _libc.syscall(ctypes.c_long(_PIVOT_ROOT), b".", b"."))
        _check("umount", _libc.umount2(b".", _MNT_DETACH))
    finally:
        for fd in fds:
            os.close(fd)


def _mounts_of(pid: int) -> list[str]:
    """What is mounted directly below the root of a process, as it sees it. Targets are ours, not a
    guest's: one word, and one component deep."""
    with open(f"/proc/{pid}/mountinfo") as file:
        targets = [line.split(" ", 5)[4] for line in file]
    return [target for target in targets if target != "/"]
