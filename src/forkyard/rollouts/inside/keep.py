"""Runs as root in a grading copy before anything crosses, in the interpreter of the tests: says
where that and pytest are, and, where what crosses could reach pytest, keeps a copy of it.

    python keep.py DIRECTORY WORKDIR [copy]
"""

import json
import os
import shutil
import sys

# What pytest is made of, in its present and its older versions.
PARTS = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "py"}
PARTS |= {"typing_extensions", "attr", "attrs", "importlib_metadata", "zipp"}


def main() -> None:
    top, workdir = sys.argv[1:3]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if path not in ("", here)]
    import importlib.util

    found = importlib.util.find_spec("pytest")
    if found is None:
        raise SystemExit("there is no pytest")
    where = os.path.dirname(os.path.dirname(os.path.abspath(found.origin)))
    if "copy" in sys.argv[3:] or os.path.realpath(where).startswith(workdir.rstrip("/") + "/"):
        where = copied(os.path.join(top, "lib"))
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    said = {"base": base, "python": sys.executable, "lib": where}
    with open(os.path.join(top, "private", "kept.json"), "w") as file:
        json.dump(said, file)


def copied(lib):
    """The modules of pytest that a run loads, with their byte code."""
    import _pytest
    import pytest  # noqa: F401

    for name in os.listdir(os.path.dirname(_pytest.__file__)):
        if name.endswith(".py") and name != "__init__.py":
            try:
                __import__("_pytest." + name[:-3])
            except Exception:
                continue
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if name.partition(".")[0] not in PARTS or not source:
            continue
        package = hasattr(module, "__path__")
        place = os.path.join(lib, *name.split("."))
        place = os.path.join(place, "__init__.py") if package else place + os.path.splitext(source)[1]
        for one, into in ((source, place), (code_of(module), cached(place, code_of(module)))):
            if one and os.path.exists(one):
                os.makedirs(os.path.dirname(into), exist_ok=True)
                shutil.copy2(one, into)
    return lib


def code_of(module):
    """Where its byte code is."""
    return getattr(module.__spec__, "cached", None)


def cached(place, original):
    """Where the byte code of the module at ``place`` belongs."""
    return os.path.join(os.path.dirname(place), "__pycache__", os.path.basename(original or "none"))


main()
