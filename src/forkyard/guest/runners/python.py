"""The program that runs a session's Python code, inside the sandbox.

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
import base64
import builtins
import faulthandler
import io
import json
import linecache
import mimetypes
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
MAX_DATA = 16 << 20
OUT, ERR = os.dup(1), os.dup(2)
BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")
REPRS = (
    ("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"), ("image/svg+xml", "_repr_svg_"),
    ("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_"), ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"), ("application/pdf", "_repr_pdf_"),
)  # fmt: skip


class State:
    """Of the run that goes on."""

    id = b"0" * 32
    pid = os.getpid()
    result = None
    error = None
    cut = False
    shown = set()
    figures = 0


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


# -- what is shown besides text ------------------------------------------------------------


def show(mime, data, name=None):
    """Hand ``data`` over as an artifact."""
    if len(data) > MAX_DATA:
        print(f"forkyard: {mime} of {len(data)} bytes is too large to show", file=sys.stderr)
        return
    head = json.dumps({"mime": mime, "name": name}).encode()
    push_all()
    send(OUT, b"d", head + b"\n" + data)


def as_bytes(mime, value):
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, str):
        if mime in BINARY:
            return base64.b64decode(value)
        return encoded(value)
    return encoded(json.dumps(value, default=str))


def show_bundle(bundle):
    """Show everything in a MIME bundle but its plain text; whether there was anything."""
    found = False
    for mime, value in bundle.items():
        if mime != "text/plain" and value is not None:
            if isinstance(value, tuple):
                value = value[0]
            show(mime, as_bytes(mime, value))
            found = True
    return found


def artifact(what, name=None, mime=None):
    """Hand a file (by its path), or bytes or text, to whoever ran this code.

    A file is read when the code has ended.
    """
    if isinstance(what, (bytes, bytearray)):
        show(mime or "application/octet-stream", bytes(what), name)
        return
    path = os.fspath(what)
    if isinstance(path, str) and not os.path.exists(path) and (mime or "\n" in path):
        show(mime or "text/plain", encoded(path), name)
        return
    path = os.path.abspath(os.fsdecode(path))
    if not os.path.isfile(path):
        raise FileNotFoundError(2, "no such file", path)
    kind = mime or mimetypes.guess_type(path)[0] or "application/octet-stream"
    head = {"path": path, "mime": kind, "name": name or os.path.basename(path)}
    send(OUT, b"p", json.dumps(head).encode("ascii"))


def show_figure(figure):
    """A matplotlib figure as PNG, once in a run."""
    if id(figure) in state.shown:
        return
    state.shown.add(id(figure))
    state.figures += 1
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    show("image/png", buffer.getvalue(), f"figure{state.figures}.png")


def show_figures(*_args, **_kwargs):
    """Show and close every figure that pyplot holds; stands in for ``plt.show``."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None:
        return
    for manager in helpers.Gcf.get_all_fig_managers():
        figure = manager.canvas.figure
        if figure.axes or figure.lines or figure.texts or figure.images:
            show_figure(figure)
    helpers.Gcf.destroy_all()


def with_show(load):
    def exec_module(module):
        load(module)
        module.show = show_figures

    return exec_module


class Loads:
    """Gives pyplot its ``show`` when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "matplotlib.pyplot":
            return None
        for finder in sys.meta_path:
            found = None if finder is Loads else finder.find_spec(name, path, target)
            if found is not None and hasattr(found.loader, "exec_module"):
                found.loader.exec_module = with_show(found.loader.exec_module)
                return found
        return None


def shown_by_itself(value):
    """Whether ``value`` has a form of its own to be shown in, which this then did."""
    kind = type(value)
    if kind.__module__.startswith("matplotlib.") and hasattr(value, "savefig"):
        show_figure(value)
        return True
    if kind.__name__ == "FileLink" and hasattr(value, "path"):
        artifact(value.path)
        return True
    if isinstance(value, os.PathLike) and os.path.isfile(os.fspath(value)):
        artifact(value)
        return True
    return False


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
    last = [*frames(b"r", encoded(state.result))] if state.result is not None else []
    if state.error:
        last += frames(b"x", json.dumps(state.error).encode("ascii"))
    last += frames(b"f", json.dumps(finish).encode("ascii"))
    with sending:
        send(ERR, b"f")
        if sum(map(len, last)) <= 4096:
            last = [b"".join(last)]
        for frame in last:
            write_all(OUT, frame)
    os.dup2(OUT, 1)
    os.dup2(ERR, 2)
    return ending


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
        if "code" in request:
            ending = run(runner, request["code"])
        else:
            send(ERR, b"s")
            send(OUT, b"s")
    try:
        atexit._run_exitfuncs()
        push_all()
    finally:
        os._exit(ending or 0)


main(requests)  # type: ignore[name-defined]  # noqa: F821
