"""Running buildah and skopeo: out of the host's way, with nothing of theirs outside one directory.

Each runs in a mount and a process namespace of its own, so that whatever it leaves mounted or
running ends with it, also when the daemon is killed. Their network is the host's. Secrets go
into files of mode 0600 that live as long as the program, never into an argv.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forkyard.errors import InvalidRequestError, UnsupportedError
from forkyard.host import files, process
from forkyard.oci.reference import is_loopback

__all__ = ["PACKAGES", "Ended", "Say", "Tools"]

log = logging.getLogger("forkyard.oci")

PACKAGES = {"buildah": "buildah", "skopeo": "skopeo"}
Say = Callable[[str, str], None]
"""Told of progress: a kind (``step``, ``output`` or ``note``) and a line."""

_SHARED = Path("/var/lib/containers")
_POLICY = Path("/etc/containers/policy.json")
_LINE = 4096
_TAIL = 200
# The tools keep a cache in the machine's own directory, whatever root they are given. Theirs
# is a tmpfs that nobody else sees.
_ENTER = f"""
set -e
mkdir -p {_SHARED}
mount -t tmpfs -o mode=700,size=16m containers {_SHARED}
while [ "$1" != -- ]; do
    mount --bind "$1" "$2"
    [ "$1" = "$2" ] || mount -o remount,bind,ro "$2"
    shift 2
done
shift
exec "$@"
"""
_DROPPED = ("FORKYARD_", "BUILDAH_", "CONTAINERS_", "REGISTRY_AUTH", "XDG_", "STORAGE_", "_CONTAINERS")


class Ended:
    """How a program ended: ``rc``, the last lines that it wrote, and its stdout where that was captured."""

    def __init__(self, rc: int, lines: list[str], out: bytes = b"") -> None:
        self.rc = rc
        self.lines = lines
        self.out = out

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Tools:
    """The two programs, for one home.

    Args:
        root: A directory of theirs (``storage``, ``tmp`` and ``deposits`` lie in it).
        install: Installs packages of this machine's distribution; None where nothing may be installed.
    """

    def __init__(self, root: Path, install: Callable[[list[str]], Awaitable[None]] | None = None) -> None:
        self.root = root
        self.storage = root / "storage"
        self.tmp = root / "tmp"
        self._install = install
        self._installing = asyncio.Lock()
        self._running = 0
        self._driver: str | None = None
        self._swept = False

    def open(self) -> None:
        """Make the directories, and clear what a crash left."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        for name in ("tmp", "deposits"):
            files.rmtree(self.root / name)
            (self.root / name).mkdir(mode=0o700)

    @contextlib.asynccontextmanager
    async def scratch(self, kind: str) -> AsyncIterator[Path]:
        """A directory for one piece of work, removed after it."""
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self.tmp))
        try:
            yield path
        finally:
            await asyncio.to_thread(files.rmtree, path)

    async def require(self, program: str, say: Say) -> None:
        """See to it that a program is there, installing its package if need be.

        Raises:
            UnsupportedError: it is not and cannot be.
        """
        async with self._installing:
            try:
                process.find_program(program)
                return
            except UnsupportedError as error:
                if self._install is None:
                    raise UnsupportedError(error.message, hint="forkyard setup --images") from None
            lacking = [package for name, package in PACKAGES.items() if not shutil.which(name)]
            say("note", f"installing {' and '.join(lacking)} with apt, once on this machine")
            log.info("installing %s", ", ".join(lacking))
            await self._install(lacking)
            say("note", f"installed {' and '.join(lacking)}")

    # -- programs

    async def skopeo(
        self,
        scratch: Path,
        *args: str | Path,
        say: Say | None = None,
        auths: Mapping[str, str] | None = None,
        capture: bool = False,
    ) -> Ended:
        """Run skopeo. ``auths`` (``{registry: "user:password"}``) is what it may log in with."""
        command, *rest = map(str, args)
        auth = _auth_file(scratch, auths or {})
        given = ["--authfile", str(auth)] if command != "copy" else ["--src-authfile", str(auth)]
        argv = ["skopeo", "--tmpdir", str(scratch), *_policy(), command, *given, *rest]
        env = {"CONTAINERS_STORAGE_CONF": str(scratch / "storage.conf")} if self._driver else {}
        return await self._run(argv, scratch, say, env, capture=capture)

    async def buildah(
        self,
        scratch: Path,
        *args: str | Path,
        say: Say | None = None,
        auths: Mapping[str, str] | None = None,
        loopback: set[str] | None = None,
        binds: Sequence[tuple[Path, Path]] = (),
    ) -> Ended:
        """Run buildah on this home's storage.

        Args:
            auths: As :meth:`skopeo`.
            loopback: Registries on this machine that may speak plain HTTP.
            binds: Directories to show, read-only, in the place of others.
        """
        command, *rest = map(str, args)
        env = {"CONTAINERS_STORAGE_CONF": str(await self._storage_conf(scratch))}
        if loopback:
            env["CONTAINERS_REGISTRIES_CONF"] = str(_registries_conf(scratch, loopback))
        given = []
        if command in ("build", "pull", "push"):
            given = ["--authfile", str(_auth_file(scratch, auths or {}))]
        # What processes mount is theirs alone, so what they note of mounts must be as well.
        runroot = str(scratch / "run")
        argv = ["buildah", "--root", str(self.storage), "--runroot", runroot, command, *given, *rest]
        overlay = self.storage / "overlay"
        if binds:
            # Else it makes a mount of this directory itself, and hides what is mounted below.
            binds = [(overlay, overlay), *binds]
        return await self._run(argv, scratch, say, env, binds=binds)

    def stored(self, scratch: Path, name: str) -> str:
        """An image in the storage, in skopeo's words; after a first :meth:`buildah`."""
        return f"containers-storage:[{self._driver}@{self.storage}+{scratch / 'run'}]{name}"

    async def _storage_conf(self, scratch: Path) -> Path:
        if self._driver is None:
            self._driver = await self._choose_driver(scratch)
        return self._write_storage_conf(scratch, self._driver)

    def _write_storage_conf(self, scratch: Path, driver: str) -> Path:
        path = scratch / "storage.conf"
        text = (
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{self.storage}"\nrunroot = "{scratch / "run"}"\n'
        )
        if driver == "overlay":
            text += '[storage.options.overlay]\nmountopt = "nodev"\n'
        path.write_text(text)
        return path

    async def _choose_driver(self, scratch: Path) -> str:
        """Overlay where it works on the home's filesystem; a storage stays with its first choice."""
        for driver in ("overlay", "vfs"):
            if (self.storage / f"{driver}-images").is_dir():
                return driver
        env = {"CONTAINERS_STORAGE_CONF": str(self._write_storage_conf(scratch, "overlay"))}
        tried = await self._run(["buildah", "images", "-q"], scratch, None, env)
        if tried.rc == 0:
            return "overlay"
        log.warning("overlay does not work for building, using vfs: %s", tried.text[-300:])
        await asyncio.to_thread(files.rmtree, self.storage)
        return "vfs"

    async def driver(self, scratch: Path) -> str:
        """How the storage keeps layers: ``overlay`` or ``vfs``. Makes the storage if need be."""
        await self.buildah(scratch, "images", "--quiet")
        assert self._driver is not None
        return self._driver

    def layer_directory(self, layers: Sequence[str]) -> Path | None:
        """Where the overlay driver keeps the content of the top one of a chain of layers (diff ids,
        lowest first); None if it has no such chain."""
        try:
            known = json.loads((self.storage / "overlay-layers" / "layers.json").read_bytes())
        except (OSError, ValueError):
            return None
        parent = ""
        for layer in layers:
            found = next(
                (one for one in known if one.get("diff-digest") == layer and one.get("parent", "") == parent),
                None,
            )
            if found is None:
                return None
            parent = found["id"]
        return self.storage / "overlay" / parent / "diff" if parent.isalnum() else None

    async def sweep(self, scratch: Path) -> None:
        """Once per daemon: containers of builds that a crash ended go."""
        if not self._swept and self.storage.is_dir():
            await self.buildah(scratch, "rm", "--all")
        self._swept = True

    async def _run(
        self,
        argv: list[str],
        scratch: Path,
        say: Say | None,
        env: Mapping[str, str] | None = None,
        *,
        capture: bool = False,
        binds: Sequence[tuple[Path, Path]] = (),
    ) -> Ended:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
        own = {"HOME": str(scratch), "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"}
        wrapped = ["setpriv", "--pdeathsig", "KILL"]
        wrapped += ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]
        wrapped += ["--mount-proc", "sh", "-c", _ENTER, "sh"]
        wrapped += [str(path) for pair in binds for path in pair] + ["--", *argv]
        self._running += 1
        try:
            if capture:
                full = {**kept, **own, **(env or {})}
                done = await process.run(wrapped, env=full, cwd=scratch, timeout_s=None)
                lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
                return Ended(done.rc, lines[-_TAIL:], done.stdout)
            return await _streamed(wrapped, {**kept, **own, **(env or {})}, scratch, say)
        finally:
            self._running -= 1
            if not self._running:
                _tidy()


async def _streamed(argv: list[str], env: Mapping[str, str], cwd: Path, say: Say | None) -> Ended:
    """Run a program, telling its lines as they come."""
    reader, writer = os.pipe()
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    try:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
        )
    except BaseException:
        os.close(writer)
        raise
    tail: deque[str] = deque(maxlen=_TAIL)

    async def listen() -> None:
        rest = b""
        while data := await stream.read(1 << 16):
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                _tell(line, tail, say)
            if len(rest) > _LINE:
                _tell(rest, tail, say)
                rest = b""
        if rest:
            _tell(rest, tail, say)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            try:
                done = await process.run(argv, env=env, cwd=cwd, timeout_s=None, stdout=writer, stderr=writer)
            finally:
                os.close(writer)
        return Ended(done.rc, list(tail))
    finally:
        transport.close()


def _policy() -> list[str]:
    """The machine's rules for which images to trust, where it has some."""
    return [] if _POLICY.exists() else ["--insecure-policy"]


def _tidy() -> None:
    """Remove the empty directory that a mount needed; somebody else's is not empty."""
    with contextlib.suppress(OSError):
        _SHARED.rmdir()


def _tell(line: bytes, tail: deque[str], say: Say | None) -> None:
    text = line[:_LINE].decode("utf-8", "replace").rstrip()
    if text:
        tail.append(text)
        if say is not None:
            say("output", text)


def _auth_file(scratch: Path, auths: Mapping[str, str]) -> Path:
    """The tools' kind of auth file; without entries, it keeps them from looking for another."""
    path = scratch / f"auth-{secrets.token_hex(4)}.json"
    known: dict[str, Any] = {}
    for registry, login in auths.items():
        if ":" not in login:
            raise InvalidRequestError(f"credentials for {registry} are no user:password")
        known[registry] = {"auth": base64.b64encode(login.encode()).decode()}
    files.write_atomic(path, json.dumps({"auths": known}), durable=False)
    return path


def _registries_conf(scratch: Path, loopback: set[str]) -> Path:
    """The machine's own configuration, and leave to speak plain HTTP to registries on loopback."""
    path = scratch / "registries.conf"
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/etc/containers/registries.conf").read_text()
    if "[registries." in text:  # the old format, which cannot be mixed with the new one
        text = ""
    for registry in sorted(loopback):
        if is_loopback(registry):
            text += f'\n[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
    path.write_text(text)
    return path
