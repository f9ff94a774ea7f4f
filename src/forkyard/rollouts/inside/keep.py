"""Runs as root in a grading copy before anything crosses, in the interpreter of the tests: where
pytest is, and with a second argument a copy of it that nobody but root can change.

    python keep.py DIRECTORY [copy]
"""

import json
import os
import shutil
import sys

# What pytest is made of, in its present and its older versions.
PARTS = (
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
    "tomli",
    "py",
    "typing_extensions",
    "attr",
    "attrs",
)


def main() -> None:
    top = sys.argv[1]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if path not in ("", here)]
    import importlib.util

    import pytest

    lib = os.path.join(top, "lib")
    for name in PARTS if "copy" in sys.argv[2:] else ():
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        if spec.submodule_search_locations:
            source = os.path.dirname(spec.origin)
            ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, os.path.join(lib, name), ignore=ignore, dirs_exist_ok=True)
        else:
            os.makedirs(lib, exist_ok=True)
            shutil.copy(spec.origin, lib)
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    said = {"base": base, "python": sys.executable, "pytest": pytest.__version__}
    with open(os.path.join(top, "private", "kept.json"), "w") as file:
        json.dump(said, file)


main()
