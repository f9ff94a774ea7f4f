"""What is asked of rollouts that cannot be is told before anything begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forkyard.errors import InvalidRequestError
from forkyard.rollouts import Task, evaluate, group_rollouts
from forkyard.rollouts.attempt import _where


def policy(sandbox: Any, task: Task) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: evaluate(Task("one"), policy), "a Task, not a list of tasks"),
        (lambda: evaluate("humaneval", policy), "the text 'humaneval', not a list of tasks"),
        (lambda: evaluate(["humaneval"], policy), "str 'humaneval' is no Task"),
        (lambda: group_rollouts([Task("one")], policy, 2), "is no Task"),
    ],
)
def test_what_is_no_list_of_tasks(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ask()
    assert caught.value.hint


def test_where_a_policy_failed() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // len([])
    assert _where(caught.value) == f"test_rollouts_asked.py:{caught.tb.tb_lineno}"
    with pytest.raises(NotImplementedError) as raised:
        policy(None, Task("one"))
    assert _where(raised.value).startswith("test_rollouts_asked.py:")
    assert _where(ValueError("raised nowhere")) == ""
