"""Unified diffs of text in git's form. Pure, and bounded: hostile text costs a coarser patch, no time."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["named_only", "patch_of", "text_of"]

CONTEXT = 3
# More differences than this between two files are shown as one: all of the old, all of the new.
MAX_EDITS = 400


def text_of(data: bytes) -> str | None:
    """The text in ``data``, or None if it is binary."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def patch_of(
    path: str,
    old: bytes | None,
    new: bytes | None,
    *,
    old_mode: int | None,
    new_mode: int | None,
    coarse: bool = False,
) -> str:
    """The part of a patch that is about one file.

    Args:
        path: Without a leading slash.
        old, new: What it held and holds; None if it was not or is not there, or did not change.
        old_mode, new_mode: As git has them (0o100644, 0o100755, 0o120000); None as above.
        coarse: All between the first and the last change is one replacement.
    """
    before, after = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    head = [f"diff --git {before} {after}"]
    if old_mode is None:
        head.append(f"new file mode {new_mode:o}")
        before = "/dev/null"
    elif new_mode is None:
        head.append(f"deleted file mode {old_mode:o}")
        after = "/dev/null"
    elif old_mode != new_mode:
        head += [f"old mode {old_mode:o}", f"new mode {new_mode:o}"]
    if (old or b"") != (new or b""):
        was, now = text_of(old or b""), text_of(new or b"")
        if was is None or now is None:
            head.append(f"Binary files {before} and {after} differ")
        else:
            head += [f"--- {before}", f"+++ {after}"]
            head += _hunks(_lines(was), _lines(now), coarse)
    elif len(head) == 1:
        return ""
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in head)


def named_only(path: str, why: str) -> str:
    """A part that only says that a file differs."""
    before, after = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    return f"diff --git {before} {after}\nBinary files {before} and {after} differ ({why})\n"


def _quoted(path: str) -> str:
    """As git writes a name with control characters, quotes or backslashes in it."""
    if path.isprintable() and '"' not in path and "\\" not in path:
        return path
    out = []
    for char in path:
        if char in '"\\':
            out.append(f"\\{char}")
        elif char.isprintable():
            out.append(char)
        else:
            out.append("".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape")))
    return f'"{"".join(out)}"'


def _lines(text: str) -> list[str]:
    """Lines with their ends; only a newline ends one."""
    lines = text.split("\n")
    whole = [f"{line}\n" for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def _hunks(old: list[str], new: list[str], coarse: bool) -> Iterator[str]:
    """The hunks between two lists of lines."""
    edits = _edits(old, new, coarse)
    at = 0
    while at < len(edits):
        last = at
        while last + 1 < len(edits) and edits[last + 1][0] - edits[last][1] <= 2 * CONTEXT:
            last += 1
        yield from _hunk(old, new, edits[at : last + 1])
        at = last + 1


def _hunk(old: list[str], new: list[str], edits: list[tuple[int, int, int, int]]) -> Iterator[str]:
    first, last = edits[0], edits[-1]
    lead = min(CONTEXT, first[0])
    trail = min(CONTEXT, len(old) - last[1])
    old_from, old_to = first[0] - lead, last[1] + trail
    new_from, new_to = first[2] - lead, last[3] + trail
    yield f"@@ -{_range(old_from, old_to)} +{_range(new_from, new_to)} @@"
    at = old_from
    for old_a, old_b, new_a, new_b in edits:
        yield from (_line(" ", line) for line in old[at:old_a])
        yield from (_line("-", line) for line in old[old_a:old_b])
        yield from (_line("+", line) for line in new[new_a:new_b])
        at = old_b
    yield from (_line(" ", line) for line in old[at:old_to])


def _range(start: int, end: int) -> str:
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _line(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"


def _edits(old: list[str], new: list[str], coarse: bool) -> list[tuple[int, int, int, int]]:
    """What to replace: (old from, old to, new from, new to), in order."""
    lead = 0
    while lead < min(len(old), len(new)) and old[lead] == new[lead]:
        lead += 1
    trail = 0
    while trail < min(len(old), len(new)) - lead and old[-1 - trail] == new[-1 - trail]:
        trail += 1
    a, b = old[lead : len(old) - trail], new[lead : len(new) - trail]
    if not a and not b:
        return []
    pairs = None if coarse or not a or not b else _matches(a, b)
    edits = []
    x = y = 0
    for i, j in [*(pairs or []), (len(a), len(b))]:
        if x < i or y < j:
            edits.append((x + lead, i + lead, y + lead, j + lead))
        x, y = i + 1, j + 1
    return edits


def _matches(a: list[str], b: list[str]) -> list[tuple[int, int]] | None:
    """The pairs of equal lines in a shortest edit (Myers, "An O(ND) Difference Algorithm", 1986),
    or None if it has more than ``MAX_EDITS`` steps."""
    # numbers compare quicker than lines
    known: dict[str, int] = {}
    one = [known.setdefault(line, len(known)) for line in a]
    other = [known.setdefault(line, len(known)) for line in b]
    n, m = len(one), len(other)
    furthest = {1: 0}
    trail: list[dict[int, int]] = []
    for d in range(min(MAX_EDITS, n + m) + 1):
        trail.append(dict(furthest))
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            y = x - k
            while x < n and y < m and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= n and y >= m:
                return _back(trail, n, m)
    return None


def _back(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for d in range(len(trail) - 1, -1, -1):
        furthest = trail[d]
        k = x - y
        down = k == -d or (k != d and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
        before_k = k + 1 if down else k - 1
        before_x = furthest[before_k] if d else 0
        before_y = before_x - before_k if d else 0
        while x > before_x and y > before_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = before_x, before_y
    return pairs[::-1]
