"""The tools for agent frameworks, driven by the framework itself with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from yard_home import client, yard  # noqa: F401

from forkyard import AsyncClient, Client
from forkyard.errors import InvalidRequestError

agents = pytest.importorskip("agents")
testing = pytest.importorskip("agents.testing")

from forkyard.integrations.openai_agents import sandbox_tools  # noqa: E402

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@pytest.fixture
def box(client: Client) -> str:  # noqa: F811
    return client.create_sandbox("agent").id


def agent_with(tools: list[Any], *calls: tuple[str, dict[str, Any]]) -> Any:
    steps = [[testing.function_call(name, arguments, call_id=str(number))]
             for number, (name, arguments) in enumerate(calls)]
    model = testing.ScriptedModel([*steps, [testing.assistant_message("done")]])
    return agents.Agent(name="solver", instructions="Work.", model=model, tools=tools)


def outputs(result: Any) -> list[str]:
    assert result.final_output == "done"
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


def play(tools: list[Any], *calls: tuple[str, dict[str, Any]]) -> list[str]:
    return outputs(agents.Runner.run_sync(agent_with(tools, *calls), "Go.", max_turns=50))


def test_an_agent_works_in_its_sandbox(client: Client, box: str) -> None:  # noqa: F811
    said = play(
        sandbox_tools(client, box),
        ("shell", {"command": "echo out; echo err >&2; exit 3"}),
        ("write_file", {"path": "a/b.txt", "content": "text é\n"}),
        ("read_file", {"path": "a/b.txt"}),
        ("list_files", {"path": "a"}),
        ("run_code", {"code": "x = 41", "language": "python"}),
        ("run_code", {"code": "print('p'); x + 1"}),
        ("run_code", {"code": "1 / 0"}),
        ("run_code", {"code": "import matplotlib.pyplot as plt; plt.plot([1, 2]); None"}),
        ("run_code", {"code": "echo $((6 * 7))", "language": "bash"}),
        ("git", {"operation": "status", "path": "a"}),
    )
    assert said[0] == "out\n[stderr]\nerr\n[exit code 3]"
    assert said[1] == "wrote 8 bytes to a/b.txt" and said[2] == "text é\n"
    assert said[3].split() == ["file", "8", "b.txt"]
    assert said[4] == "(no output)" and said[5] == "p\n42"
    assert "ZeroDivisionError" in said[6] and said[6].endswith("[exit code 1]")
    assert said[7].startswith("[image/png, ") and said[8] == "42" and "not a git repository" in said[9]
    assert client.read_text(box, "a/b.txt") == "text é\n"


def test_failures_are_told_and_end_nothing(client: Client, box: str) -> None:  # noqa: F811
    # Long enough for a git that fails, on a busy machine; three of these calls take all of it.
    tools = sandbox_tools(client, box, timeout_s=3, max_output=1000)
    said = play(
        tools,
        ("read_file", {"path": "none"}),
        ("shell", {"command": "echo begun; sleep 60"}),
        ("run_code", {"code": "while True: pass"}),
        ("shell", {"command": "seq 100000"}),
        ("shell", {"command": "head -c 100 /dev/urandom > bin"}),
        ("read_file", {"path": "bin"}),
        ("git", {"operation": "clone", "url": "https://git.example.test/x", "path": "x"}),
        ("run_code", {"code": "1", "language": "javascript"}),
        ("shell", {"wrong": "argument"}),
        ("write_file", {"path": "/proc/x/y", "content": ""}),
    )
    assert said[0].startswith("error: ") and "none" in said[0]
    assert said[1] == "begun\n[ended: it ran longer than 3 s]"
    assert "[ended: it ran longer than 3 s]" in said[2]
    assert len(said[3]) <= 1000 and said[3].startswith("1\n2\n") and said[3].rstrip().endswith("kept whole]")
    assert "characters left out]" in said[3]
    assert said[5].startswith("error: bin is no text: 100 bytes")
    assert "exit code 128" in said[6] and said[7].startswith("error: ") and said[9].startswith("error: ")
    client.delete_sandbox(box)
    assert play(tools, ("shell", {"command": "true"}))[0].startswith("error: ")


def test_which_tools_there_are(client: Client, box: str) -> None:  # noqa: F811
    names = [tool.name for tool in sandbox_tools(client, box)]
    assert names[:6] == ["shell", "run_code", "read_file", "write_file", "list_files", "git"]
    assert not {"checkpoint", "rewind"} & set(names) and ("diff" in names) == hasattr(client, "diff")
    chosen = sandbox_tools(client, box, include=["checkpoint", "rewind", "shell"])
    assert [tool.name for tool in chosen] == ["checkpoint", "rewind", "shell"]
    assert all(tool.description and "sandbox" in tool.description.lower() for tool in chosen)
    said = play(
        chosen,
        ("shell", {"command": "echo 1 > state"}),
        ("checkpoint", {"label": "before"}),
        ("shell", {"command": "echo 2 > state"}),
        ("rewind", {"to": None}),
        ("shell", {"command": "cat state"}),
    )
    assert said[1].startswith("checkpoint ck_") and said[4] == "1"
    with pytest.raises(InvalidRequestError, match="no tool 'browse'"):
        sandbox_tools(client, box, include=["browse"])


def test_user_and_directory_hold_for_every_tool(client: Client, box: str) -> None:  # noqa: F811
    client.shell(box, "mkdir -p /srv/place && chown nobody /srv/place", user="root", check=True)
    said = play(
        sandbox_tools(client, box, user="nobody", cwd="/srv/place"),
        ("shell", {"command": "whoami; pwd"}),
        ("run_code", {"code": "import os; os.getcwd(), os.getuid()"}),
        ("write_file", {"path": "f", "content": "1"}),
        ("read_file", {"path": "f"}),
        ("list_files", {}),
        ("git", {"operation": "status"}),
    )
    assert said[0] == "nobody\n/srv/place" and said[1].startswith("('/srv/place', 65534)")
    assert said[3] == "1" and " f" in said[4] and "not a git repository" in said[5]
    assert client.stat(box, "/srv/place/f").uid == 65534


def test_the_asynchronous_client(client: Client, box: str) -> None:  # noqa: F811
    async def work() -> list[str]:
        async with AsyncClient(home=client._transport.home) as other:
            agent = agent_with(sandbox_tools(other, box), ("shell", {"command": "echo a"}),
                               ("run_code", {"code": "6 * 7"}))
            return outputs(await agents.Runner.run(agent, "Go."))

    assert asyncio.run(work()) == ["a", "42"]


def test_one_rollout_in_each_copy(client: Client, box: str) -> None:  # noqa: F811
    client.run_code(box, "secret = 42")
    episodes = [fork.id for fork in client.fork(box, 4).forks]

    def rollout(sandbox: str) -> list[str]:
        return play(sandbox_tools(client, sandbox), ("run_code", {"code": "secret += 1; secret"}),
                    ("shell", {"command": f"echo {sandbox} > mine; cat mine"}))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rollout, episodes)) == [["43", sandbox] for sandbox in episodes]
