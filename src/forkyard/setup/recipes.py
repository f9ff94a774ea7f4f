"""Recipes of templates that are made from Debian packages, ``base`` first among them."""

from __future__ import annotations

import ast
import configparser
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from forkyard.host import process
from forkyard.setup.chroot import CA_FILE

__all__ = ["BASE", "Recipe", "host_pip_settings", "pip_conf"]

# Raised when what a build does changes without its recipe's words changing.
BUILD_VERSION = 1
VENV = "/opt/forkyard/venv"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Recipe:
    """How to build a template.

    Attributes:
        name: The template's name.
        packages: Debian packages, without those they recommend.
        commands: Shell scripts, run as root in order after the packages, with the host's network.
        parent: Recipe that this one adds one layer to; None builds from nothing.
        user, workdir, env: What commands in its sandboxes run as, where, and with.
    """

    name: str
    packages: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    parent: Recipe | None = None
    user: str = "user"
    workdir: str = "/home/user"
    env: Mapping[str, str] = field(default_factory=dict)

    def key(self, *, system: str) -> str:
        """Identifies what would be built on ``system`` (distribution, suite and architecture)."""
        content = {
            "version": BUILD_VERSION,
            "system": system,
            "packages": self.packages,
            "commands": self.commands,
            "parent": self.parent.key(system=system) if self.parent else None,
            "user": self.user,
            "workdir": self.workdir,
            "env": dict(self.env),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# The user comes with a password that fits nothing: there is no login, and no su to it.
_USER = """
useradd --create-home --uid 1000 --shell /bin/bash user
ln -s /home/user /workspace
mkdir -p /etc/forkyard/on-fork.d /.forkyard
"""

# Outside the home, so that a home can be replaced; owned by the user, so that plain pip installs.
_PYTHON = f"""
mkdir -p /opt/forkyard
chown user:user /opt/forkyard
su -s /bin/sh user -c '
    set -eu
    cd /home/user
    python3 -m venv {VENV}
    {VENV}/bin/pip install --quiet --no-cache-dir numpy matplotlib ipython
    # Else the first plot in each sandbox would look through all fonts.
    MPLBACKEND=agg {VENV}/bin/python -c "import matplotlib.pyplot"
    {VENV}/bin/python -c "import IPython, numpy"
'
cat >/etc/profile.d/forkyard.sh <<'END'
# A login shell sets PATH anew; put the Python environment back in front.
case ":$PATH:" in
    *":{VENV}/bin:"*) ;;
    *) PATH="{VENV}/bin:$PATH"; export PATH ;;
esac
END
"""

# fmt: off
BASE = Recipe(
    name="base",
    packages=(
        "adduser", "bash-completion", "bzip2", "ca-certificates", "curl", "diffutils", "file", "gcc", "git",
        "jq", "less", "libc6-dev", "make", "netbase", "patch", "procps", "python3", "python3-venv",
        "tar", "tzdata", "unzip", "xz-utils", "zip",
    ),
    commands=(_USER, _PYTHON),
    env={
        "PATH": f"{VENV}/bin:/home/user/.local/bin:{_SYSTEM_PATH}",
        "VIRTUAL_ENV": VENV,
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": CA_FILE,
        "REQUESTS_CA_BUNDLE": CA_FILE,
        "CURL_CA_BUNDLE": CA_FILE,
        "GIT_SSL_CAINFO": CA_FILE,
        "PIP_CERT": CA_FILE,
        "NODE_EXTRA_CA_CERTS": CA_FILE,
    },
)
# fmt: on


async def host_pip_settings() -> dict[str, str]:
    """The package index that this machine's pip is configured for (``index-url``,
    ``extra-index-url``, ``trusted-host``, ``timeout``); empty where it uses the default."""
    wanted = ("index-url", "extra-index-url", "trusted-host", "timeout")
    found: dict[str, str] = {}
    shown = await process.run([sys.executable, "-m", "pip", "config", "list"], timeout_s=30)
    if shown.rc == 0:
        # The environment's come first in the list, and win.
        for line in reversed(shown.stdout.decode(errors="replace").splitlines()):
            name, _, value = line.partition("=")
            key = name.rpartition(".")[2]
            if key in wanted:
                found[key] = str(ast.literal_eval(value))
        return found
    return _pip_settings_without_pip(wanted)


def _pip_settings_without_pip(wanted: tuple[str, ...]) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(["/etc/pip.conf", os.path.expanduser("~/.config/pip/pip.conf")])
    found = {key: parser.get("global", key, fallback="") for key in wanted}
    for key in wanted:
        found[key] = os.environ.get(f"PIP_{key.replace('-', '_').upper()}") or found[key]
    return {key: value for key, value in found.items() if value}


def pip_conf(settings: Mapping[str, str]) -> str:
    """/etc/pip.conf for a template, from the host's settings. Passwords in addresses stay on the host."""
    lines = ["[global]", f"cert = {CA_FILE}", "disable-pip-version-check = true"]
    for key, value in settings.items():
        words = [_without_password(word) for word in value.split()]
        lines.append(f"{key} = " + "\n    ".join(words))
    return "\n".join(lines) + "\n"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
