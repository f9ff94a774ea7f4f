"""What of a command may be a secret, and is kept as a digest only.

A program's arguments are for the audit to keep, and people pass tokens in them. What is hidden
is what such arguments look like: the value of an option or variable whose name says so, a
password in a URL, a bearer's token, and the values of the request's own variables wherever
they stand. What looks like nothing is kept as it is: the way to pass a secret is a variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

__all__ = ["hide", "hide_argv"]

_WORDS = "passwd|password|passphrase|secret|token|api[-_]?key|access[-_]?key|credential|auth"
# Bounded, so that a long line without an end costs its length and not its square.
_NAME = rf"[\w.-]{{0,32}}(?:{_WORDS})[\w.-]{{0,32}}"
_OPTION = re.compile(rf"--?{_NAME}", re.I)
_PLACES = (
    # --token VALUE in a shell's line, --token=VALUE and TOKEN=VALUE anywhere
    re.compile(
        rf"(?P<before>(?<!\S)--?{_NAME}\s{{1,8}})(?P<secret>'[^']*'|\"[^\"]*\"|[^\s'\"-][^\s'\"]*)", re.I
    ),
    re.compile(rf"(?P<before>(?<![\w.]){_NAME}=)(?P<secret>'[^']*'|\"[^\"]*\"|[^\s'\"]+)", re.I),
    re.compile(r"(?P<before>://[^\s/:@]{0,64}:)(?P<secret>[^\s/@]{1,256})(?=@)"),
    re.compile(r"(?P<before>\b(?:bearer|basic)\s{1,8})(?P<secret>[\w.~+/=-]{8,})", re.I),
)
_HINT = re.compile(rf"{_WORDS}|://|bearer|basic", re.I)
# Shorter ones stand everywhere by chance.
_LEAST = 6
_MARK = "hmac-sha256:"


def hide(text: str, digest: Callable[[str], str], values: Iterable[str] = ()) -> str:
    """A command line with a digest in the place of each secret; ``values`` are known to be some."""
    for value in sorted({value for value in values if len(value) >= _LEAST}, key=len, reverse=True):
        text = text.replace(value, digest(value)) if value in text else text

    if _HINT.search(text) is None:
        return text

    def replaced(found: re.Match[str]) -> str:
        secret = found["secret"]
        if secret.startswith((_MARK, "$")):  # hidden already; a variable's name
            return found[0]
        return found["before"] + digest(secret.strip("'\""))

    for place in _PLACES:
        text = place.sub(replaced, text)
    return text


def hide_argv(argv: list[str], digest: Callable[[str], str], values: Iterable[str] = ()) -> list[str]:
    """The same for a program's arguments."""
    hidden, known = [], list(values)
    expects = False
    for word in argv:
        if expects and word and not word.startswith("-"):
            hidden.append(digest(word))
            expects = False
            continue
        expects = _OPTION.fullmatch(word) is not None
        hidden.append(hide(word, digest, known))
    return hidden
