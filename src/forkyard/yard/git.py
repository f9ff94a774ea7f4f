"""git, run in the sandbox by the sandbox's own program.

A password reaches git by a pipe that only this one command has, through a credential helper
for the URL's host alone. It is in no file, no argument, no variable and no record.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit, urlunsplit

from forkyard.errors import InvalidRequestError
from forkyard.requests import Caller, Exec
from forkyard.requests import Git as GitRequest
from forkyard.types import ExecResult
from forkyard.yard.context import actor
from forkyard.yard.execs import Execs
from forkyard.yard.lifecycle import Lifecycle
from forkyard.yard.model import Sandbox

ASK_S = 10.0
PORTS = {"http": 80, "https": 443, "git": 9418, "ssh": 22}
# git does not ask a terminal that is not there, nor open an editor.
ENV = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "GIT_EDITOR": "true", "GIT_PAGER": "cat"}
# Standard input is the password's way in; git itself reads nothing from it then.
WITH_PASSWORD = 'exec 3<&0 </dev/null; exec git "$@"'
HELPER = '!f() { test "$1" = get && cat <&3; }; f'
# A commit needs a name; where the sandbox has none, it is its user's.
WITH_NAME = (
    'test -n "$(git config user.name)" || set -- -c "user.name=$(id -un)" "$@";'
    'test -n "$(git config user.email)" || set -- -c "user.email=$(id -un)@localhost" "$@";'
    'exec git "$@"'
)


@dataclass(frozen=True, slots=True)
class Remote:
    """A URL taken apart: what git is given, where it leads (None for a path), and the user and
    password that stood in it."""

    url: str
    host: str | None = None
    port: int = 0
    scheme: str = ""
    username: str | None = None
    password: str | None = None


class Git:
    """The verb ``git``."""

    def __init__(self, lifecycle: Lifecycle, execs: Execs) -> None:
        self.lifecycle = lifecycle
        self.context = lifecycle.context
        self.execs = execs

    async def run(self, request: GitRequest, caller: Caller) -> ExecResult:
        """See API: ``git``. What git refuses is a result.

        Raises:
            InvalidRequestError: an option that this operation does not take, or a URL that cannot be.
            UnsupportedError: the sandbox's memory is of an age without a network.
        """
        check_options(request)
        sandbox, _ = await self.lifecycle.running(request.sandbox)
        remote = parse_url(request.url) if request.url is not None else None
        command = make_command(request, remote)
        if remote is None and request.operation == "fetch" and request.grant:
            remote = await self._known_remote(sandbox, request, caller)
        if remote is None or remote.host is None:
            return await self.execs.run(command, caller)
        self._audit(sandbox, caller, request, remote)
        if not request.grant:
            return await self.execs.run(command, caller)
        place = f"{remote.host}:{remote.port}"
        if place not in sandbox.doc.git_hosts:
            sandbox.doc.git_hosts.append(place)
            await self.context.save(sandboxes=[sandbox.doc])
        async with self.lifecycle.network.grant_host(sandbox, remote.host, remote.port):
            return await self.execs.run(command, caller)

    async def _known_remote(self, sandbox: Sandbox, request: GitRequest, caller: Caller) -> Remote | None:
        """Where a fetch that names no URL goes. The repository says so, which the sandbox can
        change: only a host that a client of ours named before is opened for it."""
        if not sandbox.doc.git_hosts:
            return None
        asked = Exec(
            sandbox=request.sandbox,
            argv=["git", "remote", "get-url", "origin"],
            cwd=request.path,
            user=request.user,
            max_output=4096,
            timeout_s=ASK_S,
        )
        answer = await self.execs.run(asked, caller)
        with contextlib.suppress(InvalidRequestError):
            remote = parse_url(answer.stdout.strip())
            if f"{remote.host}:{remote.port}" in sandbox.doc.git_hosts:
                return remote
        return None

    def _audit(self, sandbox: Sandbox, caller: Caller, request: GitRequest, remote: Remote) -> None:
        said: dict[str, object] = {
            "operation": request.operation,
            "host": remote.host,
            "port": remote.port,
            "granted": request.grant,
        }
        username, password = credentials(request, remote)
        if password is not None:
            text = f"{sandbox.id}\0{username}\0{password}"
            said["username"] = username
            said["credential_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        self.context.audit.append("git", sandbox.id, actor(caller), said)


# -- from a request to a command --------------------------------------------------------------

TAKES: dict[str, frozenset[str]] = {
    "clone": frozenset({"url", "path", "branch", "depth", "username", "password"}),
    "fetch": frozenset({"url", "path", "branch", "depth", "username", "password"}),
    "checkout": frozenset({"path", "ref", "branch", "create", "paths"}),
    "status": frozenset({"path"}),
    "diff": frozenset({"path", "ref", "staged", "paths"}),
    "apply": frozenset({"path", "patch", "staged"}),
    "add": frozenset({"path", "paths"}),
    "commit": frozenset({"path", "message", "author", "all"}),
    "log": frozenset({"path", "ref", "limit", "paths"}),
}
OPTIONS = frozenset().union(*TAKES.values())
NEEDS = {"clone": "url", "apply": "patch", "commit": "message"}


def check_options(request: GitRequest) -> None:
    """Raises InvalidRequestError for options that the operation does not take, or lacks."""
    name = request.operation
    for option in sorted(OPTIONS - TAKES[name]):
        if getattr(request, option) not in (None, False, []):
            raise InvalidRequestError(
                f"git {name} takes no {option}", hint=f"it takes {', '.join(sorted(TAKES[name]))}"
            )
    needed = NEEDS.get(name)
    if needed is not None and getattr(request, needed) is None:
        raise InvalidRequestError(f"git {name} needs {needed}=")
    if name == "checkout" and not (request.ref or request.branch or request.paths):
        raise InvalidRequestError("git checkout needs ref=, branch= or paths=")
    for option in ("ref", "branch"):
        if (getattr(request, option) or "").startswith("-"):
            raise InvalidRequestError(f"{option}={getattr(request, option)!r} begins with a dash")
    for option in ("depth", "limit"):
        value = getattr(request, option)
        if value is not None and value < 1:
            raise InvalidRequestError(f"{option}={value} is not above 0")
    if request.password is not None and request.url is None:
        # A remote's address is in the repository, which the sandbox can change.
        raise InvalidRequestError("a password goes to the host of url= only", hint="name the url=")


def parse_url(url: str) -> Remote:
    """A URL or a path inside the sandbox, without the user and password that may stand in it.

    Raises:
        InvalidRequestError: it is neither.
    """
    if not url or url.startswith("-") or "\0" in url or "\n" in url:
        raise InvalidRequestError(f"{url[:80]!r} is no URL for git")
    if re.match(r"[A-Za-z0-9+.-]+::", url):
        raise InvalidRequestError(f"{url.partition(':')[0]!r} is no kind of URL that is supported")
    if "://" in url:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequestError(f"a URL that cannot be: {error}") from None
        if parts.scheme == "file":
            return Remote(url)
        if parts.scheme not in PORTS or not host:
            raise InvalidRequestError(f"{parts.scheme}:// is no kind of URL that is supported")
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port else ""
        keep_user = parts.scheme == "ssh" and parts.username
        clean = urlunsplit(parts._replace(netloc=f"{parts.username}@{place}" if keep_user else place))
        return Remote(
            clean,
            host,
            port or PORTS[parts.scheme],
            parts.scheme,
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
        )
    found = re.match(r"(?:[^/:@]+@)?([^/:@]+):(?!/\.)", url)
    if found and not url.startswith(("/", "./", "../")):
        return Remote(url, found[1], PORTS["ssh"], "ssh")
    return Remote(url)


def credentials(request: GitRequest, remote: Remote | None) -> tuple[str, str | None]:
    """User and password: the arguments beat those in the URL. A token alone is a password."""
    username = request.username or (remote.username if remote else None)
    password = request.password if request.password is not None else remote.password if remote else None
    return username or "x-access-token", password


def make_command(request: GitRequest, remote: Remote | None) -> Exec:
    """The command for a request.

    Raises:
        InvalidRequestError: a password where it cannot be used safely.
    """
    username, password = credentials(request, remote)
    stdin = request.patch
    options: list[str] = []
    script = WITH_NAME if request.operation == "commit" else None
    if password is not None:
        if remote is None or remote.scheme not in ("http", "https"):
            raise InvalidRequestError("a password is for http and https URLs")
        if "\n" in username + password or "\0" in username + password:
            raise InvalidRequestError("a user name or password with a line's end")
        place = urlunsplit((*urlsplit(remote.url)[:2], "", "", ""))
        # The empty one forgets the sandbox's own helpers, which could keep what they are given.
        options = ["-c", "credential.helper=", "-c", f"credential.{place}.helper={HELPER}"]
        script, stdin = WITH_PASSWORD, f"username={username}\npassword={password}\n".encode()
    words = [*options, *ARGUMENTS[request.operation](request, remote)]
    argv = ["/bin/sh", "-c", script, "git", *words] if script else ["git", *words]
    env = dict(ENV)
    if request.author is not None:
        env |= author_env(request.author)
    return Exec(
        sandbox=request.sandbox,
        argv=argv,
        cwd=None if request.operation == "clone" else request.path,
        env=env,
        stdin=stdin,
        user=request.user,
        timeout_s=request.timeout_s,
        max_output=request.max_output,
        request_id=request.request_id,
    )


def author_env(author: str) -> dict[str, str]:
    """Raises InvalidRequestError unless it is ``Name <mail>``."""
    found = re.fullmatch(r"\s*([^<>\n]+?)\s*<([^<>\n]*)>\s*", author)
    if found is None:
        raise InvalidRequestError(f"an author is 'Name <mail>', not {author[:80]!r}")
    who = ("AUTHOR", "COMMITTER")
    return {f"GIT_{w}_NAME": found[1] for w in who} | {f"GIT_{w}_EMAIL": found[2] for w in who}


def _clone(request: GitRequest, remote: Remote | None) -> list[str]:
    words = ["clone", "--quiet"]
    if request.branch:
        words += ["--branch", request.branch]
    if request.depth:
        words += ["--depth", str(request.depth)]
    assert remote is not None
    return [*words, "--", remote.url, *([request.path] if request.path else [])]


def _fetch(request: GitRequest, remote: Remote | None) -> list[str]:
    words = ["fetch", "--quiet"]
    if request.depth:
        words += ["--depth", str(request.depth)]
    if remote is None and not request.branch:
        return [*words, "--all"] if not request.depth else words
    return [*words, "--", remote.url if remote else "origin", *([request.branch] if request.branch else [])]


def _checkout(request: GitRequest, _: Remote | None) -> list[str]:
    words = ["checkout", "--quiet"]
    if request.create and request.branch:
        words += ["-b", request.branch, *([request.ref] if request.ref else [])]
    elif request.ref or request.branch:
        words.append(request.ref or request.branch or "")
    return [*words, "--", *request.paths]


def _diff(request: GitRequest, _: Remote | None) -> list[str]:
    words = ["diff", "--no-color", "--no-ext-diff"]
    words += ["--cached"] if request.staged else []
    return [*words, *([request.ref] if request.ref else []), "--", *request.paths]


def _log(request: GitRequest, _: Remote | None) -> list[str]:
    words = ["log", "--no-color", "--date=iso-strict"]
    words += ["-n", str(request.limit)] if request.limit else []
    return [*words, *([request.ref] if request.ref else []), "--", *request.paths]


ARGUMENTS: dict[str, Callable[[GitRequest, Remote | None], list[str]]] = {
    "clone": _clone,
    "fetch": _fetch,
    "checkout": _checkout,
    "status": lambda request, _: ["status", "--short", "--branch"],
    "diff": _diff,
    "apply": lambda request, _: ["apply", *(["--index"] if request.staged else []), "-"],
    "add": lambda request, _: ["add", *(["--", *request.paths] if request.paths else ["--all"])],
    "commit": lambda request, _: [
        "commit", "--quiet", *(["--all"] if request.all else []), "--message", request.message or ""
    ],
    "log": _log,
}  # fmt: skip
