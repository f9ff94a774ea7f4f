"""Builds CHANGELOG.md from the lines in changes/.

    python tools/make_changelog.py                  # shows what the next release would say
    python tools/make_changelog.py --release 0.2.0  # writes it to CHANGELOG.md, and empties changes/

Each file in changes/ is about one topic and holds sentences that a user understands, one a line.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Changelog\n"


def lines(changes: Path) -> list[str]:
    """All sentences, topic by topic, as list items; long ones may go on in indented lines."""
    found = []
    for path in sorted(changes.glob("*.md")):
        for line in path.read_text().splitlines():
            if line.startswith(" ") and found:
                found[-1] += " " + line.strip()
            elif text := re.sub(r"^[-*]\s+", "", line.strip()):
                found.append(f"- {text}")
    return found


def release(old: str, version: str, day: datetime.date, items: list[str]) -> str:
    """``old`` with a section for ``version`` on top."""
    rest = old.removeprefix(HEAD).strip()
    section = f"## {version} ({day.isoformat()})\n\n" + "\n".join(items)
    return "\n".join([HEAD, section, *(["", rest] if rest else []), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", metavar="VERSION")
    version = parser.parse_args().release
    items = lines(ROOT / "changes")
    if not version:
        print("\n".join(items))
        return
    if not items:
        raise SystemExit("nothing in changes/ to release")
    target = ROOT / "CHANGELOG.md"
    old = target.read_text() if target.exists() else HEAD
    target.write_text(release(old, version, datetime.date.today(), items))
    for path in (ROOT / "changes").glob("*.md"):
        path.unlink()


if __name__ == "__main__":
    main()
