"""Bugs to repair: one changed operator in a package whose own tests pass without a network.

Tests that the bug breaks are hidden from the agent and are what it has to make pass; the others it
may run. Nothing of the original is in its copy: not its byte code, an installed copy, a cache, a
digest or a history. Which tests a bug breaks is found once, in a sandbox, and kept in the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from forkyard.client.aio import AsyncClient
from forkyard.errors import NotFoundError, UnsupportedError
from forkyard.rollouts.graders import PytestGrader
from forkyard.rollouts.suites.hiding import Found, Trial, hide
from forkyard.rollouts.suites.mutations import shuffled
from forkyard.rollouts.suites.packages import cache, distribution
from forkyard.rollouts.types import PROTECTED as USUAL
from forkyard.rollouts.types import Commands, Task, Timeouts

REPO = "repo"
# Everything that a task's outcome depends on is named, but for the interpreter of the base template.
VERSION = 1
PYTEST = "pytest"
TESTS_S = 120
# A bug that breaks more of the tests than that is no riddle.
MOST_BROKEN = 0.25
PROTECTED = (*USUAL, "**/pyproject.toml")


PARSO = "[pytest]\nnorecursedirs = normalizer_issue_files\n"


@dataclass(frozen=True, slots=True)
class Package:
    """A source distribution: ``code`` is where bugs may be, ``tests`` what is run."""

    requirement: str
    code: str
    tests: str = "tests"
    import_path: str = "."
    needs: tuple[str, ...] = ()
    config: str = "[pytest]\n"

    @property
    def name(self) -> str:
        return self.requirement.partition("==")[0]


PACKAGES = {
    one.name: one
    for one in (
        Package("tinydb==4.9.0", "tinydb", needs=("pyyaml",)),
        Package("toolz==1.2.0", "toolz", tests="toolz/tests"),
        Package("cachetools==8.0.2", "src/cachetools", import_path="src"),
        Package("voluptuous==0.16.0", "voluptuous", tests="voluptuous/tests/tests.py"),
        Package("tomlkit==0.15.2", "tomlkit", needs=("pyyaml",)),
        Package("sqlparse==0.6.1", "sqlparse"),
        Package(
            "parso==0.8.7", "parso", tests="test", config="[pytest]\nnorecursedirs = normalizer_issue_files\n"
        ),
    )
}


def load(
    packages: Sequence[str] | str = (),
    *,
    each: int = 3,
    seed: int = 0,
    home: str | Path | None = None,
) -> list[Task]:
    """``each`` bugs in each package (names; none means all of ``PACKAGES``).

    The first time, this downloads them and runs their tests in a sandbox, some minutes in all.
    ``home`` is the daemon's (default: as for a client).

    Raises:
        NotFoundError: no such package here. UnavailableError: pip cannot get one.
        UnsupportedError: a package's own tests do not pass.
    """
    names = [one for one in (packages.split(",") if isinstance(packages, str) else packages) if one]
    if unknown := sorted(set(names) - set(PACKAGES)):
        raise NotFoundError(
            f"no package {', '.join(unknown)} in this suite", hint=f"there are {', '.join(PACKAGES)}"
        )
    tasks = []
    for name in names or PACKAGES:
        package = PACKAGES[name]
        for number, found in enumerate(_bugs(package, each, seed, home)):
            tasks.append(_task(package, f"mutants/{name}/{seed}-{number}", found))
    return tasks


def prepared(package: Package) -> Commands:
    """The state that a package's tasks start from: what its tests need, and nothing of itself."""
    name = package.code.rpartition("/")[2]
    purge = (
        f"find / -xdev \\( -path /proc -o -path /sys \\) -prune -o "
        f"\\( -name '{name}' -o -name '{name}-*' -o -name '{name}.*' -o -name '{package.name}-*' \\) "
        f"\\( -path '*-packages/*' -o -path '*/.cache/*' -o -path '*/wheels/*' \\) -print0 | xargs -0r rm -rf"
    )
    needs = " ".join((PYTEST, *package.needs))
    return Commands(
        [
            f"pip install --quiet --no-cache-dir {needs}",
            f"{purge}; rm -rf ~/.cache/pip; mkdir -p {REPO}",
            f'! python3 -c "import {name}" 2>/dev/null',
        ],
        egress_allow=("@pip",),
    )


def _tree(package: Package) -> dict[str, bytes]:
    """The files of the source distribution, without what tells of the original."""
    path = distribution(package.requirement, source=True)
    files: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts[1:]
            if member.isfile() and parts and ".." not in parts and not _tells(parts):
                data = archive.extractfile(member)
                assert data is not None
                files["/".join(parts)] = data.read()
    return files


def _tells(parts: Sequence[str]) -> bool:
    name = parts[-1]
    return (
        name in ("PKG-INFO", "RECORD", "SOURCES.txt", "MANIFEST")
        or name.endswith((".pyc", ".pyo", ".orig", ".rej", ".whl"))
        or any(part in ("__pycache__", ".git", ".hg", "build", "dist") for part in parts)
        or any(part.endswith((".egg-info", ".dist-info")) for part in parts)
    )


def _bugs(package: Package, each: int, seed: int, home: str | Path | None) -> list[Found]:
    settings = [VERSION, asdict(package), seed]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    kept = cache() / "mutants" / f"{package.requirement}-{digest}.json"
    kept.parent.mkdir(exist_ok=True)
    known = [Found(**one) for one in json.loads(kept.read_text())] if kept.exists() else []
    if len(known) < each:
        # In a thread: there may be a loop in this one.
        with ThreadPoolExecutor(1) as thread:
            known = thread.submit(asyncio.run, _look(package, each, seed, home)).result()
        fresh = kept.with_suffix(".new")
        fresh.write_text(json.dumps([asdict(one) for one in known]))
        fresh.replace(kept)
    return known[:each]


async def _look(package: Package, each: int, seed: int, home: str | Path | None) -> list[Found]:
    files = _tree(package)
    found: list[Found] = []
    async with AsyncClient(home=home) as client, Trial(client, package, files, prepared(package)) as trial:
        good = await trial.baseline()
        if not good:
            said = trial.said[-500:]
            raise UnsupportedError(f"the tests of {package.requirement} do not pass here: {said}")
        code = {
            name: data
            for name, data in files.items()
            if name.startswith(f"{package.code}/") and name.endswith(".py") and "/tests/" not in name
        }
        for name, mutation in shuffled(code, f"{seed}/{package.requirement}"):
            if len(found) == each:
                break
            outcomes = await trial.run({name: mutation.apply(files[name])})
            if outcomes is None:
                continue
            broken = sorted(one for one in good if outcomes.get(one) != "passed")
            if not broken or len(broken) > max(3, MOST_BROKEN * len(good)):
                continue
            messages = trial.messages(broken)
            hidden = hide(files, package.tests, broken)
            if hidden is None:
                continue
            visible = await trial.run({name: mutation.apply(files[name]), **hidden})
            if not visible or any(visible.get(one, "passed") != "passed" for one in good):
                continue
            texts = {path: data.decode() for path, data in hidden.items()}
            found.append(Found(name, asdict(mutation), good, broken, texts, messages))
    return found


def _task(package: Package, name: str, found: Found) -> Task:
    files = _tree(package)
    tests = {path: data for path, data in files.items() if path in found.hidden}
    buggy = {**files, **{path: text.encode() for path, text in found.hidden.items()}}
    buggy[found.file] = found.mutation_().apply(files[found.file])
    grader = PytestGrader(
        expected=found.good,
        files={f"{REPO}/{path}": data for path, data in tests.items()},
        root=REPO,
        import_paths=(package.import_path,),
        config=package.config,
        name="mutants",
    )
    shown = "\n".join(f"- {test}: {text}" for test, text in list(found.messages.items())[:5])
    return Task(
        name,
        prepared(package),
        f"The Python package in {REPO}/ has a bug somewhere in {package.code}/. The tests that are there "
        f"pass; others, which you do not have, fail:\n{shown}\nFind and repair the bug. Run the tests with: "
        f"cd {REPO} && python -m pytest {package.tests}",
        files={REPO: _folder(package, name, buggy)},
        grader=grader,
        paths=(f"{REPO}/**",),
        protected=PROTECTED,
        timeouts=Timeouts(grader_s=TESTS_S),
        cluster=package.name,
        metadata={"package": package.requirement, "hidden": len(found.broken), "sources": ["*"]},
        oracle={f"{REPO}/{found.file}": files[found.file]},
    )


def _folder(package: Package, name: str, files: dict[str, bytes]) -> Path:
    """The files as a directory of the cache, named after their content."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0%d\0" % len(files[path]) + files[path])
    folder = cache() / "mutants" / digest.hexdigest()[:32]
    if not folder.exists():
        fresh = Path(tempfile.mkdtemp(dir=folder.parent))
        for path, data in files.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_bytes(data)
        fresh.chmod(0o755)
        try:
            fresh.rename(folder)
        except OSError:
            shutil.rmtree(fresh)
    return folder
