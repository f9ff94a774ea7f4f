"""Draws docs/tree.svg: one sandbox, its forks, a checkpoint and a rewind.

    python docs/tree_svg.py
"""

from __future__ import annotations

from pathlib import Path

GREEN, BLUE, RED, GREY = "#2da44e", "#3b82c4", "#d1463b", "#8a919b"
WIDTH, HEIGHT = 760, 320


def node(x: int, y: int, color: str, name: str, note: str = "") -> str:
    parts = [f'<circle cx="{x}" cy="{y}" r="7" fill="{color}"/>',
             f'<text x="{x + 14}" y="{y - 1}" font-weight="600">{name}</text>']
    if note:
        parts.append(f'<text x="{x + 14}" y="{y + 15}" font-size="12" fill="{GREY}">{note}</text>')
    return "".join(parts)


def branch(x1: int, y1: int, x2: int, y2: int, color: str = GREY, dash: str = "") -> str:
    middle = (x1 + x2) // 2
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<path d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}" fill="none" '
            f'stroke="{color}" stroke-width="2"{style}/>')


def picture() -> str:
    parts = []
    rows = [(40, "try-1", "counts on: 101"), (110, "try-2", "counts on: 102"), (180, "try-3", ""),
            (290, "try-4", "counts on: 104")]
    for y, _, _ in rows:
        parts.append(branch(170, 160, 340, y))
    parts += [branch(20, 160, 170, 160), branch(340, 180, 490, 180, BLUE),
              branch(490, 180, 640, 225, RED, "5 4"), branch(640, 225, 490, 180, BLUE, "1 5")]
    parts += [node(20, 160, GREY, "base", "template"), node(170, 160, GREEN, "work", "a server, at 100")]
    parts += [node(340, y, GREEN, name, note) for y, name, note in rows]
    parts += [node(490, 180, BLUE, "checkpoint", ""), node(640, 225, RED, "rm -rf", "rewound")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="{GREY}" role="img">'
        "<title>A sandbox is forked four times; one copy is checkpointed, broken and rewound</title>"
        + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    Path(__file__).with_name("tree.svg").write_text(picture())
