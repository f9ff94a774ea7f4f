# ruff: noqa: F821
"""What a session's Python code shows besides text. A part of the program in ``python.py``."""

import base64
import io
import json
import mimetypes
import os
import sys

MAX_DATA = 16 << 20
BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")
REPRS = (
    ("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"), ("image/svg+xml", "_repr_svg_"),
    ("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_"), ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"), ("application/pdf", "_repr_pdf_"),
)  # fmt: skip


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
