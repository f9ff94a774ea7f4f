"""Build the root directory of a template from Debian packages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forkyard.errors import InternalError, UnsupportedError
from forkyard.host import mounts, process
from forkyard.host.files import rmtree
from forkyard.setup import apt
from forkyard.setup.chroot import add_host_certificates, run_in
from forkyard.setup.recipes import Recipe, host_pip_settings, pip_conf

__all__ = ["build_root", "build_upper", "system"]

BUILD_TIMEOUT_S = 1800
# Neither documentation nor translations: a tenth of the size. Manual pages' directories stay,
# since packages link into them when they are installed.
_EXCLUDE = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
_INCLUDE = ("/usr/share/doc/*/copyright",)
_DPKG = [
    # The store is not made safer by a thousand fsyncs: a half-built layer is thrown away.
    "force-unsafe-io",
    *(f"path-exclude={path}" for path in _EXCLUDE),
    *(f"path-include={path}" for path in _INCLUDE),
]
_APT = [
    'APT::Install-Recommends "false";',
    'APT::Install-Suggests "false";',
    'Acquire::Languages "none";',
    'Acquire::Retries "3";',
]
_LEFTOVERS = (
    "var/lib/apt/lists/*",
    "var/cache/apt/archives/*",
    "var/cache/apt/*.bin",
    "var/cache/ldconfig/aux-cache",
    "var/log/*.log",
    "var/log/apt/*",
)
_HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
# The agent answers there; see docs on egress.
_RESOLV = "nameserver 127.0.0.1\n"


def system() -> str:
    """What a build here is a build of, for a recipe's key."""
    release = apt.host_release()
    return f"{release.id}/{release.codename}/{os.uname().machine}"


async def build_root(recipe: Recipe, root: Path) -> None:
    """Fill the empty directory ``root`` with the whole system of a recipe without parent.

    Raises:
        UnsupportedError: the host is neither Debian nor Ubuntu, or names no package source of its own.
        InternalError: mmdebstrap or a command of the recipe failed.
    """
    release = apt.host_release()
    entries = apt.sources(release)
    if not any(entry.suite == release.codename for entry in entries):
        raise UnsupportedError(
            f"found no package source of {release.id or 'this system'} {release.codename} in {apt.APT_DIR}",
            hint="templates are built from the machine's own sources; add its main archive there",
        )
    acquire = await apt.acquire_options()
    scratch = root.with_name(f".{root.name}.build")
    rmtree(scratch)
    scratch.mkdir()
    try:
        (scratch / "sources.list").write_text("".join(f"{entry.line()}\n" for entry in entries))
        (scratch / "apt.conf").write_text("\n".join([*_APT, *acquire]) + "\n")
        argv = ["mmdebstrap", "--mode=root", "--variant=apt", "--format=directory"]
        argv += [f"--include={','.join(recipe.packages)}", f"--aptopt={scratch / 'apt.conf'}"]
        argv += [f"--dpkgopt={option}" for option in _DPKG]
        argv += [release.codename, str(root), str(scratch / "sources.list")]
        env = {**os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": "/tmp"}
        done = await process.run(argv, env=env, timeout_s=BUILD_TIMEOUT_S)
        if done.rc:
            raise InternalError(f"mmdebstrap ended with {done.rc}: {done.complaint}")
    finally:
        rmtree(scratch)
    etc = root / "etc"
    for name, text in {
        "hosts": _HOSTS,
        "hostname": "sandbox\n",
        "resolv.conf": _RESOLV,
        "machine-id": "",
        # What was needed to fetch here, without the host's proxies: a sandbox has its own way out.
        "apt/apt.conf.d/99mmdebstrap": "\n".join([*_APT, *_without_proxies(acquire)]) + "\n",
    }.items():
        path = etc / name
        path.unlink(missing_ok=True)
        path.write_text(text)
    await add_host_certificates(root)
    await _finish(recipe, root, acquire)


async def build_upper(recipe: Recipe, lowers: list[Path], upper: Path, work: Path, scratch: Path) -> None:
    """Fill ``upper`` with what a recipe adds to its parent, whose layers are ``lowers`` (top first).

    ``work`` is an empty directory on the same filesystem as ``upper``, ``scratch`` an empty directory
    to mount on.

    Raises:
        InternalError: installing a package or a command of the recipe failed.
    """
    acquire = await apt.acquire_options()
    mounts.mount_overlay(lowers, upper, work, scratch)
    try:
        if recipe.packages:
            script = f"apt-get -qq update\napt-get -qq install -y {' '.join(recipe.packages)}"
            await run_in(
                scratch, script, apt_options=[*_APT, *acquire, 'DPkg::Options:: "--force-unsafe-io";']
            )
        await _finish(recipe, scratch, acquire)
    finally:
        mounts.unmount(scratch)


async def _finish(recipe: Recipe, root: Path, acquire: list[str]) -> None:
    """The recipe's commands, then nothing of the build left behind."""
    pip = await host_pip_settings()
    if recipe.parent is None:
        (root / "etc/pip.conf").write_text(pip_conf(pip))
    env = {f"PIP_{key.replace('-', '_').upper()}": value for key, value in pip.items()}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        if value := os.environ.get(name):
            env[name] = value
    for command in recipe.commands:
        await run_in(root, command, env=env, apt_options=[*_APT, *acquire])
    _tidy(root)


def _tidy(root: Path) -> None:
    for pattern in _LEFTOVERS:
        for path in root.glob(pattern):
            if path.name not in ("lock", "partial", "auxfiles"):
                rmtree(path)
    for name in ("tmp", "var/tmp"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
        (root / name).chmod(0o1777)


def _without_proxies(options: list[str]) -> list[str]:
    return [line for line in options if "::proxy" not in line.lower()]
