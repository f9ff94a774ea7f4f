"""``python -m bench.soak``: many operations of several clients for a set time; what has grown by its end?

A daemon with a home of its own is given random valid work: creates, forks, rewinds, checkpoints,
snapshots, stops, starts, commands, files, deletions. The time is divided into rounds. After each the
clients delete all that they made and wait; when the yard is quiet, what the daemon holds on to is
counted. The first round warms everything up. What the daemon keeps ready for the next starts comes and
goes, and with it processes, mounts and descriptors, so that a figure has grown when in each round of
the second half it was above every round of the first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.ours import Forkyard, builds, lender
from bench.run import RESULTS, interrupted, note
from forkyard import Client
from forkyard.errors import ConflictError, ForkyardError
from forkyard.host import mounts
from forkyard.host.cgroup import Cgroups

# By how much, if more than at all: memory breathes with its allocator, and btrfs gives back what was
# deleted when it likes.
SLACK: dict[str, float] = {"memory of the daemon, MiB": 4, "store in use, MiB": 32}
# These keep what happened, on purpose: a month of deleted sandboxes, a day of replies, the audit log.
KEPT = ("catalog, MiB", "its log, MiB", "audit log, MiB")
QUIET_S = 60
MOST = 4


@dataclass
class Worker:
    """One client's sandboxes, and what it has done."""

    number: int
    client: Client
    chance: random.Random
    sandboxes: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: collections.Counter[str] = field(default_factory=collections.Counter)

    def work(self, until: float) -> None:
        """Random operations until the time, then away with everything."""
        while time.monotonic() < until:
            self._try(self._pick())
        for sandbox in list(self.sandboxes):
            self._try("delete", sandbox)
        for snapshot in list(self.snapshots):
            self._try("forget", snapshot)

    def _pick(self) -> str:
        if not self.sandboxes:
            return "create"
        doing = ["exec", "exec", "exec", "write", "checkpoint", "rewind", "rest", "forget", "delete"]
        if len(self.sandboxes) < MOST:
            doing += ["create", "fork", "fork", "snapshot", "begin"]
        return self.chance.choice(doing)

    def _try(self, name: str, of: str | None = None) -> None:
        if name in ("forget", "begin") and not self.snapshots:
            return
        among = self.snapshots if name in ("forget", "begin") else self.sandboxes
        of = of or (self.chance.choice(among) if among else "")
        try:
            getattr(self, f"_{name}")(of)
            self.done[name] += 1
        except ForkyardError as error:
            self.failed[f"{name}: {type(error).__name__}: {error.message[:120]}"] += 1

    def _create(self, _: str) -> None:
        self.sandboxes.append(self.client.create_sandbox().id)

    def _begin(self, snapshot: str) -> None:
        self.sandboxes.append(self.client.create_sandbox(snapshot=snapshot).id)

    def _fork(self, sandbox: str) -> None:
        forks = self.client.fork(sandbox, self.chance.randint(1, 2)).forks
        self.sandboxes += [fork.id for fork in forks]

    def _exec(self, sandbox: str) -> None:
        command = self.chance.choice(["true", "ls -lR /etc | sort", "head -c 300000 /dev/urandom > noise"])
        self.client.shell(sandbox, command)

    def _write(self, sandbox: str) -> None:
        data = self.chance.randbytes(self.chance.choice([10, 10_000, 2_000_000]))
        self.client.write_file(sandbox, "file", data)
        if self.client.read_file(sandbox, "file") != data:
            self.failed["write: another content came back"] += 1

    def _checkpoint(self, sandbox: str) -> None:
        self.client.checkpoint(sandbox, keep_last=3)

    def _rewind(self, sandbox: str) -> None:
        if self.client.list_checkpoints(sandbox):
            self.client.rewind(sandbox)

    def _snapshot(self, sandbox: str) -> None:
        self.snapshots.append(self.client.snapshot(sandbox).id)

    def _rest(self, sandbox: str) -> None:
        self.client.stop_sandbox(sandbox)
        self.client.start_sandbox(sandbox)

    def _delete(self, sandbox: str) -> None:
        self.client.delete_sandbox(sandbox)
        self.sandboxes.remove(sandbox)

    def _forget(self, snapshot: str) -> None:
        with contextlib.suppress(ConflictError):  # a sandbox was started from it, and lives
            self.client.delete_snapshot(snapshot)
            self.snapshots.remove(snapshot)


def figures(home: Path, pid: int) -> dict[str, float]:
    """What a daemon and its home hold on to now."""
    descriptors: collections.Counter[str] = collections.Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            descriptors[target.partition(":")[0] if ":" in target else "file"] += 1
    status = Path(f"/proc/{pid}/status").read_text()
    threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
    group = Cgroups.for_home(home)
    store = os.statvfs(home / "store")
    others = machine.pids_of(f"{home}/") - {pid}
    return {
        "threads of the daemon": float(threads),
        "descriptors of the daemon": float(sum(descriptors.values())),
        **{f"of these, {kind}": float(count) for kind, count in sorted(descriptors.items())},
        "memory of the daemon, MiB": round(machine.pss_mb({pid}), 1),
        "processes besides the daemon": float(len(others)),
        "mounts": float(len(mounts.mounts_below(home))),
        "control groups": float(len(group.names())),
        "boxes": _entries(home / "boxes"),
        "memory images": _entries(home / "images"),
        "layers": _entries(home / "store" / "layers"),
        "disks": _entries(home / "store" / "boxes"),
        "store in use, MiB": round((store.f_blocks - store.f_bfree) * store.f_frsize / (1 << 20), 1),
        "catalog, MiB": _mib([home / "catalog.db"]),
        "its log, MiB": _mib([home / "catalog.db-wal"]),
        "audit log, MiB": _mib((home / "audit").glob("*")),
    }


def _entries(directory: Path) -> float:
    return float(len(list(directory.iterdir()))) if directory.is_dir() else 0.0


def _mib(paths: Any) -> float:
    return round(sum(path.stat().st_size for path in paths) / (1 << 20), 2)


def when_quiet(home: Path, pid: int, quiet_s: float = QUIET_S) -> dict[str, float]:
    """The figures once what is done behind the calls is over: counts that are the same three times in a
    row, and half a minute at least, after which deleted space is back."""
    end, same, last = time.monotonic() + quiet_s, 0, {}
    while True:
        found = figures(home, pid)
        counted = {key: value for key, value in found.items() if "MiB" not in key}
        same = same + 1 if counted == last else 0
        last = counted
        if (same >= 3 and time.monotonic() > end - quiet_s / 2) or time.monotonic() > end:
            return found
        time.sleep(2)


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """What has grown since the first round, in words; see the module."""
    found = [sample["figures"] for sample in samples[1:]]
    first, last = found[: len(found) // 2], found[(len(found) + 1) // 2 :]
    if not first:
        return []
    words = []
    for key in dict.fromkeys(key for figures in found for key in figures if key not in KEPT):
        before, after = ([figures.get(key, 0.0) for figures in half] for half in (first, last))
        if min(after) > max(before) + SLACK.get(key, 0):
            words.append(f"{key}: from {min(before):g}-{max(before):g} to {min(after):g}-{max(after):g}")
    return words


def markdown(about: dict[str, Any], samples: list[dict[str, Any]], clients: list[Worker]) -> str:
    """The report."""
    done = sum((one.done for one in clients), collections.Counter())
    failed = sum((one.failed for one in clients), collections.Counter())
    lines = ["# Soak", "", *(f"- {key}: {value}" for key, value in about.items())]
    each = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    lines += [f"- operations: {sum(done.values())} ({each})"]
    lines += [f"- failed: {count} times {what}" for what, count in failed.most_common()] or ["- failed: none"]
    lines += [f"- grown: {line}" for line in grown(samples) or ["nothing"]]
    heads = [f"{sample['minutes']:.0f} min, {sample['operations']} operations" for sample in samples]
    lines += ["", "| with no sandbox, after | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for key in dict.fromkeys(key for sample in samples for key in sample["figures"]):
        cells = [f"{sample['figures'].get(key, 0):g}" for sample in samples]
        lines.append(f"| {key}{' (kept on purpose)' if key in KEPT else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of work (default 60)")
    parser.add_argument("--rounds", type=int, default=9, help="times it all goes and is counted (default 9)")
    parser.add_argument("--clients", type=int, default=3, help="at the same time (default 3)")
    parser.add_argument("--seed", type=int, default=None, help="of what they do (default: a new one)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to keep it (default bench/results)")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("it needs root")
    if args.rounds < 3:
        parser.error("--rounds: the first warms up and two are compared, so that there are at least 3")
    signal.signal(signal.SIGTERM, interrupted)
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    about = machine.facts()
    base = lender()
    build = builds(base)[0]
    about |= {"build": build.label, "minutes": args.minutes, "clients": args.clients, "seed": seed}
    yard = Forkyard(build, "systrap", base)
    samples: list[dict[str, Any]] = []
    clients: list[Worker] = []
    try:
        note(f"opening {yard.name}, seed {seed}")
        yard.open()
        pid = yard.client.health().pid
        clients = [
            Worker(number, Client(home=yard.home, start=False), random.Random(f"{seed}/{number}"))
            for number in range(args.clients)
        ]
        begun = time.monotonic()
        for _ in range(args.rounds):
            until = time.monotonic() + args.minutes * 60 / args.rounds
            threads = [threading.Thread(target=one.work, args=(until,), daemon=True) for one in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = when_quiet(yard.home, pid)
            minutes = (time.monotonic() - begun) / 60
            count = sum(sum(one.done.values()) for one in clients)
            samples.append({"minutes": round(minutes, 1), "operations": count, "figures": found})
            note(f"{minutes:.1f} min, {count} operations; grown: {grown(samples) or 'nothing'}")
    except KeyboardInterrupt:
        note("interrupted")
    finally:
        yard.close()
    about["load_after"] = round(os.getloadavg()[0], 2)
    if not samples:
        return 1
    text = markdown(about, samples, clients)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / time.strftime("soak-%Y-%m-%d-%H%M.md")
    path.write_text(text)
    path.with_suffix(".json").write_text(json.dumps({"about": about, "samples": samples}, indent=1) + "\n")
    note(f"kept as {path}")
    failed = any(one.failed for one in clients)
    return 1 if failed or grown(samples) else 0


if __name__ == "__main__":
    sys.exit(main())
