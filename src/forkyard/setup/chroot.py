"""Run commands inside a root directory that is being built, with the host's network.

Only set-up does this, with its own recipes: a template's commands are as trusted as the
package manager. Sandboxes never run this way.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from forkyard.errors import InternalError
from forkyard.host import process

__all__ = ["CA_FILE", "add_host_certificates", "host_certificates", "run_in"]

CA_FILE = "/etc/ssl/certs/ca-certificates.crt"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The mount namespace goes with the last process, and with it every mount made here;
# services that a package would start are refused, as in any image build.
_ENTER = """
set -eu
root=$1 script=$2
# Slave: what the host unmounts meanwhile goes here too, and is not kept in use by a long build.
mount --make-rslave /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=755 run "$root/run"
mkdir -p "$root/run/lock"
if [ -e /etc/resolv.conf ]; then mount --bind "$(readlink -f /etc/resolv.conf)" "$root/etc/resolv.conf"; fi
printf '%s' "$APT_OPTIONS" >"$root/run/apt.conf"
printf '#!/bin/sh\\nexit 101\\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
rc=0
chroot "$root" /bin/sh -euc "$script" </dev/null || rc=$?
rm -f "$root/usr/sbin/policy-rc.d"
exit "$rc"
"""


async def run_in(
    root: Path,
    script: str,
    *,
    env: Mapping[str, str] | None = None,
    apt_options: list[str] | None = None,
    timeout_s: float = 900,
) -> str:
    """Run a shell script as root in ``root``; returns what it printed.

    The script has the host's network and name servers, a fresh /tmp and /run, and nothing of
    the host's environment but ``env``.

    Raises:
        InternalError: it failed; the message has the end of its output.
    """
    full = {
        "PATH": _PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "APT_CONFIG": "/run/apt.conf",
        "APT_OPTIONS": "\n".join(apt_options or []) + "\n",
        **(env or {}),
    }
    argv = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh"]
    done = await process.run([*argv, str(root), script], env=full, timeout_s=timeout_s)
    if done.rc:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        first = script.strip().splitlines()[0]
        raise InternalError(f"building a template: `{first}` ended with {done.rc}: {said[-1500:]}")
    return done.stdout.decode(errors="replace")


def host_certificates() -> list[str]:
    """The host's trusted certificates, as PEM texts; where TLS is re-signed by a local
    authority, that authority is among them."""
    paths = [os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, CA_FILE]
    for path in paths:
        if path and Path(path).is_file():
            return _pem(Path(path).read_text(errors="replace"))
    return []


def _pem(text: str) -> list[str]:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    found = []
    for part in text.split(begin)[1:]:
        body, mark, _ = part.partition(end)
        if mark:
            lines = [line.strip() for line in body.strip().splitlines()]
            found.append("\n".join([begin, *lines, end]) + "\n")
    return found


async def add_host_certificates(root: Path) -> int:
    """Trust in ``root`` what the host trusts beyond ca-certificates; returns how many were added."""
    bundle = root / CA_FILE.lstrip("/")
    present = set(_pem(bundle.read_text(errors="replace"))) if bundle.exists() else set()
    extra = [pem for pem in dict.fromkeys(host_certificates()) if pem not in present]
    if not extra:
        return 0
    local = root / "usr/local/share/ca-certificates/host"
    local.mkdir(parents=True, exist_ok=True)
    for number, pem in enumerate(extra):
        (local / f"host-{number:03}.crt").write_text(pem)
    await run_in(root, "update-ca-certificates")
    return len(extra)
