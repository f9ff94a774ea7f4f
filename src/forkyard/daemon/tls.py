"""The listener's certificate: the user's own, or one made here that clients pin by its fingerprint."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

from forkyard.errors import InvalidRequestError, UnavailableError

DAYS = 3650
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


def fingerprint(cert: Path) -> str:
    """SHA-256 of the first certificate in a PEM file, in hexadecimal."""
    try:
        block = _BLOCK.search(cert.read_text("ascii"))
        if block is None:
            raise ValueError("it has no certificate")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(block[0])).hexdigest()
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{cert} is no certificate in PEM: {error}") from None


def context(cert: Path, key: Path) -> ssl.SSLContext:
    """For serving. Raises InvalidRequestError where the files are none, or no pair."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    try:
        made.load_cert_chain(cert, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{cert} and {key} cannot be used: {error}", hint="give a certificate chain and its key, in PEM"
        ) from None
    return made


def _refuse_password() -> str:
    raise ValueError("the key is encrypted")


def own(directory: Path, host: str) -> tuple[Path, Path]:
    """The certificate that was made here before, or a new one: its file and its key's."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    if cert.exists() and key.exists():
        return cert, key
    program = shutil.which("openssl")
    if program is None:
        raise UnavailableError(
            "a certificate cannot be made: openssl is not installed",
            hint="apt install openssl, or give --cert and --key",
        )
    directory.mkdir(mode=0o700, exist_ok=True)
    fresh_cert, fresh_key = directory / f".cert.{os.getpid()}", directory / f".key.{os.getpid()}"
    try:
        subprocess.run(
            [
                *(
                    program,
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:prime256v1",
                    "-nodes",
                ),
                *(
                    "-sha256",
                    "-days",
                    str(DAYS),
                    "-subj",
                    "/CN=forkyard",
                    "-addext",
                    f"subjectAltName={_names(host)}",
                ),
                *("-keyout", fresh_key, "-out", fresh_cert),
            ],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        fresh_key.chmod(0o600)
        # The key first: a certificate without one would be taken for no pair, and both made anew.
        fresh_key.rename(key)
        fresh_cert.rename(cert)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()[-300:]
        raise UnavailableError(f"openssl made no certificate: {said}", hint="give --cert and --key") from None
    finally:
        fresh_cert.unlink(missing_ok=True)
        fresh_key.unlink(missing_ok=True)
    return cert, key


def _names(host: str) -> str:
    """What the certificate is good for: this machine's names, and where it listens."""
    names = ["DNS:localhost", "IP:127.0.0.1", "IP:::1"]
    for one in (socket.gethostname(), socket.getfqdn(), host):
        try:
            ip = ipaddress.ip_address(one)
        except ValueError:
            if re.fullmatch(r"[A-Za-z0-9.-]{1,200}", one):
                names.append(f"DNS:{one}")
        else:
            if not ip.is_unspecified:
                names.append(f"IP:{ip}")
    return ",".join(dict.fromkeys(names))
