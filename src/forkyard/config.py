"""Settings: defaults, then files, then the environment, then flags.

``load()`` merges, from weakest to strongest: the built-in defaults, ``/etc/forkyard/config.toml``,
``<home>/config.toml``, ``FORKYARD_*`` variables and the caller's overrides (command-line flags).
``explain()`` says of every key where its value came from. Keys are documented, one by one, in
``docs/configuration.md``. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.errors import InvalidRequestError

__all__ = ["KEYS", "TYPES", "Defaults", "Settings", "explain", "load", "short"]

ETC_FILE = Path("/etc/forkyard/config.toml")

# Sandbox types: (cpus, mem_mb, disk_mb).
TYPES: dict[str, tuple[float, int, int]] = {
    "small": (1, 1024, 10240),
    "medium": (2, 4096, 20480),
    "large": (4, 8192, 40960),
}

# A unix socket's path ends at 107 bytes, and the longest that a home holds is
# boxes/<box>/st/runsc-<box>.sock; above this length a home gets a short alias.
LONG_HOME = 40
LONG_SOCKET_HOME = 90


@dataclass(frozen=True, slots=True)
class Defaults:
    """What ``create_sandbox`` uses for arguments that are not given."""

    template: str = "base"
    type: str = "small"
    cpus: float | None = None
    mem_mb: int | None = None
    disk_mb: int | None = None
    user: str | None = None
    egress: str = "deny"
    egress_allow: list[str] = field(default_factory=list)
    ttl_min: float | None = None
    auto_stop_min: float | None = None

    def for_create(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` (create's arguments by name, None where not given) with the defaults put in.

        A sandbox from a snapshot keeps the snapshot's type, limits and user, one from an image
        the image's user. ``egress`` and ``egress_allow`` are one answer: whoever gives
        either is not given the other's default.
        """
        out = dict(given)
        inherit = given.get("snapshot") is not None
        names = ["ttl_min", "auto_stop_min"]
        if not inherit:
            names += ["type", "cpus", "mem_mb", "disk_mb"]
            if given.get("type") is not None:
                # An explicit type is an answer about limits too.
                names = [n for n in names if n not in ("type", "cpus", "mem_mb", "disk_mb")]
            if given.get("image") is None:
                names += ["template", "user"]
        if given.get("egress") is None and given.get("egress_allow") is None:
            names += ["egress", "egress_allow"]
        for name in names:
            if out.get(name) is None:
                value = getattr(self, name)
                out[name] = list(value) if isinstance(value, list) else value
        return out


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, with its final value. See ``docs/configuration.md``."""

    home: Path
    socket: Path
    url: str | None = None
    token: str | None = None
    base_from: Path | None = None
    store_gb: int = 64
    log_level: str = "info"
    trace: Path | None = None
    engine: str = "auto"
    runsc: str | None = None
    platform: str = "auto"
    max_sandboxes: int = 500
    mem_mb: int | None = None
    build_cache_gb: int = 20
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True, slots=True)
class Key:
    """One key: ``parse`` takes what TOML, a flag or (as a string) the environment holds."""

    name: str
    parse: Callable[[Any], Any]
    wants: str

    @property
    def env(self) -> str:
        section, _, rest = self.name.partition(".")
        return f"FORKYARD_DEFAULT_{rest.upper()}" if rest else f"FORKYARD_{section.upper()}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = _text(value)
        if text not in choices:
            raise ValueError
        return text

    return parse


def _whole(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if number < least:
            raise ValueError
        return number

    return parse


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _path(value: Any) -> Path:
    path = Path(value if isinstance(value, Path) else _text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError
    return path


def _words(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return [item.strip() for item in items if item.strip()]


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("home", _path, "an absolute path"),
        Key("socket", _path, "an absolute path"),
        Key("url", _text, "a URL"),
        Key("token", _text, "a text"),
        Key("base_from", _path, "an absolute path"),
        Key("store_gb", _whole(1), "a whole number of at least 1"),
        Key("log_level", _one_of("debug", "info", "warning", "error"), "debug, info, warning or error"),
        Key("trace", _path, "an absolute path"),
        Key("engine", _one_of("auto", "gvisor", "qemu"), "auto, gvisor or qemu"),
        Key("runsc", _text, "the path of a runsc program"),
        Key("platform", _one_of("auto", "systrap", "ptrace", "kvm"), "auto, systrap, ptrace or kvm"),
        Key("max_sandboxes", _whole(1), "a whole number of at least 1"),
        Key("mem_mb", _whole(64), "a whole number of at least 64"),
        Key("build_cache_gb", _whole(0), "a whole number"),
        Key("defaults.template", _text, "a template's name"),
        Key("defaults.type", _one_of(*TYPES), f"one of {', '.join(TYPES)}"),
        Key("defaults.cpus", _positive, "a number above 0"),
        Key("defaults.mem_mb", _whole(64), "a whole number of at least 64"),
        Key("defaults.disk_mb", _whole(16), "a whole number of at least 16"),
        Key("defaults.user", _text, "a user's name"),
        Key("defaults.egress", _one_of("deny", "any"), "deny or any"),
        Key("defaults.egress_allow", _words, "a list of rules (in the environment: with commas)"),
        Key("defaults.ttl_min", _positive, "a number above 0"),
        Key("defaults.auto_stop_min", _positive, "a number above 0"),
    )
}
_BY_ENV = {key.env: key for key in KEYS.values()}
# Names in the environment that are no settings: what forkyard sets inside a sandbox, and
# what its tests and benchmarks read.
_NOT_SETTINGS = ("FORKYARD_FORK_ID", "FORKYARD_SANDBOX", "FORKYARD_TEST_", "FORKYARD_BENCH_", "FORKYARD_FAIL")


@dataclass(slots=True)
class _Found:
    value: Any
    where: str


def load(
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    etc_file: Path = ETC_FILE,
) -> Settings:
    """The settings in force.

    Args:
        overrides: Values by key (``{"home": ..., "defaults.type": ...}``); None is "not given".
        env: The environment, by default this process's.
        etc_file: The machine's own file.

    Raises:
        InvalidRequestError: an unknown key, a value of the wrong kind, a file that is not TOML.
    """
    found = _collect(overrides, os.environ if env is None else env, etc_file)
    top = {name: f.value for name, f in found.items() if "." not in name}
    defaults = {name.partition(".")[2]: f.value for name, f in found.items() if "." in name}
    return Settings(**top, defaults=Defaults(**defaults))


def explain(
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    etc_file: Path = ETC_FILE,
) -> list[tuple[str, Any, str]]:
    """``(key, value, where it came from)`` for every key, in the documentation's order."""
    found = _collect(overrides, os.environ if env is None else env, etc_file)
    built_in = Settings(home=Path(), socket=Path())
    rows = []
    for name in KEYS:
        section, _, rest = name.partition(".")
        if name in found:
            value, where = found[name].value, found[name].where
        else:
            value, where = getattr(built_in.defaults, rest) if rest else getattr(built_in, section), "default"
        rows.append((name, "***" if name == "token" and value else value, where))
    return rows


def _collect(
    overrides: Mapping[str, Any] | None, env: Mapping[str, str], etc_file: Path
) -> dict[str, _Found]:
    from_etc = _read_file(etc_file)
    from_env = _read_env(env)
    from_flags: dict[str, _Found] = {}
    for name, value in (overrides or {}).items():
        if value is not None:
            _take(from_flags, name, value, f"{_flag(name)} (flag)")
    home = from_flags.get("home") or from_env.get("home") or from_etc.get("home")
    home = home or _Found(_default_home(env), "default")
    from_home = _read_file(home.value / "config.toml")
    if "home" in from_home:
        raise InvalidRequestError(
            f"{from_home['home'].where} sets home, but it is read from there",
            hint=f"set it in {ETC_FILE} or FORKYARD_HOME",
        )
    found = {"home": home} | from_etc | from_home | from_env | from_flags
    found["home"] = home
    if "socket" not in found:
        base = home.value if len(os.fsencode(home.value)) <= LONG_SOCKET_HOME else short(home.value)
        found["socket"] = _Found(base / "daemon.sock", home.where)
    return found


def _take(into: dict[str, _Found], name: str, value: Any, where: str) -> None:
    key = KEYS.get(name)
    if key is None:
        raise _unknown(name, list(KEYS), where)
    try:
        into[name] = _Found(key.parse(value), where)
    except (ValueError, TypeError):
        raise InvalidRequestError(f"{where}: {name} = {value!r} is not {key.wants}") from None


def _unknown(name: str, known: list[str], where: str) -> InvalidRequestError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists all keys"
    return InvalidRequestError(f"{where}: there is no setting {name!r}", hint=hint)


def _flag(name: str) -> str:
    return "--" + name.replace("defaults.", "").replace("_", "-")


def _read_file(path: Path) -> dict[str, _Found]:
    try:
        data = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # A user who may talk to root's daemon need not be able to read root's settings.
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is not valid TOML: {error}") from None
    found: dict[str, _Found] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            if name != "defaults":
                raise _unknown(name, [*KEYS, "defaults"], str(path))
            for inner, inner_value in value.items():
                _take(found, f"defaults.{inner}", inner_value, str(path))
        else:
            _take(found, name, value, str(path))
    return found


def _read_env(env: Mapping[str, str]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for name, value in env.items():
        if not name.startswith("FORKYARD_") or name.startswith(_NOT_SETTINGS):
            continue
        key = _BY_ENV.get(name)
        if key is None:
            raise _unknown(name, list(_BY_ENV), "the environment")
        # An empty variable is how shells and CI files say "not set"; an empty list is a value.
        if value.strip() or key.parse is _words:
            _take(found, key.name, value, name)
    return found


def _default_home(env: Mapping[str, str]) -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/forkyard")
    data = env.get("XDG_DATA_HOME") or os.path.join(
        env.get("HOME") or os.path.expanduser("~"), ".local/share"
    )
    return Path(data) / "forkyard"


def short(home: Path) -> Path:
    """A short path that means ``home``: itself, or a symbolic link to it where its own path
    would make unix sockets below it too long. The link is made if it is not there.

    Raises:
        InvalidRequestError: the directory for the link belongs to another user.
    """
    if len(os.fsencode(home)) <= LONG_HOME:
        return home
    uid = os.geteuid()
    links = Path("/run/forkyard") if uid == 0 and os.access("/run", os.W_OK) else Path(f"/tmp/forkyard-{uid}")
    with contextlib.suppress(FileExistsError):
        links.mkdir(mode=0o755 if links.parent.name == "run" else 0o700)
    info = links.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid:
        raise InvalidRequestError(f"{links} is not this user's directory", hint="use a shorter FORKYARD_HOME")
    link = links / hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    with contextlib.suppress(OSError):
        if os.readlink(link) == str(home):
            return link
    fresh = links / f"{link.name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(home)
    fresh.replace(link)
    return link
