"""Signed heads: a record's number and hash, with the signature of a key in the home.

The signature is OpenSSH's (``ssh-keygen -Y``), so that whoever keeps a head can check it with
programs of their own. It says who gave the head; the log's chain says the rest.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path

from forkyard.errors import InternalError, InvalidRequestError, NotFoundError, UnsupportedError

__all__ = ["key_of", "parse_head", "sign_head", "signed_by"]

NAMESPACE = "forkyard-audit-head"
_BEGIN = "-----BEGIN SSH SIGNATURE-----"
_TIMEOUT_S = 30


def key_of(home: Path) -> Path:
    """The private key that signs heads, made when it is first needed; its public half is ``<key>.pub``.

    Raises:
        UnsupportedError: there is no ssh-keygen.
    """
    key = home / "audit-head.key"
    if not key.exists():
        _run("-q", "-t", "ed25519", "-N", "", "-C", NAMESPACE, "-f", str(key))
    return key


def sign_head(head: tuple[int, str], home: Path) -> str:
    """A head's text with its signature: ``SEQ:HASH TIME``, and OpenSSH's signature of that line."""
    line = f"{head[0]}:{head[1]} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
    said = _run("-q", "-Y", "sign", "-f", str(key_of(home)), "-n", NAMESPACE, stdin=line)
    if _BEGIN not in said:
        raise InternalError(f"ssh-keygen gave no signature: {said[:200]!r}")
    return line + said


def parse_head(text: str) -> tuple[int, str]:
    """The number and hash in a head's text, signed or not.

    Raises:
        InvalidRequestError: there is none in it.
    """
    seq, colon, digest = text.split(maxsplit=1)[0].partition(":") if text.strip() else ("", "", "")
    if not (colon and seq.isdigit() and len(digest) == 64):
        raise InvalidRequestError(f"{text[:80]!r} begins with no SEQ:HASH")
    return int(seq), digest


def signed_by(text: str, public_key: Path) -> bool:
    """Whether a head's text was signed with the key whose public half is in a file.

    Raises:
        NotFoundError, InvalidRequestError: there is no such file, or no signature in the text.
    """
    line, begin, rest = text.partition(_BEGIN)
    if not begin:
        raise InvalidRequestError("this head is not signed", hint="forkyard audit head --sign")
    try:
        key = public_key.read_text().strip()
    except FileNotFoundError:
        raise NotFoundError(f"there is no key {public_key}") from None
    with tempfile.TemporaryDirectory(prefix="forkyard-head-") as scratch:
        signature, signers = Path(scratch, "signature"), Path(scratch, "signers")
        signature.write_text(begin + rest)
        signers.write_text(f"forkyard {key}\n")
        files = ("-f", str(signers), "-s", str(signature))
        with contextlib.suppress(InternalError):
            _run("-Y", "verify", "-I", "forkyard", "-n", NAMESPACE, *files, stdin=line)
            return True
    return False


def _run(*arguments: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UnsupportedError(
            "heads are signed with ssh-keygen, which is not here", hint="install openssh-client"
        ) from None
    if done.returncode:
        raise InternalError(f"ssh-keygen: {done.stderr.strip()[:500]}")
    return done.stdout
