"""Names of images: what kind each is, and which registry has it."""

from __future__ import annotations

import ipaddress
import re

from forkyard.errors import InvalidRequestError

__all__ = ["check_reference", "is_loopback", "registry_of"]

_REFERENCE = re.compile(r"[a-z0-9\[][A-Za-z0-9._:\[\]/@+-]{0,511}")


def check_reference(image: str) -> str:
    """``image`` if it may be a registry's reference (``docker://`` in front is allowed).

    Raises:
        InvalidRequestError: it is none, or has a password in it.
    """
    name = image.removeprefix("docker://")
    if "@" in name.partition("/")[0]:
        raise InvalidRequestError(
            "an image's name holds no password",
            hint="give it as credentials=, or log in with skopeo login",
        )
    if not _REFERENCE.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidRequestError(
            f"{image[:200]!r} is no image",
            hint="a registry's reference, oci:DIRECTORY, docker-archive:FILE, or the path of a root's tar",
        )
    return name


def registry_of(reference: str) -> str:
    """``host[:port]`` of a reference that names its registry, or an empty string."""
    first, slash, _ = reference.removeprefix("docker://").partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def is_loopback(registry: str) -> bool:
    """Whether a registry is on this machine: the only kind that may speak plain HTTP."""
    host = registry
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif ":" in host:
        host = host.rpartition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
