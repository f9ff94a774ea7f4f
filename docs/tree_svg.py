"""Draws docs/tree.svg: one sandbox, its forks, a checkpoint and a rewind.

    python docs/tree_svg.py
"""

from __future__ import annotations

from pathlib import Path

GREEN, BLUE, RED, GREY = "#2da44e", "#3b82c4", "#d1463b", "#8a919b"
WIDTH, HEIGHT = 760, 290


def node(x: int, y: int, color: str, name: str, note: str = "", *, at: tuple[int, int] = (14, 5),
         anchor: str = "start") -> str:
    """A dot, its name at an offset, and a note below the name."""
    dx, dy = at
    parts = [f'<circle cx="{x}" cy="{y}" r="7" fill="{color}"/>',
             f'<text x="{x + dx}" y="{y + dy}" text-anchor="{anchor}" font-weight="600">{name}</text>']
    if note:
        parts.append(f'<text x="{x + dx}" y="{y + dy + 17}" text-anchor="{anchor}" '
                     f'font-size="12">{note}</text>')
    return "".join(parts)


def branch(x1: int, y1: int, x2: int, y2: int, color: str = GREY, dash: str = "") -> str:
    middle = (x1 + x2) // 2
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<path d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}" fill="none" '
            f'stroke="{color}" stroke-width="2"{style}/>')


def back(x1: int, y1: int, x2: int, y2: int) -> str:
    """The way of a rewind, with an arrow's head."""
    return (f'<path d="M{x1 - 8} {y1 + 4} C{x1 - 50} {y1 + 45} {x2} {y2 + 75} {x2} {y2 + 12}" fill="none" '
            f'stroke="{BLUE}" stroke-width="2"/>'
            f'<path d="M{x2 - 5} {y2 + 20} L{x2} {y2 + 11} L{x2 + 5} {y2 + 20}" fill="none" '
            f'stroke="{BLUE}" stroke-width="2"/>'
            f'<text x="{x2 + 24}" y="{y2 + 82}" fill="{BLUE}">rewind</text>')


def picture() -> str:
    copies = [(35, "try-1", "counts on: 101"), (110, "try-2", "counts on: 102"), (185, "try-3", ""),
              (260, "try-4", "counts on: 104")]
    parts = [branch(170, 148, 340, y) for y, _, _ in copies]
    parts += [branch(20, 148, 170, 148), branch(340, 185, 480, 185, BLUE),
              branch(480, 185, 640, 215, RED, "5 4"), back(640, 215, 480, 185)]
    parts += [
        node(20, 148, GREY, "base", at=(-6, -14)),
        node(170, 148, GREEN, "work", "a server, at 100", at=(6, -31), anchor="end"),
        node(480, 185, BLUE, "checkpoint", at=(-8, -14)),
        node(640, 215, RED, "rm -rf, kill"),
    ]
    parts += [node(340, y, GREEN, name, note, at=(14, 1) if note else (-8, -14)) for y, name, note in copies]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="{GREY}" role="img">'
        "<title>A sandbox is forked four times; one copy is checkpointed, broken and rewound</title>"
        + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    Path(__file__).with_name("tree.svg").write_text(picture())
