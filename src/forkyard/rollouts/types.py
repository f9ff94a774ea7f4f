"""What a rollout is made of: the task, the episode that a policy sees, and what comes out.

These are plain data, but for ``Episode``. Times are seconds (``*_s``), milliseconds
(``*_ms``) or seconds since the epoch (``*_at``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from forkyard.errors import InvalidRequestError
from forkyard.types import Diff, ExecResult, Record

# How an attempt ended. ``infra`` is what the daemon proves to be the host's doing and is retried;
# ``sandbox_broken`` is what the guest did to itself and is the policy's, with reward 0.
Outcome = Literal[
    "passed",
    "failed",
    "policy_error",
    "policy_timeout",
    "timeout_contended",
    "oom",
    "sandbox_broken",
    "infra",
    "grader_error",
]
# Those that say nothing about the policy.
UNSCORED = ("infra", "grader_error", "timeout_contended")
GradeMode = Literal["clean", "final", "service"]

# Never taken from the agent's copy unless a task says otherwise: what decides how tests run.
PROTECTED = (
    "**/tests/**",
    "**/test/**",
    "**/test_*.py",
    "**/*_test.py",
    "**/conftest.py",
    "**/pytest.ini",
    "**/tox.ini",
    "**/setup.cfg",
)


@dataclass(frozen=True, slots=True)
class Image(Record):
    """A prepared state that is an OCI image: a registry reference, layout, archive or tar."""

    reference: str


@dataclass(frozen=True, slots=True)
class Dockerfile(Record):
    """A prepared state that is built. ``context`` is a directory, ``args`` its build arguments."""

    context: str | Path
    dockerfile: str = "Dockerfile"
    args: Mapping[str, str] = field(default_factory=dict)
    warm: str | None = None


@dataclass(frozen=True, slots=True)
class Commands(Record):
    """A prepared state that is ``source`` (a template or snapshot) after each command, as ``user``.

    ``egress_allow`` holds while the commands run and at no other time.
    """

    run: Sequence[str]
    source: str = "base"
    user: str | None = None
    egress_allow: Sequence[str] = ()
    timeout_s: float = 600


# A plain string is the name of a template or a snapshot.
Prepare = str | Image | Dockerfile | Commands


@dataclass(frozen=True, slots=True)
class Limits(Record):
    """What one copy may use; ``None`` is the default of its ``type``."""

    type: str = "small"
    cpus: float | None = None
    mem_mb: int | None = None
    disk_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Timeouts(Record):
    """Seconds: for the policy's whole episode, for one grading, and for preparing."""

    policy_s: float = 600
    grader_s: float = 300
    prepare_s: float = 1800


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """What a grader says. ``reward`` is usually 0 to 1; ``passed`` is the whole task done.

    ``tests`` gives each expected test's outcome, ``evidence`` whatever else a reader needs
    (plain data). ``trusted`` is False where the agent's machine took part in the grading.
    """

    passed: bool
    reward: float
    message: str = ""
    tests: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = True


class Grader(Protocol):
    """Scores a state the agent left, in a machine the agent never had.

    ``name`` and ``key()`` (a digest of everything that can change a verdict) go into the
    run's records. ``files`` arrive in the grading copy after ``build`` has run there.
    """

    @property
    def name(self) -> str:
        """What it is called in records."""

    @property
    def mode(self) -> GradeMode:
        """How it grades where nobody says otherwise."""

    @property
    def build(self) -> str | None:
        """A command of the task's user, before ``files``."""

    @property
    def files(self) -> Mapping[str, str | bytes | Path]:
        """What it brings, written as root."""

    def key(self) -> str:
        """A digest of what decides the verdict: code, files, expected tests."""

    async def grade(self, grading: Grading) -> Verdict:
        """Score. Raises ``GraderError`` where the grader itself failed: never the policy's fault."""


@dataclass(frozen=True, slots=True)
class Grading:
    """What a grader gets: ``sandbox``, a handle (async) on the grading copy; the task; the diff
    that crossed; in ``service`` mode ``ports``, the frozen final copy's by number; and how many
    seconds its commands may take in all."""

    sandbox: Any
    task: Task
    diff: Diff
    mode: GradeMode
    ports: Mapping[int, str] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task(Record):
    """One thing to do, and how to tell whether it was done.

    Args:
        id: Unique within a suite; any printable text.
        prepare: Where an episode starts, before ``files``.
        instruction: What the policy is told.
        files: Put into the prepared state, path -> content (a ``Path`` is read from this machine).
        grader: None scores nothing: the outcome is ``passed`` with reward 0 if the policy returns.
        paths: What may cross into the grading copy, globs relative to the working directory
            (``**`` crosses directories); empty is the whole working directory.
        protected: Globs that never cross; None is ``PROTECTED``.
        user: Of the policy's commands; None is the template's.
        egress: Rules for the policy's copy (``("@pip",)``); empty is closed.
        env: Of every command.
        cluster: Tasks of one cluster are not independent (mutants of one package); None is the task.
        metadata: Plain data, carried to the report. ``canaries`` (texts that decoy files hold) and
            ``sources`` (globs of hosts that serve the answer) are read for suspicions.
        oracle: What solves it, for ``validate``: files (None deletes one), or a callable that is
            given the sandbox's async handle and the task. No episode ever sees it.
    """

    id: str
    prepare: Prepare = "base"
    instruction: str = ""
    files: Mapping[str, str | bytes | Path] = field(default_factory=dict)
    grader: Grader | None = None
    paths: Sequence[str] = ()
    protected: Sequence[str] | None = None
    user: str | None = None
    egress: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    cluster: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    oracle: Mapping[str, str | bytes | Path | None] | Callable[..., Awaitable[Any]] | None = None


def check_task(task: object) -> None:
    """Raises InvalidRequestError unless it is a Task."""
    if not isinstance(task, Task):
        shown = f"{type(task).__name__} {str(task)[:80]!r}"
        hint = "Task(id, ...), or a suite's: load(name), of forkyard.rollouts.suites"
        raise InvalidRequestError(f"{shown} is no Task", hint=hint)


@dataclass(frozen=True, slots=True)
class Phases(Record):
    """Where a sample's time went, in seconds. ``policy_s`` includes ``sandbox_s``, the time in
    which a call to the sandbox was open; the rest of it is the policy's own (a model, mostly)."""

    queue_s: float = 0.0
    start_s: float = 0.0
    policy_s: float = 0.0
    sandbox_s: float = 0.0
    freeze_s: float = 0.0
    grade_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """One line of a run: one attempt at one task, as it ended.

    ``key`` identifies what was run (task, prepared snapshot, policy, limits, number).
    ``transcript`` and ``diff`` name files in the run's directory, None where there are none.
    ``audit`` is the first and last sequence number of the episode's records. ``episode`` names the
    file of its log and commands, ``trajectory`` is a digest of what the policy did: the same in two
    samples of a task means that they are one. ``suspicions`` are the grading's, as plain data,
    ``prepared`` is the snapshot that it started from.
    """

    task: str
    sample: int
    key: str
    seed: int
    outcome: Outcome
    reward: float
    verdict: Verdict | None
    message: str
    phases: Phases
    retries: int
    started_at: float
    ended_at: float
    sandbox: str | None
    transcript: str | None
    diff: str | None
    audit: tuple[int, int] | None
    cluster: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    episode: str | None = None
    trajectory: str | None = None
    suspicions: Sequence[Mapping[str, Any]] = field(default_factory=list)
    prepared: str | None = None

    @property
    def valid(self) -> bool:
        """Whether the sample says something about the policy."""
        return self.outcome not in UNSCORED


class EpisodeLike(Protocol):
    """What a policy may use of an episode."""

    sandbox: Any
    task: Task
    sample: int
    seed: int
    deadline: float

    @property
    def cancelled(self) -> bool:
        """Whether the rollout no longer wants a result."""

    def log(self, **fields: Any) -> None:
        """Add a line to the episode's log: plain data."""


Policy = Callable[..., Any] | Callable[..., Awaitable[Any]]
CommandResult = ExecResult
