"""Grading on a real yard: what crosses, what does not, and verdicts that the code cannot write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from yard_home import YardHome, yard  # noqa: F401

from forkyard import Client
from forkyard.client.aio import AsyncClient
from forkyard.rollouts import grading
from forkyard.rollouts.graders import PRIVATE, CommandGrader, GraderError, PytestGrader
from forkyard.rollouts.grading import Graded, grade, grade_files, regrade
from forkyard.rollouts.types import Task, Timeouts

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]

BUGGY = "def add(a, b):\n    return a - b\n"
GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
HIDDEN = TESTS + "\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
IDS = ["tests/test_calc.py::test_zero", "tests/test_calc.py::test_sum"]
ORDINARY = PytestGrader(IDS, files={"repo/tests/test_calc.py": HIDDEN}, root="repo")
APART = PytestGrader(
    ["test_calc.py::test_zero", "test_calc.py::test_sum"],
    files={"test_calc.py": HIDDEN},
    root="repo",
    isolate="process",
    modules=("calc",),
)


@pytest.fixture(scope="module")
def client(yard: YardHome) -> Iterator[Client]:  # noqa: F811
    """Its home has the snapshot ``calc``: a repository with a bug, and pytest."""
    client = yard.client
    client.create_sandbox("made", egress_allow=["@pip"])
    client.shell("made", "pip install -q --no-cache-dir pytest", check=True)
    client.set_egress("made", "deny")
    client.write_files("made", {"repo/calc.py": BUGGY, "repo/tests/test_calc.py": TESTS, "repo/old": "old"})
    client.snapshot("made", "calc")
    client.delete_sandbox("made")
    yield client
    yard.clear()


def run(yard: YardHome, work: Callable[[AsyncClient], Any]) -> Any:  # noqa: F811
    async def main() -> Any:
        async with AsyncClient(home=yard.home) as client:
            return await work(client)

    return asyncio.run(main())


def graded(yard: YardHome, command: str, grader: Any, **task: Any) -> Graded:  # noqa: F811
    """What ``command`` in a fork of ``calc`` gets."""
    mode = task.pop("mode", None)
    audit = task.pop("audit", False)

    async def work(client: AsyncClient) -> Graded:
        (info,) = (await client.fork("calc", ephemeral=True)).forks
        await client.shell(info.id, command, cwd="repo", check=True)
        made = Task("t", "calc", grader=grader, **task)
        try:
            return await grade(client, made, prepared="calc", final=info.id, mode=mode, audit=audit)
        finally:
            await client.delete_sandbox(info.id)

    return run(yard, work)  # type: ignore[no-any-return]


HOOK = """\
cat > {} <<'E'
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
E
"""
# The end of a command that graded well.
SAY = """ && printf '{"passed": true, "end": true}' > $FORKYARD_REPORT"""
FIX = f"printf '{GOOD}' > calc.py".replace("\n", "\\n")


@pytest.mark.parametrize("grader", [ORDINARY, APART], ids=["ordinary", "apart"])
def test_a_repair_passes_and_nothing_else(client: Client, yard: YardHome, grader: PytestGrader) -> None:  # noqa: F811
    done = graded(yard, FIX, grader)
    assert done.verdict.passed and done.verdict.reward == 1.0 and done.verdict.trusted
    assert done.diff.paths == ["/home/user/repo/calc.py"] and done.suspicions == []
    nothing = graded(yard, "true", grader)
    assert not nothing.verdict.passed and sorted(nothing.verdict.tests.values()) == ["failed", "passed"]
    for command in (
        "printf 'import os; os._exit(0)' > calc.py",
        "printf 'raise SystemExit(0)' > calc.py",
        "printf 'import pytest; pytest.skip(allow_module_level=True)' > calc.py",
        "printf 'import pytest; pytest.exit(\"done\", 0)' > calc.py",
    ):
        assert graded(yard, command, grader).verdict.reward == 0.0, command


def test_24_an_agent_looks_for_the_answer(client: Client, yard: YardHome) -> None:  # noqa: F811
    looked = "! grep -rIl 'add(1, 2)' / --include='*.py' --exclude-dir=proc --exclude-dir=sys 2>/dev/null"
    assert not graded(yard, f"{looked} && ! ls {PRIVATE}", ORDINARY).verdict.passed
    for path in ("conftest.py", "tests/conftest.py", "../conftest.py"):
        done = graded(yard, HOOK.format(path), ORDINARY)
        assert not done.verdict.passed
        assert [one.kind for one in done.suspicions if one.severity == "strong"] == ["protected-changed"]
    planted = "printf 'import os; os._exit(0)' > {}"
    for path in ("sitecustomize.py", "pytest.py", "_pytest.py", "../.local/lib/x.pth"):
        done = graded(yard, f"mkdir -p $(dirname {path}); {planted.format(path)}", ORDINARY)
        assert not done.verdict.passed


def test_what_crosses(client: Client, yard: YardHome) -> None:  # noqa: F811
    command = (
        "rm old; cp /bin/true tool; chmod 4755 tool; ln -s calc.py inside; ln -s /etc/passwd outside;"
        " head -c 9M /dev/urandom > large; sha256sum large > sum; mkdir d; printf x > d/f; echo out > /tmp/o"
    )
    check = (
        "cd repo && test ! -e old && test -x tool && test ! -u tool && ./tool && test -L inside"
        " && test ! -e outside && test ! -L outside && sha256sum -c sum && test -f d/f"
        f" && test $(($(date +%s) - $(stat -c %Y d/f))) -lt 600{SAY}"
    )
    done = graded(yard, command, CommandGrader(check))
    assert done.verdict.passed, done.verdict.evidence
    assert "link that leaves" in done.refused["/home/user/repo/outside"]
    assert done.diff.complete

    async def again(client: AsyncClient) -> tuple[Graded, Graded]:
        task = Task("t", "calc")
        other = CommandGrader("test -e repo/old")
        return (
            await regrade(client, task, prepared="calc", diff=done.diff, grader=CommandGrader(check)),
            await regrade(client, task, prepared="calc", diff=done.diff, grader=other),
        )

    same, other = run(yard, again)
    assert same.verdict.passed and not other.verdict.passed


def test_paths_limit_what_crosses(client: Client, yard: YardHome) -> None:  # noqa: F811
    done = graded(yard, f"{FIX}; echo x > ../note", ORDINARY, paths=("note",))
    assert done.outside == ["/home/user/repo/calc.py"] and not done.verdict.passed


def test_a_build_is_the_users_and_leaves_nothing_running(client: Client, yard: YardHome) -> None:  # noqa: F811
    spy = f"while :; do cat {PRIVATE}/secret repo/secret >> /tmp/seen 2>/dev/null; done"
    script = f"printf '%s\\n' '{GOOD.strip()}' > calc.py; setsid sh -c '{spy}' > /dev/null 2>&1 &"
    command = f"cat > build.sh <<'E'\n{script}\nE\n"
    check = f'test -z "$(cat /tmp/seen 2>/dev/null)"{SAY}'
    secret = {"repo/secret": "s", f"{PRIVATE}/secret": "s"}
    done = graded(yard, command, CommandGrader(check, build="sh repo/build.sh", files=secret))
    assert done.verdict.passed, done.verdict
    broken = graded(yard, "echo 'exit 3' > build.sh", CommandGrader(check, build="sh repo/build.sh"))
    assert "exited with 3" in broken.verdict.message and not broken.verdict.passed


def test_the_final_state_is_graded_without_its_processes(client: Client, yard: YardHome) -> None:  # noqa: F811
    spawn = "setsid sleep 1000 > /dev/null 2>&1 & echo done > /home/user/answer"
    check = f"test -e answer && ! pgrep -x sleep{SAY}"
    done = graded(yard, spawn, CommandGrader(check), mode="final")
    assert done.verdict.passed and not done.verdict.trusted
    keeps = CommandGrader(check.replace("! pgrep", "pgrep"), keep=("sleep",))
    kept = graded(yard, spawn, keeps, mode="final")
    assert kept.verdict.passed


def test_clean_and_final_that_differ_need_a_review(client: Client, yard: YardHome) -> None:  # noqa: F811
    done = graded(yard, HOOK.format("conftest.py"), ORDINARY, audit=True)
    assert not done.verdict.passed
    (found,) = [one for one in done.suspicions if one.kind == "grades-differ"]
    assert found.severity == "strong" and "needs review" in found.message


def test_a_service_answers_from_a_frozen_copy(client: Client, yard: YardHome) -> None:  # noqa: F811
    command = (
        "printf hello > index.html; setsid python3 -m http.server 8123 > /dev/null 2>&1 &"
        " for i in $(seq 100); do curl -s 127.0.0.1:8123 > /dev/null && break; sleep 0.1; done"
    )
    check = (
        'test "$(curl -s http://127.0.0.1:8123/)" = hello'
        f" && test ! -e repo/index.html{SAY}"
    )
    grader = CommandGrader(check, mode="service", ports=(8123,))
    done = graded(yard, command, grader)
    assert done.verdict.passed, done.verdict


def test_files_and_a_grader_that_fails(client: Client, yard: YardHome) -> None:  # noqa: F811
    async def work(client: AsyncClient) -> tuple[Graded, Graded]:
        task = Task("t", "calc", grader=ORDINARY)
        return (
            await grade_files(client, task, prepared="calc", files={"repo/calc.py": GOOD}),
            await grade_files(client, task, prepared="calc", files={"repo/calc.py": None}),
        )

    good, gone = run(yard, work)
    assert good.verdict.passed and not gone.verdict.passed
    with pytest.raises(GraderError, match="cannot be run"):
        graded(yard, "true", CommandGrader("/no/such/program"))
    hangs = graded(yard, "echo 'while True: pass' > calc.py", ORDINARY, timeouts=Timeouts(grader_s=10))
    assert "too long" in hangs.verdict.message and hangs.verdict.reward == 0.0


class _Waiting(CommandGrader):
    async def grade(self, grading: Any) -> Any:
        await asyncio.Event().wait()


def test_a_grader_that_never_answers(yard: YardHome, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It holds its place no longer than its own time and a moment."""
    monkeypatch.setattr(grading, "END_S", 0.5)
    with pytest.raises(GraderError, match=r"not done after [0-2] s"):
        graded(yard, "true", _Waiting("true"), timeouts=Timeouts(grader_s=1))
