"""What is measured. Every case takes turns: one sample of A, one of B, one of C, and again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from bench import machine
from bench.contender import Contender

TRUE = ["true"]
SHELL_TRUE = ["sh", "-c", "true"]
HEAP_MB = 100
PAUSE_S = 0.5
FILE_MB = 100
IN_A_ROW = 10
IDLE_BOXES = 4
# What one contender does behind its last sample (a spare box, writing back) is not to slow the next one's.
SETTLE_S = 0.3
BURST = 8
FORKED = 8
MANY_FILES = [
    "python3",
    "-c",
    "import os; os.chdir(os.path.expanduser('~'))\n"
    "for d in range(50):\n"
    "    os.makedirs(f'{d}')\n"
    "    for f in range(1000):\n"
    "        open(f'{d}/{f}', 'w').write(str(f))\n",
]


@dataclass(frozen=True)
class Row:
    """One sample."""

    metric: str
    contender: str
    round: int
    value: float
    unit: str


class Bench:
    """Takes the samples.

    Args:
        contenders: In the order of their turns.
        n: Samples of each.
    """

    def __init__(self, contenders: list[Contender], n: int, note: Callable[[str], None]) -> None:
        self.contenders = contenders
        self.n = n
        self.note = note
        self.rows: list[Row] = []
        self.failures: list[str] = []

    def add(self, metric: str, contender: str, index: int, value: float, unit: str = "ms") -> None:
        self.rows.append(Row(metric, contender, index, round(value, 3), unit))

    @contextlib.contextmanager
    def timed(self, metric: str, contender: str, index: int) -> Iterator[None]:
        """One sample: how long the block takes. The first turn, of index -1, only warms up."""
        begun = time.perf_counter()
        yield
        if index >= 0:
            self.add(metric, contender, index, (time.perf_counter() - begun) * 1e3)

    def turns(
        self,
        what: str,
        turn: Callable[[Contender, int], None],
        n: int | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Give every contender its turn, so often. One that fails is left out from then on."""
        self.note(what)
        taking_part = list(self.contenders)
        for index in range(-1, n or self.n):
            for contender in list(taking_part):
                try:
                    turn(contender, index)
                except Exception as error:
                    taking_part.remove(contender)
                    self.failures.append(f"{what}, {contender.name}: {type(error).__name__}: {error}")
                    self.note(f"  failed: {self.failures[-1]}")
                machine.reap()
                time.sleep(settle_s)

    @contextlib.contextmanager
    def boxes(self, make: Callable[[Contender], str]) -> Iterator[dict[str, str]]:
        """A box of every contender's, for the time of a case."""
        made: dict[str, str] = {}
        try:
            for contender in self.contenders:
                try:
                    made[contender.name] = make(contender)
                except Exception as error:
                    self.failures.append(f"{contender.name}: {type(error).__name__}: {error}")
            yield made
        finally:
            for contender in self.contenders:
                if contender.name in made:
                    with contextlib.suppress(Exception):
                        contender.end(made[contender.name])

    def data(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def lifecycle(bench: Bench) -> None:
    """Create, its first command, create at once after another, destroy."""

    def turn(contender: Contender, index: int) -> None:
        with bench.timed("create", contender.name, index):
            first = contender.start()
        with bench.timed("create, at once after another", contender.name, index):
            second = contender.start()
        with bench.timed("first command", contender.name, index):
            contender.run(second, TRUE)
        with bench.timed("destroy", contender.name, index):
            contender.end(second)
        contender.end(first)

    # Also what is started ahead, half a second after the last start, is there again by the next turn.
    bench.turns("create, first command, destroy", turn, settle_s=1.2)


def burst(bench: Bench) -> None:
    """Create eight, one after another without a pause: more than is kept started ahead."""

    def turn(contender: Contender, index: int) -> None:
        begun = time.perf_counter()
        boxes = [contender.start() for _ in range(BURST)]
        took = (time.perf_counter() - begun) * 1e3
        if index >= 0:
            bench.add(f"create, each of {BURST} in a row", contender.name, index, took / BURST)
        for box in boxes:
            contender.end(box)

    bench.turns(f"create {BURST} in a row", turn)


def forks(
    bench: Bench,
    n: int,
    heap_mb: int,
    fill: list[str] | None = None,
    what_is: str = "",
    turns: int | None = None,
) -> None:
    """Fork one source again and again; the copies answer a command each, then go.

    Args:
        fill: A command of the source's, before; ``what_is`` says what it leaves there.
        turns: Fewer than all.
    """
    heap = what_is or (f"{heap_mb} MB heap" if heap_mb else "idle")
    what = f"fork n={n}, {heap}"

    def source(contender: Contender) -> str:
        box = contender.source(heap_mb)
        if fill:
            contender.run(box, fill)
        return box

    with bench.boxes(source) as sources:

        def turn(contender: Contender, index: int) -> None:
            source = sources[contender.name]
            begun = time.perf_counter()
            forked = contender.fork(source, n, heap_mb)
            took = (time.perf_counter() - begun) * 1e3
            begun = time.perf_counter()
            contender.run(forked.boxes[0], TRUE)
            first = (time.perf_counter() - begun) * 1e3
            if heap_mb and index < 0:
                contender.check_heap(forked.boxes[-1])
            for box in forked.boxes:
                contender.end(box)
            if index < 0:
                return
            name = contender.name
            bench.add(what, name, index, took / n)
            bench.add(f"first command after fork, {heap}", name, index, first)
            if n == 1:
                bench.add(f"source paused, {heap}", name, index, forked.said["paused_ms"])
            if "dirty_mb" in forked.said:
                bench.add(f"dirty at the pause, {heap}", name, index, forked.said["dirty_mb"], "MB")

        bench.turns(what, turn, turns and min(turns, bench.n), settle_s=2 * SETTLE_S)


def rewinds(bench: Bench, heap_mb: int = 0) -> None:
    """Checkpoint once, then back to it again and again."""
    heap = f"{heap_mb} MB heap" if heap_mb else "idle"
    with bench.boxes(lambda contender: contender.source(heap_mb)) as boxes:

        def turn(contender: Contender, index: int) -> None:
            name = contender.name
            if index < 0:
                contender.checkpoint(boxes[name])
            with bench.timed(f"rewind, {heap}", name, index):
                boxes[name] = contender.rewind(boxes[name])
            contender.run(boxes[name], TRUE)

        bench.turns(f"rewind, {heap}", turn)


def checkpoints(bench: Bench) -> None:
    """One after another of an idle source, the last one kept."""
    with bench.boxes(lambda contender: contender.source(0)) as boxes:

        def turn(contender: Contender, index: int) -> None:
            with bench.timed("checkpoint, idle", contender.name, index):
                contender.checkpoint(boxes[contender.name])

        bench.turns("checkpoint, idle", turn)


def commands(bench: Bench) -> None:
    """``true`` and ``sh -c true``: so many in a row, and one after a pause."""
    with bench.boxes(lambda contender: contender.start()) as boxes:

        def in_a_row(contender: Contender, index: int) -> None:
            box, name = boxes[contender.name], contender.name
            contender.run(box, TRUE)
            for argv in (TRUE, SHELL_TRUE):
                for number in range(IN_A_ROW):
                    at = index * IN_A_ROW + number if index >= 0 else -1
                    with bench.timed(f"exec `{' '.join(argv)}`, in a row", name, at):
                        contender.run(box, argv)

        def after_pause(contender: Contender, index: int) -> None:
            time.sleep(PAUSE_S)
            with bench.timed("exec `true`, after 0.5 s", contender.name, index):
                contender.run(boxes[contender.name], TRUE)
            time.sleep(PAUSE_S)
            with bench.timed("exec `sh -c true`, after 0.5 s", contender.name, index):
                contender.run(boxes[contender.name], SHELL_TRUE)

        bench.turns("exec in a row", in_a_row, settle_s=0)
        bench.turns("exec after a pause", after_pause, settle_s=0)


def files(bench: Bench) -> None:
    """1 KB and 100 MB of noise in, and back out, from and to memory."""
    data = os.urandom(FILE_MB << 20)
    with bench.boxes(lambda contender: contender.start()) as boxes:

        def small(contender: Contender, index: int) -> None:
            box, name = boxes[contender.name], contender.name
            for number in range(IN_A_ROW):
                at = index * IN_A_ROW + number if index >= 0 else -1
                with bench.timed("file of 1 KB in", name, at):
                    contender.put(box, data[:1024])
                with bench.timed("file of 1 KB out", name, at):
                    contender.get(box)

        def turn(contender: Contender, index: int) -> None:
            box, name = boxes[contender.name], contender.name
            begun = time.perf_counter()
            contender.put(box, data)
            between = time.perf_counter()
            size = contender.get(box)
            ended = time.perf_counter()
            if size != len(data):
                raise AssertionError(f"{size} bytes came back of {len(data)}")
            if index >= 0:
                bench.add("file in", name, index, FILE_MB / (between - begun), "MB/s")
                bench.add("file out", name, index, FILE_MB / (ended - between), "MB/s")

        bench.turns("1 KB in and out", small, n=min(bench.n, 10))
        bench.turns("100 MB in and out", turn, n=min(bench.n, 10), settle_s=1)


def idle(bench: Bench, watch_s: float) -> None:
    """What boxes with nothing to do use, each, and what serves them all."""
    bench.note("idle: memory and CPU")
    for contender in bench.contenders:
        boxes: list[str] = []
        try:
            boxes += [contender.start() for _ in range(IDLE_BOXES)]
            time.sleep(2)
            pids = [contender.pids(box) for box in boxes]
            shared = contender.shared_pids()
            begun, before = time.perf_counter(), [machine.cpu_s(group) for group in (*pids, shared)]
            time.sleep(watch_s)
            took = time.perf_counter() - begun
            used = [machine.cpu_s(group) for group in (*pids, shared)]
            percent = [100 * (b - a) / took for a, b in zip(before, used, strict=True)]
            for index, group in enumerate(pids):
                bench.add("idle memory (PSS)", contender.name, index, machine.pss_mb(group), "MB")
                bench.add("idle CPU", contender.name, index, percent[index], "%")
            if shared:
                bench.add("memory that serves all", contender.name, 0, machine.pss_mb(shared), "MB")
                bench.add("CPU that serves all", contender.name, 0, percent[-1], "%")
        except Exception as error:
            bench.failures.append(f"idle, {contender.name}: {type(error).__name__}: {error}")
        finally:
            for box in boxes:
                with contextlib.suppress(Exception):
                    contender.end(box)


def output(bench: Bench) -> None:
    """100 MB of a command's output, read as it comes."""
    argv = ["head", "-c", str(FILE_MB << 20), "/dev/zero"]
    with bench.boxes(lambda contender: contender.start()) as boxes:

        def turn(contender: Contender, index: int) -> None:
            begun = time.perf_counter()
            size = contender.read_out(boxes[contender.name], argv)
            took = time.perf_counter() - begun
            if size != FILE_MB << 20:
                raise AssertionError(f"{size} bytes came of {FILE_MB << 20}")
            if index >= 0:
                bench.add("output of a command", contender.name, index, FILE_MB / took, "MB/s")

        bench.turns("100 MB of output", turn, n=min(bench.n, 10), settle_s=1)


def sustained(bench: Bench, for_s: float) -> None:
    """Fork eight, delete them, and again without a pause, for so long."""
    with bench.boxes(lambda contender: contender.source(0)) as sources:

        def turn(contender: Contender, index: int) -> None:
            begun, made = time.perf_counter(), 0
            while (took := time.perf_counter() - begun) < (for_s if index >= 0 else 0.1):
                boxes = contender.fork(sources[contender.name], FORKED, 0).boxes
                made += len(boxes)
                with ThreadPoolExecutor(FORKED) as threads:
                    list(threads.map(contender.end, boxes))
            if index >= 0:
                bench.add(
                    f"forks made and deleted, {FORKED} at a time", contender.name, index, made / took, "/s"
                )

        bench.turns("forks without a pause", turn, n=min(bench.n, 3), settle_s=2)


def busy(bench: Bench, watch_s: float) -> None:
    """Forks of a program that holds 100 MB and wakes five times a second: memory and CPU of each."""
    with bench.boxes(lambda contender: contender.source(HEAP_MB)) as sources:

        def turn(contender: Contender, index: int) -> None:
            if index < 0:
                return
            boxes = contender.fork(sources[contender.name], IDLE_BOXES, HEAP_MB).boxes
            try:
                time.sleep(2)
                pids = [contender.pids(box) for box in boxes]
                begun, before = time.perf_counter(), [machine.cpu_s(group) for group in pids]
                time.sleep(watch_s)
                took = time.perf_counter() - begun
                for at, (group, used) in enumerate(zip(pids, before, strict=True)):
                    name = contender.name
                    bench.add("memory (PSS) of a fork with 100 MB", name, at, machine.pss_mb(group), "MB")
                    cpu = 100 * (machine.cpu_s(group) - used) / took
                    bench.add("CPU of a fork that wakes 5 times a second", name, at, cpu, "%")
            finally:
                for box in boxes:
                    contender.end(box)

        bench.turns("forks of a live program", turn, n=1)


# In the order of a run.
CASES: dict[str, Callable[[Bench], None]] = {
    "lifecycle": lifecycle,
    "burst": burst,
    "fork1": lambda bench: forks(bench, 1, 0),
    "fork8": lambda bench: forks(bench, 8, 0),
    "fork1-heap": lambda bench: forks(bench, 1, HEAP_MB),
    "fork8-heap": lambda bench: forks(bench, 8, HEAP_MB),
    "fork1-gb": lambda bench: forks(bench, 1, 1024, turns=5),
    "fork1-files": lambda bench: forks(bench, 1, 0, MANY_FILES, "50,000 files written", 5),
    "sustained": lambda bench: sustained(bench, 4 if bench.n < 10 else 15),
    "checkpoint": checkpoints,
    "rewind": rewinds,
    "rewind-heap": lambda bench: rewinds(bench, HEAP_MB),
    "exec": commands,
    "files": files,
    "output": output,
    "idle": lambda bench: idle(bench, 3 if bench.n < 10 else 15),
    "busy": lambda bench: busy(bench, 3 if bench.n < 10 else 15),
}
