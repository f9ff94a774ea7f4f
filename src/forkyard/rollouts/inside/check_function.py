"""Runs as root in a grading copy: a problem's checks, whose candidate is called in another process.

python -I -S check_function.py MODULE
"""

import json
import os
import pwd
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
# The other process runs it, so that others can read it.
PROGRAM = "/var/lib/forkyard-grader/isolate.py"


def main() -> None:
    space = {"__name__": "isolate"}
    with open(os.path.join(HERE, "isolate.py")) as file:
        source = file.read()
    exec(compile(source, "isolate.py", "exec"), space)
    with open(PROGRAM, "w") as file:
        file.write(source)
    with open(os.path.join(HERE, "problem.json")) as file:
        problem = json.load(file)
    nobody = pwd.getpwnam("nobody")
    job = {
        "python": "python3",
        "workdir": os.getcwd(),
        "import_paths": ["."],
        "modules": [sys.argv[1]],
        "uid": nobody.pw_uid,
        "gid": nobody.pw_gid,
        "home": "/tmp",
    }
    message = ""
    try:
        space["install"](job, PROGRAM)
        module = __import__(sys.argv[1])
        # What the prompt defines beside the function is the problem's own here, not the candidate's.
        given = {"__name__": "problem"}
        exec(compile(problem["prompt"], "prompt", "exec"), given)
        exec(compile(problem["test"], "test", "exec"), given)
        candidate = getattr(module, problem["entry_point"])
        # Some checks call it by its name.
        given[problem["entry_point"]] = candidate
        given["check"](candidate)
    except BaseException as error:
        message = "".join(traceback.format_exception_only(type(error), error)).strip()[-2000:] or "failed"
    with open(os.environ["FORKYARD_REPORT"], "w") as file:
        json.dump({"passed": not message, "message": message, "end": True}, file)
    os._exit(0)


main()
