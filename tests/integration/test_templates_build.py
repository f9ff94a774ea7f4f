# ruff: noqa: F401, F811
"""Templates from Dockerfiles, and those that hold something running."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from image_kit import (
    Registry,
    musl_root,
    packages,
    registry,
    skopeo,
    static_program,
    tar_of,
    templates,
)
from yard_home import YardHome, client, until, yard

from forkyard import Client
from forkyard.errors import (
    CommandFailedError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
)
from forkyard.types import Progress, SandboxInfo

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]

Fetch = Callable[..., Path]

WHOLE = """\
# syntax of most instructions, in two stages
ARG PARENT=forkyard/base
FROM ${PARENT} AS builder
USER root
COPY hello.c /src/hello.c
RUN gcc -O1 -o /usr/local/bin/hello /src/hello.c

FROM ${PARENT}
LABEL about=test
ARG GREETING
ENV GREETING=${GREETING:-none} \\
    OTHER="two words"
USER root
COPY --from=builder /usr/local/bin/hello /usr/local/bin/
ADD data.tar.gz /opt/
COPY --chown=user:user . /home/user/app
RUN ["/bin/sh", "-c", "rm -rf /usr/share/zoneinfo/Etc && mkdir /usr/share/zoneinfo/Etc && id -u > /opt/who"]
SHELL ["/bin/bash", "-ec"]
RUN [[ -n "$GREETING" ]] && echo "$GREETING" > /opt/greeting
VOLUME /opt/volume
EXPOSE 8000
HEALTHCHECK CMD true
STOPSIGNAL SIGTERM
ONBUILD RUN true
WORKDIR /home/user/app/deep
WORKDIR ../made
USER user
ENTRYPOINT ["python", "-m"]
CMD ["http.server", "8000"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context."""
    root = tmp_path / "context"
    (root / "sub").mkdir(parents=True)
    (root / "Dockerfile").write_text(WHOLE)
    (root / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    (root / "sub/kept").write_text("kept")
    (root / "sub/secret").write_text("secret")
    (root / ".dockerignore").write_text("sub/*\n!sub/kept\n")
    (tmp_path / "inside.txt").write_text("from the tar")
    subprocess.run(["tar", "-czf", root / "data.tar.gz", "-C", tmp_path, "inside.txt"], check=True)
    return root


def started(client: Client, template: str, **options: object) -> SandboxInfo:
    return client.create_sandbox(template=template, **options)  # type: ignore[arg-type]


def test_every_instruction_on_base(templates: Client, context: Path, yard: YardHome) -> None:
    told: list[Progress] = []
    info = templates.build_template(
        "app", context, build_args={"GREETING": "hi there"}, on_progress=told.append
    )
    assert (info.kind, info.user, info.workdir) == ("build", "user", "/home/user/app/made")
    assert info.env["GREETING"] == "hi there" and info.env["OTHER"] == "two words"
    assert any("RUN gcc" in progress.text for progress in told if progress.kind == "step")
    box = started(templates, "app")
    said = templates.shell(box.id, "pwd; id -un; hello; cat /opt/inside.txt /opt/who /opt/greeting; "
                           "ls /usr/share/zoneinfo/Etc ../sub; test -e /src || echo no sources; "
                           "python -c 'import numpy'; stat -c %U ../sub/kept").stdout.split("\n")  # fmt: skip
    assert said[:7] == ["/home/user/app/made", "user", "hello", "from the tar0", "hi there",
                        "../sub:", "kept"]  # fmt: skip
    assert "no sources" in said and "secret" not in said and said[-2] == "user"

    # The parent's disk is shared, not copied.
    layers = [path.name for path in (yard.home / "store/layers").iterdir() if path.is_dir()]
    small = [name for name in layers if name.startswith("t-") and not name.startswith("t-base")]
    assert len(small) == 1
    used = subprocess.run(["du", "-sm", yard.home / "store/layers" / small[0], yard.home / "builds"],
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert all(int(line.split()[0]) < 40 for line in used.splitlines()), used


def test_the_same_input_is_built_once(templates: Client, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM forkyard/base\nCOPY . /x\nRUN date +%s%N > /home/user/when\n")
    told: list[Progress] = []
    made: list[str] = []

    def build(name: str) -> None:
        info = templates.build_template(name, context, on_progress=told.append)
        made.append(info.key)

    threads = [threading.Thread(target=build, args=(f"same{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    build("later")
    assert len(set(made)) == 1 and len(made) == 4
    notes = [progress.text for progress in told]
    assert "nothing has changed: it is built already" in notes
    whens = set()
    for name in ("same0", "later"):
        whens.add(templates.read_text(started(templates, name).id, "/home/user/when"))
    assert len(whens) == 1

    # Other content is built, but the instructions before it come out of the cache.
    (context / "Dockerfile").write_text(
        "FROM forkyard/base\nRUN date +%s%N > /home/user/first\nCOPY hello.c /x\n"
    )
    first = templates.build_template("cached", context)
    (context / "hello.c").write_text("other")
    second = templates.build_template("cached", context)
    assert first.key != second.key
    box = started(templates, "cached")
    when = templates.read_text(box.id, "/home/user/first")
    assert templates.read_text(box.id, "/x") == "other"
    third = templates.build_template("cached2", context)
    assert third.key == second.key
    assert templates.read_text(started(templates, "cached2").id, "/home/user/first") == when


def test_a_cache_that_grew_too_large_is_dropped(
    templates: Client, tmp_path: Path, yard: YardHome
) -> None:
    config = yard.home / "config.toml"
    before = config.read_text() if config.exists() else ""
    config.write_text(f"{before}build_cache_gb = 0\n")
    templates.shutdown()
    try:
        for text in ("one", "two"):
            (tmp_path / "Dockerfile").write_text(f"FROM forkyard/base\nRUN echo {text} > /home/user/said\n")
            templates.build_template(text, tmp_path)
            assert not (yard.home / "builds" / "storage").exists()
            templates.create_sandbox(text, template=text)
            assert templates.read_text(text, "said") == f"{text}\n"
    finally:
        config.write_text(before)
        templates.shutdown()
    (tmp_path / "Dockerfile").write_text("FROM forkyard/base\nRUN true\n")
    templates.build_template("three", tmp_path)
    assert (yard.home / "builds" / "storage").exists()


def test_failures_name_the_instruction(templates: Client, context: Path) -> None:
    (context / "Bad").write_text("FROM forkyard/base\nRUN true\nRUN echo some words; echo more >&2; exit 3\n")
    with pytest.raises(CommandFailedError) as failed:
        templates.build_template("bad", context, "Bad")
    assert "`RUN echo some words; echo more >&2; exit 3`" in failed.value.message
    # (stdout and stderr are two pipes: either may be read first.)
    assert set(failed.value.message.splitlines()[-2:]) == {"some words", "more"}
    (context / "Bad").write_text("FROM forkyard/base\nCOPY none /x\n")
    with pytest.raises(CommandFailedError, match="COPY none /x"):
        templates.build_template("bad", context, "Bad")
    (context / "Bad").write_text("FROM forkyard/none\n")
    with pytest.raises(NotFoundError, match="none"):
        templates.build_template("bad", context, "Bad")
    (context / "Bad").write_text("FROM forkyard/base\nUSER nobody-here\n")
    with pytest.raises(InvalidRequestError, match="nobody-here"):
        templates.build_template("bad", context, "Bad")
    with pytest.raises(NotFoundError):
        templates.build_template("bad", context, "NoFile")
    assert [info.name for info in templates.list_templates()] == ["base"]


def test_from_scratch_from_a_registry_and_from_another_template(
    templates: Client, registry: Registry, packages: Fetch, tmp_path: Path
) -> None:
    root = tmp_path / "scratch"
    root.mkdir()
    static_program(root)
    (root / "Dockerfile").write_text('FROM scratch\nCOPY alone /alone\nUSER 4:4\nENTRYPOINT ["/alone"]\n')
    templates.build_template("alone", root)
    box = started(templates, "alone")
    assert templates.exec(box.id, ["/alone"]).stdout == "alone, uid 4\n"

    archive = tar_of(musl_root(packages, tmp_path), tmp_path / "musl.tar")
    templates.pull_template("musl", str(archive))
    (root / "Dockerfile").write_text("FROM forkyard/musl\nRUN echo one > /one\nRUN rm /bin/ls\nUSER app\n")
    templates.build_template("second", root)
    (root / "Dockerfile").write_text("FROM forkyard/second\nCOPY --from=forkyard/alone /alone /bin/alone\n")
    info = templates.build_template("third", root)
    assert info.user == "app"
    box = started(templates, "third")
    assert templates.shell(box.id, "cat /one; alone; musl-program; ls").stdout == (
        "one\nalone, uid 100\nfrom musl\n"
    )

    skopeo("copy", "-q", f"tarball:{archive}", f"oci:{tmp_path}/layout:1")
    reference = registry.push(f"oci:{tmp_path}/layout:1", "musl:1")
    (root / "Dockerfile").write_text(f"FROM {reference}\nRUN musl-program > /said\n")
    templates.build_template("remote", root)
    assert templates.read_text(started(templates, "remote").id, "/said") == "from musl\n"
    (root / "Dockerfile").write_text(f"FROM {registry.address}/none:1\n")
    with pytest.raises(CommandFailedError, match="none:1"):
        templates.build_template("remote", root)


def test_a_build_that_nobody_waits_for_ends(templates: Client, context: Path, yard: YardHome) -> None:
    import multiprocessing

    (context / "Dockerfile").write_text("FROM forkyard/base\nRUN touch /home/user/begun && sleep 300\n")
    other = multiprocessing.get_context("spawn").Process(target=_build, args=(str(yard.home), str(context)))
    other.start()
    storage = yard.home / "builds/storage/overlay"
    until(lambda: list(storage.glob("*/diff/home/user/begun")), 60)
    other.kill()
    other.join()
    until(lambda: not list((yard.home / "builds/tmp").iterdir()))
    # The next build clears its working container.
    (context / "Dockerfile").write_text("FROM forkyard/base\nRUN true\n")
    templates.build_template("after", context)


def _build(home: str, context: str) -> None:
    Client(home=home).build_template("slow", context)


# -- warm commands


SERVER = """\
import http.server, os, time
time.sleep(0.3)
with open("started", "a") as file:
    file.write("once\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"%d\\n" % Handler.count)
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", 8000), Handler)
print("serving now", flush=True)
server.serve_forever()
"""
ASK = "curl -s http://127.0.0.1:8000/; cat started"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A context with a server in it."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "Dockerfile").write_text(
        "FROM forkyard/base\nWORKDIR /home/user/srv\nUSER root\nRUN chown user .\nUSER user\n"
        'COPY server.py .\nCMD ["python", "server.py"]\n'
    )
    return tmp_path


@pytest.mark.parametrize(
    "ready",
    [8000, "port:8000", "log:serving now", "curl -sf http://127.0.0.1:8000/ > /dev/null", None],
    ids=["port", "portword", "log", "command", "idle"],
)
def test_sandboxes_start_with_a_server(templates: Client, server: Path, ready: str | int | None) -> None:
    info = templates.build_template("srv", server, warm=True, ready=ready)
    assert info.warm and info.warm_command == ["python", "server.py"]
    probed = 1 if isinstance(ready, str) and ready.startswith("curl") else 0
    for _ in range(2):
        box = started(templates, "srv")
        assert templates.shell(box.id, ASK).stdout == f"{probed + 1}\nonce\n"
        running = [process for process in templates.processes(box.id) if "server.py" in process.command]
        assert len(running) == 1 and running[0].detached and running[0].user == "user"


def test_a_warm_template_is_forked_and_started_in_other_shapes(templates: Client, server: Path) -> None:
    templates.build_template("srv", server, warm="exec python server.py", ready=8000)
    forks = templates.fork("srv", 3).forks
    for fork in forks:
        assert templates.shell(fork.id, ASK).stdout == "1\nonce\n"
    # No image fits this shape: it boots cold and runs the command.
    cold = started(templates, "srv", type="medium")
    assert templates.shell(cold.id, ASK).stdout == "1\nonce\n"
    templates.delete_template("srv")
    with pytest.raises(ConflictError, match="base is what"):
        templates.delete_template("base")
    assert templates.shell(cold.id, ASK).stdout == "2\nonce\n", "it lives on without its template"


def test_warm_commands_that_fail(templates: Client, server: Path) -> None:
    with pytest.raises(CommandFailedError, match="ended with 3: some words"):
        templates.build_template("bad", server, warm="echo some words; exit 3")
    with pytest.raises(DeadlineError, match="was not ready within 1 s: up"):
        templates.build_template("bad", server, warm="echo up; sleep 60", ready=9, ready_timeout_s=1)
    with pytest.raises(CommandFailedError, match="before it was ready"):
        templates.build_template("bad", server, warm="echo up", ready="log:never")
    with pytest.raises(InvalidRequestError):
        templates.build_template("bad", server, warm="true", ready=123456)
    (server / "Dockerfile").write_text("FROM forkyard/base\n")
    with pytest.raises(InvalidRequestError):
        templates.build_template("bad", server, warm=True)
    assert [info.name for info in templates.list_templates()] == ["base"]
    # What only had to run once may end.
    info = templates.build_template("done", server, warm="echo data > /home/user/data")
    assert info.warm
    assert templates.read_text(started(templates, "done").id, "/home/user/data") == "data\n"


def test_memory_is_loaded_once(templates: Client, server: Path) -> None:
    (server / "Dockerfile").write_text("FROM forkyard/base\nCOPY server.py .\n")
    program = "import numpy, time; x = numpy.ones(4_000_000); print('loaded', flush=True); time.sleep(1e6)"
    load = ["python", "-c", program]
    templates.build_template("numpy", server, warm=load, ready="log:loaded")
    box = started(templates, "numpy")
    loaded = [process for process in templates.processes(box.id) if "numpy.ones" in process.command]
    assert max(process.rss_mb for process in loaded) > 30
    templates.delete_template("numpy")
    checkpoint = templates.checkpoint(box.id)
    assert templates.rewind(box.id, checkpoint.id).state == "running"
