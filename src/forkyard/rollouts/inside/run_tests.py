"""pytest with the expected tests alone, telling each outcome on a pipe of root's.

python run_tests.py DESCRIPTOR < job
"""

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class Reporter:
    """A plugin. A test has passed if its three phases have, and nothing about it was unexpected."""

    def __init__(self, expected, say):
        self.expected = expected
        self.say = say
        self.phases = {}

    def pytest_collection_modifyitems(self, config, items):
        left = [item for item in items if item.nodeid not in self.expected]
        items[:] = [item for item in items if item.nodeid in self.expected]
        if left:
            config.hook.pytest_deselected(items=left)

    def pytest_collectreport(self, report):
        if report.failed:
            self.say(collect=report.nodeid, message=str(report.longrepr)[-2000:])

    def pytest_runtest_logreport(self, report):
        phases = self.phases.setdefault(report.nodeid, {})
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        phases[report.when] = (outcome, str(report.longrepr)[-2000:] if report.longrepr else "")
        if report.when == "teardown":
            self.tell(report.nodeid, phases)

    def tell(self, nodeid, phases):
        for when in ("setup", "call", "teardown"):
            outcome, message = phases.get(when, ("missing", ""))
            if outcome != "passed":
                if outcome == "failed" and when != "call":
                    outcome = "error"
                self.say(test=nodeid, outcome=outcome, message=message)
                return
        self.say(test=nodeid, outcome="passed")


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    job = json.loads(sys.stdin.buffer.read())
    key = job.pop("key")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    pipe = os.fdopen(descriptor, "w", buffering=1)

    def say(**record):
        pipe.write(json.dumps({"key": key, **record}) + "\n")

    lib = os.path.join(HERE, "lib")
    sys.path = [path for path in sys.path if path not in ("", HERE)]
    if os.path.isdir(lib):
        sys.path.insert(0, lib)
    import pytest

    if job["isolate"]:
        top = os.path.join(HERE, "private", "tests")
        install_proxies(job)
    else:
        top = job["workdir"]
        # After pytest and what it needs are here, so that no module beside the code is taken for them.
        for path in reversed(job["import_paths"]):
            sys.path.insert(0, os.path.normpath(os.path.join(top, path)))
    os.chdir(top)
    files = list(dict.fromkeys(name.partition("::")[0] for name in job["expected"]))
    there = [name for name in files if os.path.exists(name)]
    plugins = [word for name in job["plugins"] for word in ("-p", name)]
    arguments = [
        "-c",
        os.path.join(HERE, "pytest.ini"),
        "--rootdir",
        top,
        "--confcutdir",
        top,
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
        "-o",
        "addopts=",
        *plugins,
        "--",
        *there,
    ]
    code = int(pytest.main(arguments, plugins=[Reporter(frozenset(job["expected"]), say)])) if there else 5
    sys.stdout.flush()
    sys.stderr.flush()
    say(finished=code)
    pipe.close()
    # Nothing of the code's (threads, exit handlers) has a say in how it ends.
    os._exit(code)


def install_proxies(job):
    """What the tests import of the code under test is called in another process."""
    space = {"__name__": "isolate"}
    with open(os.path.join(HERE, "isolate.py")) as file:
        exec(compile(file.read(), "isolate.py", "exec"), space)
    space["install"](job, os.path.join(HERE, "isolate.py"))


main()
