"""Build the newest runsc from source with this machine's Go, for short starts and little memory.

Two things differ from a plain ``go install`` of the same source (docs/adr/0007): the seccomp
filters are compiled once, here, as gVisor's own build does, and a memory image is read by four
threads at once, where 128 cost each start 10 ms and each sandbox 5 MiB.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from forkyard.errors import UnsupportedError
from forkyard.host import process
from forkyard.host.files import rmtree

__all__ = ["GO_NEEDED", "build_newest"]

MODULE = "gvisor.dev/gvisor"
GO_NEEDED = "1.26"
TIMEOUT_S = 1800

# Files of gVisor's, what is replaced in each, and by what. One that is no longer found costs speed alone.
_TUNED = (
    (
        "pkg/sentry/state/stateio/pagesfile.go",
        "pagesFileFDDefaultMaxParallel = 128",
        "pagesFileFDDefaultMaxParallel = 4",
    ),
    # Filters for GPUs are most of the work, and no sandbox here has one.
    (
        "runsc/boot/filter/config/config_precompiled.go",
        "range nvconf.PopularCapabilitySets()",
        "range nvconf.PopularCapabilitySets()[:0]",
    ),
)
_FILTERS = ("runsc/boot/filter/filter_precompiled.go", "runsc/fsgofer/filter/filter_precompiled.go")
_PROGRAMS = "programs := make(map[string]precompiledseccomp.Program)\n"

log = logging.getLogger("forkyard.setup")


async def build_newest(home: Path) -> Path:
    """Build the newest runsc from source with this machine's Go, through its module proxy.

    The version is that of the module's ``go`` branch, as ``@latest`` gives it; some proxies
    refuse the branch's name, so that is tried last.

    Raises:
        UnsupportedError: no Go, one that is too old, or the build failed.
    """
    if shutil.which("go") is None:
        raise UnsupportedError(
            "building the newest runsc needs Go, and there is none on PATH",
            hint=f"install Go {GO_NEEDED} or newer, or go without --newest",
        )
    into = home / "engine" / "newest"
    scratch = home / "engine" / ".newest"
    rmtree(scratch)
    built = scratch / "built"
    built.mkdir(parents=True)
    try:
        (scratch / "go.mod").write_text("module scratch\n")
        version = await _newest_version(scratch)
        source = scratch / "source"
        await _fetch(version, scratch, source)
        for file, old, new in _TUNED:
            _replace(source / file, old, new)
        await _precompile(source, scratch)
        stamp = f"-s -w -X {MODULE}/runsc/version.version={version}"
        await _go(source, "build", "-trimpath", f"-ldflags={stamp}", "-o", str(built / "runsc"), "./runsc")
        (built / "VERSION").write_text(f"{version}\n")
        rmtree(into)
        built.rename(into)
    finally:
        rmtree(scratch)
    return into / "runsc"


async def _go(cwd: Path, *args: str) -> bytes:
    """Run Go without cgo: a runsc with it has to start twice to drop its rights."""
    done = await process.run(
        ["go", *args], env={**os.environ, "CGO_ENABLED": "0"}, cwd=cwd, timeout_s=TIMEOUT_S
    )
    if done.rc:
        raise UnsupportedError(
            f"building runsc failed: go {args[0]}: {done.complaint}",
            hint=f"it needs Go {GO_NEEDED} or newer and a module proxy that it can reach",
        )
    return done.stdout


async def _newest_version(scratch: Path) -> str:
    reasons = []
    for query in ("latest", "go"):
        try:
            listed = await _go(scratch, "list", "-m", "-json", f"{MODULE}@{query}")
        except UnsupportedError as error:
            reasons.append(error.message)
            continue
        version = json.loads(listed).get("Version")
        if isinstance(version, str) and version:
            return version
    raise UnsupportedError(
        f"the Go module proxy does not say which runsc is newest: {'; '.join(reasons)}",
        hint="check `go env GOPROXY`, or go without --newest",
    )


async def _fetch(version: str, scratch: Path, source: Path) -> None:
    """A copy of the module that may be written to: Go's own is shared and read-only."""
    about = json.loads(await _go(scratch, "mod", "download", "-json", f"{MODULE}@{version}"))
    shutil.copytree(about["Dir"], source, copy_function=shutil.copyfile)
    for directory, _, _ in os.walk(source):
        os.chmod(directory, 0o700)


def _replace(file: Path, old: str, new: str) -> bool:
    try:
        text = file.read_text()
    except OSError:
        text = ""
    if old not in text:
        log.warning("%s of the newest runsc is not as expected; it is built as it is", file.name)
        return False
    file.write_text(text.replace(old, new))
    return True


async def _precompile(source: Path, scratch: Path) -> None:
    """Put compiled seccomp filters where gVisor's own build has them."""
    program = source / "precompile"
    program.mkdir()
    shutil.copyfile(Path(__file__).with_name("precompile.go"), program / "main.go")
    files = [scratch / "sentry.go", scratch / "gofer.go"]
    try:
        await _go(source, "run", "./precompile", *map(str, files))
    except UnsupportedError as error:
        log.warning("the newest runsc is built without compiled filters: %s", error.message)
        return
    finally:
        rmtree(program)
    for target, code in zip(_FILTERS, files, strict=True):
        _replace(source / target, _PROGRAMS, _PROGRAMS + code.read_text())
