"""The languages that sessions run: their interpreters, our programs for them, and how those are spoken to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import InvalidRequestError

RUNNERS = Path(__file__).parent / "runners"
MAX_CODE = 4 << 20


@dataclass(frozen=True, slots=True)
class Language:
    """How a session of a language is started and spoken to.

    Attributes:
        programs: Command lines to try; the first whose program the image has is used.
        prelude: What is sent first.
        request: The line (or lines) for a run, from its id and the code.
        mark: The line that asks for a mark.
        group: An interrupt goes to the interpreter's children as well, at once.
    """

    name: str
    programs: tuple[tuple[str, ...], ...]
    prelude: Callable[[], bytes]
    request: Callable[[str, str], bytes]
    mark: Callable[[str], bytes]
    group: bool = False


def _sized(*names: str) -> Callable[[], bytes]:
    def prelude() -> bytes:
        program = b"\n".join((RUNNERS / name).read_bytes() for name in names)
        return b"%d\n%s" % (len(program), program)

    return prelude


def _json_line(**fields: str) -> bytes:
    return json.dumps(fields).encode("ascii") + b"\n"


def _json_run(run: str, code: str) -> bytes:
    return _json_line(id=run, code=code)


def _json_mark(mark: str) -> bytes:
    return _json_line(id=mark)


def _bash_run(run: str, code: str) -> bytes:
    # One bare word, so that a line which was cut off leaves no quote open.
    word = re.sub(rb"[^A-Za-z0-9_./-]", lambda m: b"%%%02x" % m[0][0], code.encode()).decode()
    return (
        f'__fy_take {run} {word or "%0a"} END && eval "$__fy_code" </dev/null\n__fy_done {run} END\n'
    ).encode()


_BOOT_PYTHON = (
    "import os;requests=os.fdopen(os.dup(0),'rb');"
    "exec(compile(requests.read(int(requests.readline())),'<forkyard>','exec'),{'requests':requests})"
)
_BOOT_NODE = (
    "const fs=require('fs'),b=Buffer.alloc(1);let n='';"
    "while(fs.readSync(0,b,0,1,null)&&b[0]!==10)n+=b;"
    "const p=Buffer.alloc(+n);for(let at=0,k;at<p.length&&(k=fs.readSync(0,p,at,p.length-at,null));at+=k);"
    "new Function('require',p.toString())(require)"
)

LANGUAGES = {
    "python": Language(
        "python",
        (("python3", "-c", _BOOT_PYTHON), ("python", "-c", _BOOT_PYTHON)),
        _sized("python_show.py", "python.py"),
        _json_run,
        _json_mark,
    ),
    "bash": Language(
        "bash",
        (("bash", "--noprofile", "--norc", "--noediting", "+m", "-i", "-s"),),
        (RUNNERS / "bash.sh").read_bytes,
        _bash_run,
        lambda mark: f"__fy_sync {mark} END\n".encode(),
        group=True,
    ),
    "javascript": Language(
        "javascript",
        (("node", "-e", _BOOT_NODE), ("nodejs", "-e", _BOOT_NODE)),
        _sized("javascript.js"),
        _json_run,
        _json_mark,
    ),
}


def check_code(code: str) -> None:
    """Raises InvalidRequestError for code that cannot be sent."""
    if "\0" in code:
        raise InvalidRequestError("code with a NUL character")
    if len(code) > MAX_CODE:
        raise InvalidRequestError(
            f"the code has {len(code)} characters, {MAX_CODE} are possible",
            hint="write it to a file, and run that",
        )
    try:
        code.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the code is not text that can be sent") from None
