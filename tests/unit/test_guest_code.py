"""The host's end of a code session takes a stream apart, however it was cut and whatever is in it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from typing import Any

import pytest

from forkyard.errors import InvalidRequestError
from forkyard.guest.code import clean_name, mime_of
from forkyard.guest.languages import LANGUAGES, check_code
from forkyard.guest.splitter import Splitter
from forkyard.requests import RunCode
from forkyard.yard.code import run_id, session_tag
from forkyard.yard.commands import CODE_TAG

ID, OTHER = "a" * 32, "b" * 32


def frame(letter: str, payload: bytes = b"", one: str = ID) -> bytes:
    return b"\0%s%s%04x%s" % (one.encode(), letter.encode(), len(payload), payload)


class Heard:
    def __init__(self, *ids: str, hunting: bool = False) -> None:
        self.output = bytearray()
        self.messages: list[tuple[str, str, bytes | None]] = []
        self.splitter = Splitter(self.output.extend, lambda letter, one, payload: self.messages.append(
            (letter.decode(), one, payload)))
        self.splitter.listen(*ids, hunting=hunting)


def test_frames_between_output_however_it_is_cut() -> None:
    stream = (b"a\0b" + frame("b") + b"\0" * 50 + frame("X", b"one ") + b"mid" + frame("x", b"two")
              + frame("f", one=OTHER) + b"\0" + ID.encode()[:20] + b"end" + frame("f", b"{}") + b"tail\0aaaa")
    expected = (b"a\0b" + b"\0" * 50 + b"mid" + frame("f", one=OTHER) + b"\0" + ID.encode()[:20] + b"end"
                + b"tail\0aaaa")
    random.seed(7)
    for size in (1, 2, 3, 7, 38, 39, 1000):
        heard = Heard(ID)
        at = 0
        while at < len(stream):
            step = random.randint(1, size)
            heard.splitter.feed(stream[at : at + step])
            at += step
        heard.splitter.end()
        assert bytes(heard.output) == expected, size
        assert heard.messages == [("b", ID, b""), ("x", ID, b"one two"), ("f", ID, b"{}")]


def test_a_hunt_drops_what_comes_before_the_first_frame() -> None:
    heard = Heard(ID, OTHER, hunting=True)
    noise = b"half a fra\0" + frame("o", one="c" * 32) + b"noise"
    heard.splitter.feed(noise + frame("s", one=OTHER) + b"new")
    assert bytes(heard.output) == b"new" and heard.messages == [("s", OTHER, b"")]
    assert heard.splitter.dropped.endswith(b"noise")


@pytest.mark.parametrize("bad", [b"zzzz", b"ffff", b"-fff", b"0x10", b"+001", b" 001"])
def test_a_frame_that_cannot_be_is_output(bad: bytes) -> None:
    heard = Heard(ID)
    data = b"\0" + ID.encode() + b"r" + bad + b"x" * 100
    heard.splitter.feed(data)
    assert bytes(heard.output) == data and heard.messages == []


def test_an_endless_message_is_not_kept() -> None:
    heard = Heard(ID)
    piece = frame("D", b"x" * 4000)
    for _ in range(5000):
        heard.splitter.feed(piece)
    heard.splitter.feed(frame("d") + frame("r", b"next"))
    assert heard.messages == [("d", ID, None), ("r", ID, b"next")]


def test_a_flood_of_nuls_is_quick() -> None:
    heard = Heard(ID)
    begun = time.perf_counter()
    for _ in range(200):
        heard.splitter.feed(bytes(65536))
    heard.splitter.end()
    assert len(heard.output) == 200 * 65536 and time.perf_counter() - begun < 2


def test_names_and_types_are_cleaned() -> None:
    assert clean_name("../../etc/passwd") == "passwd"
    assert clean_name("..") is None and clean_name("a/") is None and clean_name(None) is None
    assert clean_name("a\nb\0c") == "abc" and clean_name("c:\\x\\y.png") == "y.png"
    assert mime_of("image/png") == "image/png"
    assert mime_of("image/png\r\nx: y") == mime_of("") == mime_of("html") == "application/octet-stream"


def test_code_that_cannot_be_sent() -> None:
    for code in ("a\0b", "x" * (5 << 20), "\ud800"):
        with pytest.raises(InvalidRequestError):
            check_code(code)


def test_tags_and_run_ids() -> None:
    tag = session_tag("javascript", "x" * 128, "user")
    assert tag.startswith(CODE_TAG) and len(tag) <= 64
    assert session_tag("python", "a", "b") != session_tag("python", "a", "c") != session_tag("bash", "a", "c")
    request = RunCode(sandbox="s", code="1", request_id="r")
    assert run_id(request, 0, "a") == run_id(request, 0, "a")
    assert len({run_id(request, 0, "a"), run_id(request, 1, "a"), run_id(request, 0, "b")}) == 3
    assert len(run_id(request, 0, "a")) == 32
    anonymous = RunCode(sandbox="s", code="1")
    assert run_id(anonymous, 0, "a") != run_id(anonymous, 0, "a")


def test_bash_requests_are_one_bare_word() -> None:
    line = LANGUAGES["bash"].request(ID, "echo 'a b' \"$x\"\n\\ é").decode()
    word = line.split()[2]
    assert word == "echo%20%27a%20b%27%20%22%24x%22%0a%5c%20%c3%a9"


class Program:
    """A runner on this host, without a sandbox: what its image may lack is then up to the test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.count = 0
        self.out, self.err = Heard(ID, OTHER, hunting=True), Heard(ID, OTHER, hunting=True)

    async def ask(self, line: bytes) -> None:
        self.process.stdin.write(line)
        await self.process.stdin.drain()

    async def until(self, letter: str) -> dict[str, bytes | None]:
        """Read until both streams had ``letter``; the messages of stdout."""
        for stream, heard in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            while letter not in [message[0] for message in heard.messages]:
                data = await asyncio.wait_for(stream.read(65536), 30)
                assert data, bytes(self.err.splitter.dropped)
                heard.splitter.feed(data)
        said = {message[0]: message[2] for message in self.out.messages}
        self.out.messages.clear()
        self.err.messages.clear()
        return said

    async def run(self, code: str) -> dict[str, Any]:
        for heard in (self.out, self.err):
            heard.output.clear()
        self.count += 1
        one = f"{self.count:032x}"
        for heard in (self.out, self.err):
            heard.splitter.listen(one, OTHER, hunting=self.count == 1)
        await self.ask(LANGUAGES["python"].request(one, code))
        said = await self.until("f")
        return {letter: json.loads(data) if letter in "xf" else data for letter, data in said.items()}


@pytest.fixture
async def plain(tmp_path):
    """The Python runner where there is no IPython."""
    (tmp_path / "IPython.py").write_text("raise ImportError")
    language = LANGUAGES["python"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *language.programs[0][1:], cwd=tmp_path, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, start_new_session=True)
    program = Program(process)
    await program.ask(language.prelude())
    try:
        yield program
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_plain_python_keeps_its_variables(plain: Program) -> None:
    assert (await plain.run("x = 41"))["f"] == {"code": 0, "exit": False, "cut": False}
    assert (await plain.run("print('p'); x + 1"))["r"] == b"42"
    assert bytes(plain.out.output) == b"p\n"
    assert (await plain.run("_ + 1"))["r"] == b"43"
    assert "r" not in await plain.run("None")
    assert (await plain.run("__name__, __import__('sys').argv"))["r"] == b"('__main__', [''])"


async def test_plain_python_errors_start_in_the_code(plain: Program) -> None:
    said = await plain.run("def f():\n    return 1 / 0\nf()")
    assert said["x"]["name"] == "ZeroDivisionError" and said["f"]["code"] == 1
    assert "<forkyard>" not in said["x"]["traceback"] and "return 1 / 0" in said["x"]["traceback"]
    assert (await plain.run("if"))["x"]["name"] == "SyntaxError"
    assert (await plain.run("raise Exception('\\ud800')"))["x"]["value"] == "\\ud800"
    broken = "class E(Exception):\n def __str__(self): raise ValueError\nraise E"
    assert (await plain.run(broken))["x"]["value"] == "<no text>"


async def test_plain_python_awaits_and_shows(plain: Program) -> None:
    assert (await plain.run("import asyncio\nawait asyncio.sleep(0.01)\n7"))["r"] == b"7"
    said = await plain.run("class A:\n def _repr_html_(self): return '<b>'\ndisplay(A()); A()")
    head, _, data = said["d"].partition(b"\n")
    assert json.loads(head)["mime"] == "text/html" and data == b"<b>"
    said = await plain.run("open('f.csv', 'w').write('1'); artifact('f.csv')")
    assert json.loads(said["p"])["name"] == "f.csv" and json.loads(said["p"])["mime"] == "text/csv"
    assert (await plain.run("artifact('none.csv')"))["x"]["name"] == "FileNotFoundError"


async def test_output_of_children_is_in_order_and_breaks_nothing(plain: Program) -> None:
    code = "import os, subprocess\nprint('1'); subprocess.run(['echo', '2']); print('3')\n"
    code += "os.system('echo 4')\n"
    await plain.run(code + "os.write(1, b'5\\n'); print('6')")
    assert bytes(plain.out.output) in (b"1\n2\n3\n4\n5\n6\n", b"1\n2\n3\n4\n6\n5\n")
    await plain.run("if os.fork() == 0: print('child')\nelse: os.wait(); print('parent')")
    assert bytes(plain.out.output) == b"child\nparent\n"
    await plain.run("import sys; sys.stdout.close(); os.close(2)")
    await plain.run("print('again'); print('err', file=sys.stderr)")
    assert bytes(plain.out.output) == b"again\n" and bytes(plain.err.output) == b"err\n"


async def test_an_interrupt_ends_the_code_and_not_the_session(plain: Program) -> None:
    await plain.run("x = 1")
    await plain.ask(LANGUAGES["python"].request(OTHER, "print('begun', flush=True)\nwhile True: pass"))
    while b"begun" not in plain.out.output:
        plain.out.splitter.feed(await asyncio.wait_for(plain.process.stdout.read(65536), 30))
    plain.process.send_signal(signal.SIGINT)
    assert json.loads((await plain.until("f"))["x"])["name"] == "KeyboardInterrupt"
    plain.process.send_signal(signal.SIGINT)
    assert (await plain.run("x"))["r"] == b"1"


async def test_a_half_written_line_is_forgotten_and_a_mark_answered(plain: Program) -> None:
    whole = LANGUAGES["python"].request(OTHER, "print('never')")
    await plain.ask(whole[: len(whole) // 2] + b"\n" + LANGUAGES["python"].mark(OTHER))
    await plain.until("s")
    assert (await plain.run("1"))["r"] == b"1" and bytes(plain.out.output) == b""


async def test_leaving_ends_the_program(plain: Program) -> None:
    said = await plain.run("import sys; sys.exit('bye')")
    assert said["f"] == {"code": 1, "exit": True, "cut": False}
    assert await asyncio.wait_for(plain.process.wait(), 10) == 1
    assert bytes(plain.err.output) == b"bye\n"


async def test_a_long_value_is_cut(plain: Program) -> None:
    said = await plain.run("'y' * 10_000_000")
    assert len(said["r"]) < 300_000 and said["f"]["cut"]


async def test_a_run_that_is_asked_for_again_is_told(plain: Program) -> None:
    await plain.run("n = 0")

    async def ask(code: str) -> tuple[bytes | None, dict[str, Any]]:
        await plain.ask(LANGUAGES["python"].request(OTHER, code))
        said = await plain.until("f")
        return said.get("r"), json.loads(said["f"])

    assert await ask("n += 1; n") == (b"1", {"code": 0, "exit": False, "cut": False})
    assert await ask("n += 1; n") == (b"1", {"code": 0, "exit": False, "cut": True})
