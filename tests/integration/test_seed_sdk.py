"""Rollouts and evals with the SDK: prepare, fan out, roll out, score, search, throw away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from forkyard import Client as Kosa8Client
from forkyard.errors import NotFoundError

pytestmark = [pytest.mark.root, pytest.mark.slow]

BUGGY = "def slug(text):\n    return text.lower().replace(' ', '-')\n"
FIXED = "import re\n\ndef slug(text):\n    return re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')\n"
GRADER = """
import sys, unittest
sys.path.insert(0, "/workspace/repo")
from slugs import slug

class Hidden(unittest.TestCase):
    def test_plain(self): self.assertEqual(slug("One Two"), "one-two")
    def test_marks(self): self.assertEqual(slug("What? Now!"), "what-now")

unittest.main()
"""


@pytest.fixture
def client(own_yard: OwnYard) -> Iterator[Kosa8Client]:  # noqa: F811
    with Kosa8Client(home=own_yard.home) as made:
        yield made


@pytest.fixture
def base(client: Kosa8Client) -> Any:
    made = client.create_sandbox(name="task-base", ttl_min=30)
    sb = client.sandbox(made["id"])
    sb.write_file("repo/slugs.py", BUGGY)
    sb.shell("cd /workspace/repo && git init -q . && git add -A && "
             "git -c user.name=a -c user.email=a@b.test commit -qm start", check=True)
    return made


def reward(client: Kosa8Client, sid: str) -> float:
    sb = client.sandbox(sid)
    sb.write_file("/workspace/.grader/test_hidden.py", GRADER)
    r = sb.shell("cd /workspace/repo && python3 /workspace/.grader/test_hidden.py", timeout_s=60)
    return 1.0 if r.ok else 0.0


def test_fan_out_and_score(client: Kosa8Client, base: Any) -> None:
    f = client.fork(base["id"], 8, prefix="ep-")
    episodes = [x["id"] for x in f["forks"]]
    assert [x["name"] for x in f["forks"]] == [f"ep-{n}" for n in range(1, 9)]
    assert len(set(episodes)) == 8 and all(x["state"] == "running" for x in f["forks"])

    def rollout(number: int) -> str:
        # Half of the policies know the answer; each is alone in its copy.
        sid = episodes[number]
        client.write_file(sid, "repo/slugs.py", FIXED if number % 2 else BUGGY + f"# {number}\n")
        return client.shell(sid, "git -C repo diff --stat | tail -n 1").stdout

    with ThreadPoolExecutor(8) as pool:
        transcripts = list(pool.map(rollout, range(8)))
        rewards = list(pool.map(lambda sid: reward(client, sid), episodes))
    assert all("1 file changed" in text for text in transcripts)
    assert rewards == [0.0, 1.0] * 4

    for sid in episodes:
        client.delete_sandbox(sid)
        client.delete_sandbox(sid)
    assert [box.name for box in client.list_sandboxes()] == ["task-base"]
    assert client.read_text(base["id"], "repo/slugs.py") == BUGGY
    assert not client.shell(base["id"], "test -e .grader").ok
    with pytest.raises(NotFoundError):
        client.get_sandbox("ep-1")


def test_branching_inside_an_episode(client: Kosa8Client, base: Any) -> None:
    client.fork(base["id"], 1, prefix="ep-")
    client.write_file("ep-1", "/workspace/repo/migrate.sh", "rm -rf .git slugs.py; exit 1\n", mode=0o755)
    client.checkpoint("ep-1", label="before migration")
    r = client.shell("ep-1", "cd /workspace/repo && sh ./migrate.sh")
    assert not r.ok and not client.shell("ep-1", "test -e repo/slugs.py").ok
    client.rewind("ep-1")
    assert client.shell("ep-1", "git -C repo status --short").stdout == "?? migrate.sh\n"

    answers = [BUGGY.replace("lower", "upper"), FIXED, BUGGY]
    tries = [x["id"] for x in client.fork("ep-1", len(answers), prefix="ep-1-try")["forks"]]

    def attempt(pair: tuple[str, str]) -> bool:
        sid, answer = pair
        client.write_file(sid, "repo/slugs.py", answer)
        return reward(client, sid) == 1.0

    with ThreadPoolExecutor(len(tries)) as pool:
        oks = list(pool.map(attempt, zip(tries, answers, strict=True)))
    assert oks == [False, True, False]
    winner = next((sid for sid, ok in zip(tries, oks, strict=True) if ok), None)
    for sid in tries:
        if sid != winner:
            client.delete_sandbox(sid)
    assert winner and client.read_text(winner, "repo/slugs.py") == FIXED
    client.delete_sandbox(winner)
    client.delete_sandbox("ep-1")


def test_an_eval_over_a_data_set(client: Kosa8Client, base: Any) -> None:
    dataset = [
        {"id": "sum", "setup": "seq 10 > numbers", "check": "grep -qx 55 answer", "model": "55"},
        {"id": "word", "setup": "echo fork > word", "check": "grep -qx krof answer", "model": "krof"},
        {"id": "wrong", "setup": "true", "check": "grep -qx 1 answer", "model": "2"},
    ]
    results = []
    for task in dataset:
        sid = client.fork(base["id"], 1, prefix=f"eval-{task['id']}-")["forks"][0]["id"]
        try:
            client.shell(sid, task["setup"])
            client.write_file(sid, "answer", task["model"])
            results.append(client.shell(sid, task["check"]).ok)
        finally:
            client.delete_sandbox(sid)
    assert results == [True, True, False]


def test_what_to_watch(client: Kosa8Client, base: Any) -> None:
    assert client.get_sandbox("task-base").egress == "deny"
    r = client.shell(base["id"], "echo begun; sleep 60", timeout_s=0.5)
    assert r.timed_out and r.stdout == "begun\n"
    client.shell(base["id"], "echo a-reward-too-good")
    assert any("a-reward-too-good" in str(record.data) for record in client.audit(base["id"]))
    throwaway = client.create_sandbox(ephemeral=True)
    client.stop_sandbox(throwaway["id"])
    assert throwaway["id"] not in [box.id for box in client.list_sandboxes()]
