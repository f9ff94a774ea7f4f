"""The memory of a paused guest, taken from outside.

QEMU maps a file as the guest's RAM, privately: what the guest writes becomes pages of the process's
own, and the file stays as it is, shared in the host's cache by every machine that maps it. The
kernel's page map tells which pages are the process's own; those, on top of the file, are the guest's
memory. So a fork of a fork is saved like the first, and the source of a fork goes on undisturbed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["mapping_of", "save_ram"]

PAGE = 4096
_FICLONE = 0x40049409
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
# Of the highest byte of a page map's entry: in memory, in the swap, a file's page.
_PRESENT, _SWAPPED, _FILE = 0x80, 0x40, 0x20
_OWN = bytes(1 if byte & (_PRESENT | _SWAPPED) and not byte & _FILE else 0 for byte in range(256))


def mapping_of(pid: int, path: Path, size: int) -> int:
    """Where process ``pid`` has mapped the first ``size`` bytes of the file ``path``.

    Raises:
        OSError: nowhere.
    """
    inode = os.stat(path).st_ino
    start = end = 0
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            words = line.split(maxsplit=5)
            if len(words) < 6 or int(words[4]) != inode or not words[5].rstrip("\n").endswith(path.name):
                continue
            low, high = (int(word, 16) for word in words[0].split("-"))
            if low != end:
                start = low
            end = high
            if end - start == size:
                return start
    raise OSError(errno.ENOENT, f"process {pid} has not mapped {size} bytes of {path}")


def save_ram(pid: int, address: int, base: Path, target: Path) -> int:
    """Write a stopped guest's memory to the new file ``target``, sparsely; how many bytes were its own.

    Args:
        address: Where ``base`` is mapped in the process (:func:`mapping_of`).
    """
    with contextlib.ExitStack() as stack:

        def opened(path: str, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            return fd

        source = opened(str(base), os.O_RDONLY)
        memory = opened(f"/proc/{pid}/mem", os.O_RDONLY)
        pages = opened(f"/proc/{pid}/pagemap", os.O_RDONLY)
        out = opened(str(target), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        size = os.fstat(source).st_size
        own = _own_pages(pages, address // PAGE, size // PAGE)
        os.ftruncate(out, size)
        cloned = _clone(source, out)
        if not cloned:
            for start, end in _data(source, size):
                for low, high in _runs(own, 0, start // PAGE, -(-end // PAGE)):
                    _copy_file(source, out, low * PAGE, min(high * PAGE, size))
        written = 0
        for low, high in _runs(own, 1, 0, len(own)):
            written += _copy_memory(memory, address, out, low * PAGE, high * PAGE, sparse=not cloned)
        return written


def _own_pages(pagemap: int, first: int, count: int) -> bytes:
    """For each page 1 if it is the process's own, else 0."""
    marks = []
    for at in range(first, first + count, _CHUNK // 8):
        entries = os.pread(pagemap, min(_CHUNK, (first + count - at) * 8), at * 8)
        marks.append(entries[7::8].translate(_OWN))
    own = b"".join(marks)
    if len(own) != count:
        raise OSError(errno.EIO, "the page map ends early")
    return own


def _runs(own: bytes, what: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where pages of one kind begin and end."""
    mark, other = bytes([what]), bytes([1 - what])
    at = own.find(mark, start, end)
    while at >= 0:
        stop = own.find(other, at, end)
        yield at, stop if stop >= 0 else end
        at = own.find(mark, stop, end) if stop >= 0 else -1


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a sparse file holds something."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL):
            return False
        raise
    return True


def _copy_file(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        done = os.copy_file_range(source, target, end - start, start, start)
        if not done:
            raise OSError(errno.EIO, "the memory's file ends early")
        start += done


def _copy_memory(memory: int, address: int, out: int, start: int, end: int, *, sparse: bool) -> int:
    """Copy part of a process's memory, without pages of zeros if ``sparse``."""
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    at = start
    while at < end:
        part = view[: min(_CHUNK, end - at)]
        got = os.preadv(memory, [part], address + at)
        if got != len(part):
            raise OSError(errno.EIO, "the guest's memory ends early")
        if sparse:
            for low, high in _filled(buffer, got):
                _write(out, view[low:high], at + low)
        else:
            _write(out, part, at)
        at += got
    return end - start


def _filled(buffer: bytearray, size: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that are not all zero."""
    if buffer.startswith(_ZEROS[:PAGE]) and buffer[:size] == _ZEROS[:size]:
        return
    begin = -1
    for at in range(0, size, PAGE):
        # Most are told by their first bytes.
        filled = any(buffer[at : at + 16]) or buffer[at : at + PAGE] != _ZEROS[:PAGE]
        if filled and begin < 0:
            begin = at
        elif not filled and begin >= 0:
            yield begin, at
            begin = -1
    if begin >= 0:
        yield begin, size


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
