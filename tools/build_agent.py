"""Compile the guest agent: ``python3 tools/build_agent.py [OUTPUT]``.

One static program from every ``agent/*.c``, by ``CC`` or the first of musl-gcc, gcc and cc. Used
by setup.py (for wheels and editable installs) and by the Makefile; needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "src" / "forkyard" / "agent" / "fy-agent"
# No linker's build id and no paths: the same source and compiler give the same file.
FLAGS = ["-std=gnu11", "-Os", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fno-strict-aliasing"]
FLAGS += ["-static", "-s", "-Wl,--build-id=none"]


class NoCompilerError(Exception):
    pass


def sources() -> list[Path]:
    return sorted((ROOT / "agent").glob("*.c"))


def inputs() -> list[Path]:
    """All files that the result depends on."""
    return [*sources(), *sorted((ROOT / "agent").glob("*.h")), Path(__file__).resolve()]


def source_id() -> str:
    """Names the agent's source; the agent tells it to its host."""
    digest = hashlib.sha256()
    for path in inputs():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """``CC``, or musl's gcc (no name services, half the size), or what there is."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    return [next((name for name in ("musl-gcc", "gcc", "cc") if shutil.which(name)), "cc")]


def build(output: Path = OUTPUT, *, force: bool = False) -> bool:
    """Make ``output``, unless it is newer than its inputs. Says whether it compiled.

    Raises:
        NoCompilerError: there is no C compiler, or it cannot link statically.
    """
    if not force and output.exists():
        made = output.stat().st_mtime
        if all(path.stat().st_mtime < made for path in inputs()):
            return False
    compiler = find_compiler()
    if shutil.which(compiler[0]) is None:
        raise NoCompilerError(
            f"forkyard's guest agent is a small C program, and there is no C compiler {compiler[0]!r} here: "
            "apt-get install gcc libc6-dev (or set CC)"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        fresh = Path(scratch) / output.name
        names = [str(path.relative_to(ROOT)) for path in sources()]
        define = f'-DBUILD_ID="{source_id()}"'
        done = subprocess.run([*compiler, *FLAGS, define, "-o", str(fresh), *names], cwd=ROOT)
        if done.returncode != 0:
            raise NoCompilerError(
                f"{compiler[0]} could not build the guest agent (see above). "
                "If it says that -lc is missing: apt-get install libc6-dev"
            )
        fresh.chmod(0o755)
        fresh.replace(output)
    return True


def main(argv: list[str]) -> int:
    output = Path(argv[0]) if argv else OUTPUT
    try:
        done = build(output)
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"guest agent: {'built' if done else 'already there'} ({output.stat().st_size // 1024} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
