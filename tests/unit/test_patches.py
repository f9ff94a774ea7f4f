from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from forkyard.yard.patches import named_only, patch_of

FILE, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000


def _apply(directory: Path, patch: str) -> None:
    done = subprocess.run(["git", "apply", "-p1"], cwd=directory, input=patch.encode(), capture_output=True)
    assert done.returncode == 0, (patch, done.stderr)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


@pytest.mark.parametrize("coarse", [False, True])
def test_git_applies_what_is_made(tree: Path, coarse: bool) -> None:
    dice = random.Random(3)
    for _ in range(40):
        lines = [dice.choice("abcdef") for _ in range(dice.randint(0, 30))]
        old = "".join(f"{line}\n" for line in lines)
        for _ in range(dice.randint(1, 6)):
            if lines and dice.random() < 0.5:
                lines.pop(dice.randrange(len(lines)))
            else:
                lines.insert(dice.randint(0, len(lines)), dice.choice("abcxyz"))
        new = "\n".join(lines)
        (tree / "a file").write_text(old)
        patch = patch_of(
            "a file", old.encode(), new.encode(), old_mode=FILE, new_mode=FILE, coarse=coarse
        )
        if patch:
            _apply(tree, patch)
        assert (tree / "a file").read_text() == new


def test_what_comes_goes_and_changes_its_mode(tree: Path) -> None:
    (tree / "gone").write_text("1\n2\n")
    (tree / "tool").write_text("#!/bin/sh\n")
    patch = patch_of("new", None, b"x", old_mode=None, new_mode=EXECUTABLE)
    patch += patch_of("empty", None, b"", old_mode=None, new_mode=FILE)
    patch += patch_of("gone", b"1\n2\n", None, old_mode=FILE, new_mode=None)
    patch += patch_of("tool", None, None, old_mode=FILE, new_mode=EXECUTABLE)
    patch += patch_of("link", None, b"new", old_mode=None, new_mode=LINK)
    patch += patch_of('odd "\tname', None, b"y\n", old_mode=None, new_mode=FILE)
    _apply(tree, patch)
    assert (tree / "new").read_text() == "x" and (tree / "new").stat().st_mode & 0o777 == 0o755
    assert (tree / "empty").read_bytes() == b"" and not (tree / "gone").exists()
    assert (tree / "tool").stat().st_mode & 0o111 and (tree / "link").readlink() == Path("new")
    assert (tree / 'odd "\tname').read_text() == "y\n"


def test_the_form() -> None:
    assert patch_of("etc/x", b"a\nb\n", b"a\nc\n", old_mode=FILE, new_mode=FILE) == (
        "diff --git a/etc/x b/etc/x\n--- a/etc/x\n+++ b/etc/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    )
    assert patch_of("x", b"a", b"b\0", old_mode=FILE, new_mode=FILE) == (
        "diff --git a/x b/x\nBinary files a/x and b/x differ\n"
    )
    assert patch_of("x", None, None, old_mode=FILE, new_mode=FILE) == ""
    assert "(too large)" in named_only("x", "too large")
    assert '"b/caf\\351"' in patch_of("caf\udce9", None, b"", old_mode=None, new_mode=FILE)


def test_hostile_text_takes_no_time() -> None:
    dice = random.Random(5)
    one, other = ("\n".join(dice.choice("ab") for _ in range(20_000)).encode() for _ in range(2))
    begun = time.perf_counter()
    patch_of("x", one, other, old_mode=FILE, new_mode=FILE)
    assert time.perf_counter() - begun < 10
