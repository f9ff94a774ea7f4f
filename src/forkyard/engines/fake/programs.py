"""The toy machine's programs. Each is called whenever its process can go on."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable

from forkyard.engines.fake.kernel import Kernel, Proc, program

KIB = 1024


def once(name: str) -> Callable[[Callable[[Kernel, Proc, list[str]], int]], None]:
    """A program that says something and returns its exit status."""

    def register(function: Callable[[Kernel, Proc, list[str]], int]) -> None:
        @program(name)
        def run(k: Kernel, p: Proc) -> None:
            p.ending = function(k, p, p.argv[1:])

    return register


def complain(k: Kernel, p: Proc, text: str, code: int = 1) -> int:
    name = p.argv[0].rpartition("/")[2]
    k.say(p, f"{name}: {text}\n", fd=2)
    return code


@once("true")
def _true(k: Kernel, p: Proc, args: list[str]) -> int:
    return 0


@once("false")
def _false(k: Kernel, p: Proc, args: list[str]) -> int:
    return 1


@once("echo")
def _echo(k: Kernel, p: Proc, args: list[str]) -> int:
    newline = not args or args[0] != "-n"
    k.say(p, " ".join(args if newline else args[1:]) + ("\n" if newline else ""))
    return 0


def unescape(text: str) -> str:
    table = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "0": "\0"}
    return re.sub(r"\\([ntr\\0])", lambda match: table[str(match[1])], text)


@once("printf")
def _printf(k: Kernel, p: Proc, args: list[str]) -> int:
    if not args:
        return complain(k, p, "missing operand", 2)
    rest = args[1:]
    while True:
        count = len(re.findall(r"%[sd]", args[0]))
        values = [*rest[:count], *[""] * (count - len(rest[:count]))]
        text = unescape(args[0])
        for value in values:
            text = re.sub(r"%[sd]", value.replace("\\", r"\\"), text, count=1)
        k.say(p, text.replace("%%", "%"))
        rest = rest[count:]
        if not rest or not count:
            return 0


@program("sleep")
def _sleep(k: Kernel, p: Proc) -> None:
    try:
        seconds = float(p.argv[1])
    except (IndexError, ValueError):
        p.ending = complain(k, p, "invalid time interval")
        return
    p.wait = ("until", k.now() + seconds)
    p.ending = 0


@program("cat")
def _cat(k: Kernel, p: Proc) -> None:
    left = p.mem.setdefault("files", [a for a in p.argv[1:] if a != "-u"] or ["-"])
    if not left:
        p.ending = p.mem.get("code", 0)
        return
    number = 0
    if left[0] != "-":
        number = 3
        if number not in p.fds:
            try:
                p.fds[number] = k.open(p, left[0])
            except OSError as error:
                p.mem["code"] = complain(k, p, f"{left.pop(0)}: {error.strerror}")
                return
    data = k.read(p, number)
    if data:
        k.say(p, data)
    elif data == b"":
        left.pop(0)
        if 3 in p.fds:
            k.close(p.fds.pop(3))


@program("wc")
def _wc(k: Kernel, p: Proc) -> None:
    data = k.read(p, 0)
    if data:
        p.mem["bytes"] = p.mem.get("bytes", 0) + len(data)
        p.mem["lines"] = p.mem.get("lines", 0) + data.count(b"\n")
    elif data == b"":
        k.say(p, f"{p.mem.get('lines' if '-l' in p.argv else 'bytes', 0)}\n")
        p.ending = 0


@program("head")
def _head(k: Kernel, p: Proc) -> None:
    if "left" not in p.mem:
        match = re.fullmatch(r"(\d+)([KM]?)", p.argv[2]) if p.argv[1:2] == ["-c"] else None
        if match is None:
            p.ending = complain(k, p, "only -c SIZE is known here")
            return
        p.mem["left"] = int(match[1]) * {"": 1, "K": KIB, "M": KIB * KIB}[match[2]]
        if len(p.argv) > 3:
            k.close(p.fds[0])
            p.fds[0] = k.open(p, p.argv[3])
    if not p.mem["left"]:
        p.ending = 0
        return
    data = k.read(p, 0, min(p.mem["left"], 64 * KIB))
    if data:
        p.mem["left"] -= len(data)
        k.say(p, data)
    elif data == b"":
        p.ending = 0


@program("tr")
def _tr(k: Kernel, p: Proc) -> None:
    data = k.read(p, 0)
    if data:
        k.say(p, data.replace(unescape(p.argv[1]).encode("latin-1"), p.argv[2].encode("latin-1")))
    elif data == b"":
        p.ending = 0


@program("hog")
def _hog(k: Kernel, p: Proc) -> None:
    """Holds that many MiB for ever."""
    p.rss_kb = int(p.argv[1]) * KIB
    p.wait = ("until", k.now() + 1e9)


@program("setsid")
def _setsid(k: Kernel, p: Proc) -> None:
    p.session = p.pgrp = p.pid
    _exec(k, p, p.argv[1:])


@program("env")
def _env(k: Kernel, p: Proc) -> None:
    words = p.argv[1:]
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        p.env[name] = value
    if words:
        _exec(k, p, words)
        return
    k.say(p, "".join(f"{name}={value}\n" for name, value in p.env.items()))
    p.ending = 0


def _exec(k: Kernel, p: Proc, argv: list[str]) -> None:
    p.program, p.argv = k.find(argv, p.env, p.cwd, p.who)
    p.mem, p.ending = {}, None


@once("printenv")
def _printenv(k: Kernel, p: Proc, args: list[str]) -> int:
    if args[0] not in p.env:
        return 1
    k.say(p, f"{p.env[args[0]]}\n")
    return 0


@once("pwd")
def _pwd(k: Kernel, p: Proc, args: list[str]) -> int:
    k.say(p, f"{p.cwd}\n")
    return 0


@once("id")
def _id(k: Kernel, p: Proc, args: list[str]) -> int:
    k.say(p, f"{p.user if '-un' in args or '-n' in args else p.uid}\n")
    return 0


@once("whoami")
def _whoami(k: Kernel, p: Proc, args: list[str]) -> int:
    k.say(p, f"{p.user}\n")
    return 0


@once("hostname")
def _hostname(k: Kernel, p: Proc, args: list[str]) -> int:
    k.say(p, f"{k.state.hostname}\n")
    return 0


@once("sync")
def _sync(k: Kernel, p: Proc, args: list[str]) -> int:
    return 0


@once("stty")
def _stty(k: Kernel, p: Proc, args: list[str]) -> int:
    fd = p.fds.get(0)
    if fd is None or fd.kind != "tty":
        return complain(k, p, "'standard input': Inappropriate ioctl for device")
    tty = k.state.ttys[fd.ident]
    k.say(p, f"{tty.rows} {tty.cols}\n")
    return 0


@once("ls")
def _ls(k: Kernel, p: Proc, args: list[str]) -> int:
    for arg in [arg for arg in args if not arg.startswith("-")] or ["."]:
        path = k.tree.resolve(arg, p.cwd, p.who)
        if not k.tree.exists(path):
            return complain(k, p, f"cannot access '{arg}': No such file or directory", 2)
        entries = k.tree.list(path, p.who) if k.tree.is_dir(path) else [arg]
        k.say(p, "".join(f"{name}\n" for name in entries if not name.startswith(".")))
    return 0


@once("rm")
def _rm(k: Kernel, p: Proc, args: list[str]) -> int:
    flags = {flag for arg in args if arg.startswith("-") for flag in arg[1:]}
    for arg in [arg for arg in args if not arg.startswith("-")]:
        with contextlib.suppress(FileNotFoundError) if "f" in flags else contextlib.nullcontext():
            path = k.tree.resolve(arg, p.cwd, p.who, follow=False)
            k.tree.remove(path, p.who, recursive="r" in flags)
    return 0


@once("mv")
def _mv(k: Kernel, p: Proc, args: list[str]) -> int:
    source, target = (k.tree.resolve(arg, p.cwd, p.who, follow=False) for arg in args)
    k.tree.rename(source, target, p.who)
    return 0


@once("mkdir")
def _mkdir(k: Kernel, p: Proc, args: list[str]) -> int:
    for arg in [arg for arg in args if not arg.startswith("-")]:
        whole = "-p" in args
        path = (k.tree.resolve_new if whole else k.tree.resolve)(arg, p.cwd, p.who)
        if whole:
            k.tree.make_parents(path, p.who)
            if k.tree.is_dir(path):
                continue
        k.tree.mkdir(path, p.who, 0o777)
    return 0


@once("touch")
def _touch(k: Kernel, p: Proc, args: list[str]) -> int:
    for arg in args:
        path = k.tree.resolve(arg, p.cwd, p.who)
        k.tree.open(path, p.who, write=True, create=True)
    return 0


@once("test")
def _test(k: Kernel, p: Proc, args: list[str]) -> int:
    return 0 if _true_test(k, p, args) else 1


@once("[")
def _bracket(k: Kernel, p: Proc, args: list[str]) -> int:
    return 0 if _true_test(k, p, args[:-1]) else 1


def _true_test(k: Kernel, p: Proc, args: list[str]) -> bool:
    match args:
        case ["!", *rest]:
            return not _true_test(k, p, rest)
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [("-e" | "-f" | "-d" | "-s") as kind, name]:
            try:
                path = k.tree.resolve(name, p.cwd, p.who)
            except OSError:
                return False
            if kind == "-s":
                return k.tree.is_file(path) and bool(k.tree.read(path, 0, 1))
            return {"-e": k.tree.exists, "-f": k.tree.is_file, "-d": k.tree.is_dir}[kind](path)
        case [left, ("=" | "!=") as sign, right]:
            return (left == right) == (sign == "=")
        case [left, ("-eq" | "-ne" | "-lt" | "-gt" | "-le" | "-ge") as sign, right]:
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-gt": a > b, "-le": a <= b, "-ge": a >= b}[
                sign
            ]
    return False


@once("kill")
def kill(k: Kernel, p: Proc, args: list[str]) -> int:
    number = int(signal.SIGTERM)
    if args and args[0].startswith("-") and args[0] != "-":
        word = args.pop(0)[1:]
        number = int(word) if word.isdigit() else int(signal.Signals[f"SIG{word.removeprefix('SIG')}"])
    code = 0
    for arg in args:
        group = arg.startswith("-")
        chosen = [q for q in k.procs.values() if (q.pgrp if group else q.pid) == abs(int(arg))]
        if not chosen:
            code = complain(k, p, "No such process")
        for q in chosen:
            if p.uid not in (0, q.uid):
                code = complain(k, p, "Operation not permitted")
            else:
                k.deliver(q, number)
    return code
