"""Everything that lives in a sandbox goes on in its forks, and after a rewind.

The programs in ``live/`` hold one kind of state each. All are started in one sandbox, which is
forked in two and then rewound; each program checks itself in all three copies.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from yard_home import YardHome, debian_yard, newest_yard  # noqa: F401

from forkyard import Client
from forkyard.client.sync_sandbox import Sandbox

pytestmark = [pytest.mark.root, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "live"
KINDS = re.findall(
    r"^@kind\ndef (\w+)", "".join(path.read_text() for path in sorted(PROGRAMS.glob("*.py"))), re.M
)
COPIES = ["first-fork", "second-fork", "rewound"]
WAIT = "for i in $(seq 600); do test -e {0} && exec cat {0}; sleep 0.05; done; echo no {0}"


def start(box: Sandbox, kind: str) -> None:
    """Set one kind's state up, detached."""
    box.spawn(["python3", "live/run.py", kind], detach=True).close()


def finish(box: Sandbox, kind: str) -> str:
    """Let it check itself: ``ok``, or what is wrong."""
    pid = box.read_text(f"/tmp/live/{kind}.ready")
    return box.shell(f"kill -{signal.SIGUSR1} {pid}; {WAIT.format(f'/tmp/live/{kind}.result')}").stdout


def make_copies(home: YardHome) -> Client:
    """The sandbox with everything in it, three times."""
    client = home.client
    client.create_sandbox("rewound")
    box = client.sandbox("rewound")
    box.upload(PROGRAMS, "live")
    for kind in KINDS:
        start(box, kind)
    for kind in KINDS:
        text = box.shell(WAIT.format(f"/tmp/live/{kind}.ready")).stdout
        assert text.strip().isdigit(), f"{kind}: {text}"
    box.checkpoint()
    client.fork("rewound", 2, names=COPIES[:2])
    box.rewind()
    return client


@pytest.fixture(scope="module")
def debian_copies(debian_yard: YardHome) -> Iterator[Client]:  # noqa: F811
    yield make_copies(debian_yard)
    debian_yard.clear()


@pytest.fixture(scope="module")
def newest_copies(newest_yard: YardHome) -> Iterator[Client]:  # noqa: F811
    yield make_copies(newest_yard)
    newest_yard.clear()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_survives(debian_copies: Client, kind: str, copy: str) -> None:
    assert finish(debian_copies.sandbox(copy), kind) == "ok"


@pytest.mark.newest
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_on_the_newest(newest_copies: Client, kind: str, copy: str) -> None:
    assert finish(newest_copies.sandbox(copy), kind) == "ok"
