"""Draws a search tree, as text and as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkyard.rollouts.tree import Node

LONGEST_ACTION = 60
GREEN, BLUE, GREY, RED = "#2da44e", "#3b82c4", "#8a919b", "#d1463b"
STEP_X, STEP_Y, MARGIN = 150, 30, 24


def as_text(root: Node, best: Node | None) -> str:
    """One line a node, indented below its parent; the way to the best is marked with ``*``."""
    lines = []
    marked = _way_to(best)
    waiting: list[tuple[Node, str, str]] = [(root, "", "")]
    while waiting:
        node, lead, below = waiting.pop()
        lines.append(f"{lead}{'*' if node in marked else ' '}{_line(node)}")
        for i, child in reversed(list(enumerate(node.children))):
            last = i == len(node.children) - 1
            waiting.append((child, below + ("└─" if last else "├─"), below + ("  " if last else "│ ")))
    return "\n".join(lines)


def _line(node: Node) -> str:
    words = [f"{node.number}", "root" if node.parent is None else label(node.action)]
    if node.score is not None:
        words.append(f"{node.score:.3g}")
    if node.visits:
        words.append(f"{node.visits}x{node.total / node.visits:.2f}")
    if node.error:
        words.append(f"({label(node.error)})")
    elif node.ended and node.ended not in ("leaf", "expanded"):
        words.append(f"({node.ended})")
    return "  ".join(words)


def label(action: Any) -> str:
    """An action in one short line."""
    text = " ".join((action if isinstance(action, str) else repr(action)).split())
    return text if len(text) <= LONGEST_ACTION else text[: LONGEST_ACTION - 1] + "…"


def _way_to(node: Node | None) -> set[Node]:
    found = set()
    while node is not None:
        found.add(node)
        node = node.parent
    return found


def as_svg(root: Node, best: Node | None) -> str:
    """Left to right, a row for each leaf; the title of a dot holds its action."""
    rows: dict[Node, float] = {}
    order: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(node.children)
    used = 0
    for node in order:
        if not node.children:
            rows[node] = used
            used += 1
    for node in reversed(order):
        if node.children:
            rows[node] = (rows[node.children[0]] + rows[node.children[-1]]) / 2
    scores = [node.score for node in order if node.score is not None]
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    depths = {root: 0}
    for node in order[1:]:
        assert node.parent is not None
        depths[node] = depths[node.parent] + 1

    def at(node: Node) -> tuple[float, float]:
        return MARGIN + depths[node] * STEP_X, MARGIN + rows[node] * STEP_Y

    marked = _way_to(best)
    lines, dots = [], []
    for node in order:
        x, y = at(node)
        if node.parent is not None:
            x0, y0 = at(node.parent)
            thick = node in marked
            lines.append(
                f'<path d="M{x0:g} {y0:g} C{(x0 + x) / 2:g} {y0:g} {(x0 + x) / 2:g} {y:g} {x:g} {y:g}" '
                f'fill="none" stroke="{GREEN if thick else GREY}" stroke-width="{3 if thick else 1}"/>'
            )
        dots.append(_dot(node, x, y, low, high, node is best))
    width = 2 * MARGIN + max(depths.values()) * STEP_X + 90
    height = 2 * MARGIN + max(used - 1, 0) * STEP_Y
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11" fill="{GREY}" role="img">'
        f"<title>A search tree of {len(order)} nodes</title>" + "".join(lines) + "".join(dots) + "</svg>\n"
    )


def _dot(node: Node, x: float, y: float, low: float, high: float, is_best: bool) -> str:
    if node.error:
        fill, opacity = RED, 1.0
    elif node.score is None:
        fill, opacity = GREY, 0.5
    else:
        fill = GREEN if is_best else BLUE
        opacity = 0.25 + 0.75 * ((node.score - low) / (high - low) if high > low else 1.0)
    score = "" if node.score is None else f"{node.score:.3g}"
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="{8 if is_best else 6}" fill="{fill}" fill-opacity="{opacity:.2f}">'
        f"<title>{escape(_line(node))}</title></circle>"
        f'<text x="{x + 11:g}" y="{y - 5:g}">{score}</text>'
    )
