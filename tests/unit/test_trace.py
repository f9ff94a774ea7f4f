"""Spans, and the file that viewers read."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from forkyard.host.trace import span, tracing


def in_a_thread() -> None:
    with span("of a thread"):
        pass


async def test_spans_lie_in_each_other_and_side_by_side(tmp_path: Path) -> None:
    async def work(name: str) -> None:
        with span(name, n=1):
            await asyncio.sleep(0)
            with span(f"{name} inside"):
                await asyncio.sleep(0)

    file = tmp_path / "trace.json"
    with tracing(file):
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(work(name))
        thread = threading.Thread(target=in_a_thread)
        with pytest.raises(KeyError), span("failed"):
            raise KeyError
        thread.start()
        thread.join()
    with span("after"):
        pass
    events = {event["name"]: event for event in json.loads(file.read_text())}
    assert set(events) == {"a", "a inside", "b", "b inside", "failed", "of a thread"}
    for name in ("a", "b"):
        outer, inner = events[name], events[f"{name} inside"]
        assert outer["tid"] == inner["tid"]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert len({events[name]["tid"] for name in ("a", "b", "failed", "of a thread")}) == 4
    assert events["a"]["args"] == {"n": 1}
    # They overlapped: the second began before the first had ended.
    assert events["b"]["ts"] < events["a"]["ts"] + events["a"]["dur"]


def test_off_is_nothing() -> None:
    with tracing(None), span("x") as got:
        assert got is None
