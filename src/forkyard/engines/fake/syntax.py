"""The toy shell's grammar: from text to nested lists, so that a script is data in an image.

A word is a list of parts: ``["t", text, quoted]``, ``["v", name, quoted]`` or
``["a", word]`` for arithmetic. A node is ``[kind, ...]``; see the shell for the kinds.
"""

from __future__ import annotations

import re
from typing import Any

Node = list[Any]
Token = tuple[str, Any]

_OPERATOR = re.compile(r"&&|\|\||;|&|\||\(|\)|\n|(\d?)(>>|>&|>|<)")
_NAME = re.compile(r"\{(\w+|[?!$#])\}|(\w+|[?!$#])")
_END: Token = ("", "")
KEYWORDS = {"then", "else", "fi", "do", "done", "}"}


class SyntaxFault(Exception):
    """What a shell says to text that is no script."""


def tokens(text: str) -> list[Token]:
    """Operators as ``("op", text)``, redirections as ``("to", (fd, sign))``, words as ``("w", parts)``."""
    found: list[Token] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char in " \t" or text.startswith("\\\n", at):
            at += 1 if char in " \t" else 2
        elif char == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif (match := _OPERATOR.match(text, at)) and match[0]:
            at = match.end()
            if match[2]:
                fd = int(match[1]) if match[1] else 0 if match[2] == "<" else 1
                found.append(("to", (fd, match[2])))
            else:
                found.append(("op", ";" if match[0] == "\n" else match[0]))
        else:
            parts, at = _word(text, at)
            found.append(("w", parts))
    return found


def _word(text: str, at: int) -> tuple[Node, int]:
    parts: Node = []
    while at < len(text) and text[at] not in " \t\n;&|()<>":
        char = text[at]
        if char == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise SyntaxFault("Unterminated quoted string")
            parts.append(["t", text[at + 1 : end], True])
            at = end + 1
        elif char == '"':
            at = _quoted(text, at + 1, parts)
        elif char == "\\" and at + 1 < len(text):
            parts.append(["t", text[at + 1], True])
            at += 2
        elif char == "$":
            at = _dollar(text, at, parts, False)
        else:
            parts.append(["t", char, False])
            at += 1
    merged: Node = []
    for part in parts:
        if merged and part[0] == "t" and merged[-1][0] == "t" and merged[-1][2] == part[2]:
            merged[-1][1] += part[1]
        else:
            merged.append(part)
    return merged, at


def _quoted(text: str, at: int, parts: Node) -> int:
    parts.append(["t", "", True])
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`"):
            parts.append(["t", text[at + 1], True])
            at += 2
        elif text[at] == "$":
            at = _dollar(text, at, parts, True)
        else:
            parts.append(["t", text[at], True])
            at += 1
    if at >= len(text):
        raise SyntaxFault("Unterminated quoted string")
    return at + 1


def _dollar(text: str, at: int, parts: Node, quoted: bool) -> int:
    if text.startswith("$((", at):
        end = text.find("))", at)
        if end < 0:
            raise SyntaxFault("Missing '))'")
        parts.append(["a", text[at + 3 : end]])
        return end + 2
    match = _NAME.match(text, at + 1)
    if match is None:
        parts.append(["t", "$", quoted])
        return at + 1
    parts.append(["v", match[1] or match[2], quoted])
    return match.end()


def plain(word: Node) -> str:
    """The text of a word without quotes or variables, or an empty one."""
    return word[0][1] if len(word) == 1 and word[0][0] == "t" and not word[0][2] else ""


class Parser:
    """Recursive descent over the tokens of one script."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens(text)
        self.at = 0

    def script(self) -> Node:
        node = self._list(set())
        if self.at < len(self.tokens):
            raise SyntaxFault(f"{self.tokens[self.at][1]!r} unexpected")
        return node

    def _op(self, *wanted: str) -> str:
        kind, value = self.tokens[self.at] if self.at < len(self.tokens) else _END
        if kind == "op" and value in wanted:
            self.at += 1
            return str(value)
        return ""

    def _keyword(self) -> str:
        kind, value = self.tokens[self.at] if self.at < len(self.tokens) else _END
        return plain(value) if kind == "w" else ""

    def _expect(self, word: str) -> None:
        if self._keyword() != word:
            raise SyntaxFault(f"{word!r} expected")
        self.at += 1

    def _list(self, ends: set[str]) -> Node:
        nodes: Node = []
        while True:
            while self._op(";"):
                pass
            kind, value = self.tokens[self.at] if self.at < len(self.tokens) else _END
            if not kind or (kind == "op" and value == ")") or (kind == "w" and plain(value) in ends):
                return ["seq", nodes]
            node = self._and_or()
            if self._op("&"):
                node = ["bg", node]
            nodes.append(node)

    def _and_or(self) -> Node:
        node = self._pipeline()
        while sign := self._op("&&", "||"):
            node = ["and" if sign == "&&" else "or", node, self._pipeline()]
        return node

    def _pipeline(self) -> Node:
        if self._keyword() == "!":
            self.at += 1
            return ["not", self._pipeline()]
        nodes = [self._command()]
        while self._op("|"):
            nodes.append(self._command())
        return nodes[0] if len(nodes) == 1 else ["pipe", nodes]

    def _command(self) -> Node:
        if self._op("("):
            node = ["sub", self._list(set())]
            if not self._op(")"):
                raise SyntaxFault("')' expected")
            return ["redirected", node, self._redirections()]
        word = self._keyword()
        if word == "{":
            self.at += 1
            node = self._list({"}"})
            self._expect("}")
            return ["redirected", ["sub", node], redirs] if (redirs := self._redirections()) else node
        if word == "while":
            self.at += 1
            condition = self._list({"do"})
            self._expect("do")
            body = self._list({"done"})
            self._expect("done")
            return ["while", condition, body]
        if word == "if":
            self.at += 1
            condition = self._list({"then"})
            self._expect("then")
            body = self._list({"else", "fi"})
            otherwise: Node = ["seq", []]
            if self._keyword() == "else":
                self.at += 1
                otherwise = self._list({"fi"})
            self._expect("fi")
            return ["if", condition, body, otherwise]
        if word in KEYWORDS:
            raise SyntaxFault(f"{word!r} unexpected")
        return self._simple()

    def _redirections(self) -> Node:
        found: Node = []
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "to":
            fd, sign = self.tokens[self.at][1]
            self.at += 1
            if self.at >= len(self.tokens) or self.tokens[self.at][0] != "w":
                raise SyntaxFault("a file name expected")
            found.append([fd, sign, self.tokens[self.at][1]])
            self.at += 1
        return found

    def _simple(self) -> Node:
        words: Node = []
        assigned: Node = []
        redirections = self._redirections()
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "w":
            word = self.tokens[self.at][1]
            self.at += 1
            name, sign, rest = word[0][1].partition("=") if word and word[0][0] == "t" else ("", "", "")
            if sign and not words and name.isidentifier() and not word[0][2]:
                assigned.append([name, [["t", rest, False], *word[1:]]])
            else:
                words.append(word)
            redirections += self._redirections()
        if not words and not assigned and not redirections:
            value = self.tokens[self.at][1] if self.at < len(self.tokens) else "end of file"
            raise SyntaxFault(f"{value!r} unexpected")
        return ["simple", assigned, words, redirections]
