"""Rules read out of this machine's own configuration: where its pip, npm and apt take packages from.

No registry's name is written here. What a preset gives is kept for some minutes, since asking
pip and npm takes a second.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from forkyard.egress.policy import PRESETS
from forkyard.errors import InvalidRequestError, UnsupportedError
from forkyard.host import process

APT_DIR = Path("/etc/apt")
KEPT_S = 300.0
ASK_S = 60.0
_DEFAULT_INDEX = (
    "import json; from pip._internal.models.index import PyPI;"
    "print(json.dumps([PyPI.simple_url, PyPI.file_storage_domain]))"
)


@dataclass(frozen=True, slots=True)
class Preset:
    """``rules`` without presets, and ``env``: what commands inside need to know of it."""

    rules: list[str]
    env: dict[str, str] = field(default_factory=dict)


class Presets:
    """The presets of this machine. ``environ`` is that of the daemon."""

    def __init__(self, environ: Mapping[str, str] | None = None, apt_dir: Path = APT_DIR) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self.apt_dir = apt_dir
        self._kept: dict[str, tuple[float, Preset]] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str) -> Preset:
        """One preset.

        Raises:
            InvalidRequestError: there is none of this name.
            UnsupportedError: this machine has no such program, or it names no source.
        """
        async with self._lock:
            at, kept = self._kept.get(name, (0.0, None))
            if kept is None or time.monotonic() - at > KEPT_S:
                kept = await self._read(name)
                self._kept[name] = (time.monotonic(), kept)
        return kept

    async def expand(self, texts: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Rules with every preset replaced by its own, and the presets' variables."""
        rules: list[str] = []
        env: dict[str, str] = {}
        for text in texts:
            if text.startswith("@"):
                preset = await self.get(text)
                rules += preset.rules
                env |= preset.env
            else:
                rules.append(text)
        return list(dict.fromkeys(rules)), env

    async def _read(self, name: str) -> Preset:
        if name == "@pip":
            preset = await self._pip()
        elif name == "@npm":
            preset = await self._npm()
        elif name == "@apt":
            preset = Preset(_rules_of(apt_uris(self.apt_dir)))
        else:
            raise InvalidRequestError(f"the egress preset {name!r} is not known: {', '.join(PRESETS)} are")
        if not preset.rules:
            raise UnsupportedError(
                f"{name}: this machine names no package source for {name[1:]}",
                hint="name the hosts themselves in egress_allow",
            )
        return preset

    async def _ask(self, argv: list[str]) -> str | None:
        """A program's answer, or None if there is none."""
        try:
            done = await process.run(argv, env=self.environ, timeout_s=ASK_S)
        except (UnsupportedError, OSError):
            return None
        return done.stdout.decode("utf-8", "replace") if done.rc == 0 else None

    async def _pip(self) -> Preset:
        for python in dict.fromkeys((sys.executable, shutil.which("python3") or "")):
            listed = await self._ask([python, "-m", "pip", "config", "list"]) if python else None
            if listed is not None:
                break
        else:
            raise UnsupportedError("@pip: this machine has no pip", hint="apt-get install python3-pip")
        index, extra, trusted = pip_settings(listed)
        env: dict[str, str] = {}
        urls, rules = [*extra], []
        if index:
            urls.append(index)
            env["PIP_INDEX_URL"] = without_login(index)
        else:
            answer = await self._ask([python, "-c", _DEFAULT_INDEX])
            if answer is None:
                raise UnsupportedError(
                    "@pip: this machine's pip does not say what its default index is",
                    hint="set index-url: pip config set global.index-url URL",
                )
            default, files = json.loads(answer)
            urls.append(default)
            rules.append(files)
        if extra:
            env["PIP_EXTRA_INDEX_URL"] = " ".join(map(without_login, extra))
        if trusted:
            env["PIP_TRUSTED_HOST"] = " ".join(trusted)
        return Preset([*_rules_of(urls), *rules], env)

    async def _npm(self) -> Preset:
        answer = (await self._ask(["npm", "config", "get", "registry"]) or "").strip()
        scoped = dict(npm_settings(self.environ))
        registry = answer if "://" in answer else scoped.get("registry", "")
        if not registry:
            raise UnsupportedError(
                "@npm: this machine has neither npm nor an .npmrc that names a registry",
                hint="apt-get install npm, or write registry=URL into ~/.npmrc",
            )
        urls = [registry, *(url for key, url in scoped.items() if key.endswith(":registry"))]
        return Preset(_rules_of(urls), {"npm_config_registry": without_login(registry)})


def pip_settings(listed: str) -> tuple[str | None, list[str], list[str]]:
    """The index, further places and trusted hosts in what ``pip config list`` prints."""
    found: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if equals:
            try:
                found.setdefault(name.replace("_", "-"), {})[section] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
    order = (":env:", "install", "download", "global")

    def values(name: str) -> list[str]:
        known = found.get(name, {})
        ranked = sorted(known, key=lambda s: order.index(s) if s in order else len(order))
        return [known[section] for section in ranked]

    index = next(iter(values("index-url")), None)
    places = [word for value in (*values("extra-index-url"), *values("find-links")) for word in value.split()]
    extra = [url for url in places if url.startswith(("http://", "https://"))]
    trusted = [word for value in values("trusted-host") for word in value.split()]
    return index, list(dict.fromkeys(extra)), list(dict.fromkeys(trusted))


def npm_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Registries in npm's files, the most general first, and in the environment."""
    home = Path(environ.get("HOME") or "/root")
    named = environ.get("npm_config_userconfig") or environ.get("NPM_CONFIG_USERCONFIG")
    user = Path(named) if named else home / ".npmrc"
    for path in (Path("/etc/npmrc"), Path("/usr/etc/npmrc"), user):
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            key, equals, value = line.partition("=")
            if equals and key.strip().endswith("registry") and "://" in value:
                yield key.strip(), value.strip().strip("\"'")
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if "://" in environ.get(name, ""):
            yield "registry", environ[name]


def apt_uris(apt_dir: Path) -> list[str]:
    """Every address in this machine's apt sources that is in use, third parties' included."""
    found: list[str] = []
    parts = apt_dir / "sources.list.d"
    for path in [apt_dir / "sources.list", *sorted(parts.glob("*.list"))]:
        for line in _text(path).splitlines():
            entry = re.match(r"\s*deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?(\S+)", line)
            if entry:
                found.append(entry[1])
    for path in sorted(parts.glob("*.sources")):
        for paragraph in re.split(r"\n[ \t]*\n", _text(path)):
            fields = _fields(paragraph)
            if fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off"):
                found += fields.get("uris", "").split()
    urls: list[str] = []
    for uri in found:
        if uri.startswith("mirror+file:"):
            listed = _text(Path(uri.removeprefix("mirror+file:").replace("//", "/")))
            urls += [line.split()[0] for line in listed.splitlines() if line.strip() and line[0] != "#"]
        else:
            urls.append(uri.removeprefix("mirror+"))
    return list(dict.fromkeys(url for url in urls if url.startswith(("http://", "https://"))))


def _fields(paragraph: str) -> dict[str, str]:
    """The fields of a deb822 paragraph, folded lines joined."""
    out: dict[str, str] = {}
    name = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in " \t" and name:
            out[name] += " " + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            out[name] = value.strip()
    return out


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _rules_of(urls: Iterable[str]) -> list[str]:
    """One rule for each URL's host, with its port where it names one."""
    rules: list[str] = []
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname
        if not host or host == "localhost":
            continue
        host = f"[{host}]" if ":" in host else host
        rules.append(f"{host}:{parts.port}" if parts.port else host)
    return list(dict.fromkeys(rules))


def without_login(url: str) -> str:
    """A URL without user and password: a sandbox is not told the host's."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
