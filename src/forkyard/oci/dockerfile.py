"""What a Dockerfile refers to. Building it is buildah's work; this only finds names in it."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["images"]

_CONTINUED = re.compile(r"[\\`][ \t]*\n(?:[ \t]*#[^\n]*\n)*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")
_FROM_OPTION = re.compile(r"(?:--from=|[,=]from=)([^\s,]+)")


def images(text: str, build_args: Mapping[str, str]) -> list[str]:
    """The images that a Dockerfile names, variables in place, stages of its own left out."""
    values: dict[str, str] = {}
    stages: set[str] = set()
    found: list[str] = []
    seen_from = False
    for line in _CONTINUED.sub(" ", text).splitlines():
        word, *others = line.split(None, 1) or [""]
        word, rest = word.upper(), "".join(others).strip()
        if word == "ARG":
            for given in rest.split():
                name, equals, default = given.partition("=")
                if name in build_args:
                    values[name] = build_args[name]
                elif equals and not seen_from:
                    values[name] = _expand(default.strip("\"'"), values)
        elif word == "FROM":
            seen_from = True
            words = [part for part in rest.split() if not part.startswith("--")]
            if words:
                found.append(_expand(words[0], values))
            if len(words) >= 3 and words[1].upper() == "AS":
                stages.add(words[2].lower())
        elif word in ("COPY", "ADD", "RUN"):
            found += [_expand(name, values) for name in _FROM_OPTION.findall(rest)]
    wanted = [name for name in found if name.lower() not in stages and not name.isdigit()]
    return [name for name in dict.fromkeys(wanted) if name and name != "scratch"]


def _expand(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = values.get(match[1] or match[2])
        if match[3] in ("-", ":-"):
            return known or match[4]
        if match[3] in ("+", ":+"):
            return match[4] if known else ""
        return known or ""

    return _VARIABLE.sub(value, text)
