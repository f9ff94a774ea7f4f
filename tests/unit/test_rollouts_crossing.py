"""What of an agent's changes crosses into a grading copy."""

from __future__ import annotations

import pytest

from forkyard.rollouts.crossing import Crossed, Rules, cross, pattern, with_pytest_section
from forkyard.types import Change, Diff

W = "/home/user"


def made(*changes: Change) -> Diff:
    patch = "".join(f"diff --git a{one.path} b{one.path}\n+x\n" for one in changes)
    return Diff(
        [one for one in changes if one.old_kind is None],
        [one for one in changes if one.mode is not None and one.old_kind is not None],
        [one for one in changes if one.mode is None],
        patch,
    )


def file(path: str, mode: int | None = 0o644, old: str | None = None) -> Change:
    return Change(f"{W}/{path}", "file", mode, old, 0o644 if old else None, data=b"x")


def link(path: str, target: str) -> Change:
    return Change(f"{W}/{path}", "link", 0o777, target=target)


def crossed(*changes: Change, **rules: object) -> Crossed:
    return cross(made(*changes), Rules(W, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("src", "src/a/b", True),
        ("src/**", "src", True),
        ("src/**", "srcs/a", False),
        ("*.py", "a.py", True),
        ("*.py", "d/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "d/e/a.py", True),
        ("**/__pycache__/**", "d/__pycache__/a.pyc", True),
        ("**/__pycache__/**", "__pycache__", True),
        ("a?c", "a/c", False),
        ("a.c", "abc", False),
        ("**/*.py", "a\nb.py", True),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert bool(pattern(glob).fullmatch(path)) is matches


def test_what_never_crosses() -> None:
    names = [
        *(
            "a/__pycache__/m.cpython-311.pyc",
            "m.pyc",
            "x.pth",
            "sitecustomize.py",
            "d/usercustomize/__init__.py",
        ),
        *(".git/config", "sub/.git/hooks/pre-commit", "build/lib/m.py", "x.egg-info/entry_points.txt"),
        *("x-1.dist-info/entry_points.txt", ".bashrc", ".config/pip/pip.conf", ".local/bin/python3"),
    ]
    found = crossed(*map(file, names), file("m.py"), file(".git/refs/heads/main"))
    assert found.diff.paths == [f"{W}/.git/refs/heads/main", f"{W}/m.py"]
    assert set(found.refused) == {f"{W}/{name}" for name in names}
    # Neither does it where a task asks for another place.
    other = Change("/opt/venv/lib/x.pth", "file", 0o644, data=b"")
    assert cross(made(other), Rules(W, ("/opt/venv/**",))).refused == {other.path: "never crosses"}


def test_tests_and_their_settings_stay() -> None:
    names = ["tests/helper.py", "sub/tests/a.txt", "test_a.py", "d/conftest.py", "pytest.ini", "setup.cfg"]
    found = crossed(*map(file, names), file("tests/old.py", None, "file"))
    assert found.diff.empty and len(found.protected) == 7
    assert crossed(*map(file, names), protected=()).diff.paths == sorted(f"{W}/{name}" for name in names)


def test_paths_and_what_is_outside() -> None:
    found = crossed(
        Change(f"{W}/src", "dir", 0o755), file("src/a.py"), file("other.py"),
        Change("/etc/passwd", "file", 0o644, "file", 0o644, data=b""), paths=["src/*.py"],
    )  # fmt: skip
    # The directory comes along because of what is in it.
    assert found.diff.paths == [f"{W}/src", f"{W}/src/a.py"]
    assert found.outside == ["/etc/passwd", f"{W}/other.py"]
    assert "other.py" not in found.diff.patch and "src/a.py" in found.diff.patch


def test_modes_and_kinds() -> None:
    found = crossed(
        file("run", 0o4755), file("gone", None, "file"), Change(f"{W}/p", "fifo", 0o644),
        Change(f"{W}/d", "char", 0o644), Change(f"{W}/was-link", "dir", 0o755, "link", 0o777),
    )  # fmt: skip
    assert {one.path: one.mode for one in found.diff.changes} == {
        f"{W}/run": 0o755, f"{W}/gone": None, f"{W}/was-link": 0o755}  # fmt: skip
    assert set(found.refused) == {f"{W}/p", f"{W}/d"}


@pytest.mark.parametrize(
    ("target", "stays"),
    [
        ("b", True),
        ("../a", True),
        ("../../../etc", False),
        ("/etc/passwd", False),
        ("/home/user/x", True),
        ("/home/user/../root", False),
        ("b/../../../..", False),
        ("../../user2/x", False),
    ],
)
def test_links_that_leave(target: str, stays: bool) -> None:
    found = crossed(link("d/l", target))
    assert (found.diff.paths == [f"{W}/d/l"]) is stays


def test_nothing_crosses_through_what_does_not() -> None:
    """A directory in place of what stays behind must not become a way through it."""
    found = crossed(
        Change(f"{W}/tests", "dir", 0o755, "link", 0o777),
        file("tests/x.py"),
        protected=["tests"],
        paths=["**"],
    )
    assert found.diff.empty
    found = cross(
        made(Change(f"{W}/etc", "dir", 0o755, "link", 0o777), file("etc/passwd")),
        Rules(W, ("etc/*",), ()),
    )
    assert found.diff.empty and found.refused[f"{W}/etc/passwd"] == "what it is in does not cross"


def test_the_pytest_section_of_pyproject() -> None:
    ours = b'[project]\nname = "a"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n\n[tool.x]\ny = 1\n'
    theirs = ours.replace(b'"-q"', b'"--collect-only"').replace(b'"a"', b'"b"')
    merged = with_pytest_section(theirs, ours)
    assert merged is not None and b"--collect-only" not in merged
    assert b'addopts = "-q"' in merged and b'name = "b"' in merged
    assert with_pytest_section(ours, ours) is not None
    plain = b'[project]\nname = "a"\n'
    assert with_pytest_section(plain, None) == plain
    hidden = b'tool.pytest.ini_options.addopts = "--collect-only"\n' + plain
    assert with_pytest_section(hidden, plain) is None
    assert with_pytest_section(b"[[", ours) is None
