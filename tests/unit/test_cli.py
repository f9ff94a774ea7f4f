"""The command line's own logic, on a client in memory: arguments, output forms, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from cli_client import MemoryClient

from forkyard.cli.app import App
from forkyard.cli.copying import Place, parse
from forkyard.cli.main import SECTIONS, VERBS, cli, run
from forkyard.cli.output import age, aligned, camel, size
from forkyard.errors import SandboxLostError, UnavailableError

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def fy(client: MemoryClient, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command line; gives its exit code, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        code = run(args, App(client))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_new_prints_the_id_alone(fy: Cli, client: MemoryClient) -> None:
    code, out, err = fy("new", "--name", "work", "--ttl", "10m", "--type", "medium", "--allow", "a.test",
                        "--allow", "@pip", "--env", "A=b=c", "--label", "run=7", "--from", "prepared")
    assert (code, out) == (0, "sb_0000000001\n")
    assert err == "work is ready after 71 ms\n"
    assert client.calls == [("create_sandbox", {
        "name": "work", "ttl_min": 10, "type": "medium", "egress_allow": ["a.test", "@pip"],
        "env": {"A": "b=c"}, "labels": {"run": "7"}, "snapshot": "prepared"})]


def test_new_leaves_what_is_not_said_to_the_defaults(fy: Cli, client: MemoryClient) -> None:
    assert fy("new", "-q")[0] == 0
    assert client.calls == [("create_sandbox", {"name": None})]


def test_new_json_ends_with_ready_or_failed(fy: Cli) -> None:
    code, out, err = fy("new", "--name", "work", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1]) == {
        "event": "ready", "id": "sb_0000000001", "name": "work", "start_ms": 71.4}
    code, out, err = fy("new", "--name", "work", "--json")
    assert code == 4
    assert json.loads(out.splitlines()[-1]) == {
        "event": "failed", "code": "conflict", "message": "the name 'work' is taken"}
    assert err == "forkyard: the name 'work' is taken\n"


def test_exit_codes_and_hints(fy: Cli, client: MemoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fy("info", "nobody") == (
        3, "", "forkyard: no sandbox 'nobody'\nhint: forkyard ls shows them\n")
    client.room = 0
    assert fy("new") == (5, "", "forkyard: 0 sandboxes are the most\nhint: delete some\n")
    assert fy("new", "--allow", "two words")[0] == 2

    def fails(error: Exception) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise error
        return call

    monkeypatch.setattr(client, "get_sandbox", fails(UnavailableError("no daemon\nanswers")))
    assert fy("info", "x") == (6, "", "forkyard: no daemon answers\n")
    trace = "it died: critical | Traceback (most recent call last):\\n File x\\nOSError: odd"
    monkeypatch.setattr(client, "get_sandbox", fails(UnavailableError(trace)))
    assert fy("info", "x") == (6, "", "forkyard: it died: critical OSError: odd\n")
    monkeypatch.setattr(client, "get_sandbox", fails(SandboxLostError("it died", cause="guest")))
    assert fy("info", "x")[0] == 1
    monkeypatch.setattr(client, "get_sandbox", fails(KeyError("odd")))
    code, out, err = fy("info", "x")
    assert (code, out) == (1, "")
    assert err.startswith("forkyard: unexpected KeyError") and "Traceback" not in err
    monkeypatch.setattr(client, "get_sandbox", fails(KeyboardInterrupt()))
    assert fy("info", "x")[0] == 130
    assert client.closed


@pytest.mark.parametrize("args", [
    ("nonsense",), ("info",), ("exec",), ("exec", "box"), ("exec", "--wrong", "box", "ls"),
    ("new", "--ttl", "soon"),
    ("new", "--from", "a", "--image", "b"), ("delete",), ("rename", "box"), ("fork", "box", "-n", "0"),
    ("cp", "a", "b"), ("cp", "a:x", "b:y"), ("completion", "tcsh"), ("snapshots", "delete"),
])
def test_usage_errors_are_two_plain_lines(fy: Cli, args: tuple[str, ...]) -> None:
    code, out, err = fy(*args)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("forkyard: ")
    assert second.startswith("hint: forkyard") and second.endswith("--help")


def test_a_wrong_verb_names_the_nearest(fy: Cli) -> None:
    assert "did you mean 'rewind'?" in fy("rewnid", "x")[2]


def test_ls_filters_and_forms(fy: Cli) -> None:
    fy("new", "--name", "one", "--label", "run=7")
    fy("new", "--name", "two")
    code, out, _ = fy("ls")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["NAME", "one", "two"]
    assert fy("ls", "--label", "run=7", "-q")[1] == "sb_0000000001\n"
    found = json.loads(fy("ls", "--json", "--state", "running")[1])["sandboxes"]
    assert [box["name"] for box in found] == ["one", "two"]
    assert found[0]["memMb"] == 1024 and found[0]["labels"] == {"run": "7"}
    assert json.loads(fy("ls", "--json", "--state", "stopped")[1]) == {"sandboxes": []}


def test_info_is_json_in_a_pipe(fy: Cli) -> None:
    fy("new", "--name", "work", "--from", "prepared")
    box = json.loads(fy("info", "work")[1])["sandbox"]
    assert (box["name"], box["memoryRestored"], box["resumedFrom"]) == ("work", True, "prepared")


def test_rename_stop_start_delete(fy: Cli) -> None:
    fy("new", "--name", "work")
    assert fy("rename", "work", "--name", "play")[:2] == (0, "sb_0000000001\n")
    assert fy("stop", "play")[:2] == (0, "sb_0000000001\n")
    assert fy("ls", "--state", "stopped", "-q")[1] == "sb_0000000001\n"
    assert fy("start", "play")[0] == 0
    assert '"memoryRestored":true' in fy("start", "play", "--json")[1]
    assert '"memoryRestored":false' in fy("start", "play", "--no-memory", "--json")[1]
    code, out, err = fy("delete", "nobody", "play", "play")
    assert (code, out) == (3, "play\n") and "nobody" in err


def test_delete_by_label(fy: Cli, client: MemoryClient) -> None:
    for name in ("a", "b"):
        fy("new", "--name", name, "--label", "run=7")
    fy("new", "--name", "c")
    assert fy("delete", "--label", "run=7")[:2] == (0, "a\nb\n")
    assert [box.name for box in client.boxes.values()] == ["c"]


def test_snapshot_prints_the_contract(fy: Cli) -> None:
    fy("new", "--name", "work")
    code, out, _ = fy("snapshot", "work", "prepared")
    answer = json.loads(out)
    assert code == 0 and answer["ok"] is True and answer["type"] == "snapshot.named.info"
    shown = answer["snapshot"]
    assert shown["name"] == "prepared" and shown["sourceSandboxId"] == "sb_0000000001"
    assert len(shown["snapshotId"]) == 36 and shown["sizeBytes"] == 4096
    assert (shown["status"], shown["type"]) == ("ready", "small")
    listed = json.loads(fy("snapshots", "ls", "--json")[1])["snapshots"]
    assert listed[0]["snapshotId"] == shown["snapshotId"]
    assert fy("snapshots", "ls")[1].split("\n")[1].startswith("prepared")
    assert fy("snapshots", "delete", "prepared")[:2] == (0, "prepared\n")
    assert fy("snapshots", "delete", "prepared")[0] == 3


def test_what_evaluations_prepared_is_listed_on_request(fy: Cli) -> None:
    fy("new", "--name", "work")
    fy("snapshot", "work", "mine")
    fy("snapshot", "work", "rollouts/abc", "--label", "forkyard.rollouts=prepared")
    _, out, err = fy("snapshots", "ls")
    assert "mine" in out and "rollouts/abc" not in out and "1 prepared for evaluations" in err
    assert "rollouts/abc" in fy("snapshots", "ls", "--all")[1]


def test_fork_forms(fy: Cli, client: MemoryClient) -> None:
    fy("new", "--name", "work")
    code, out, err = fy("fork", "work", "-n", "3", "--prefix", "ep-", "--ttl", "60")
    assert (code, len(out.split())) == (0, 3) and "3 forks in 120 ms, 40 ms each" in err
    assert client.calls[-1] == ("fork", {
        "source": "work", "n": 3, "prefix": "ep-", "ttl_min": 1, "ephemeral": False})
    one = json.loads(fy("fork", "work", "--type", "small", "--ttl", "600", "--wait", "--json")[1])
    assert one["id"].startswith("sb_") and one["name"] and one["memoryRestored"] is True
    many = json.loads(fy("fork", "work", "-n", "2", "--json", "--name", "x", "--name", "y")[1])
    assert [box["name"] for box in many["forks"]] == ["x", "y"]
    assert fy("fork", "work", "-n", "2", "--name", "z")[0] == 2


def test_checkpoints(fy: Cli) -> None:
    fy("new", "--name", "work")
    assert fy("rewind", "work")[0] == 4
    first = fy("checkpoint", "work", "--label", "before")[1].strip()
    second = json.loads(fy("checkpoint", "work", "--json")[1])["checkpoint"]
    assert second["parent"] == first
    lines = fy("checkpoints", "ls", "work")[1].splitlines()
    assert lines[2].startswith("*") and not lines[1].startswith("*")
    assert '"memoryRestored":false' in fy("rewind", "work", "--no-memory", "--json")[1]
    code, out, err = fy("rewind", "work", "--to", first)
    assert (code, out) == (0, "sb_0000000001\n") and first in err
    assert fy("checkpoints", "delete", "work", first, "ck_none")[:2] == (3, f"{first}\n")


def test_tree_draws_the_lineage(fy: Cli) -> None:
    fy("new", "--name", "work")
    fy("fork", "work", "-n", "2", "--prefix", "a-")
    lines = fy("tree")[1].splitlines()
    assert [line.split("sb_")[0].rstrip() for line in lines[1:]] == [
        "└── work", "    ├── a-1", "    └── a-2"]
    assert lines[0].startswith("base")
    fy("fork", "work", "-n", "30", "--prefix", "b-")
    assert "… 28 more …" in fy("tree")[1] and "b-17" not in fy("tree")[1]
    assert "b-17" in fy("tree", "--all")[1]
    assert len(json.loads(fy("tree", "--json")[1])["nodes"]) == 34


def test_templates_top_and_audit(fy: Cli) -> None:
    assert fy("template", "ls")[1].splitlines()[1].split()[:3] == ["base", "recipe", "user"]
    assert fy("template", "delete", "base")[0] == 4
    fy("new", "--name", "work")
    heading, row = fy("top", "--once", "--every", "0")[1].splitlines()
    assert heading.startswith("NAME") and "20 of 1024 MiB" in row
    assert "echo a\\nb" in fy("audit", "ls", "--since", "1h")[1]
    assert json.loads(fy("audit", "ls", "--json")[1])["data"] == {"command": "echo a\nb", "exit_code": 0}


@pytest.mark.parametrize("text, place", [
    ("work:file", Place("work", "file")),
    ("work:/a/b:c", Place("work", "/a/b:c")),
    ("a:b:/x", Place("a:b", "/x")),
    ("work:~/x", Place("work", "x")),
    ("work:", Place("work", ".")),
    ("./a:b", Place(None, "./a:b")),
    ("/a:b", Place(None, "/a:b")),
    ("-", Place(None, "-")),
    ("plain", Place(None, "plain")),
])
def test_places_of_cp(text: str, place: Place) -> None:
    assert parse(text) == place


def test_cp_targets(fy: Cli, client: MemoryClient, tmp_path: Path) -> None:
    fy("new", "--name", "work")
    here = tmp_path / "f.txt"
    here.write_bytes(b"data\0")
    client.files["sb_0000000001", "dir"] = None
    assert fy("cp", str(here), "work:g.txt")[0] == 0
    assert fy("cp", str(here), "work:dir")[0] == 0
    assert fy("cp", str(here), "work:new/")[0] == 0
    assert {path for _, path in client.files} == {"dir", "g.txt", "dir/f.txt", "new/f.txt"}
    assert fy("cp", "work:g.txt", f"{tmp_path}/out/")[0] == 0
    assert (tmp_path / "out" / "g.txt").read_bytes() == b"data\0"
    assert fy("cp", "work:g.txt", "-")[1] == "data\0"
    assert fy("cp", f"{tmp_path}/none", "work:x")[0] == 3
    assert fy("cp", "work:none", str(tmp_path / "x"))[0] == 3


def test_every_verb_explains_itself(fy: Cli) -> None:
    code, out, _ = fy("--help")
    assert code == 0
    assert all(f"  {verb} " in out for verb in VERBS) and all(title in out for title in SECTIONS)
    context = click.Context(cli)
    for verb, (_, text) in VERBS.items():
        command = cli.get_command(context, verb)
        assert command is not None and command.help and command.name == verb
        leaves = getattr(command, "commands", {}) or {verb: command}
        for leaf in leaves.values():
            assert leaf.help, leaf.name
            assert verb == "version" or (leaf.epilog and "Example" in leaf.epilog), leaf.name
        assert command.help.split(".")[0].split()[0] == text.split()[0], verb
    assert fy("--version")[1].startswith("forkyard ")
    assert fy("version")[1].startswith("forkyard ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(fy: Cli, shell: str) -> None:
    code, out, err = fy("completion", shell)
    assert (code, err) == (0, "") and "_FORKYARD_COMPLETE" in out and "_FY_COMPLETE" in out


def test_config_says_where_from(fy: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKYARD_STORE_GB", "33")
    found = json.loads(fy("config", "--json")[1])["settings"]
    assert found["store_gb"]["value"] == 33 and "FORKYARD_STORE_GB" in found["store_gb"]["from"]
    assert any(line.startswith("store_gb") for line in fy("config")[1].splitlines())


def test_shell_refuses_without_a_terminal(fy: Cli) -> None:
    fy("new", "--name", "work")
    code, _, err = fy("shell", "work")
    assert code == 2 and "forkyard exec work" in err


def test_output_helpers() -> None:
    assert camel({"start_ms": 1, "labels": {"a_b": 1}, "forks": [{"mem_mb": 2}]}) == {
        "startMs": 1, "labels": {"a_b": 1}, "forks": [{"memMb": 2}]}
    assert [size(n) for n in (0, 1023, 1536, 300 << 20, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "300 MiB", "5120 GiB"]
    assert [age(100 - n, now=100) for n in (0, 119)] == ["0s", "119s"]
    assert age(None) == "-"
    assert aligned(("a", "b"), [("xxx", "y")]) == ["A    B", "xxx  y"]


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "forkyard.cli", "--help"], stdout=write,
                          stderr=subprocess.PIPE, timeout=30)
    os.close(write)
    assert done.returncode in (1, 141) and done.stderr == b""


def test_the_start_imports_nothing_heavy() -> None:
    code = ("import sys, forkyard.cli.main, forkyard.cli.running; "
            "print([m for m in ('rich', 'asyncio', 'httpx', 'msgspec', 'ssl', 'json', 'dataclasses') "
            "if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
                          check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("words, at, found", [
    ("forkyard rew", 1, ["rewind"]),
    ("forkyard checkpoints l", 2, ["ls"]),
    ("forkyard info w", 2, ["work"]),
    ("forkyard exec w", 2, ["work"]),
    ("forkyard new --fr", 2, ["--from"]),
])
def test_words_are_completed(
    client: MemoryClient, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: str, at: int, found: list[str],
) -> None:
    client.create_sandbox("work")
    monkeypatch.setenv("_FORKYARD_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(at))
    assert run((), App(client)) == 0
    assert [line.split(",")[1] for line in capfd.readouterr().out.splitlines()] == found


def test_the_sdk_alone_says_so() -> None:
    code = "import sys; sys.modules['click'] = None; from forkyard.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "ls"], capture_output=True, text=True)
    assert done.returncode == 1 and "forkyard[host]" in done.stderr and "Traceback" not in done.stderr
