"""An image as a directory of files: what it says of itself, and its layers.

Two layouts are read: skopeo's ``dir:`` (a manifest, and blobs beside it) and OCI's.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.errors import InvalidRequestError
from forkyard.host.files import write_atomic

__all__ = ["Image", "ImageConfig", "config_of", "read", "read_oci", "write"]

_FOREIGN = ("foreign", "nondistributable")
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_MAX_ENV = 1 << 20
_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True)
class ImageConfig:
    """What an image asks for. ``diff_ids`` are the digests of its unpacked layers, lowest first."""

    digest: str = ""
    user: str = "root"
    workdir: str = "/workspace"
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    diff_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Image:
    """An image in a directory; ``layers`` are its layers' archives, lowest first, one a diff id."""

    config: ImageConfig
    layers: list[Path]


def read(directory: Path) -> Image:
    """What lies in a ``dir:`` layout.

    Raises:
        InvalidRequestError: it is no image of files, or one for another kind of machine.
    """
    return _image((directory / "manifest.json").read_bytes(), lambda digest: directory / _hex(digest))


def read_oci(directory: Path) -> Image:
    """What lies in an OCI layout that holds one image. Raises as :func:`read`."""

    def blob(digest: str) -> Path:
        return directory / "blobs" / "sha256" / _hex(digest)

    index = json.loads((directory / "index.json").read_bytes())
    return _image(blob(index["manifests"][0]["digest"]).read_bytes(), blob)


def _image(raw_manifest: bytes, blob: Callable[[str], Path]) -> Image:
    manifest = json.loads(raw_manifest)
    if "config" not in manifest:
        raise InvalidRequestError(
            f"the image's manifest ({manifest.get('mediaType', 'schema 1')}) is too old or no image's",
            hint="convert it with skopeo copy --format oci",
        )
    raw = blob(manifest["config"]["digest"]).read_bytes()
    layers = []
    for layer in manifest["layers"]:
        if any(word in layer.get("mediaType", "") for word in _FOREIGN):
            raise InvalidRequestError("the image has layers that its registry does not give away")
        layers.append(blob(layer["digest"]))
    config = config_of(raw)
    if len(config.diff_ids) != len(layers):
        raise InvalidRequestError(
            f"the image has {len(layers)} layers and {len(config.diff_ids)} of them in its configuration"
        )
    return Image(config, layers)


def config_of(raw: bytes) -> ImageConfig:
    """An image's configuration, from its bytes."""
    data = json.loads(raw)
    asked: dict[str, Any] = data.get("config") or {}
    if data.get("os", "linux") != "linux":
        raise InvalidRequestError(f"the image is for {data['os']}, sandboxes are Linux")
    env = dict(word.partition("=")[::2] for word in asked.get("Env") or [] if word.partition("=")[0])
    if sum(len(key) + len(value) for key, value in env.items()) > _MAX_ENV:
        raise InvalidRequestError("the image's environment is larger than a MiB")
    workdir = asked.get("WorkingDir") or "/workspace"
    return ImageConfig(
        digest=hashlib.sha256(raw).hexdigest(),
        user=asked.get("User") or "root",
        workdir=workdir if workdir.startswith("/") else f"/{workdir}",
        env=env,
        entrypoint=_words(asked.get("Entrypoint")),
        cmd=_words(asked.get("Cmd")),
        diff_ids=list((data.get("rootfs") or {}).get("diff_ids") or []),
    )


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    return [str(word) for word in value or []]


def _hex(digest: str) -> str:
    """A blob's name in a layout; nothing else of a manifest is used as a path."""
    kind, _, hexes = digest.partition(":")
    if not kind.isalnum() or not hexes or not hexes.isalnum():
        raise InvalidRequestError(f"{digest[:80]!r} is no digest")
    return hexes


def write(directory: Path, config: ImageConfig, layers: list[tuple[str, int]]) -> list[str]:
    """Write a layout's manifest and configuration, for layers whose archives are there already.

    Args:
        layers: Digest (hex) and size of each archive, lowest first; the file's name is the digest.

    Returns:
        The layers' diff ids.
    """
    diff_ids = [f"sha256:{digest}" for digest, _ in layers]
    raw = json.dumps(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": {
                "User": config.user,
                "WorkingDir": config.workdir,
                "Env": [f"{key}={value}" for key, value in config.env.items()],
                "Entrypoint": config.entrypoint,
                "Cmd": config.cmd,
            },
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            # With a time, or builds on it are never found in the cache.
            "created": _EPOCH,
            "history": [{"created": _EPOCH, "created_by": "forkyard"} for _ in layers],
        },
        sort_keys=True,
    ).encode()
    digest = hashlib.sha256(raw).hexdigest()
    write_atomic(directory / digest, raw, durable=False)
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {"mediaType": _CONFIG, "digest": f"sha256:{digest}", "size": len(raw)},
        "layers": [
            {"mediaType": _LAYER, "digest": f"sha256:{layer}", "size": size} for layer, size in layers
        ],
    }
    write_atomic(directory / "manifest.json", json.dumps(manifest), durable=False)
    write_atomic(directory / "version", "Directory Transport Version: 1.1\n", durable=False)
    return diff_ids


def _architecture() -> str:
    import platform

    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
