"""The toy machine's shell: a stack of nodes and where it is in each."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

from forkyard.engines.fake.kernel import Fd, Kernel, Proc, program
from forkyard.engines.fake.syntax import Node, Parser, SyntaxFault

_ARITHMETIC = re.compile(r"[\s\d+*%()/-]*")


@program("sh")
def shell(k: Kernel, p: Proc) -> None:
    """One step of a shell."""
    m = p.mem
    if "stack" not in m:
        _begin(k, p)
        return
    if m.get("pending"):
        number = m["pending"].pop(0)
        _push(p, ["seq", [Parser(m["traps"][str(number)]).script()]])
    if not m["stack"]:
        if m["stdin"]:
            _next_line(k, p)
        else:
            p.ending = m["status"]
        return
    frame = m["stack"][-1]
    STEPS[frame[0][0]](k, p, frame)


def _begin(k: Kernel, p: Proc) -> None:
    m, words = p.mem, p.argv[1:]
    m.update(stack=[], status=0, vars={}, last=0, traps={}, pending=[], args=[], name="sh", stdin=False)
    text = ""
    while words and words[0] == "-l":
        words.pop(0)
    if words[:1] == ["-c"]:
        text, m["args"] = words[1], words[3:]
    elif words:
        path = k.tree.resolve(words[0], p.cwd, p.who)
        k.tree.open(path, p.who, write=False)
        text = k.tree.read(path, 0, 1 << 20).decode("latin-1")
        m["name"], m["args"] = words[0], words[1:]
    else:
        m["stdin"], m["input"] = True, ""
    _run_text(k, p, text)


def _run_text(k: Kernel, p: Proc, text: str) -> None:
    try:
        _push(p, Parser(text).script())
    except SyntaxFault as fault:
        k.say(p, f"{p.mem['name']}: 1: Syntax error: {fault}\n", fd=2)
        p.mem["status"] = 2


def _next_line(k: Kernel, p: Proc) -> None:
    line, end, rest = p.mem["input"].partition("\n")
    if end:
        p.mem["input"] = rest
        _run_text(k, p, line)
        return
    data = k.read(p, 0)
    if data == b"":
        p.mem["stdin"] = False
        _run_text(k, p, line)
    elif data:
        p.mem["input"] += data.decode("latin-1")


def _push(p: Proc, node: Node) -> None:
    p.mem["stack"].append([node, 0])


def _pop(p: Proc, status: int | None = None) -> None:
    p.mem["stack"].pop()
    if status is not None:
        p.mem["status"] = status


# -- words


def _lookup(p: Proc, name: str) -> str:
    m = p.mem
    if name == "?":
        return str(m["status"])
    if name == "!":
        return str(m["last"])
    if name == "$":
        return str(m.get("shell_pid", p.pid))
    if name == "#":
        return str(len(m["args"]))
    if name == "0":
        return str(m["name"])
    if name.isdigit():
        return m["args"][int(name) - 1] if int(name) <= len(m["args"]) else ""
    return str(m["vars"].get(name, p.env.get(name, "")))


def _arithmetic(p: Proc, text: str) -> str:
    filled = re.sub(r"\$?([A-Za-z_]\w*)", lambda match: _lookup(p, match[1]) or "0", text)
    filled = re.sub(r"\$(\d)", lambda match: _lookup(p, match[1]) or "0", filled)
    if not _ARITHMETIC.fullmatch(filled) or "**" in filled:
        raise OSError(22, f"arithmetic: {text}")
    return str(int(eval(filled.replace("/", "//"), {"__builtins__": {}})))  # digits and signs only


def _expand(p: Proc, word: Node) -> list[str]:
    """The fields that a word becomes: unquoted variables are split at blanks."""
    fields: list[str] = []
    current: str | None = None
    if word and word[0][0] == "t" and not word[0][2] and re.match(r"~(/|$)", word[0][1]):
        word = [["t", _lookup(p, "HOME") + word[0][1][1:], True], *word[1:]]
    for part in word:
        if part[0] == "t":
            current = (current or "") + part[1]
        elif part[0] == "a":
            current = (current or "") + _arithmetic(p, part[1])
        elif part[2]:
            current = (current or "") + _lookup(p, part[1])
        else:
            value = _lookup(p, part[1])
            pieces = value.split()
            if pieces:
                current = (current or "") + pieces[0]
                for piece in pieces[1:]:
                    fields.append(current)
                    current = piece
    return fields if current is None else [*fields, current]


def _text(p: Proc, word: Node) -> str:
    return " ".join(_expand(p, word))


# -- children


def _redirect(k: Kernel, shell: Proc, fds: dict[int, Fd], redirections: Node) -> dict[int, Fd]:
    for number, sign, word in redirections:
        target = _text(shell, word)
        if sign == ">&":
            fds[number] = fds[int(target)]
        else:
            try:
                fds[number] = k.open(shell, target, write=sign != "<", append=sign == ">>")
            except OSError as error:
                verb = "open" if sign == "<" else "create"
                raise OSError(error.errno, f"cannot {verb} {target}: {error.strerror}") from None
    return fds


def _subshell(k: Kernel, p: Proc, node: Node, fds: dict[int, Fd]) -> Proc:
    """A child shell that runs ``node`` and ends."""
    m = p.mem
    child = k.fork(p, fds, program="sh")
    child.mem = {
        **m,
        "vars": dict(m["vars"]),
        "args": list(m["args"]),
        "stack": [[node, 0]],
        "stdin": False,
        "traps": {},
        "pending": [],
        "shell_pid": m.get("shell_pid", p.pid),
    }
    return child


def _wait_for(k: Kernel, p: Proc, frame: Node) -> None:
    """Wait for the child whose number is the frame's place; its status ends the node."""
    status = k.reap(p, frame[1])
    if status is None:
        p.wait = ("child", frame[1])
    else:
        _pop(p, status)


# -- nodes


def _seq(k: Kernel, p: Proc, frame: Node) -> None:
    node, at = frame
    if at >= len(node[1]):
        _pop(p)
        return
    frame[1] += 1
    _push(p, node[1][at])


def _and(k: Kernel, p: Proc, frame: Node) -> None:
    node, at = frame
    if at == 0:
        frame[1] = 1
        _push(p, node[1])
        return
    _pop(p)
    if (p.mem["status"] == 0) == (node[0] == "and"):
        _push(p, node[2])


def _not(k: Kernel, p: Proc, frame: Node) -> None:
    if frame[1] == 0:
        frame[1] = 1
        _push(p, frame[0][1])
    else:
        _pop(p, int(p.mem["status"] == 0))


def _while(k: Kernel, p: Proc, frame: Node) -> None:
    node, at = frame
    if at == 0:
        frame[1] = 1
        _push(p, node[1])
    elif p.mem["status"] == 0:
        frame[1] = 0
        _push(p, node[2])
    else:
        _pop(p, 0)


def _if(k: Kernel, p: Proc, frame: Node) -> None:
    node, at = frame
    if at == 0:
        frame[1] = 1
        _push(p, node[1])
    else:
        _pop(p)
        _push(p, node[2] if p.mem["status"] == 0 else node[3])


def _bg(k: Kernel, p: Proc, frame: Node) -> None:
    fds = dict(p.fds) | {0: Fd("null")}
    p.mem["last"] = _subshell(k, p, frame[0][1], fds).pid
    _pop(p, 0)


def _redirected(k: Kernel, p: Proc, frame: Node) -> None:
    if frame[1] == 0:
        fds = _redirect(k, p, dict(p.fds), frame[0][2])
        frame[1] = _subshell(k, p, frame[0][1][1], fds).pid
    _wait_for(k, p, frame)


def _pipe(k: Kernel, p: Proc, frame: Node) -> None:
    if frame[1] == 0:
        source = p.fds[0]
        for index, node in enumerate(frame[0][1]):
            fds = dict(p.fds) | {0: source}
            last = index == len(frame[0][1]) - 1
            if not last:
                number = k.new_pipe()
                fds[1] = Fd("pipe", number, writes=True)
                following = Fd("pipe", number)
                held = k.share(following)
            frame[1] = _subshell(k, p, node, fds).pid
            if source is not p.fds[0]:
                k.close(source)
            if not last:
                source = held
    _wait_for(k, p, frame)


def _simple(k: Kernel, p: Proc, frame: Node) -> None:
    node, at = frame
    if at > 0:
        _wait_for(k, p, frame)
        return
    _, assigned, words, redirections = node
    argv = [field for word in words for field in _expand(p, word)]
    values = {name: _text(p, word) for name, word in assigned}
    if not argv:
        p.mem["vars"].update(values)
        p.env.update({name: value for name, value in values.items() if name in p.env})
        _pop(p, 0)
        return
    try:
        fds = _redirect(k, p, dict(p.fds), redirections)
    except OSError as error:
        k.say(p, f"{p.mem['name']}: 1: {error.strerror}\n", fd=2)
        _pop(p, 2)
        return
    try:
        if argv[0] in BUILTINS:
            BUILTINS[argv[0]](k, p, frame, argv[1:])
            return
        env = {**p.env, **values}
        name, argv = k.find(argv, env, p.cwd, p.who)
    except OSError as error:
        missing = error.errno == 2
        what = "not found" if missing else error.strerror
        k.say(p, f"{p.mem['name']}: 1: {argv[0]}: {what}\n", fd=2)
        _pop(p, 127 if missing else 126)
        return
    child = k.fork(p, fds, program=name, argv=argv)
    child.env = env
    frame[1] = child.pid
    _wait_for(k, p, frame)


STEPS: dict[str, Callable[[Kernel, Proc, Node], None]] = {
    "seq": _seq,
    "and": _and,
    "or": _and,
    "not": _not,
    "while": _while,
    "if": _if,
    "bg": _bg,
    "redirected": _redirected,
    "pipe": _pipe,
    "simple": _simple,
}


# -- builtins


def _exit(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    p.mem["stack"], p.mem["stdin"] = [], False
    p.mem["status"] = int(args[0]) if args else p.mem["status"]


def _cd(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    path = k.tree.resolve(args[0] if args else p.env.get("HOME", "/"), p.cwd, p.who)
    if not k.tree.is_dir(path):
        k.say(p, f"{p.mem['name']}: 1: cd: can't cd to {args[0]}\n", fd=2)
        _pop(p, 2)
        return
    p.cwd = path
    _pop(p, 0)


def _export(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    for arg in args:
        name, sign, value = arg.partition("=")
        p.env[name] = value if sign else _lookup(p, name)
    _pop(p, 0)


def _nothing(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    _pop(p, 0)


def _trap(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    for word in args[1:]:
        number = int(word) if word.isdigit() else int(signal.Signals[f"SIG{word.removeprefix('SIG')}"])
        p.ignored = [old for old in p.ignored if old != number]
        p.mem["traps"].pop(str(number), None)
        if args[0]:
            p.mem["traps"][str(number)] = args[0]
        else:
            p.ignored = [*p.ignored, number]
    _pop(p, 0)


def _wait(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    pid = int(args[0]) if args else 0
    status = k.reap(p, pid)
    if status is None:
        p.wait = ("child", pid)
    elif pid:
        _pop(p, status)
    elif status == 127:
        _pop(p, 0)


def _exec(k: Kernel, p: Proc, frame: Node, args: list[str]) -> None:
    p.program, p.argv = k.find(args, p.env, p.cwd, p.who)
    p.mem = {}


BUILTINS: dict[str, Callable[[Kernel, Proc, Node, list[str]], Any]] = {
    "exit": _exit,
    "cd": _cd,
    "export": _export,
    ":": _nothing,
    "trap": _trap,
    "wait": _wait,
    "exec": _exec,
}
