"""``python -m bench``: forkyard beside Docker and bare runsc, in one run, taking turns."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench import kept, machine, report
from bench.cases import CASES, Bench
from bench.contender import Contender
from bench.downloads import downloads
from bench.floors import floors
from bench.neighbour import neighbour
from bench.ours import Build, Forkyard, base_layers, builds, lender
from bench.pool import acquires
from bench.rivals import BareRunsc, Docker
from bench.scale import SCALE

OURS = {"pool": acquires, "downloads": downloads, "neighbour": neighbour, **SCALE}
MEASURED = {"floors": floors, **CASES, **OURS}
RESULTS = Path(__file__).parent / "results"


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 samples of each, shown and not kept")
    parser.add_argument("-n", type=int, default=20, help="samples of each (default 20)")
    parser.add_argument("--only", default="", help=f"cases, with commas, of: {','.join(MEASURED)}")
    parser.add_argument("--without", default="", help="of docker,runsc,newest,ptrace,systrap; with commas")
    parser.add_argument("--out", type=Path, default=None, help="where to keep it (default bench/results)")
    parser.add_argument("--trace", type=Path, default=None, help="a directory for traces of our daemons")
    args = parser.parse_args(argv)
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in args.only.split(",") if name] or list(MEASURED)
    if unknown := set(wanted) - MEASURED.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if os.geteuid() != 0:
        parser.error("Docker's daemon and runsc need root")
    signal.signal(signal.SIGTERM, interrupted)
    begun = time.monotonic()
    about = machine.facts()
    bench = Bench([], 3 if args.quick else args.n, note)
    try:
        _run(bench, about, wanted, set(args.without.split(",")), args.trace)
    except KeyboardInterrupt:
        bench.failures.append("the run was interrupted")
    about["minutes"] = round((time.monotonic() - begun) / 60, 1)
    print(report.markdown(about, bench.rows, bench.failures, kept.last_kept(RESULTS)[1]))
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        name = time.strftime("%Y-%m-%d-%H%M")
        note(f"kept as {kept.write(out, name, about, bench.rows, bench.failures)}")
    return 1 if bench.failures else 0


def interrupted(*_: object) -> None:
    """As Ctrl-C, and not a second time while things are put away."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(
    bench: Bench, about: dict[str, Any], wanted: list[str], without: set[str], trace: Path | None
) -> None:
    home = lender()
    layers = base_layers(home)
    found = [build for build in builds(home) if build.label not in without]
    about["builds"] = ", ".join(f"{build.label} ({build.path})" for build in found)
    with contextlib.ExitStack() as stack:
        for contender in _contenders(home, layers, found, without, trace):
            # Even if it does not open: it may have made something by then.
            stack.callback(contender.close)
            note(f"opening {contender.name}")
            try:
                contender.open()
                bench.contenders.append(contender)
            except Exception as error:
                bench.failures.append(f"{contender.name}: {type(error).__name__}: {error}")
                note(f"  failed: {bench.failures[-1]}")
        for name in wanted:
            try:
                MEASURED[name](bench)
            except Exception as error:  # what the others gave is kept
                bench.failures.append(f"{name}: {type(error).__name__}: {error}")
                note(f"  failed: {bench.failures[-1]}")
        about["load_after"] = round(os.getloadavg()[0], 2)
    machine.reap()


def _contenders(
    home: Path, layers: list[Path], found: list[Build], without: set[str], trace: Path | None
) -> list[Contender]:
    contenders: list[Contender] = [
        Forkyard(build, platform, home, trace)
        for build in found
        for platform in ("systrap", "ptrace")
        if platform not in without
    ]
    if "runsc" not in without:
        contenders += [BareRunsc(build, layers) for build in found]
    if "docker" not in without:
        contenders.append(Docker(layers, note))
    return contenders
