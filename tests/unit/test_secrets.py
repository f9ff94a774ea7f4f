"""What of a command line the audit keeps as a digest."""

from __future__ import annotations

import time

import pytest

from forkyard.yard.secrets import hide, hide_argv


def digest(secret: str) -> str:
    return f"<{len(secret)}>"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("curl -H 'Authorization: Bearer abcdefgh12' x", "curl -H 'Authorization: Bearer <10>' x"),
        ("tool --password hunter2 -v", "tool --password <7> -v"),
        ("tool --api-key=abc", "tool --api-key=<3>"),
        ("GITHUB_TOKEN=ghp_x make", "GITHUB_TOKEN=<5> make"),
        ("export DB_PASSWORD='two words'; run", "export DB_PASSWORD=<9>; run"),
        ("git clone https://me:s3cret@host.test/x", "git clone https://me:<6>@host.test/x"),
        ("echo $TOKEN --token $TOKEN", "echo $TOKEN --token $TOKEN"),
        ("ls -la /etc/passwd && cat tokens.txt", "ls -la /etc/passwd && cat tokens.txt"),
        ("tool --no-auth --verbose", "tool --no-auth --verbose"),
        ("echo https://host.test:8080/x", "echo https://host.test:8080/x"),
    ],
)
def test_a_line(line: str, kept: str) -> None:
    assert hide(line, digest) == kept


def test_arguments() -> None:
    argv = ["tool", "--token", "abc", "--secret=xyz", "--auth", "-v", "plain"]
    assert hide_argv(argv, digest) == ["tool", "--token", "<3>", "--secret=<3>", "--auth", "-v", "plain"]


def test_the_values_of_variables_are_hidden_wherever_they_stand() -> None:
    assert hide("echo sesame-open | x", digest, ["sesame-open", "x"]) == "echo <11> | x"
    assert hide_argv(["echo", "sesame-open"], digest, ["sesame-open"]) == ["echo", "<11>"]


@pytest.mark.parametrize("line", ["a" * 16384, "token" * 3000, "-" * 16384, "://" * 5000, "x y=z " * 2700])
def test_a_long_line_costs_its_length(line: str) -> None:
    before = time.process_time()
    hide(line, digest)
    assert time.process_time() - before < 1  # by its square it would be minutes
