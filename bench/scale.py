"""What grows: chains of checkpoints, dirty data, forks at once, commands at once, forks that live."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench import machine
from bench.cases import TRUE, Bench
from bench.ours import Forkyard
from forkyard.errors import CapacityError

CHAIN = 30
WRITTEN_MB = (1, 50, 800)
AT_ONCE = (1, 8, 64)
FORKS = 64
LIVE = int(os.environ.get("FORKYARD_BENCH_LIVE", "500"))
STEP = 20
ASKED_AT_ONCE = 16


def _each(bench: Bench, what: str, measure: Callable[[Bench, Forkyard], None]) -> None:
    for ours in [contender for contender in bench.contenders if isinstance(contender, Forkyard)]:
        bench.note(f"{ours.name}: {what}")
        try:
            measure(bench, ours)
        except Exception as error:  # what the others give is kept
            bench.failures.append(f"{what}, {ours.name}: {type(error).__name__}: {error}")
        machine.reap()


def _chain(bench: Bench, ours: Forkyard) -> None:
    box = ours.start()
    try:
        for index in range(CHAIN):
            ours.client.shell(box, f"head -c 1M /dev/urandom > f{index}", check=True)
            third = ("first", "second", "last")[index * 3 // CHAIN]
            metric = f"checkpoint of a chain of {CHAIN}, 1 MB new, the {third} third"
            with bench.timed(metric, ours.name, index):
                ours.client.checkpoint(box)
    finally:
        ours.end(box)


def _dirty(bench: Bench, ours: Forkyard) -> None:
    box = ours.client.create_sandbox(type="medium").id
    try:
        for written in WRITTEN_MB:
            for index in range(-1, min(bench.n, 5)):
                ours.client.shell(box, f"head -c {written}M /dev/urandom > f", check=True)
                made = ours.client.fork(box, 1)
                ours.end(made.forks[0].id)
                if index >= 0:
                    name = f"after writing {written} MB"
                    bench.add(f"source paused, {name}", ours.name, index, made.paused_ms)
                    bench.add(f"dirty at the pause, {name}", ours.name, index, made.dirty_mb, "MB")
                    bench.add(f"fork n=1, {name}", ours.name, index, made.total_ms)
    finally:
        ours.end(box)


def _many(bench: Bench, ours: Forkyard) -> None:
    box = ours.start()
    try:
        for index in range(-1, min(bench.n, 3)):
            begun = time.perf_counter()
            made = ours.client.fork(box, FORKS).forks
            took = (time.perf_counter() - begun) * 1e3
            for fork in made:
                ours.end(fork.id)
            if index >= 0:
                bench.add(f"fork n={FORKS}, idle", ours.name, index, took / FORKS)
    finally:
        ours.end(box)


def _stops(bench: Bench, ours: Forkyard) -> None:
    box = ours.start()
    try:
        for index in range(-1, bench.n):
            with bench.timed("stop, memory kept", ours.name, index):
                ours.client.stop_sandbox(box)
            with bench.timed("start again", ours.name, index):
                ours.client.start_sandbox(box)
            ours.run(box, TRUE)
    finally:
        ours.end(box)


def _at_once(bench: Bench, ours: Forkyard) -> None:
    """The same number of commands in all, each in a sandbox of its own."""
    box = ours.start()
    boxes = [fork.id for fork in ours.client.fork(box, max(AT_ONCE)).forks]
    try:
        for width in AT_ONCE:

            def one(at: int, width: int = width) -> float:
                begun = time.perf_counter()
                ours.run(boxes[at % width], TRUE)
                return (time.perf_counter() - begun) * 1e3

            with ThreadPoolExecutor(width) as threads:
                list(threads.map(one, range(width)))
                for index, took in enumerate(threads.map(one, range(2 * max(AT_ONCE)))):
                    bench.add(f"exec `true`, {width} at once", ours.name, index, took)
    finally:
        for each in (*boxes, box):
            ours.end(each)


def _density(bench: Bench, ours: Forkyard) -> None:
    """Forks of one idle sandbox until there are so many, or the machine says that it is full."""
    box = ours.start()
    live: list[str] = []
    try:
        while len(live) < LIVE:
            begun = time.perf_counter()
            try:
                made = ours.client.fork(box, min(STEP, LIVE - len(live))).forks
            except CapacityError as full:
                bench.note(f"  full at {len(live)}: {full}")
                break
            live += [fork.id for fork in made]
            last = (time.perf_counter() - begun) * 1e3 / len(made)
        bench.add("live forks of an idle sandbox", ours.name, 0, len(live), "forks")
        bench.add("fork, each, when all of these live", ours.name, 0, last)
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            list(threads.map(lambda one: ours.run(one, TRUE), live))
        bench.add("memory of the daemon then", ours.name, 0, machine.pss_mb(ours.shared_pids()), "MB")
        group = set().union(*(ours.pids(one) for one in live[:STEP]))
        bench.add("memory (PSS) of each then", ours.name, 0, machine.pss_mb(group) / len(live[:STEP]), "MB")
        with bench.timed("exec `true` in one of them", ours.name, 0):
            ours.run(live[0], TRUE)
    finally:
        for each in (*live, box):
            ours.end(each)


SCALE: dict[str, Callable[[Bench], None]] = {
    name: functools.partial(_each, what=what, measure=measure)
    for name, (what, measure) in {
        "chain": (f"{CHAIN} checkpoints in a row", _chain),
        "dirty": ("forks of what has just written", _dirty),
        "fork64": (f"{FORKS} forks at once", _many),
        "stops": ("stop and start", _stops),
        "at-once": ("commands at once", _at_once),
        "density": (f"up to {LIVE} live forks", _density),
    }.items()
}
