# ruff: noqa: F821
"""The program that runs a session's Python code, inside the sandbox; ``python_show.py`` goes before it.

It is sent to an interpreter's stdin when a session is first used, and needs nothing but the
standard library of Python 3.6 or later; it uses IPython and matplotlib where they are. It is
never imported. ``requests`` (a binary file of JSON lines) is given to it as a global.

What it has to say goes down the pipes that are the program's stdout and stderr, between the
code's own output, in frames of at most PIPE_BUF bytes, so that a write is never torn by another
process's: NUL, the run's id (32 hexadecimal digits), a letter, four digits of length, the payload.
The letter is a capital one where the message goes on in the next frame.
"""

import ast
import atexit
import builtins
import faulthandler
import io
import json
import linecache
import os
import select
import signal
import sys
import threading
import time
import traceback
import types
import warnings

STEP = 4000
MAX_TEXT = 256 << 10
OUT, ERR = os.dup(1), os.dup(2)


class State:
    """Of the run that goes on."""

    id = b"0" * 32
    pid = os.getpid()
    result = None
    error = None
    cut = False
    shown = set()
    figures = 0
    # How the latest runs ended: a run that is asked for again is told, not repeated.
    ended = {}


state = State()
sending = threading.RLock()


def write_all(fd, data):
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # A child made the pipe, which it shares, non-blocking.
            select.select([], [fd], [])


def frames(kind, payload=b""):
    at = 0
    while True:
        piece = payload[at : at + STEP]
        at += STEP
        more = at < len(payload)
        yield b"\0%s%s%04x%s" % (state.id, kind.upper() if more else kind, len(piece), piece)
        if not more:
            return


def send(fd, kind, payload=b""):
    # A child that was forked off has output as any program has, and nothing to report.
    if os.getpid() == state.pid:
        with sending:
            for frame in frames(kind, payload):
                write_all(fd, frame)


def cut(text, limit=MAX_TEXT):
    if len(text) <= limit:
        return text
    state.cut = True
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def encoded(text):
    return text.encode("utf-8", "backslashreplace")


def whole(text):
    return encoded(text).decode()


class Out(io.RawIOBase):
    """A text stream's lower half: written at once, except where lines follow each other so
    quickly that each would cost more than it says. What waits is written 10 ms later."""

    def __init__(self, fd):
        super().__init__()
        self.fd = fd
        self.reset()

    def reset(self):
        self.lock = threading.RLock()
        self.waiting = []
        self.size = 0
        self.last = 0.0
        self.timer = None

    def writable(self):
        return True

    def fileno(self):
        return self.fd

    def isatty(self):
        return False

    def write(self, data):
        data = bytes(data)
        with self.lock:
            self.waiting.append(data)
            self.size += len(data)
            if self.size >= 16384 or time.monotonic() - self.last > 0.01:
                self.push()
            elif self.timer is None:
                self.timer = threading.Thread(target=self.later, daemon=True)
                self.timer.start()
        return len(data)

    def later(self):
        idle = 0
        while idle < 100:
            time.sleep(0.01)
            with self.lock:
                idle = 0 if self.waiting else idle + 1
                if idle == 100:
                    self.timer = None
                try:
                    self.push()
                except OSError:
                    self.waiting = []

    def flush(self):
        self.push()

    def push(self):
        with self.lock:
            if self.waiting:
                data, self.waiting, self.size = b"".join(self.waiting), [], 0
                write_all(self.fd, data)
                self.last = time.monotonic()


outs = [Out(1), Out(2)]


def push_all():
    for out in outs:
        try:
            out.push()
        except OSError:
            out.waiting = []


def before_child(event, _args):
    # What was printed before a child begins comes before what the child prints.
    if event in ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"):
        push_all()


def in_child():
    for out in outs:
        out.reset()


# -- the two ways to run code ---------------------------------------------------------------


class Plain:
    """Runs code with nothing but the standard library."""

    def __init__(self):
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.names = module.__dict__
        self.names["__builtins__"] = builtins
        self.names["display"] = self.display
        self.cells = 0
        self.loop = None

    def display(self, *values):
        for value in values:
            if not shown_by_itself(value) and not show_bundle(self.bundle(value)):
                print(value if isinstance(value, str) else repr(value))

    @staticmethod
    def bundle(value):
        if isinstance(value, type):
            return {}
        found = {}
        for mime, method in REPRS:
            call = getattr(value, method, None)
            if callable(call):
                made = call()
                if made is not None:
                    found[mime] = made
        call = getattr(value, "_repr_mimebundle_", None)
        if callable(call):
            made = call()
            found.update(made[0] if isinstance(made, tuple) else made or {})
        return found

    def run(self, code):
        self.cells += 1
        name = f"<cell {self.cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            self.evaluate(compile(tree, name, "exec", self.flags()))
            if last is not None:
                value = self.evaluate(compile(last, name, "eval", self.flags()))
                if value is not None:
                    self.names["_"] = value
                    if not shown_by_itself(value):
                        show_bundle(self.bundle(value))
                    state.result = repr(value)
        except SystemExit:
            raise
        except BaseException as error:
            note_error(type(error), error, format_plain(error, name))

    @staticmethod
    def flags():
        return getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)

    def evaluate(self, compiled):
        if compiled.co_flags & 0x80:
            import asyncio

            if self.loop is None:
                self.loop = asyncio.new_event_loop()
            return self.loop.run_until_complete(eval(compiled, self.names))
        return eval(compiled, self.names)


def format_plain(error, name):
    """The traceback from the code's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def make_ipython():
    """IPython's shell, which writes no history and no profile."""
    import IPython.display
    from IPython.core.autocall import ExitAutocall
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Hook(DisplayHook):
        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            state.result = format_dict.get("text/plain")
            show_bundle(format_dict)

        def finish_displayhook(self):
            pass

        def compute_format_data(self, result):
            if shown_by_itself(result):
                return {"text/plain": repr(result)}, {}
            return super().compute_format_data(result)

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, source=None, **_more):
            if not show_bundle(data) and data.get("text/plain"):
                print(data["text/plain"])

        def clear_output(self, wait=False):
            pass

    class Exit(ExitAutocall):
        def __call__(self, code=None):
            raise SystemExit(code)

    class Shell(InteractiveShell):
        displayhook_class = Hook
        display_pub_class = Publisher

        def init_ipython_dir(self, ipython_dir):
            """It would be made, in the user's home."""

        def init_profile_dir(self, profile_dir):
            self.profile_dir = None

        def ask_exit(self):
            raise SystemExit(0)

        def _showtraceback(self, etype, evalue, stb):
            note_error(etype, evalue, self.InteractiveTB.stb2text(stb))

        def run(self, code):
            done = self.run_cell(code, store_history=True)
            error = done.error_before_exec or done.error_in_exec
            if isinstance(error, SystemExit):
                state.error = None
                raise error
            if error is not None and state.error is None:
                note_error(type(error), error, repr(error))

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor" if Shell.colors.default_value.islower() else "NoColor"
    config.InteractiveShell.banner1 = ""
    config.InteractiveShell.xmode = "Context"
    shell = Shell.instance(config=config)
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    leave = Exit(shell)
    shell.user_ns["exit"] = shell.user_ns["quit"] = leave
    plain = IPython.display.display

    def display(*values, **options):
        for value in values:
            if not shown_by_itself(value):
                plain(value, **options)

    IPython.display.display = builtins.display = display
    shell.run_cell("None", silent=True)
    return shell


def note_error(kind, value, text):
    try:
        said = str(value)
    except BaseException:
        said = "<no text>"
    state.error = {
        "name": whole(kind.__name__),
        "value": whole(cut(said, 16384)),
        "traceback": whole(cut(text)),
    }


# -- the loop -------------------------------------------------------------------------------


def ignore(_number, _frame):
    """Between runs there is nothing to interrupt. Not SIG_IGN, which children would inherit."""


def exit_code(error):
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def run(runner, code):
    """Run one piece of code and report; the exit code if it ended the session, else None."""
    state.result = state.error = None
    state.shown, state.figures, state.cut = set(), 0, False
    ending = None
    send(OUT, b"b")
    send(ERR, b"b")
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            runner.run(code)
            show_figures()
        finally:
            signal.signal(signal.SIGINT, ignore)
    except SystemExit as error:
        ending = exit_code(error)
    except BaseException as error:
        note_error(type(error), error, "".join(traceback.format_exception(type(error), error, None)))
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:
            # The code closed it, or put something else there.
            restore_stream(name)
    push_all()
    state.result = cut(state.result) if isinstance(state.result, str) else None
    if os.getpid() != state.pid:
        # A copy that the code forked off and let run on: it is not the session.
        os._exit(ending or 0)
    finish = {
        "code": ending if ending is not None else 1 if state.error else 0,
        "exit": ending is not None,
        "cut": state.cut,
    }
    said = [*frames(b"r", encoded(state.result))] if state.result is not None else []
    if state.error:
        said += frames(b"x", json.dumps(state.error).encode("ascii"))
    short = sum(map(len, said)) < 4000
    again = frames(b"f", json.dumps({**finish, "cut": True}).encode("ascii"))
    state.ended[state.id] = [*(said if short else ()), *again]
    if len(state.ended) > 32:
        del state.ended[next(iter(state.ended))]
    said += frames(b"f", json.dumps(finish).encode("ascii"))
    report([b"".join(said)] if short else said)
    os.dup2(OUT, 1)
    os.dup2(ERR, 2)
    return ending


def report(last):
    """The end of a run, on both streams."""
    with sending:
        send(ERR, b"f")
        for frame in last:
            write_all(OUT, frame)


def restore_stream(name):
    fd = 1 if name == "stdout" else 2
    out = outs[fd - 1] = Out(fd)
    stream = io.TextIOWrapper(out, "utf-8", "backslashreplace", newline="\n", write_through=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def main(requests):
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, ignore)
    restore_stream("stdout")
    restore_stream("stderr")
    os.environ.setdefault("MPLBACKEND", "agg")
    sys.meta_path.insert(0, Loads)
    sys.argv = [""]
    builtins.artifact = artifact
    faulthandler.enable(ERR)
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(before_child)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)
    try:
        runner = make_ipython()
    except Exception:
        # Absent, or of a version that is not as expected: code runs all the same.
        runner = Plain()
    ending = None
    while ending is None:
        line = requests.readline()
        if not line:
            break
        try:
            request = json.loads(line.decode())
            state.id = request["id"].encode("ascii")
        except (ValueError, KeyError, TypeError):
            # The rest of a line whose writer went away in the middle of it.
            continue
        if state.id in state.ended:
            send(OUT, b"b")
            report(state.ended[state.id])
        elif "code" in request:
            ending = run(runner, request["code"])
        else:
            send(ERR, b"s")
            send(OUT, b"s")
    try:
        atexit._run_exitfuncs()
        push_all()
    finally:
        os._exit(ending or 0)


main(requests)
