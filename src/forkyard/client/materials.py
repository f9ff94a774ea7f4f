"""What templates are made of, as the client finds it: contexts, images in files, logins.

A context is packed as its ``.dockerignore`` says; registries' logins are read from the auth
files that ``skopeo login`` and its kind write, and only those of registries that are asked.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forkyard import errors
from forkyard import requests as rq
from forkyard.client import _protocol as protocol
from forkyard.client.trees import CHUNK, Packer
from forkyard.types import Progress

__all__ = ["Context", "Ignored", "Local", "auths_of", "build_spec", "local_image", "logins", "template_event"]

_AUTH_FILES = ("~/.config/containers/auth.json", "~/.docker/config.json")


class Ignored:
    """The rules of a ``.dockerignore``: the last one that fits a path, or a directory above it, counts."""

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.splitlines():
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            keeps = line.startswith("!")
            path = os.path.normpath(line.removeprefix("!").strip().lstrip("/") or ".")
            if path != ".":
                self._rules.append((keeps, re.compile(_regex(path))))
        self.has_exceptions = any(keeps for keeps, _ in self._rules)

    def __call__(self, path: str) -> bool:
        """Whether ``path`` (relative, with slashes) is left out."""
        above = [path]
        while "/" in above[-1]:
            above.append(above[-1].rpartition("/")[0])
        left_out = False
        for keeps, rule in self._rules:
            if keeps == left_out and any(rule.fullmatch(one) for one in above):
                left_out = not keeps
        return left_out


def _regex(pattern: str) -> str:
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            out, at = out + ".*", at + 2
        elif char == "*":
            out, at = out + "[^/]*", at + 1
        elif char == "?":
            out, at = out + "[^/]", at + 1
        elif char == "[" and "]" in pattern[at + 2 :]:
            end = pattern.index("]", at + 2)
            out, at = out + "[" + pattern[at + 1 : end].replace("\\", "\\\\") + "]", end + 1
        elif char == "\\" and at + 1 < len(pattern):
            out, at = out + re.escape(pattern[at + 1]), at + 2
        else:
            out, at = out + re.escape(char), at + 1
    return out


class Context(Packer):
    """The tree at ``root`` without what is ignored, as a tar stream."""

    def __init__(self, root: Path, ignored: Ignored) -> None:
        super().__init__(root)
        self._ignored = ignored

    def _pack(self, directory: Path, prefix: str) -> Iterator[bytes]:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = prefix + entry.name
            left_out = self._ignored(name)
            is_directory = entry.is_dir(follow_symlinks=False)
            if not left_out:
                yield from self._entry(entry, name)
            # Below a directory that is left out, an exception may keep something.
            if is_directory and (not left_out or self._ignored.has_exceptions):
                yield from self._pack(Path(entry.path), name + "/")

    def _entry(self, entry: os.DirEntry[str], name: str) -> Iterator[bytes]:
        info = entry.stat(follow_symlinks=False)
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = stat.S_IMODE(info.st_mode), int(info.st_mtime)
        if stat.S_ISREG(info.st_mode):
            self._files += 1
            yield from self._file(entry.path, member)
        elif stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
            yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        else:
            self._skipped.append(name)


class Local:
    """An image in files of this machine: how it is called, its form, and its bytes to send."""

    def __init__(self, image: str, format: rq.ImageFormat, path: Path) -> None:
        self.image = image
        self.format = format
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        if self.format == "oci":
            yield from Packer(self._path)
            return
        with open(self._path, "rb", buffering=0) as file:
            while data := file.read(CHUNK):
                yield data


def local_image(image: str) -> Local | None:
    """The image if it is in files: ``oci:DIRECTORY[:TAG]``, ``docker-archive:FILE[:TAG]`` or a path
    that begins with a slash or a dot, or leads to a file here; None for a registry's reference.

    Raises:
        NotFoundError: there is no such file. InvalidRequestError: it is no text.
    """
    if not isinstance(image, str):
        raise errors.InvalidRequestError(f"image={image!r} is neither a reference nor a path")
    kind, colon, rest = image.partition(":")
    if colon and kind in ("oci", "docker-archive"):
        name, _, tag = rest.partition(":")
        path = Path(name)
        if not (path.is_dir() if kind == "oci" else path.is_file()):
            raise errors.NotFoundError(f"there is no {name} here")
        shown = f"{kind}:{path.name}" + (f":{tag}" if tag else "")
        return Local(shown, "oci" if kind == "oci" else "docker-archive", path)
    if image.startswith(("/", "./", "../")) or Path(image).is_file():
        path = Path(image)
        if not path.is_file():
            raise errors.NotFoundError(f"there is no file {image} here")
        return Local(path.name, "tar", path)
    return None


def looks_like_an_image(name: str) -> bool:
    """Whether a name that nothing in the yard has can be an image's: a reference with a registry,
    a path or a tag in it, or files here."""
    return "/" in name or ":" in name or local_image(name) is not None


def logins(images: Iterable[str], credentials: str | Mapping[str, str] | None = None) -> dict[str, str]:
    """``{registry: "user:password"}`` for the registries that ``images`` name.

    Args:
        credentials: ``user:password`` for all of them, or by registry; else the user's auth files.
    """
    registries = {first for image in images if (first := _registry(image))}
    if isinstance(credentials, Mapping):
        return dict(credentials)
    if credentials is not None:
        if ":" not in credentials:
            raise errors.InvalidRequestError("credentials are user:password")
        return {registry: credentials for registry in registries}
    found: dict[str, str] = {}
    for entries in _auth_entries() if registries else ():
        for key, entry in entries.items():
            host = key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
            auth = entry.get("auth") if isinstance(entry, dict) else None
            if auth and host in registries and key not in found:
                found[key if "://" not in key else host] = base64.b64decode(auth).decode()
    return found


def _registry(image: str) -> str:
    first, slash, _ = image.removeprefix("docker://").partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def _auth_entries() -> Iterator[dict[str, Any]]:
    paths = [Path(path) for path in (os.environ.get("REGISTRY_AUTH_FILE"),) if path]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        paths.append(Path(runtime) / "containers" / "auth.json")
    if os.geteuid() == 0:
        paths.append(Path("/run/containers/0/auth.json"))
    paths += [Path(path).expanduser() for path in _AUTH_FILES]
    for path in paths:
        try:
            found = json.loads(path.read_bytes()).get("auths")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(found, dict):
            yield found


def auths_of(image: str | None) -> dict[str, str]:
    """The user's own login for an image's registry, if there is one."""
    return logins([image]) if image else {}


def build_spec(
    name: str,
    context: str | os.PathLike[str],
    dockerfile: str | os.PathLike[str],
    build_args: Mapping[str, str],
    credentials: str | Mapping[str, str] | None,
    **fields: Any,
) -> tuple[rq.TemplateSpec, Context]:
    """What to ask for, and the context to send beforehand.

    Raises:
        NotFoundError: no context, or no Dockerfile in it.
    """
    root = Path(protocol.path_of(context))
    if not root.is_dir():
        raise errors.NotFoundError(f"there is no directory {root} here")
    path = root / dockerfile
    if not path.is_file() and dockerfile == "Dockerfile" and (root / "Containerfile").is_file():
        path = root / "Containerfile"
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise errors.NotFoundError(f"there is no {path} here", hint="name it with dockerfile=") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise errors.InvalidRequestError(f"{path} is no Dockerfile") from None
    rules = ""
    own = path.with_name(f"{path.name}.dockerignore")
    for ignore in (own, root / ".containerignore", root / ".dockerignore"):
        if ignore.is_file():
            rules = ignore.read_text()
            break
    named = re.findall(r"[\w.:\[\]-]+/[\w./:@-]+", " ".join([text, *build_args.values()]))
    spec = protocol.made(
        rq.TemplateSpec,
        name=name,
        dockerfile=text,
        build_args=dict(build_args),
        auths=logins(named, credentials),
        **fields,
    )
    return spec, Context(root, Ignored(rules))


def template_event(event: rq.TemplateEvent, on_progress: Any) -> None:
    """Tell the caller of progress. Nothing else is told."""
    if on_progress is not None and event.kind in ("step", "output", "note"):
        on_progress(Progress(event.kind, event.text, event.index))

