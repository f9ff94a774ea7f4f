"""``diff``, ``explore`` and ``audit verify``: arguments, forms of output, exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkyard.audit import AuditLog, export
from forkyard.audit import verify as verify_log
from forkyard.audit.heads import key_of, sign_head, signed_by
from forkyard.cli.app import App
from forkyard.cli.comparing import coloured, summary
from forkyard.cli.main import run
from forkyard.requests import ExploreEvent
from forkyard.types import AuditRecord, Change, Diff, ExploreResult, VariantResult

PATCH = (
    "diff --git a/home/user/a b/home/user/a\n--- a/home/user/a\n+++ b/home/user/a\n"
    "@@ -1 +1,2 @@\n-x\n+y\n+z\n"
    "diff --git a/bin/t b/bin/t\nold mode 100644\nnew mode 100755\n"
)
DIFF = Diff(
    added=[Change("/home/user/l", "link", 0o777, target="a")],
    modified=[
        Change("/bin/t", "file", 0o755, "file", 0o644, 5, 5, content=False),
        Change("/home/user/a", "file", 0o644, "file", 0o644, 4, 2, data=b"y\nz\n"),
    ],
    deleted=[Change("/home/user/gone", "file", None, "file", 0o600, 0, 2048)],
    patch=PATCH,
)
Cli = Callable[..., tuple[int, str, str]]


class OneAnswer:
    """A client that was told what to answer."""

    def __init__(self, outcome: ExploreResult | None = None) -> None:
        self.outcome = outcome
        self.calls: list[Any] = []

    def close(self) -> None:
        pass

    def diff(self, sandbox: str, since: str | None = None) -> Diff:
        self.calls.append((sandbox, since))
        return DIFF

    def explore(self, source: str, variants: list[Any], **options: Any) -> ExploreResult:
        tell = options.pop("on_progress")
        self.calls.append((source, variants, options))
        assert self.outcome is not None
        for result in self.outcome.results:
            tell(ExploreEvent(kind="started", name=result.name))
            tell(ExploreEvent(kind="result", name=result.name, result=result))
        return self.outcome


@pytest.fixture
def fy(capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(client: OneAnswer, *args: str) -> tuple[int, str, str]:
        code = run(args, App(client))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_diff_prints_the_patch(fy: Cli) -> None:
    client = OneAnswer()
    assert fy(client, "diff", "work") == (0, PATCH, "")
    assert fy(client, "diff", "work", "--since", "point", "--name-only")[1].splitlines() == [
        "/bin/t", "/home/user/a", "/home/user/gone", "/home/user/l"]  # fmt: skip
    assert client.calls == [("work", None), ("work", "point")]
    assert fy(client, "diff", "work", "--stat", "--json")[0] == 2


def test_diff_json_has_no_content(fy: Cli) -> None:
    shown = json.loads(fy(OneAnswer(), "diff", "work", "--json")[1])
    assert shown["modified"][0] | {"oldMode": 0o644, "mode": 0o755, "path": "/bin/t"} == shown["modified"][0]
    assert "data" not in shown["modified"][1] and shown["patch"] == PATCH


@pytest.mark.parametrize("url", ["memory://a/b", "simplecache::memory://a/b"])
def test_an_export_into_memory_that_ends_with_the_command_is_refused(fy: Cli, url: str) -> None:
    client = OneAnswer()
    code, out, err = fy(client, "export", "snap", url)
    assert (code, out, client.calls) == (2, "", []) and "use a path" in err, err


def test_stat() -> None:
    assert list(summary(DIFF)) == [
        "M /bin/t           mode 0644 -> 0755",
        "M /home/user/a     +2 -1",
        "D /home/user/gone  2.0 KiB -> 0 B",
        "A /home/user/l     (link)",
        "1 added, 2 modified, 1 deleted; 2 lines more, 1 lines less",
    ]


def test_a_patch_does_not_steer_the_terminal() -> None:
    shown = coloured("diff --git a/x b/x\n@@ -1 +1 @@\n-old\n+\x1b]0;title\x07new\n")
    assert "\x1b]0" not in shown and "\x07" not in shown and "\\x1b]0;title\\x07new" in shown
    assert "\x1b[31m-old\x1b[m" in shown and "\x1b[36m@@ -1 +1 @@\x1b[m" in shown


def test_explore_prints_the_winner(fy: Cli) -> None:
    won = VariantResult("2", True, "passed", 0, 12.0, diff=DIFF, id="sb_0000000001")
    client = OneAnswer(ExploreResult(won, [VariantResult("1", False, "failed", 1, 3.0), won], 20.0, 300.0))
    code, out, err = fy(client, "explore", "work", "-c", "false", "-c", "true", "--timeout", "2m", "-j", "3")
    assert (code, out) == (0, "sb_0000000001\n")
    assert "1  failed  3.0 ms  1  false" in err and "kept 2 in 300 ms" in err
    source, variants, options = client.calls[0]
    assert source == "work" and [one["command"] for one in variants] == ["false", "true"]
    assert options == {"keep": "fastest", "ephemeral": False, "timeout_s": 120.0, "parallel": 3}
    shown = json.loads(fy(client, "explore", "work", "-c", "false", "-c", "true", "--json")[1])
    assert shown["winner"]["id"] == "sb_0000000001" and "data" not in shown["winner"]["diff"]["modified"][1]


def test_explore_without_a_winner(fy: Cli) -> None:
    lost = VariantResult("1", False, "failed", 1, 3.0, output="why\n")
    code, out, err = fy(OneAnswer(ExploreResult(None, [lost])), "explore", "work", "-c", "false")
    assert (code, out) == (1, "") and "1: why" in err and "none of 1 passed" in err


async def _log(directory: Path) -> tuple[int, str]:
    log = AuditLog(directory)
    await log.open()
    for number in range(3):
        log.append("test", "sb_1", "tester", {"number": number})
    await log.close()
    return log.head


def test_audit_verify_of_a_copy(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seq, digest = asyncio.run(_log(tmp_path))

    def verify(*more: str) -> tuple[int, str, str]:
        code = run(("audit", "verify", "--dir", str(tmp_path), *more), App(OneAnswer()))
        out, err = capfd.readouterr()
        return code, out, err

    assert verify() == (0, f"3:{digest}\n", "3 records, all of them whole\n") and seq == 3
    assert verify("--head", f"3:{digest}")[0] == 0
    assert verify("--head", f"9:{digest}")[0] == 1
    assert verify("--head", "nonsense")[0] == 2
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"number":1', '"number":7'))
    code, out, err = verify()
    assert (code, out) == (1, "") and "record 2 is the first that is wrong" in err
    assert json.loads(verify("--json")[1])["seq"] == 2
    path.unlink()
    assert verify()[0] == 3


def test_audit_verify_of_an_export_against_a_signed_head(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = asyncio.run(_log(tmp_path / "audit"))
    export(tmp_path / "audit", tmp_path / "copy.tar")
    (tmp_path / "head").write_text(sign_head(head, tmp_path))
    (tmp_path / "strange").mkdir()
    keys = {where: f"{key_of(where)}.pub" for where in (tmp_path, tmp_path / "strange")}

    def verify(*more: str) -> tuple[int, str]:
        code = run(("audit", "verify", str(tmp_path / "copy.tar"), *more), App(OneAnswer()))
        return code, capfd.readouterr().err

    kept = ("--head", str(tmp_path / "head"))
    assert verify(*kept, "--key", keys[tmp_path]) == (0, "3 records, all of them whole\n")
    assert "was not checked" in verify(*kept)[1]
    code, said = verify(*kept, "--key", keys[tmp_path / "strange"])
    assert code == 1 and "not signed with that key" in said
    day = next((tmp_path / "audit").iterdir())
    day.write_bytes(b"".join(day.read_bytes().splitlines(keepends=True)[:2]))
    export(tmp_path / "audit", tmp_path / "copy.tar")
    assert verify()[0] == 0
    code, said = verify(*kept)
    assert code == 1 and "record 3 is the first that is wrong" in said and "cut off" in said


def test_audit_show_head_and_export(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKYARD_HOME", str(tmp_path))
    head = asyncio.run(_log(tmp_path / "audit"))

    class Log(OneAnswer):
        def audit(self, *, limit: int = 0, seq: int | None = None) -> list[AuditRecord]:
            log = AuditLog(tmp_path / "audit")
            one = log.get(seq) if seq is not None else None
            return log.read(limit=limit) if one is None else [one]

    def call(*args: str) -> tuple[int, str]:
        code = run(("audit", *args), App(Log()))
        return code, capfd.readouterr().out

    code, shown = call("show", "2")
    assert code == 0 and json.loads(shown)["data"] == {"number": 1}
    assert call("head") == (0, f"{head[0]}:{head[1]}\n")
    code, text = call("head", "--sign")
    assert code == 0 and signed_by(text, tmp_path / "audit-head.key.pub")
    assert call("export", str(tmp_path / "copy.tgz"))[0] == 0
    assert verify_log(tmp_path / "copy.tgz", head).ok
