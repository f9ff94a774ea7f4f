"""How fast this CPU's time stamp counter runs, which no file says everywhere."""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import time
from collections.abc import Callable

__all__ = ["tsc_khz"]

# rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")
_MEASURE_S = 0.05


@functools.cache
def tsc_khz() -> int:
    """The counter's frequency, measured once against the kernel's clock; 0 on other CPUs than x86-64."""
    if platform.machine() != "x86_64":
        return 0
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_RDTSC)
        start = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(start))
        before = _reading(read)
        time.sleep(_MEASURE_S)
        after = _reading(read)
        del read, start
    return round((after[0] - before[0]) * 1e6 / (after[1] - before[1]))


def _reading(read: Callable[[], int]) -> tuple[int, int]:
    """Counter and clock (ns) at the same moment: of several tries the one that took least."""
    best: tuple[int, int, int] | None = None
    for _ in range(16):
        early = time.monotonic_ns()
        ticks = read()
        late = time.monotonic_ns()
        if best is None or late - early < best[0]:
            best = late - early, ticks, (early + late) // 2
    assert best is not None
    return best[1], best[2]
