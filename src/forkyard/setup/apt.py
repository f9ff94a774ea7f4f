"""Debian packages: what this machine's apt is configured with, missing programs, single packages.

Where packages come from is read from the machine's own apt configuration, never written
here, so that mirrors, proxies and air-gapped hosts work as their owner set them up.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import UnsupportedError
from forkyard.host import process, userns
from forkyard.host.files import rmtree

__all__ = [
    "Release",
    "Source",
    "acquire_options",
    "download",
    "host_release",
    "install",
    "missing",
    "sources",
]

APT_DIR = Path("/etc/apt")
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
QUIET = ["-qq", "-o", "Acquire::Retries=3", "-o", "Dpkg::Use-Pty=0"]
APT_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Release:
    """Which distribution the host is: ``id`` is ``debian``, ``ubuntu`` or another."""

    id: str
    codename: str


@dataclass(frozen=True, slots=True)
class Source:
    """One binary package source: a URI, one suite of it, its components and the key it is signed with."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None = None

    def line(self) -> str:
        """As one line of a sources.list."""
        options = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(self.components)}"


def host_release(os_release: Path = Path("/etc/os-release")) -> Release:
    """The host's distribution, from os-release; a derivative counts as what it derives from."""
    try:
        pairs = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', os_release.read_text(), re.M))
    except OSError:
        pairs = {}
    name = pairs.get("ID", "")
    if name not in ("debian", "ubuntu"):
        name = next((word for word in pairs.get("ID_LIKE", "").split() if word in ("ubuntu", "debian")), name)
    codename = pairs.get("VERSION_CODENAME", "")
    if name == "ubuntu":
        codename = pairs.get("UBUNTU_CODENAME") or codename
    elif name == "debian":
        codename = pairs.get("DEBIAN_CODENAME") or codename
    return Release(name, codename)


def sources(release: Release, apt_dir: Path = APT_DIR) -> list[Source]:
    """The distribution's own entries among this machine's apt sources: main, updates and security.

    Third parties' archives often use the distribution's suite names, so an entry counts only
    if its key or its address says that it is the distribution's.
    """
    suites = {release.codename, f"{release.codename}-updates", f"{release.codename}-security"}
    found: list[Source] = []
    for entry in _entries(apt_dir):
        if entry.suite in suites and "main" in entry.components and _is_own(entry, release.id):
            wanted = tuple(c for c in entry.components if c in ("main", "universe"))
            own = Source(_resolve(entry.uri), entry.suite, wanted, entry.signed_by)
            if own not in found:
                found.append(own)
    return found


def _is_own(entry: Source, distribution: str) -> bool:
    if entry.signed_by:
        return f"{distribution}-archive" in entry.signed_by
    last = entry.uri.rstrip("/").rpartition("/")[2]
    return distribution in entry.uri.partition("://")[2] or last.startswith(distribution)


def _resolve(uri: str) -> str:
    """Cloud images name a local file with mirrors; take the first, which is the preferred one."""
    if not uri.startswith("mirror+file:"):
        return uri
    try:
        lines = Path(uri.removeprefix("mirror+file:")).read_text().splitlines()
    except OSError:
        return uri
    return next((line.split()[0] for line in lines if line.strip() and not line.startswith("#")), uri)


def _entries(apt_dir: Path) -> list[Source]:
    parts = apt_dir / "sources.list.d"
    found: list[Source] = []
    lists = [apt_dir / "sources.list", *sorted(parts.glob("*.list"))]
    for path in lists:
        for line in _read(path).splitlines():
            found += _one_line(line)
    for path in sorted(parts.glob("*.sources")):
        for paragraph in re.split(r"\n[ \t]*\n", _read(path)):
            found += _deb822(paragraph)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _one_line(line: str) -> list[Source]:
    match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
    if not match:
        return []
    options = dict(word.partition("=")[::2] for word in (match[1] or "").split())
    return [Source(match[2], match[3], tuple(match[4].split()), options.get("signed-by"))]


def _deb822(paragraph: str) -> list[Source]:
    fields: dict[str, str] = {}
    name = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t") and name:
            fields[name] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
        return []
    signed_by: str | None = fields.get("signed-by")
    if signed_by and not signed_by.startswith("/"):
        signed_by = None  # a key in the file itself: not to be referred to by path
    return [
        Source(uri, suite, tuple(fields.get("components", "").split()), signed_by)
        for uri in fields.get("uris", "").split()
        for suite in fields.get("suites", "").split()
    ]


async def acquire_options() -> list[str]:
    """This machine's own settings for fetching (proxies, certificates, checks), as lines of apt.conf."""
    shown = await process.run(["apt-config", "dump", "--format", "%F %v%n", "Acquire"], timeout_s=10)
    wanted = re.compile(r"Acquire::(Check-|http|https|Retries|ForceIPv4|ForceIPv6|AllowInsecure)", re.I)
    lines = []
    for line in shown.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if value and wanted.match(key) and '"' not in value:
            lines.append(f'{key} "{value}";')
    return lines


def missing(programs: dict[str, str]) -> list[str]:
    """Packages whose program (``{program or file: package}``) is not on this machine."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = []
    for program, package in programs.items():
        present = Path(program).exists() if program.startswith("/") else shutil.which(program, path=path)
        if not present and package not in found:
            found.append(package)
    return found


def _apt_env() -> dict[str, str]:
    return {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}


async def install(packages: Iterable[str]) -> None:
    """Install packages on the host.

    Raises:
        UnsupportedError: no apt, not root, or apt failed; the hint is the command to run by hand.
    """
    names = list(packages)
    command = f"apt-get install {' '.join(names)}"
    if shutil.which("apt-get") is None:
        raise UnsupportedError(
            f"this machine lacks {', '.join(names)} and has no apt-get",
            hint="install their equivalents by this system's own means and try again",
        )
    if os.geteuid() != 0 or userns.inside():
        raise UnsupportedError(f"this machine lacks {', '.join(names)}", hint=f"as root: {command}")
    update = await process.run(["apt-get", *QUIET, "update"], timeout_s=APT_TIMEOUT_S, env=_apt_env())
    done = await process.run(
        ["apt-get", *QUIET, "install", "-y", "--no-install-recommends", *names],
        timeout_s=APT_TIMEOUT_S,
        env=_apt_env(),
    )
    if done.rc:
        why = done.complaint or update.complaint
        raise UnsupportedError(f"{command} failed: {why}", hint="see that it works by hand, then try again")


async def download(package: str, sources: list[Source], into: Path) -> Path:
    """Download one package of another release, its signature checked, and unpack it to ``into``.

    Package lists, cache and state are private to the call: the machine's own apt learns nothing of it.

    Raises:
        UnsupportedError: it could not be had; the message has apt's reason.
    """
    scratch = into.with_name(f".{into.name}.apt")
    rmtree(scratch)
    for name in ("lists/partial", "cache/archives/partial", "parts", "root"):
        (scratch / name).mkdir(parents=True)
    try:
        (scratch / "sources.list").write_text("".join(f"{source.line()}\n" for source in sources))
        (scratch / "status").touch()
        private = {
            "Dir::Etc::SourceList": scratch / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "-",
            "Dir::State::lists": scratch / "lists",
            "Dir::State::status": scratch / "status",
            "Dir::Cache": scratch / "cache",
            # apt's own user may not enter a home of mode 0700.
            "APT::Sandbox::User": "root",
            "APT::Update::Post-Invoke-Success": "",
            "APT::Update::Post-Invoke": "",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Acquire::IndexTargets::deb::CNF::DefaultEnabled": "false",
        }
        options = [word for key, value in private.items() for word in ("-o", f"{key}={value}")]
        for verb in (["update"], ["download", package]):
            done = await process.run(
                ["apt-get", *QUIET, *options, *verb], timeout_s=APT_TIMEOUT_S, env=_apt_env(), cwd=scratch
            )
            if done.rc or b"Err:" in done.stdout or b"W: Failed" in done.stderr:
                raise UnsupportedError(f"apt could not {' '.join(verb)}: {done.complaint}")
        archive = next(scratch.glob("*.deb"))
        await process.run(["dpkg-deb", "-x", archive, scratch / "root"], timeout_s=120, check=True)
        rmtree(into)
        os.rename(scratch / "root", into)
    finally:
        rmtree(scratch)
    return into
