"""Search beats sampling: patches for a package with four bugs, tried in a machine that is warm.

    python examples/search_vs_sampling.py [--nodes 60] [--tries 5] [--image IMAGE]

A state here is more than files: an interpreter has the package loaded, and holds an open
transaction on a sqlite database with what earlier steps posted. An action replaces one line of
the package and reloads it there. The score is the share of the visible tests that pass; hidden
tests, which no search sees, say at the end whether the best state is right.

Sampling and search get the same number of nodes. Then the same path of nodes is timed four ways:
a rewind, a fork, a fresh sandbox in which everything is done again, and a fresh container.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from containers import Container, image_there

from forkyard import Client
from forkyard.rollouts import Budget, Node, SearchResult, beam, best_of_n, mcts

PACKAGE = """\
def balance(db, account, day):
    rows = db.execute("select cents from entries where account = ? and day < ?", (account, day))  # 0
    return sum(cents for (cents,) in rows)


def transfer(db, day, source, target, cents):
    for account, amount in ((source, -cents), (target, -cents)):  # 1
        db.execute("insert into entries values (?, ?, ?)", (account, day, amount))


def fee(cents):
    return cents * 15 // 1000  # 2


def richest(db, day):
    accounts = [name for (name,) in db.execute("select distinct account from entries")]
    return min(accounts, key=lambda name: (balance(db, name, day), name))  # 3
"""

# What a policy that does not know better proposes for each line, the right one among them.
LINES = [
    [
        '    rows = db.execute("select cents from entries where account = ? and day > ?", (account, day))',
        '    rows = db.execute("select cents from entries where account = ? and day <= ?", (account, day))',
        '    rows = db.execute("select cents from entries where account = ? and day = ?", (account, day))',
    ],
    [
        "    for account, amount in ((source, cents), (target, -cents)):",
        "    for account, amount in ((source, cents), (target, cents)):",
        "    for account, amount in ((source, -cents), (target, cents)):",
    ],
    ["    return -(-cents * 15 // 1000)", "    return cents * 15 / 1000", "    return round(cents * 1.5)"],
    [
        "    return max(accounts, key=lambda name: (cents(db, name, day), name))",
        "    return max(accounts, key=lambda name: (balance(db, name, day), name))",
        "    return sorted(accounts)[0]",
    ],
]
RIGHT = [LINES[0][1], LINES[1][2], LINES[2][0], LINES[3][1]]


def package(bugs: int) -> str:
    """The package with its first so many bugs."""
    lines = PACKAGE.split("\n")
    for site in range(bugs, len(RIGHT)):
        where = next(number for number, line in enumerate(lines) if line.endswith(f"# {site}"))
        lines[where] = f"{RIGHT[site]}  # {site}"
    return "\n".join(lines)


def actions(bugs: int) -> list[tuple[int, str]]:
    """What can be tried: a site and its new line."""
    return [(site, line) for site, lines in enumerate(LINES[:bugs]) for line in lines]


# Runs in the interpreter that is searched over. The transaction stays open for good.
WARM = '''\
import importlib, random, sqlite3, sys
sys.path.insert(0, "")
sys.dont_write_bytecode = True
db = sqlite3.connect("ledger.db", isolation_level=None)
db.execute("create table entries (account text, day integer, cents integer)")
db.execute("begin")
rng = random.Random(0)
names = [f"account-{n}" for n in range(40)]
db.executemany("insert into entries values (?, ?, ?)",
               [(rng.choice(names), rng.randrange(1000), rng.randrange(-500, 900)) for _ in range(ROWS)])
first = db.execute("select min(day) from entries where account = ?", (names[3],)).fetchone()[0]
import ledger

def patch(site, line):
    lines = open("ledger.py").read().split("\\n")
    where = next(n for n, text in enumerate(lines) if text.endswith(f"# {site}"))
    lines[where] = f"{line}  # {site}"
    open("ledger.py", "w").write("\\n".join(lines))
    importlib.reload(ledger)

def passes(*checks):
    """How many hold; what they post is taken back."""
    count = 0
    for check in checks:
        db.execute("savepoint test")
        try:
            count += bool(check())
        except Exception:
            pass
        db.execute("rollback to test")
        db.execute("release test")
    return count

def known(name, day):
    query = "select total(cents) from entries where account = ? and day <= ?"
    return db.execute(query, (name, day)).fetchone()[0]

def after(day, source, target, cents):
    before = known(source, day), known(target, day)
    ledger.transfer(db, day, source, target, cents)
    return known(source, day) - before[0], known(target, day) - before[1]

def top(day):
    return max(names, key=lambda name: (known(name, day), name))

def visible():
    return passes(
        lambda: ledger.balance(db, names[3], first) == known(names[3], first) != 0,
        lambda: after(7, names[0], names[1], 250) == (-250, 250),
        lambda: ledger.fee(1001) == 16,
        lambda: ledger.richest(db, 999) == top(999)) / 4

def hidden():
    return passes(
        *(lambda day=day: ledger.balance(db, names[day % 40], day) == known(names[day % 40], day)
          for day in range(0, 1000, 90)),
        lambda: after(300, names[5], names[6], 1) == (-1, 1),
        lambda: [ledger.fee(cents) for cents in (0, 1, 200, 1001, 66667)] == [0, 1, 3, 16, 1001],
        *(lambda day=day: ledger.richest(db, day) == top(day) for day in (400, 999))) == 16
'''
ROWS = 20_000


def warm_up(sandbox: Any, bugs: int) -> None:
    """The state to start from: files, database, interpreter."""
    sandbox.write_file("ledger.py", package(bugs))
    _code(sandbox, WARM.replace("ROWS", str(ROWS)))


def _code(sandbox: Any, code: str) -> str:
    done = sandbox.run_code(code)
    if not done.ok:
        raise RuntimeError(f"{code[:60]!r}: {done.error}")
    return str(done.result)


def apply(sandbox: Any, action: tuple[int, str]) -> None:
    _code(sandbox, f"patch({action[0]}, {action[1]!r})")


def score(sandbox: Any) -> float:
    return float(_code(sandbox, "visible()"))


def check(sandbox: Any) -> bool:
    return _code(sandbox, "hidden()") == "True"


def compare(client: Client, nodes: int, tries: int, bugs: int) -> list[tuple[str, list[SearchResult]]]:
    """Sampling and two searches, each ``tries`` times with other random choices."""
    depth = bugs
    found: list[tuple[str, list[SearchResult]]] = []
    for name in ("best of n", "beam", "UCT"):
        results = []
        for seed in range(tries):
            rng = random.Random(seed)

            def propose(node: Node, rng: random.Random = rng) -> list[tuple[int, str]]:
                done = {site for site, _ in node.actions}
                left = [action for action in actions(bugs) if action[0] not in done]
                return rng.sample(left, len(left))

            common: dict[str, Any] = {"apply": apply, "check": check, "target": 1.0, "keep": False}
            common["budget"] = Budget(nodes=nodes)
            if name == "best of n":
                done = best_of_n(
                    client, "ledger", propose, score, n=-(-nodes // depth), depth=depth, **common
                )
            elif name == "beam":
                done = beam(client, "ledger", propose, score, width=2, depth=depth, **common)
            else:
                done = mcts(client, "ledger", propose, score, depth=depth, c=0.2, **common)
            results.append(done)
        found.append((name, results))
        print(f"  {name}: done", flush=True)
    return found


def nodes_a_minute(client: Client, count: int, image: str | None) -> dict[str, list[float]]:
    """The seconds of ``count`` nodes, siblings three actions below the start, each way in turn, so that
    a load that changes meanwhile is the same for all; of those in which all is done again, a third."""
    bugs = len(LINES)
    path = list(enumerate(RIGHT[:-1]))
    parent = client.sandbox(client.create_sandbox(ephemeral=True).id)
    warm_up(parent, bugs)
    for action in path:
        apply(parent, action)
    point = parent.checkpoint()

    def node(sandbox: Any, action: tuple[int, str]) -> None:
        apply(sandbox, action)
        score(sandbox)

    def by_rewind(action: tuple[int, str]) -> None:
        parent.rewind(to=point.id)
        node(parent, action)

    def by_fork(action: tuple[int, str]) -> None:
        copy = client.sandbox(client.fork(point.id, 1, ephemeral=True).forks[0].id)
        node(copy, action)
        copy.delete_sandbox()

    def by_fresh_sandbox(action: tuple[int, str]) -> None:
        fresh = client.sandbox(client.create_sandbox(ephemeral=True).id)
        warm_up(fresh, bugs)
        for earlier in path:
            apply(fresh, earlier)
        node(fresh, action)
        fresh.delete_sandbox()

    def by_container(action: tuple[int, str]) -> None:
        assert image is not None
        steps = [f"patch({site}, {line!r})" for site, line in [*path, action]]
        program = [f"open('ledger.py', 'w').write({package(bugs)!r})", WARM.replace("ROWS", str(ROWS))]
        with Container(image) as container:
            text = "\n".join([*program, *steps, "visible()"])
            container.run("sh", "-c", "cd /tmp && python3 -", stdin=text)

    ways: dict[str, tuple[int, Callable[[tuple[int, str]], None]]] = {
        "rewind": (1, by_rewind),
        "fork": (1, by_fork),
        "fresh sandbox, all done again": (3, by_fresh_sandbox),
    }
    if image is not None and image_there(image):
        ways["fresh container, all done again"] = (3, by_container)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count):
        for name, (each, way) in ways.items():
            if number % each == 0:
                begun = time.perf_counter()
                way(actions(bugs)[9 + number % 3])
                took[name].append(time.perf_counter() - begun)
    parent.delete_sandbox()
    return took


def table(took: dict[str, list[float]]) -> str:
    """How many nodes each way made, and how fast."""
    lines = [f"{'one node by':34} {'nodes':>6} {'ms each':>8} {'nodes a minute':>15}"]
    for name, seconds in took.items():
        each = statistics.mean(seconds)
        lines.append(f"{name:34} {len(seconds):>6} {each * 1e3:>8.0f} {60 / each:>15.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=60, help="the budget of each search")
    parser.add_argument("--bugs", type=int, default=len(LINES), choices=range(1, len(LINES) + 1))
    parser.add_argument("--tries", type=int, default=5, help="how often each is run")
    parser.add_argument("--timed", type=int, default=30, help="nodes in the second table")
    parser.add_argument("--image", help="a Docker image with python3 that is on this machine")
    parser.add_argument("--svg", type=Path, help="where to draw the first beam's tree")
    chosen = parser.parse_args()
    with Client() as client:
        client.create_sandbox("ledger", ephemeral=True)
        warm_up(client.sandbox("ledger"), chosen.bugs)
        print(f"{chosen.nodes} nodes each, {chosen.tries} tries:")
        found = compare(client, chosen.nodes, chosen.tries, chosen.bugs)
        print(f"\n{'':10} {'solved':>8} {'hidden tests':>13} {'best score':>11} {'nodes':>6} {'seconds':>8}")
        for name, results in found:
            best = [(done.best.score or 0.0) if done.best else 0.0 for done in results]
            print(
                f"{name:10} {sum(score >= 1 for score in best):>3} of {len(results)} "
                f"{sum(bool(done.passed) for done in results):>8} of {len(results)} "
                f"{statistics.mean(best):>11.2f} {statistics.mean(done.nodes for done in results):>6.0f} "
                f"{statistics.mean(done.seconds for done in results):>8.1f}"
            )
        beams = dict(found)["beam"]
        print(f"\n{beams[0]}")
        if chosen.svg is not None:
            beams[0].tree.save_svg(chosen.svg)
        client.delete_sandbox("ledger")
        print(f"\n{table(nodes_a_minute(client, chosen.timed, chosen.image))}")


if __name__ == "__main__":
    main()
