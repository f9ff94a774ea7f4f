"""``forkyard fork`` and ``forkyard tree``: copies, and who came from whom."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli.app import App, note, pass_app
from forkyard.cli.output import age, ms, on_terminal, print_json, record
from forkyard.cli.params import (
    complete_sandbox,
    env_option,
    given,
    json_option,
    label_option,
    life_options,
    limit_options,
    minutes,
)

if TYPE_CHECKING:
    from rich.tree import Tree

    from forkyard.types import TreeNode


@click.command("fork", epilog="""\b
Examples:
  forkyard fork work
  forkyard fork work -n 8 --prefix ep-
  forkyard fork work -n 8 --json | jq -r '.forks[].id'""")
@click.argument("source", metavar="SOURCE", shell_complete=complete_sandbox)
@click.option("-n", "count", type=click.IntRange(min=1), default=1, metavar="N",
              help="How many (default: 1).")
@click.option("--prefix", metavar="P", help="Call them P1, P2, ...")
@click.option("--name", "names", multiple=True, help="Call them so; once for each.")
@click.option("--no-memory", is_flag=True, help="Boot the copies afresh on a copy of the disk.")
@limit_options
@env_option
@label_option("Mark them. Repeatable.")
@life_options
@click.option("--wait", is_flag=True, help="Return when they run, which is always so.")
@json_option()
@pass_app
def fork_verb(
    app: App, source: str, count: int, prefix: str | None, names: tuple[str, ...], no_memory: bool,
    type_: str | None, cpus: float | None, cpu_weight: int | None, mem_mb: int | None, disk_mb: int | None,
    env: tuple[tuple[str, str], ...], labels: tuple[tuple[str, str], ...], wait_s: float,
    ttl_s: float | None, auto_stop_s: float | None, egress: str | None, allow: tuple[str, ...],
    wait: bool, as_json: bool,
) -> None:
    """Make N running copies of SOURCE, memory, processes and disk included; print their ids.

    SOURCE is a sandbox (which runs on), a snapshot or a checkpoint. All copies are made, or none.
    """
    if names and prefix:
        raise click.UsageError("--name and --prefix exclude each other")
    if names and len(names) != count:
        if count != 1:
            raise click.UsageError(f"{len(names)} names for {count} forks")
        count = len(names)
    done = app.client.fork(source, count, **given(
        prefix=prefix, names=list(names) or None, memory=False if no_memory else None,
        type=type_, cpus=cpus, cpu_weight=cpu_weight, mem_mb=mem_mb, disk_mb=disk_mb,
        env=dict(env), labels=dict(labels),
        wait_s=wait_s or None, ttl_min=minutes(ttl_s), auto_stop_min=minutes(auto_stop_s),
        egress=egress, egress_allow=list(allow) or None,
        # A copy of an ephemeral sandbox would end with this very process.
        ephemeral=False,
    ))
    times = {"pausedMs": round(done.paused_ms, 1), "totalMs": round(done.total_ms, 1)}
    if as_json and count == 1:
        print_json({**record(done.forks[0]), **times})
    elif as_json:
        print_json({"forks": [record(box) for box in done.forks], "snapshot": done.snapshot, **times})
    else:
        print("\n".join(box.id for box in done.forks), flush=True)
        each = f", {ms(done.total_ms / count)} each" if count > 1 else ""
        note(f"{count} {'fork' if count == 1 else 'forks'} in {ms(done.total_ms)}{each}; "
             f"the source stood still for {ms(done.paused_ms)}")


@click.command("tree", epilog="""\b
Examples:
  forkyard tree
  forkyard tree work --all""")
@click.argument("root", metavar="[ROOT]", required=False, shell_complete=complete_sandbox)
@click.option("--all", "-a", "everything", is_flag=True, help="Draw every copy, also of many alike.")
@json_option()
@pass_app
def tree_verb(app: App, root: str | None, everything: bool, as_json: bool) -> None:
    """Draw who was forked from what, from ROOT down."""
    nodes = app.client.tree(root) if root else app.client.tree()
    if as_json:
        print_json({"nodes": [record(node) for node in nodes]})
        return
    if not nodes:
        print("Nothing here yet. Make a sandbox: forkyard new")
        return
    print_tree(nodes, everything=everything)


FEW = 12
# Columns: rich cuts what is wider than its console.
WIDE = 10_000
KINDS = {"template": "template", "snapshot": "snapshot", "checkpoint": "checkpoint", "sandbox": ""}
STYLES = {"running": "green", "stopped": "yellow", "failed": "red", "creating": "cyan", "deleted": "dim"}


def print_tree(nodes: list[TreeNode], *, everything: bool = False) -> None:
    """Draw ``nodes`` on stdout, in a pipe without colours and as wide as it gets."""
    from rich.console import Console

    trees = grow(nodes, everything=everything)
    if on_terminal():
        console = Console(highlight=False)
        for tree in trees:
            console.print(tree)
        return
    console = Console(highlight=False, width=WIDE, color_system=None)
    with console.capture() as drawn:
        for tree in trees:
            console.print(tree)
    for line in drawn.get().splitlines():
        print(line.rstrip())


def grow(nodes: list[TreeNode], *, everything: bool = False) -> list[Tree]:
    """One tree for each node whose parent is not among ``nodes``; older ones first.

    More than a dozen leaves alike under one parent are drawn as the first three, the last
    and a count, unless ``everything`` is wanted.
    """
    from rich.tree import Tree

    known = {node.id for node in nodes}
    below: dict[str | None, list[TreeNode]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.created_at):
        below[node.parent if node.parent in known and node.parent != node.id else None].append(node)

    def add(onto: Any, node: TreeNode) -> None:
        branch = onto.add(_label(node))
        children = below[node.id]
        leaves = [child for child in children if not below[child.id] and child.kind == "sandbox"]
        hidden = {child.id for child in leaves[3:-1]} if len(leaves) > FEW and not everything else set()
        for child in children:
            if child.id not in hidden:
                add(branch, child)
            elif child is leaves[3]:
                branch.add(f"[dim]… {len(hidden)} more …[/]")

    trees = []
    for node in below[None]:
        holder = Tree("")
        add(holder, node)
        trees.append(holder.children[0])
    return trees


def _label(node: TreeNode) -> str:
    from rich.markup import escape

    if node.kind == "snapshot" and not node.name:
        # What a fork took for itself: of interest is only when.
        return f"[dim]fork point  {escape(node.id)}  {age(node.created_at)}[/]"
    words = [f"[bold]{escape(node.name)}[/]" if node.name else "", KINDS[node.kind],
             f"[dim]{escape(node.id)}[/]" if node.kind != "template" else ""]
    if node.kind == "sandbox":
        words.append(f"[{STYLES.get(node.state, 'dim')}]{escape(node.state)}[/]")
    if node.kind != "template" and node.created_at:
        words.append(f"[dim]{age(node.created_at)}[/]")
    return "  ".join(word for word in words if word)
