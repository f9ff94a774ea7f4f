"""A copy out of a pool: until it is there, and until its first command ended."""

from __future__ import annotations

import time

from bench.cases import TRUE, Bench
from bench.ours import Forkyard

SIZE = 4
REFILL_S = 60


def acquires(bench: Bench) -> None:
    """From a full pool each time: how long one takes that has run dry is the fork's time."""
    bench.note("copies out of a pool")
    for ours in bench.contenders:
        if not isinstance(ours, Forkyard):
            continue
        source = ours.start()
        try:
            with ours.client.pool(source, SIZE) as pool:
                for index in range(-1, bench.n):
                    deadline = time.monotonic() + REFILL_S
                    while pool.ready < SIZE and time.monotonic() < deadline:
                        time.sleep(0.02)
                    with bench.timed("copy out of a pool, its first command included", ours.name, index):
                        with bench.timed("copy out of a pool", ours.name, index):
                            box = pool.acquire().id
                        ours.run(box, TRUE)
                    ours.end(box)
        except Exception as error:
            bench.failures.append(f"pool, {ours.name}: {type(error).__name__}: {error}")
        finally:
            ours.end(source)
