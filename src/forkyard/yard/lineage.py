"""Who came from what, and when."""

from __future__ import annotations

from collections.abc import Iterable

from forkyard.errors import NotFoundError
from forkyard.types import TreeNode
from forkyard.yard.context import Context
from forkyard.yard.templates import TemplateDoc


def tree(context: Context, templates: Iterable[TemplateDoc], root: str | None) -> list[TreeNode]:
    """Every template, sandbox, snapshot and checkpoint with its parent, parents first.

    Args:
        root: Only what came from this one (an id or a name), itself included.

    Raises:
        NotFoundError: there is no such root.
    """
    nodes = {
        f"template:{doc.name}": TreeNode(
            f"template:{doc.name}", "template", doc.name, None, "ready", doc.created_at
        )
        for doc in templates
    }
    for snapshot in context.snapshots.values():
        if snapshot.kind in ("checkpoint", "snapshot", "fork"):
            kind = "checkpoint" if snapshot.kind == "checkpoint" else "snapshot"
            parent: str | None = snapshot.sandbox
            if snapshot.kind == "checkpoint" and snapshot.parent:
                parent = snapshot.parent
            nodes[snapshot.id] = TreeNode(
                snapshot.id,
                kind,  # type: ignore[arg-type]
                snapshot.name,
                parent,
                "ready",
                snapshot.created_at,
            )
    for sandbox in context.sandboxes:
        doc = sandbox.doc
        parent = doc.snapshot or (f"template:{doc.template}" if doc.template else None)
        if parent not in nodes:
            parent = doc.parent or (f"template:{doc.template}" if doc.template else None)
        nodes[doc.id] = TreeNode(doc.id, "sandbox", doc.name, parent, doc.state, doc.created_at)
    ordered = sorted(nodes.values(), key=lambda node: node.created_at)
    if root is None:
        return ordered
    start = next((node for node in ordered if root in (node.id, node.name)), None)
    if start is None:
        raise NotFoundError(f"nothing in the tree is called {root[:140]!r}")
    chosen = {start.id}
    # Children are younger than their parents, so that one pass in order of age is enough.
    for node in ordered:
        if node.parent in chosen:
            chosen.add(node.id)
    return [node for node in ordered if node.id in chosen]
