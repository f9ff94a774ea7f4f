"""One runsc binary: what it is, what it can do, and how its command line is built."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import UnsupportedError
from forkyard.host import process

PLATFORMS = ("systrap", "ptrace")
# In a box's directory: what its sentry said as it ended.
PANIC = "panic"


@dataclass(frozen=True, slots=True)
class Runsc:
    """A probed runsc.

    Attributes:
        path: The binary.
        version: As it names itself; images only restore under the same version.
        digest: First 16 hex digits of the binary's SHA-256, since a build from source has no version.
        flags: Names of all flags that it knows.
    """

    path: Path
    version: str
    digest: str
    flags: frozenset[str]

    @classmethod
    async def probe(cls, path: Path) -> Runsc:
        """Ask the binary at ``path`` what it is.

        Raises:
            UnsupportedError: it does not run, or is too old to checkpoint in the way needed.
        """
        shown = await process.run([str(path), "--version"], timeout_s=10)
        match = re.search(rb"runsc version (\S+)", shown.stdout)
        if shown.rc or not match:
            raise UnsupportedError(
                f"{path} is not a working runsc: {shown.stderr.decode(errors='replace')[-200:]}",
                hint="forkyard setup installs one",
            )
        listed = await process.run([str(path), "flags"], timeout_s=10)
        flags = _flag_names(listed.stdout + listed.stderr)
        runsc = cls(path, match[1].decode(), _digest(path), flags)
        if "overlay2" not in flags or "directfs" not in flags:
            raise UnsupportedError(
                f"{path} (version {runsc.version}) is too old",
                hint="forkyard setup installs Debian 13's, which runs on Debian 12 too",
            )
        return runsc

    @property
    def validates_specs(self) -> bool:
        """True for builds of 2026: they compare the spec at restore, name deleted files
        savable and want the loopback described before a restore by socket."""
        return "restore-spec-validation" in self.flags

    @property
    def saves_deleted_files(self) -> bool:
        """Whether open files that were deleted from the root directory can be saved
        (gVisor 2025-03 and later; the flag below came between that and today)."""
        return self.validates_specs

    def command(self, platform: str, root: Path, shared: Path) -> list[str]:
        """The command line up to the verb, for one box whose state is in ``root``.

        One ``root`` per box: ids in a shared one are matched by prefix, and its lock is contended.
        """
        argv = [
            str(self.path),
            f"--root={root}",
            "--network=none",
            f"--platform={platform}",
            # The disk is layered on the host, so that it is not in the memory image.
            "--overlay2=none",
            # Boxes enter their cgroup before runsc starts: 24 ms cheaper than letting it.
            "--ignore-cgroups",
            "--host-uds=none",
        ]
        optional = {
            "shared-root": f"--shared-root={shared}",
            "host-settings": "--host-settings=ignore",
            "allow-suid": "--allow-suid",
            # Else the sentry's last words are lost: its stderr is not ours.
            "panic-log": f"--panic-log={root.parent / PANIC}",
            # The yard decides what fits: box paths and limits differ between image and fork.
            "restore-spec-validation": "--restore-spec-validation=ignore",
        }
        return argv + [flag for name, flag in optional.items() if name in self.flags]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _flag_names(usage: bytes) -> frozenset[str]:
    """The names in what ``runsc flags`` prints, on whichever stream the build prefers."""
    return frozenset(re.findall(r"^\s+-{1,2}([A-Za-z][\w-]*)", usage.decode(errors="replace"), re.M))
