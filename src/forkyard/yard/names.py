"""Ids and names: what they look like, and how a host name is made of one."""

from __future__ import annotations

import re
import secrets
import uuid

from forkyard.errors import InvalidRequestError
from forkyard.guest import Identity

_NAME = re.compile(r"[A-Za-z0-9._:@+/=-]{1,128}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _token(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def sandbox_id() -> str:
    return f"sb_{_token(10)}"


def checkpoint_id() -> str:
    return f"ck_{_token(10)}"


def snapshot_id() -> str:
    return str(uuid.uuid4())


def box_id() -> str:
    """Id of a box, the host's side of one machine; a sandbox has a new one after each rewind."""
    return f"bx{_token(10)}"


def looks_like_id(text: str) -> bool:
    """Whether ``text`` has the form of an id that forkyard makes: such a name would be ambiguous."""
    if re.fullmatch(r"(sb|ck)_[0-9a-z]{10}", text):
        return True
    return bool(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text))


def check_name(name: str, what: str = "name") -> str:
    """``name`` if it may be one.

    Raises:
        InvalidRequestError: it has other characters than ``A-Za-z0-9._:@+/=-``, is empty,
            longer than 128, or has the form of an id.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{what} {name[:140]!r} is not allowed",
            hint="use 1 to 128 of the characters A-Z a-z 0-9 . _ : @ + / = -",
        )
    if looks_like_id(name):
        raise InvalidRequestError(f"{what} {name!r} has the form of an id", hint="choose another name")
    return name


def host_name(name: str) -> str:
    """A host name made of a sandbox's name: lower case letters, digits and hyphens, at most 63."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return cleaned or "sandbox"


def identity(name: str, sandbox: str, *, generation: int, fork: bool = False, network: int = 0) -> Identity:
    """A new identity for a machine: host name, machine id, fork id and fresh randomness.

    ``fork`` is for every machine that comes out of an image: its commands have lost their
    readers, and its programs' own generators are copies.
    """
    return Identity(
        hostname=host_name(name),
        machine_id=secrets.token_hex(16),
        fork_id=sandbox,
        generation=generation,
        fork=fork,
        network=network,
    )
