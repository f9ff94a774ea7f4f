"""The soak: what it says has grown, and a short one."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

from bench.soak import Worker, grown, when_quiet
from forkyard import Client


def samples(**figures: list[float]) -> list[dict[str, Any]]:
    rounds = len(next(iter(figures.values())))
    return [{"figures": {key: values[n] for key, values in figures.items()}} for n in range(rounds)]


def test_what_grows_is_told_from_what_comes_and_goes() -> None:
    assert grown(samples(mounts=[3, 4, 3, 5, 4, 3, 4])) == []
    assert grown(samples(mounts=[9, 3, 3, 3, 3, 3, 3])) == []  # warming up
    assert grown(samples(mounts=[3, 3, 4, 5, 6, 7, 8])) == ["mounts: from 3-5 to 6-8"]
    assert grown(samples(mounts=[3, 5, 5, 5, 5, 6, 7])) == [], "not in each round of the second half"
    # What is there for the first time in the end has grown too.
    late = [{"figures": {}}, {"figures": {}}, {"figures": {"layers": 2.0}}]
    assert grown(late) == ["layers: from 0-0 to 2-2"]
    memory = "memory of the daemon, MiB"
    assert grown(samples(**{memory: [50, 51, 52, 53]})) == []
    assert grown(samples(**{memory: [50, 51, 51, 60]})) == [f"{memory}: from 51-51 to 60-60"]
    assert grown(samples(**{"catalog, MiB": [1, 2, 3, 4]})) == [], "kept on purpose"


@pytest.mark.root
@pytest.mark.slow
def test_a_short_soak_leaves_no_image_layer_or_box(own_yard: OwnYard) -> None:  # noqa: F811
    with Client(home=own_yard.home) as client:
        worker, found = Worker(0, client, random.Random(7)), []
        for _ in range(2):
            worker.work(time.monotonic() + 8)
            found.append(when_quiet(own_yard.home, client.health().pid, quiet_s=6))
    assert worker.failed == {} and sum(worker.done.values()) > 10 and not worker.sandboxes
    for name in ("memory images", "layers"):
        assert found[1][name] <= max(found[0][name], 1), (name, found)
