"""``python -m bench.age``: does anything get slower with age?

One daemon makes and deletes thousands of sandboxes, then keeps thousands of snapshots, and writes a
long audit log. What an operation costs is taken from its first hundred and its last hundred: the
median time, and the daemon's own CPU, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import machine
from bench.cases import TRUE
from bench.ours import Forkyard, builds, lender
from bench.run import RESULTS, interrupted, note

SAMPLE = 100
CHAIN = 100


class Age:
    """Takes samples of operations on one yard."""

    def __init__(self, yard: Forkyard) -> None:
        self.yard = yard
        self.pid = yard.client.health().pid
        self.rows: list[tuple[str, str, float, float]] = []

    def add(self, what: str, when: str, operation: Callable[[], object], times: int = SAMPLE) -> None:
        """Run ``operation`` so often; its median in ms and the daemon's CPU of each in ms are a row."""
        before, took = machine.cpu_s({self.pid}), []
        for _ in range(times):
            begun = time.perf_counter()
            operation()
            took.append((time.perf_counter() - begun) * 1e3)
        cpu = (machine.cpu_s({self.pid}) - before) * 1e3 / times
        self.rows.append((what, when, round(statistics.median(took), 2), round(cpu, 2)))
        note(f"{what}, {when}: {self.rows[-1][2]} ms, {self.rows[-1][3]} ms of the daemon's CPU")

    def sandboxes(self, count: int) -> None:
        """Create, a command and delete: the first and the last of so many."""

        def life() -> None:
            box = self.yard.start()
            self.yard.run(box, TRUE)
            self.yard.end(box)

        self.add("create, a command, delete", "the first hundred", life)
        for made in range(SAMPLE, count - SAMPLE):
            self.yard.end(self.yard.start())
            if made % 1000 == 0:
                note(f"  {made} sandboxes, daemon {machine.pss_mb({self.pid}):.1f} MiB")
        self.add("create, a command, delete", f"the last hundred of {count}", life)

    def snapshots(self, count: int) -> None:
        """What is asked of a yard without, and with so many snapshots."""
        box = self.yard.start()
        client = self.yard.client
        kept: list[str] = []

        def snapshot() -> None:
            kept.append(client.snapshot(box, memory=False).id)

        def fork() -> None:
            self.yard.end(client.fork(box, 1).forks[0].id)

        def ask(when: str) -> None:
            self.add("fork one, delete it", when, fork, 20)
            self.add("list_snapshots", when, client.list_snapshots, 5)
            self.add("get_snapshot", when, lambda: client.get_snapshot(kept[0]), 20)

        self.add("snapshot of the disk", "the first hundred", snapshot)
        ask(f"beside {SAMPLE} snapshots")
        while len(kept) < count - SAMPLE:
            snapshot()
            if len(kept) % 1000 == 0:
                note(f"  {len(kept)} snapshots, daemon {machine.pss_mb({self.pid}):.1f} MiB")
        self.add("snapshot of the disk", f"the last hundred of {count}", snapshot)
        ask(f"beside {count} snapshots")
        begun = time.perf_counter()
        for one in kept:
            client.delete_snapshot(one)
        each = (time.perf_counter() - begun) * 1e3 / len(kept)
        self.rows.append(("delete a snapshot", f"all {count}", round(each, 2), 0.0))
        self.yard.end(box)

    def chain(self) -> None:
        """Checkpoints of one sandbox, each kept, each with 1 MB of new data."""
        box = self.yard.start()
        client = self.yard.client

        def checkpoint() -> None:
            client.checkpoint(box)

        for at in range(0, CHAIN, 10):
            client.shell(box, f"head -c 1M /dev/urandom > f{at}", check=True)
            self.add(f"checkpoint of a chain of {CHAIN}", f"{at + 1} to {at + 10}", checkpoint, 10)
        self.yard.end(box)

    def records(self, an_hour: int) -> None:
        """Audit records at the pace of so many an hour, for as long as it takes to write a thousand."""
        client = self.yard.client
        box = self.yard.start()
        pause_s = 3600 / an_hour

        def paced() -> None:
            client.write_file(box, "f", b"x")
            time.sleep(pause_s)

        self.add(
            f"a file at {an_hour} an hour (the pause of {pause_s * 1e3:.0f} ms included)", "", paced, 1000
        )
        begun = time.perf_counter()
        verdict = client.verify_audit()
        took = (time.perf_counter() - begun) * 1e3
        if not verdict.ok:
            raise AssertionError(f"the audit log does not hold: {verdict}")
        self.rows.append((f"verify_audit of {verdict.seq} records", "once", round(took, 1), 0.0))
        self.yard.end(box)


def markdown(about: dict[str, Any], rows: list[tuple[str, str, float, float]]) -> str:
    lines = ["# Age", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| operation | when | median, ms | the daemon's CPU, ms each |", "| --- | --- | --- | --- |"]
    lines += [f"| {what} | {when} | {took} | {cpu or ''} |" for what, when, took, cpu in rows]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.age", description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=10_000, help="made and deleted (default 10000)")
    parser.add_argument("--snapshots", type=int, default=5_000, help="kept at a time (default 5000)")
    parser.add_argument("--records", type=int, default=100_000, help="of the audit log, an hour")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to keep it (default bench/results)")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("it needs root")
    if min(args.sandboxes, args.snapshots) < 2 * SAMPLE:
        parser.error(f"the first and the last {SAMPLE} are compared, so that there are {2 * SAMPLE} at least")
    signal.signal(signal.SIGTERM, interrupted)
    about = machine.facts()
    base = lender()
    build = builds(base)[0]
    about["build"] = build.label
    yard = Forkyard(build, "systrap", base)
    age: Age | None = None
    begun = time.monotonic()
    try:
        yard.open()
        age = Age(yard)
        age.chain()
        age.sandboxes(args.sandboxes)
        age.snapshots(args.snapshots)
        age.records(args.records)
        about["memory of the daemon, MiB"] = round(machine.pss_mb({age.pid}), 1)
    except KeyboardInterrupt:
        note("interrupted")
    finally:
        yard.close()
    if age is None:
        return 1
    about["minutes"] = round((time.monotonic() - begun) / 60, 1)
    about["load_after"] = round(os.getloadavg()[0], 2)
    text = markdown(about, age.rows)
    print(text)
    path = args.out / time.strftime("age-%Y-%m-%d-%H%M.md")
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.with_suffix(".json").write_text(json.dumps({"about": about, "rows": age.rows}, indent=1) + "\n")
    note(f"kept as {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
