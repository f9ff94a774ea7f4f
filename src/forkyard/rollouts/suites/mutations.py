"""One-operator bugs in Python source. Pure: text in, text out."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_BINARY = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")}
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


@dataclass(frozen=True, slots=True)
class Mutation:
    """At ``start`` to ``end`` (offsets in bytes) stands ``new`` instead of ``old``."""

    start: int
    end: int
    old: str
    new: str
    line: int

    def apply(self, source: bytes) -> bytes:
        """The source with the bug."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """Every one-operator bug that can be put into functions of the source, in order.

    Raises:
        SyntaxError: it is no Python of this interpreter's version.
    """
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                found |= set(_in(statement, source, starts))
    return sorted(found, key=lambda one: (one.start, one.new))


def _in(top: ast.AST, source: bytes, starts: Sequence[int]) -> Iterator[Mutation]:
    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, what: str, new: str, *, plain: bool) -> Iterator[Mutation]:
        """The operator in what is between two operands: white space, parentheses and comments."""
        gap = source[end(left) : begin(right)].decode()
        word = re.escape(what) if plain else rf"\b{what}\b"
        found = list(re.finditer(word, re.sub(r"#.*", lambda m: " " * len(m[0]), gap)))
        if len(found) == 1 and gap.isascii():
            at = end(left) + found[0].start()
            yield Mutation(at, at + len(found[0][0]), found[0][0], new, left.end_lineno or left.lineno)

    for node in ast.walk(top):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            what, new = _COMPARE[type(node.ops[0])]
            yield from between(node.left, node.comparators[0], what, new, plain=not what[0].isalpha())
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            what, new = _BINARY[type(node.op)]
            if not any(_is_text(one) for one in (node.left, node.right)):
                yield from between(node.left, node.right, what, new, plain=True)
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            what, new = _BOOLEAN[type(node.op)]
            yield from between(node.values[0], node.values[1], what, new, plain=False)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            old = source[begin(node) : end(node)].decode()
            new = str(not node.value) if isinstance(node.value, bool) else str(int(node.value) + 1)
            yield Mutation(begin(node), end(node), old, new, node.lineno)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutation(begin(node), begin(node.operand), "not ", "", node.lineno)


def _is_text(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return constant or isinstance(node, ast.JoinedStr)


def shuffled(files: dict[str, bytes], seed: str) -> list[tuple[str, Mutation]]:
    """All mutations of all files in an order that the seed decides."""
    found = [(name, one) for name in sorted(files) for one in mutations(files[name])]
    random.Random(seed).shuffle(found)
    return found


def without(source: bytes, names: set[tuple[str, ...]]) -> tuple[bytes, set[tuple[str, ...]]]:
    """The source without functions, named by class and name (``("TestX", "test_y")``) or by name
    alone; and which of them were in it. A class or a file that gets empty keeps a ``pass``."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    gone: set[tuple[str, ...]] = set()
    cut: list[tuple[int, int, bytes]] = []

    def visit(body: Sequence[ast.stmt], inside: tuple[str, ...]) -> None:
        left = len(body)
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, (*inside, node.name))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = (*inside, node.name)
                if name in names or (node.name,) in names:
                    gone.add(name if name in names else (node.name,))
                    left -= 1
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    kept = b" " * node.col_offset + b"pass\n" if not left else b""
                    cut.append((first - 1, node.end_lineno or node.lineno, kept))

    visit(tree.body, ())
    for first, last, kept in sorted(cut, reverse=True):
        lines[first:last] = [kept] if kept else []
    return b"".join(lines), gone
