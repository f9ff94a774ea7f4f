"""The suites on a real yard: oracles pass, doing nothing does not, and nothing tells of the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from yard_home import YardHome, client, yard  # noqa: F401

from forkyard import Client
from forkyard.client.aio import AsyncClient
from forkyard.errors import NotFoundError
from forkyard.rollouts.graders import CommandGrader
from forkyard.rollouts.grading import grade_files
from forkyard.rollouts.prepare import Preparer
from forkyard.rollouts.suites import harbor, humaneval, load, mutants, packages
from forkyard.rollouts.types import Commands, Task
from forkyard.rollouts.validating import Validation, avalidate

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The suites' cache, for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def validated(yard: YardHome, tasks: list[Task], times: int = 1) -> Validation:  # noqa: F811
    async def main() -> Validation:
        async with AsyncClient(home=yard.home) as daemon:
            return await avalidate(tasks, times=times, client=daemon)

    return asyncio.run(main())


def test_humaneval_oracles_pass_and_stubs_do_not(yard: YardHome, client: Client) -> None:  # noqa: F811
    """A sample; examples/humaneval_oracle.py does all 164."""
    problems = humaneval.problems()
    assert len(problems) == len(load("humaneval")) == 164
    # With a helper in the prompt, with floats, with a check that calls the candidate by its name.
    tasks = load("humaneval:0,32,33,50,87")
    assert len(tasks) == 5
    found = validated(yard, tasks)
    assert [one.state for one in found.checked] == ["good"] * 5, str(found)

    async def stubs() -> list[float]:
        async with AsyncClient(home=yard.home) as daemon:
            rewards = []
            for task, number in zip(tasks, (0, 32, 33, 50, 87), strict=True):
                async with Preparer(daemon).holding(task) as prepared:
                    files = {humaneval.SOLUTION: humaneval.stub(problems[number])}
                    done = await grade_files(daemon, task, prepared=prepared.snapshot, files=files)
                    rewards.append(done.verdict.reward)
            return rewards

    assert asyncio.run(stubs()) == [0.0] * 5


def test_humaneval_candidates_cannot_write_the_verdict(yard: YardHome, client: Client) -> None:  # noqa: F811
    (task,) = load("humaneval:0")
    name = task.metadata["entry_point"]
    cheats = [
        "import os\nos._exit(0)\n",
        f"import os\ndef {name}(*a):\n    os._exit(0)\n",
        f"class T(int):\n    __eq__ = lambda s, o: True\ndef {name}(*a):\n    return T(1)\n",
        f"import builtins\nbuiltins.print = None\ndef {name}(*a):\n    raise SystemExit(0)\n",
        "import glob\nassert glob.glob('/var/lib/forkyard-grader/private/*')\n",
    ]

    async def rewards() -> list[float]:
        async with AsyncClient(home=yard.home) as daemon, Preparer(daemon).holding(task) as prepared:
            done = [
                await grade_files(daemon, task, prepared=prepared.snapshot, files={"solution.py": text})
                for text in cheats
            ]
            return [one.verdict.reward for one in done]

    assert asyncio.run(rewards()) == [0.0] * len(cheats)


def test_mutants(yard: YardHome, client: Client) -> None:  # noqa: F811
    (task,) = mutants.load("voluptuous", each=1, home=yard.home)
    found = validated(yard, [task])
    assert [one.state for one in found.checked] == ["good"], str(found)
    assert task.cluster == "voluptuous"
    # The same seed gives the same bugs, now from the cache.
    again = mutants.load("voluptuous", each=1, home=yard.home)
    assert again[0].grader is not None and task.grader is not None
    assert again[0].grader.key() == task.grader.key() and again[0].files == task.files

    async def prepared() -> str:
        async with AsyncClient(home=yard.home) as daemon:
            return (await Preparer(daemon).get(task)).snapshot

    (info,) = client.fork(asyncio.run(prepared())).forks
    # Of the original nothing is left: no copy, byte code, digest or history.
    what = "-name 'voluptuous*' -o -name '*.pyc' -path '*/repo/*'"
    left = f"find / -xdev -path /proc -prune -o \\( {what} \\) -print"
    names = client.shell(info.id, left, user="root").stdout.split()
    assert names and all(name.startswith("/home/user/repo/voluptuous") for name in names)
    assert not client.shell(info.id, "ls -d repo/.git repo/*.egg-info repo/PKG-INFO").stdout
    # What is there of its tests passes, and the network is closed.
    tests = client.shell(info.id, "cd repo && python -m pytest -q voluptuous/tests/tests.py")
    assert tests.ok, tests.stdout
    assert not client.shell(info.id, "pip download voluptuous", timeout_s=60).ok


def test_packages_that_are_not_there(yard: YardHome) -> None:  # noqa: F811
    with pytest.raises(NotFoundError, match="no suite"):
        load("nothing")
    with pytest.raises(NotFoundError, match="no package"):
        load("mutants:nothing")
    assert packages.cache().stat().st_mode & 0o777 == 0o700


def test_flaky_and_empty_tasks_are_dropped(yard: YardHome, client: Client) -> None:  # noqa: F811
    say = 'printf \'{"passed": %s, "end": true}\' "$ok" > $FORKYARD_REPORT'
    prepare = Commands(["touch ready"])
    ask = "test -e done && ok=true || ok=false; " + say
    # Different in every copy.
    coin = "test -e done && test $(od -An -N1 -tu1 /dev/urandom) -lt 128 && ok=true || ok=false; " + say
    good = Task("good", prepare, grader=CommandGrader(ask), oracle={"done": ""})
    tasks = [
        good,
        dataclasses.replace(good, id="empty", grader=CommandGrader("ok=true; " + say)),
        dataclasses.replace(good, id="wrong", oracle={"other": ""}),
        dataclasses.replace(good, id="unknown", oracle=None),
        dataclasses.replace(good, id="broken", grader=CommandGrader("/no/such/thing")),
        dataclasses.replace(good, id="flaky", grader=CommandGrader(coin)),
    ]
    found = validated(yard, tasks, times=8)
    assert {one.task: one.state for one in found.checked} == {
        "good": "good", "empty": "passes_empty", "wrong": "oracle_fails", "unknown": "no_oracle",
        "broken": "broken", "flaky": "flaky"}  # fmt: skip
    assert [task.id for task in found.tasks] == ["good", "unknown"]
    assert "flaky" in str(found) and "of 8 times" in str(found)


def folder(top: Path, name: str, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (top / name / path).parent.mkdir(parents=True, exist_ok=True)
        (top / name / path).write_text(text)
    return top / name


HARBOR = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60.0\n'
    '[agent]\ntimeout_sec = 90.0\n[environment]\ncpus = 1\nmemory = "1G"\n',
    "instruction.md": "Write hello into greeting.txt.\n",
    "environment/Dockerfile": "FROM forkyard/base\nUSER root\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\nif grep -q hello /app/greeting.txt; then echo 1; else echo 0; fi"
    " > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho hello > greeting.txt\n",
}
TWO = "services:\n  main:\n    build: .\n  db:\n    image: x\n"


def test_harbor_folders(yard: YardHome, client: Client, tmp_path: Path) -> None:  # noqa: F811
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah")
    folder(tmp_path, "hello", HARBOR)
    (task,) = harbor.load(tmp_path)
    assert task.instruction.startswith("Write hello") and task.timeouts.policy_s == 90
    assert task.limits.mem_mb == 1024 and task.grader is not None and task.grader.mode == "final"
    found = validated(yard, [task])
    assert [one.state for one in found.checked] == ["good"], str(found)


def test_several_services_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    folder(tmp_path, "hello", HARBOR)
    folder(tmp_path, "pair", {**HARBOR, "environment/docker-compose.yaml": TWO})
    bench = {
        "task.yaml": "instruction: |-\n  Do it.\nmax_agent_timeout_sec: 120\n",
        "Dockerfile": "FROM forkyard/base\n",
        "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
        "tests/test_outputs.py": "def test_it():\n    pass\n",
        "solution.sh": "true\n",
    }
    folder(tmp_path, "old", bench)
    folder(tmp_path, "old-pair", {**bench, "docker-compose.yaml": TWO})
    with pytest.warns(UserWarning, match=r"2 of 4 tasks are left out: old-pair .*pair \(2 services"):
        tasks = load(f"harbor:{tmp_path}")
    assert [task.id for task in tasks] == ["hello", "old"]
    assert tasks[1].timeouts.policy_s == 120 and tasks[1].instruction == "Do it."


def test_the_whole_of_humaneval_is_an_example(yard: YardHome, client: Client) -> None:  # noqa: F811
    words = [sys.executable, str(ROOT / "examples/humaneval_oracle.py"), "0,1,2,3"]
    env = {"FORKYARD_HOME": str(yard.home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 of 4" in done.stdout and "stub: 0 of 4" in done.stdout
