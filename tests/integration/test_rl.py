"""Environments and groups of rollouts, on real sandboxes."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import typing
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from yard_home import YardHome, client, yard  # noqa: F401

from forkyard import AsyncClient, Client
from forkyard.errors import InvalidRequestError
from forkyard.rollouts.envs import SandboxEnv, SandboxVectorEnv
from forkyard.rollouts.graders import CommandGrader
from forkyard.rollouts.grouping import agroup_rollouts, group_rollouts
from forkyard.rollouts.tool_env import ToolEnvironment
from forkyard.rollouts.types import Task

pytestmark = [pytest.mark.root, pytest.mark.slow]

SPACES: dict[str, Any] = {
    "observation_space": gymnasium.spaces.Box(-1000, 1000, (1,), np.int64),
    "action_space": gymnasium.spaces.Discrete(3),
}


def begin(sandbox: Any, rng: np.random.Generator, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    target = int(rng.integers(1, 4))
    sandbox.run_code(f"target = {target}")
    return np.array([target]), {"target": target}


def act(sandbox: Any, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
    """A counter in a running interpreter, to be brought to the target by -1, 0, +1."""
    said = sandbox.run_code(f"count += {int(action) - 1}; (count, target)")
    count, target = (int(word) for word in said.result.strip("()").split(","))
    return np.array([target - count]), float(count == target), count == target, {}


@pytest.fixture
def counter(client: Client) -> str:  # noqa: F811
    client.create_sandbox("counter")
    assert client.run_code("counter", "count = 0").ok
    return "counter"


def test_check_env(client: Client, counter: str) -> None:  # noqa: F811
    env = SandboxEnv(client, counter, begin, act, max_steps=5, **SPACES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*spec.*")
        check_env(env)
    env.close()
    env.close()
    assert [info.name for info in client.list_sandboxes()] == [counter] and client.list_snapshots() == []


def test_reset_is_a_rewind(client: Client, counter: str) -> None:  # noqa: F811
    env = SandboxEnv(client, counter, begin, act, max_steps=5, **SPACES)
    with pytest.raises(InvalidRequestError):
        _ = env.sandbox
    env.reset(seed=1)
    first = env.sandbox.id
    env.sandbox.shell("rm -rf ~/* && echo x > /tmp/left", check=True)
    _, info = env.reset(seed=1)
    assert env.sandbox.id == first and not env.sandbox.shell("cat /tmp/left").ok
    for _ in range(info["target"]):
        observation, reward, terminated, truncated, _ = env.step(2)
    assert (observation[0], reward, terminated, truncated) == (0, 1.0, True, False)
    env.reset()
    assert [env.step(1)[3] for _ in range(5)] == [False] * 4 + [True]
    # A destroyed sandbox ends the episode, not the environment.
    env.reset()
    client.delete_sandbox(env.sandbox.id)
    _, reward, terminated, _, info = env.step(1)
    assert (reward, terminated) == (0.0, True) and "deleted the sandbox" in info["lost"]
    env.reset()
    assert env.sandbox.id != first and env.step(1)[1] == 0.0
    env.close()
    assert client.run_code(counter, "count").result == "0"


def test_a_vector_of_forks(client: Client, counter: str) -> None:  # noqa: F811
    envs = SandboxVectorEnv(client, counter, 3, begin, act, max_steps=4, **SPACES)
    observations, info = envs.reset(seed=5)
    targets = list(info["target"])
    assert observations.shape == (3, 1) and list(observations[:, 0]) == targets
    again, _ = envs.reset(seed=5)
    assert (again == observations).all()
    ended_at: dict[int, int] = {}
    for step in range(1, 5):
        observations, rewards, terminated, truncated, _ = envs.step(np.array([2, 2, 0]))
        for number in np.flatnonzero(terminated):
            ended_at.setdefault(int(number), step)
            assert rewards[number] == 1.0
    assert {number: ended_at[number] for number in (0, 1)} == {0: targets[0], 1: targets[1]}
    assert truncated[2] and 2 not in ended_at
    # Its next step begins anew, whatever the action.
    observations, rewards, terminated, truncated, info = envs.step(np.array([1, 1, 1]))
    assert observations[2, 0] == info["target"][2] and not truncated[2] and rewards[2] == 0.0
    assert len({env.sandbox.id for env in envs.envs}) == 3
    envs.close()
    assert [info.name for info in client.list_sandboxes()] == [counter] and client.list_snapshots() == []


def test_vector_env_acts_at_the_same_time(client: Client, counter: str) -> None:  # noqa: F811
    """All three have to be in ``act`` before any of them may go on."""
    together = threading.Barrier(3, timeout=60)

    def meet(sandbox: Any, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        together.wait()
        return np.array([0]), 0.0, False, {}

    envs = SandboxVectorEnv(client, counter, 3, begin, meet, **SPACES)
    try:
        envs.reset(seed=0)
        envs.step(np.array([0, 0, 0]))
    finally:
        envs.close()


GRADER = CommandGrader(
    "n=$(cat answer 2>/dev/null || echo 0); echo $n.0e-1 > $FORKYARD_REPORT", report_format="number"
)
TASK = Task("tenths", instruction="Write a number of tenths to answer.", grader=GRADER)


def test_a_trainers_environment(client: Client) -> None:  # noqa: F811
    env = ToolEnvironment(client, [TASK, Task("other", instruction="Another.")])
    assert env.reset(task="tenths", prompt="unused") == TASK.instruction
    sandbox = client.list_sandboxes()[0].id
    assert "uid=" in env.shell("id") and env.shell("exit 3").endswith("[exit code 3]")
    assert "No such file" in env.read_file("answer") and env.read_file("answer").startswith("error:")
    env.write_file("answer", "7")
    assert env.read_file("answer") == "7"
    assert env.get_reward() == pytest.approx(0.7)
    # The reward ends the episode: nobody corrects the answer now.
    assert env.write_file("answer", "10").startswith("error: the episode has ended")
    assert env.get_reward() == pytest.approx(0.7)
    env.reset(task="tenths")
    assert [info.id for info in client.list_sandboxes()] == [sandbox], "the same one, taken back"
    assert env.read_file("answer").startswith("error:") and env.get_reward() == 0.0
    assert env.reset(task="other") == "Another."
    with pytest.raises(InvalidRequestError, match="names the task 'third'"):
        env.reset(task="third")
    # What the model did to its sandbox is no reason to try again.
    env.reset(task="tenths")
    env.write_file("answer", "9")
    client.delete_sandbox(client.list_sandboxes()[0].id)
    assert "deleted the sandbox" in env.shell("true") and "deleted" in env.read_file("answer")
    assert env.get_reward() == 0.0
    env._close()


def test_tools_are_typed_and_described() -> None:
    tools = [getattr(ToolEnvironment, name) for name in ("shell", "read_file", "write_file")]
    for tool in tools:
        hints = typing.get_type_hints(tool)
        text = inspect.getdoc(tool) or ""
        for name in list(inspect.signature(tool).parameters)[1:]:
            assert hints[name] is str and f"{name}:" in text
        assert hints["return"] is str and "Returns:" in text
    public = {name for name, _ in inspect.getmembers(ToolEnvironment, inspect.isfunction) if name[0] != "_"}
    assert public == {"reset", "get_reward", "shell", "read_file", "write_file"}


def test_a_group_has_rewards_and_advantages(client: Client) -> None:  # noqa: F811
    def policy(episode: Any) -> dict[str, Any]:
        if episode.sample == 3:
            raise RuntimeError("the policy's own fault")
        answer = 3 * episode.sample + 1
        episode.sandbox.shell(f"echo {answer} > answer", check=True)
        return {"tokens": [episode.sample], "seed": episode.seed}

    group = group_rollouts(TASK, policy, 4, client=client, run="r1")
    assert group.rewards == pytest.approx([0.1, 0.4, 0.7, 0.0])
    assert [rollout.outcome for rollout in group.rollouts] == ["failed"] * 3 + ["policy_error"]
    assert group.valid == [True] * 4 and not group.no_variance and group.ddof == 1
    rewards = np.array(group.rewards)
    assert group.advantages == pytest.approx(list((rewards - rewards.mean()) / rewards.std(ddof=1)))
    assert [t["tokens"] for t in group.transcripts[:3]] == [[0], [1], [2]] and group.identical == []
    assert len({rollout.seed for rollout in group.rollouts}) == 4
    again = group_rollouts(TASK, policy, 4, client=client, run="r1", normalize="rloo")
    assert [r.seed for r in again.rollouts] == [r.seed for r in group.rollouts]
    assert again.advantages == pytest.approx([4 / 3 * (r - 0.3) for r in again.rewards])
    assert client.list_sandboxes() == []


def test_the_same_thing_twice_is_told(client: Client) -> None:  # noqa: F811
    def policy(sandbox: Any, task: Task) -> None:
        sandbox.shell("echo 5 > answer")

    group = group_rollouts(TASK, policy, 3, client=client)
    assert group.no_variance and group.advantages == [0.0] * 3 and group.identical == [[0, 1, 2]]


async def test_stragglers_are_cancelled(yard: YardHome, client: Client) -> None:  # noqa: F811
    async def policy(episode: Any) -> None:
        await episode.sandbox.shell("sleep 300" if episode.sample == 1 else f"echo {episode.sample} > answer")

    begun = time.monotonic()
    async with AsyncClient(home=yard.home) as aio:
        group = await agroup_rollouts(
            TASK, policy, 3, client=aio, parallel=3, deadline_s=0.1, min_valid=2, normalize="mean"
        )
    assert time.monotonic() - begun < 120
    assert [rollout.outcome for rollout in group.rollouts] == ["failed", "cancelled", "failed"]
    assert group.valid == [True, False, True]
    assert group.advantages == pytest.approx([-0.1, 0.0, 0.1])
    assert client.list_sandboxes() == []


def test_arguments_of_a_group(client: Client) -> None:  # noqa: F811
    for wrong in ({"n": 0}, {"n": 2, "min_valid": 1}, {"n": 2, "min_valid": 3, "deadline_s": 1.0},
                  {"n": 2, "normalize": "max"}):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            group_rollouts(TASK, lambda episode: None, client=client, **wrong)  # type: ignore[arg-type]


async def test_a_group_that_is_cancelled_leaves_nothing(yard: YardHome, client: Client) -> None:  # noqa: F811
    running = asyncio.Event()

    async def policy(episode: Any) -> None:
        running.set()
        await episode.sandbox.shell("sleep 300")

    async with AsyncClient(home=yard.home) as aio, asyncio.TaskGroup() as group:
        task = group.create_task(agroup_rollouts(TASK, policy, 2, client=aio))
        await running.wait()
        task.cancel()
    assert task.cancelled() and client.list_sandboxes() == []
