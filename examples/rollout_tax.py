"""The rollout tax: what a rollout costs besides the model, four ways.

    python examples/rollout_tax.py [--actions 10 50 150] [--rollouts 6] [--image IMAGE] [--svg tax.svg]

A rollout needs a machine with a project set up in it (files, a database, a running interpreter
that has read it), does so many scripted actions, and leaves. The machine is a fresh sandbox that
is set up each time, a fork of one that was set up once, one sandbox that is rewound after each
rollout, or a fresh Docker container that is set up each time (where Docker and the image are here).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from containers import Container, image_there

from forkyard import Client

SET_UP = r"""
set -e
mkdir -p work/src
for n in $(seq 40); do printf 'def f%d(x):\n    return x + %d\n' $n $n > work/src/m$n.py; done
python3 - <<'END'
import sqlite3
db = sqlite3.connect("work/facts.db")
db.execute("create table facts (n integer, square integer)")
db.executemany("insert into facts values (?, ?)", ((n, n * n) for n in range(50_000)))
db.commit()
END
"""
# What an agent does: look, edit, run.
ACTIONS = [
    "ls work/src | wc -l",
    "grep -l 'return x + 9$' -r work/src",
    "sed -i 's/x + 7$/x + 8/' work/src/m7.py",
    "cd work/src && python3 -c 'import m7; print(m7.f7(1))'",
    'python3 -c \'import sqlite3; print(sqlite3.connect("work/facts.db")'
    '.execute("select sum(square) from facts").fetchone())\'',
]


def script(count: int) -> list[str]:
    """So many actions."""
    return [ACTIONS[n % len(ACTIONS)] for n in range(count)]


def by_fresh_sandbox(client: Client, rollouts: int, actions: list[str], source: str) -> None:
    for _ in range(rollouts):
        sandbox = client.sandbox(client.create_sandbox(ephemeral=True).id)
        sandbox.shell(SET_UP, check=True)
        _act(sandbox, actions)
        sandbox.delete_sandbox()


def by_fork(client: Client, rollouts: int, actions: list[str], source: str) -> None:
    for _ in range(rollouts):
        sandbox = client.sandbox(client.fork(source, 1, ephemeral=True).forks[0].id)
        _act(sandbox, actions)
        sandbox.delete_sandbox()


def by_rewind(client: Client, rollouts: int, actions: list[str], source: str) -> None:
    sandbox = client.sandbox(client.fork(source, 1, ephemeral=True).forks[0].id)
    start = sandbox.checkpoint()
    for number in range(rollouts):
        if number:
            sandbox.rewind(to=start.id)
        _act(sandbox, actions)
    sandbox.delete_sandbox()


def by_container(image: str) -> Callable[[Client, int, list[str], str], None]:
    def run(client: Client, rollouts: int, actions: list[str], source: str) -> None:
        for _ in range(rollouts):
            with Container(image) as container:
                container.run("sh", "-c", SET_UP)
                for action in actions:
                    container.run("sh", "-c", action)

    return run


def _act(sandbox: Any, actions: list[str]) -> None:
    for action in actions:
        sandbox.shell(action, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--actions", type=int, nargs="+", default=[10, 50, 150])
    parser.add_argument("--rollouts", type=int, default=6, help="for each figure")
    parser.add_argument("--image", help="a Docker image with sh and python3 that is on this machine")
    parser.add_argument("--svg", type=Path, help="where to draw the table")
    chosen = parser.parse_args()
    ways = {"fresh sandbox": by_fresh_sandbox, "fork of a warm one": by_fork, "rewind": by_rewind}
    if chosen.image and image_there(chosen.image):
        ways["fresh container"] = by_container(chosen.image)
    with Client() as client:
        client.create_sandbox("tax", ephemeral=True)
        client.shell("tax", SET_UP, check=True)
        snapshot = client.snapshot("tax")
        client.delete_sandbox("tax")
        try:
            took = table(client, ways, snapshot.id, chosen.actions, chosen.rollouts)
        finally:
            client.delete_snapshot(snapshot.id)
    if chosen.svg is not None:
        chosen.svg.write_text(as_svg(took, chosen.actions))


def table(
    client: Client, ways: dict[str, Any], source: str, counts: list[int], rollouts: int
) -> dict[str, list[float]]:
    """Print seconds for each rollout, and the machine's hours for a million of them, one at a time. The
    seconds, by way."""
    took: dict[str, list[float]] = {}
    head = "".join(f"{count:>8} actions" for count in counts)
    print(f"{'seconds a rollout':20}{head}   worker-hours for a million rollouts")
    for name, run in ways.items():
        cells, hours = "", ""
        for count in counts:
            begun = time.perf_counter()
            run(client, rollouts, script(count), source)
            each = (time.perf_counter() - begun) / rollouts
            took.setdefault(name, []).append(each)
            cells += f"{each:>16.2f}"
            hours += f"{each * 1e6 / 3600:>9.0f}"
        print(f"{name:20}{cells}   {hours}", flush=True)
    return took


def as_svg(took: dict[str, list[float]], counts: list[int]) -> str:
    """A bar for each way and number of actions: seconds a rollout."""
    width, step, left = 640, 20, 160
    most = max(each for row in took.values() for each in row)
    parts, y = [], 0
    for at, count in enumerate(counts):
        parts.append(f'<text x="0" y="{y + 16}">{count} actions</text>')
        y += step
        for name, row in took.items():
            wide = (width - left - 80) * row[at] / most
            colour = "#d97706" if name == "fresh container" else "#2563eb"
            parts.append(
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>'
                f'<rect x="{left}" y="{y + 3}" width="{max(wide, 1):.0f}" height="14" fill="{colour}"/>'
                f'<text x="{left + wide + 8:.0f}" y="{y + 14}">{row[at]:.2f} s</text>'
            )
            y += step
        y += step // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="#8a919b" role="img">'
        f"<title>Seconds a rollout, in {len(took)} ways</title>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()
