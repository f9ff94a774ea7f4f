"""Calling code in another process, of another user: only plain data goes back and forth.

As a program it is that other process. ``install`` makes ``import`` of its modules give proxies.
Standard library only, and nothing of ``pickle``: the other side is not to be believed.
"""

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import struct
import subprocess
import sys
import threading
import types

MAX_FRAME = 64 << 20
_TAGS = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_KINDS = {tag: kind for kind, tag in _TAGS.items()}


def pack(value):
    """Plain data as JSON that keeps types apart. Raises TypeError for anything else."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["b", value.hex()]
    if kind in _TAGS:
        return [_TAGS[kind], [pack(one) for one in value]]
    if kind is dict:
        return ["d", [[pack(key), pack(one)] for key, one in value.items()]]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not plain data")


def unpack(raw):
    """What ``pack`` made. Raises ValueError."""
    if raw is None or isinstance(raw, (bool, str)):
        return raw
    if isinstance(raw, list) and raw:
        tag = raw[0]
        if tag == "i":
            return int(raw[1], 16)
        if tag == "f":
            return float.fromhex(raw[1])
        if tag == "c":
            return complex(float.fromhex(raw[1]), float.fromhex(raw[2]))
        if tag == "b":
            return bytes.fromhex(raw[1])
        if tag == "d":
            return {unpack(key): unpack(one) for key, one in raw[1]}
        if tag in _KINDS:
            return _KINDS[tag](unpack(one) for one in raw[1])
    raise ValueError(f"{str(raw)[:80]} is not packed data")


def send(file, value):
    raw = json.dumps(value).encode()
    file.write(struct.pack(">I", len(raw)) + raw)
    file.flush()


def receive(file):
    head = file.read(4)
    if len(head) < 4:
        raise EOFError
    (size,) = struct.unpack(">I", head)
    if size > MAX_FRAME:
        raise EOFError
    raw = file.read(size)
    if len(raw) < size:
        raise EOFError
    return json.loads(raw)


class Other:
    """The process that has the code."""

    def __init__(self, job, program):
        self._lock = threading.Lock()
        environment = {**os.environ, "HOME": job["home"], "PYTHONSAFEPATH": "1"}
        paths = [os.path.normpath(os.path.join(job["workdir"], path)) for path in job["import_paths"]]
        self._child = subprocess.Popen(
            [job["python"], program, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=job["workdir"],
            env=environment,
            user=job["uid"],
            group=job["gid"],
            extra_groups=[],
            start_new_session=True,
        )

    def ask(self, **request):
        with self._lock:
            try:
                send(self._child.stdin, request)
                answer = receive(self._child.stdout)
                if "error" in answer:
                    kind, text = str(answer["error"]), str(answer.get("message", ""))
                else:
                    return answer["kind"], unpack(answer.get("value"))
            except (EOFError, OSError):
                kind, text = "EOFError", "the code under test has ended its process"
            except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
                kind, text = "ValueError", f"no plain data came back: {error}"
        known = getattr(builtins, kind, None)
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                error = known(text)
            except TypeError:
                error = RuntimeError(f"{kind}: {text}")
            raise error
        raise RuntimeError(f"{kind}: {text}")


def install(job, program):
    """From now on importing one of the job's modules gives a proxy."""
    other = Other(job, program)
    names = frozenset(job["modules"])

    class Proxy(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            kind, value = other.ask(get=name, module=self.__name__)
            if kind == "data":
                return value

            def call(*args, **kwargs):
                given = {key: pack(one) for key, one in kwargs.items()}
                packed = [pack(one) for one in args]
                return other.ask(call=name, module=self.__name__, args=packed, kwargs=given)[1]

            call.__name__ = call.__qualname__ = name
            return call

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            if name in names:
                return importlib.machinery.ModuleSpec(name, self)
            return None

        def create_module(self, spec):
            other.ask(get="__name__", module=spec.name)
            return Proxy(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())


def serve(paths):
    """The other process: imports what it is asked for, and calls it."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", here))]
    import importlib

    while True:
        try:
            request = receive(asked)
        except EOFError:
            return
        try:
            module = importlib.import_module(request["module"])
            if "get" in request:
                value = getattr(module, request["get"])
                answer = {"kind": "call"} if callable(value) else {"kind": "data", "value": pack(value)}
            else:
                args = [unpack(one) for one in request["args"]]
                kwargs = {key: unpack(one) for key, one in request["kwargs"].items()}
                value = getattr(module, request["call"])(*args, **kwargs)
                answer = {"kind": "data", "value": pack(value)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)[:2000]}
        send(answers, answer)


if __name__ == "__main__":
    serve(sys.argv[1:])
