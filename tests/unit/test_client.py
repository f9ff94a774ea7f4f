"""The blocking client against the daemon's surface, over a real socket."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from daemon_thread import DEADLINE_S, ThreadedDaemon, until

from forkyard import (
    CapacityError,
    Client,
    CommandFailedError,
    ConflictError,
    CorruptSnapshotError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    Sandbox,
    SandboxLostError,
    UnavailableError,
)
from forkyard import requests as rq


@pytest.fixture
def box(client: Client) -> Sandbox:
    return client.sandbox(client.create_sandbox("box").id)


def test_a_sandboxs_life(client: Client) -> None:
    made = client.create_sandbox("a", labels={"k": "v"})
    assert made["id"] == made.id
    assert client.get_sandbox("a") == made
    assert client.list_sandboxes(labels={"k": "v"}) == [made]
    assert client.list_sandboxes({"k": "other"}) == []
    assert client.rename_sandbox("a", "b").name == "b"
    assert client.set_ttl("b", 2.5).ttl_min == 2.5
    assert client.set_egress("b", egress_allow=["x:443"]).egress_allow == ["x:443"]
    assert client.stop_sandbox("b").state == "stopped"
    assert client.start_sandbox("b").state == "running"
    assert client.wait_sandbox("b").state == "running"
    assert client.usage("b").processes == 4
    assert client.checkpoint("b", "before").label == "before"
    assert client.rewind("b").name == "b"
    assert client.snapshot("b", "s").name == "s"
    assert [node.name for node in client.tree()] == ["b"]
    assert client.delete_sandbox("b").state == "deleted"
    assert client.delete_sandbox("b") is None
    assert client.delete_sandboxes({"k": "v"}) == []
    assert str(client.version()) == client.version().version
    assert client.health().ok
    assert client.capacity().fits == 1


def test_forks_are_what_the_guide_reads(client: Client, box: Sandbox) -> None:
    box.write_file("x", "1")
    forked = client.fork("box", 3, prefix="ep-")
    assert [fork["name"] for fork in forked["forks"]] == ["ep-1", "ep-2", "ep-3"]
    assert client.sandbox("ep-2").read_text("x") == "1"
    assert pickle.loads(pickle.dumps(forked)) == forked


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.get_sandbox("none"), NotFoundError),
        (lambda c: c.create_sandbox(cpus="many"), InvalidRequestError),
        (lambda c: c.create_sandbox("box"), ConflictError),
        (lambda c: c.fork("box", 100), CapacityError),
        (lambda c: c.delete_snapshot("x"), CorruptSnapshotError),
        (lambda c: c.delete_template("x"), InternalError),
        (lambda c: c.shell("box", ["a", "list"]), InvalidRequestError),
        (lambda c: c.exec("box", "a string"), InvalidRequestError),
        (lambda c: c.spawn("box", []), InvalidRequestError),
        (lambda c: c.spawn("none", "true"), NotFoundError),
        (lambda c: c.adopt("box", lease="mine"), InvalidRequestError),
        (lambda c: c.read_file("box", "none"), NotFoundError),
    ],
)
def test_errors_keep_their_class(client: Client, box: Sandbox, call: Callable, error: type) -> None:
    with pytest.raises(error) as caught:
        call(client)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.message) == (type(caught.value), caught.value.message)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.create_sandbox(wait=False, mem_mb=1 << 70),
        lambda c: c.create_sandbox(disk_mb=10**15),
        lambda c: c.create_sandbox(ttl_min=float("nan")),
        lambda c: c.fork("box", 1, wait_s=-1),
        lambda c: c.fork("box", 1, wait_s=float("inf")),
        lambda c: c.exec("box", ["true"], timeout_s=float("nan")),
        lambda c: c.exec("box", ["true"], stdin="\ud800"),
        lambda c: c.exec("box", ["cat"], stdin=iter([b"a", 1])),
        lambda c: c.exec_many([("box",)]),
        lambda c: c.attach("box", 1 << 40).wait(),
        lambda c: c.attach("box", -1).wait(),
        lambda c: c.audit(since=float("nan")),
        lambda c: c.audit(limit=1 << 64),
        lambda c: c.list_sandboxes(state="nope"),
        lambda c: c.list_sandboxes(state="\udc80"),
        lambda c: c.write_file("box", "file", "\ud800"),
        lambda c: c.write_file("box", 5, b"x"),
        lambda c: c.write_file("box", "file", 5),
        lambda c: c.read_file("box", 5),
        lambda c: c.exec("box", [1]),
        lambda c: c.exec("box", ["true"], cwd=5),
        lambda c: c.git("box", "\udc80"),
        lambda c: c.explore("box", [5]),
        lambda c: c.create_sandbox(image=5),
        lambda c: c.build_template("x", 5),
    ],
)
def test_what_cannot_be_is_said_to_be_wrong(client: Client, box: Sandbox, call: Callable) -> None:
    with pytest.raises(InvalidRequestError):
        call(client)
    assert box.shell("echo fine").stdout == "fine\n"


def test_a_refused_value_is_named(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"^CreateSandbox: wait_s: Expected `float` >= 0"):
        client.create_sandbox(wait_s=-1)


def test_exec_and_shell(box: Sandbox) -> None:
    result = box.shell("echo out; echo err >&2; exit 3", env={"A": "x\n$y'\""})
    assert (result.ok, result.exit_code, result.stdout, result["stderr"]) == (False, 3, "out\n", "err\n")
    assert box.exec(["printf", "%s", "a b"]).stdout == "a b"
    assert box.shell('printf %s "$A"', env={"A": "x\n$y'\""}).stdout == "x\n$y'\""
    killed = box.shell("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, 9)
    assert box.shell("cat").stdout == ""
    with pytest.raises(CommandFailedError) as caught:
        box.shell("echo why >&2; exit 4", check=True)
    assert caught.value.result.exit_code == 4
    assert "why" in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, (4 << 20) + 1, 50 << 20])
@pytest.mark.parametrize("form", ["bytes", "file", "iterator"])
def test_stdin_of_any_size(box: Sandbox, size: int, form: str) -> None:
    data = os.urandom(1024) * (size // 1024 + 1)
    data = data[:size]
    given = {
        "bytes": data,
        "file": io.BytesIO(data),
        "iterator": (data[at : at + 65536] for at in range(0, size, 65536)),
    }[form]
    box.write_file("expected", data)
    assert box.shell("cmp - expected && echo same", stdin=given).stdout == "same\n"


def test_exec_many(client: Client, box: Sandbox) -> None:
    client.create_sandbox("other")
    results = client.exec_many([("box", "echo 1"), ("none", "echo 2"), ("other", ["echo", "3"])])
    assert results[0].stdout == "1\n"
    assert isinstance(results[1], NotFoundError)
    assert results[2].stdout == "3\n"


def test_spawn_streams_both_ways(box: Sandbox) -> None:
    with box.spawn("while read x; do echo got $x; done; echo end >&2") as process:
        stream = process.stream()
        process.write("one\n")
        assert next(stream) == ("stdout", b"got one\n")
        process.write(b"two\n")
        chunk = next(stream)
        assert (chunk.kind, chunk.data) == ("stdout", b"got two\n")
        with pytest.raises(ConflictError):
            next(process.stream())
        process.close_stdin()
        assert list(stream) == [("stderr", b"end\n")]
        assert process.wait().ok
    assert process.wait().exit_code == 0


def test_wait_collects_what_nobody_read(box: Sandbox) -> None:
    result = box.spawn("echo a; echo b >&2; exit 2").wait()
    assert (result.stdout, result.stderr, result.exit_code) == ("a\n", "b\n", 2)


def test_wait_while_another_thread_reads(box: Sandbox) -> None:
    process = box.spawn("read x; exit 5")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(chunk.data for chunk in process.stream()))
    reader.start()
    until(lambda: process._reading)
    process.close_stdin()
    assert process.wait().exit_code == 5
    reader.join(DEADLINE_S)


def test_signals(box: Sandbox) -> None:
    process = box.spawn("sleep 1000")
    process.signal(15)
    assert process.wait().signal == 15


@pytest.mark.parametrize("how", ["close", "drop", "exit"])
def test_a_handle_that_goes_ends_its_command(daemon: ThreadedDaemon, box: Sandbox, how: str) -> None:
    process = box.spawn("sleep 1000")
    if how == "close":
        process.close()
    elif how == "exit":
        with process:
            pass
    else:
        del process
        gc.collect()
    until(lambda: daemon.yard.execs.cancelled == 1)


def test_a_detached_command_stays_and_is_found_again(box: Sandbox) -> None:
    process = box.spawn("echo first; read x; echo second $x", detach=True)
    assert next(process.stream()).data == b"first\n"
    process.close()
    (found,) = [p for p in box.processes() if p.handle]
    again = box.attach(found.pid)
    again.write("y\n")
    assert again.wait().stdout == "first\nsecond y\n"


def test_closing_in_one_thread_ends_reading_in_another(box: Sandbox) -> None:
    process = box.spawn("sleep 1000")
    seen: list[BaseException] = []

    def read() -> None:
        try:
            list(process.stream())
        except BaseException as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: process._reading)
    process.close()
    reader.join(DEADLINE_S)
    assert not reader.is_alive()


def test_threads_share_a_client(client: Client, box: Sandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: box.shell(f"echo {i}").stdout, range(64)))
    assert results == [f"{i}\n" for i in range(64)]


def test_a_pickled_client_connects_again(client: Client, box: Sandbox) -> None:
    assert pickle.loads(pickle.dumps(client)).get_sandbox("box").name == "box"


def test_after_a_fork_both_go_on(client: Client, box: Sandbox) -> None:
    box.shell("true")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        try:
            for i in range(20):
                assert client.shell("box", f"echo c{i}").stdout == f"c{i}\n"
            queue.put("ok")
        except BaseException as error:
            queue.put(repr(error))

    process = context.Process(target=child)
    process.start()
    for i in range(20):
        assert client.shell("box", f"echo p{i}").stdout == f"p{i}\n"
    assert queue.get() == "ok"
    process.join()


def test_a_forked_child_does_not_keep_the_parents_stream_open(daemon: ThreadedDaemon, box: Sandbox) -> None:
    process = box.spawn("sleep 1000")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        process.close()
        until(lambda: daemon.yard.execs.cancelled == 1)
    finally:
        os.close(write)
        os.waitpid(pid, 0)


def test_the_lease_is_this_process_and_close_ends_it(daemon: ThreadedDaemon) -> None:
    client = Client(socket=daemon.socket, start=False)
    mine = client.create_sandbox("mine", ephemeral=True)
    client.create_sandbox("lasting")
    runs = client.create_sandbox("runs", ephemeral=True, lease="run:7")
    forked = client.fork("lasting", 2, ephemeral=True).forks
    lease = daemon.yard.leases[mine.id]
    assert lease == rq.Lease(pid=os.getpid(), start_time=lease.start_time)
    assert lease.start_time
    assert daemon.yard.leases[runs.id] == rq.Lease(run="7")
    client.close()
    left = {info.name for info in daemon.yard.boxes.values()}
    assert left == {"lasting", "runs"}
    assert not left & {fork.name for fork in forked}


def test_a_childs_close_leaves_the_parents_sandboxes(daemon: ThreadedDaemon) -> None:
    client = Client(socket=daemon.socket, start=False)
    client.create_sandbox("mine", ephemeral=True)
    pid = os.fork()
    if pid == 0:
        client.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert client.get_sandbox("mine").name == "mine"
    client.close()


def test_defaults_in_this_processs_environment(
    daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKYARD_DEFAULT_EGRESS_ALLOW", "@pip")
    monkeypatch.setenv("FORKYARD_DEFAULT_TTL_MIN", "5")
    client.create_sandbox("a")
    client.create_sandbox("b", egress="deny", ttl_min=1)
    first, second = daemon.yard.requests
    assert (first.egress, first.egress_allow, first.ttl_min) == (None, ["@pip"], 5)
    assert (second.egress, second.egress_allow, second.ttl_min) == ("deny", None, 1)
    assert first.type is None


def test_a_restart_between_requests_is_not_noticed(daemon: ThreadedDaemon, client: Client) -> None:
    client.create_sandbox("a")
    daemon.restart()
    assert client.get_sandbox("a").name == "a"


def test_a_running_command_outlives_the_daemon(daemon: ThreadedDaemon, client: Client, box: Sandbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(box.shell, "while [ ! -e go ]; do sleep 0.01; done; echo done")
        until(lambda: daemon.yard.execs.runs == 1)
        daemon.restart()
        until(lambda: daemon.times_up == 2 and not daemon.yard.execs.kept)
        box.write_file("go", "")
        assert future.result(DEADLINE_S).stdout == "done\n"
    assert daemon.yard.execs.runs == 1
    assert daemon.yard.execs.cancelled == 0


def test_a_stream_goes_on_with_the_next_daemon(daemon: ThreadedDaemon, box: Sandbox) -> None:
    process = box.spawn("echo one; read x; echo two; read x; echo three")
    stream = process.stream()
    assert next(stream).data == b"one\n"
    daemon.restart()
    until(lambda: daemon.times_up == 2)  # without start=True a client does not wait for one
    process.write("\n")
    assert next(stream).data == b"two\n"
    process.write("\n")
    assert next(stream).data == b"three\n"
    assert process.wait().ok


def test_a_stream_that_breaks_says_why(daemon: ThreadedDaemon, box: Sandbox) -> None:
    box.write_file("big", b"x" * (2 << 20))
    daemon.yard.fail_reads_after = 1
    with pytest.raises(SandboxLostError) as caught:
        box.read_file("big")
    assert caught.value.cause == "guest"


def test_no_daemon(tmp_path) -> None:
    client = Client(socket=tmp_path / "none.sock", start=False)
    with pytest.raises(UnavailableError) as caught:
        client.version()
    assert "forkyard daemon start" in caught.value.hint
    client.close()


def test_a_daemon_of_another_version(tmp_path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()

        def answer() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nforkyard-wire: 999\r\ncontent-length: 1\r\n\r\n\x80")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnavailableError) as caught:
            Client(socket=path, start=False).version()
        thread.join()
    assert "forkyard daemon restart" in caught.value.hint
