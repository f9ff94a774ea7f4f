"""The agent, fuzzed from the daemon's side with the compiler's sanitizers in it.

    python tests/fuzz/fuzz_agent.py [--seconds 60] [--seed N]

Requests of every kind with a few bytes changed, frames of no kind, torn ones, data for streams that
ended, replies that nobody asked for, and a daemon that does not read. After each round the agent has
to answer a ping, and end by itself when its input does. It needs root, and runs as
nobody, in namespaces of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
SANITIZED = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
}
CLONE_NEWUSER = 0x10000000
IDS = 0x40000000
ACTIONS = 400
PATH = "PATH=/usr/bin:/bin"
ANSWER_S = 20.0
RSS_MB = 1024


def build(into: Path) -> Path:
    """The agent with the sanitizers in it. They need the C library as a shared one."""
    out = into / "agent"
    make = ["make", "-s", "-C", str(ROOT / "agent"), "CC=gcc", f"CFLAGS={SANITIZED}", "LINK=", f"OUT={out}"]
    subprocess.run(make, check=True, timeout=300)
    return out


def fuzz(seconds: float, seed: int) -> str:
    """Build the agent and fuzz it in a place of its own; what it came to.

    Raises:
        RuntimeError: the agent broke; with its last words and the seed.
    """
    place = Path(tempfile.mkdtemp(prefix="fy-fuzz-"))
    try:
        place.chmod(0o755)
        build(place)
        shutil.copy(ROOT / "src/forkyard/wire.py", place / "wire.py")
        shutil.copy(HERE, place / "fuzz_agent.py")
        (place / "home").mkdir()
        os.chown(place / "home", IDS, IDS)
        argv = [_python(), str(place / "fuzz_agent.py"), "--inside", str(seconds), str(seed)]
        argv = [
            "unshare",
            "--net",
            "--ipc",
            "--uts",
            "--pid",
            "--mount",
            "--fork",
            "--kill-child",
            "--mount-proc",
            *argv,
        ]
        code, said = _as_its_own_root(argv, place)
        if code:
            raise RuntimeError(f"seed {seed}: {said[-8000:]}")
        return said.strip()
    finally:
        shutil.rmtree(place)


def _as_its_own_root(argv: list[str], place: Path) -> tuple[int, str]:
    """Run ``argv`` as root of a user namespace in which no id is one that owns anything on the host."""
    ready, go = os.pipe(), os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        if libc.unshare(CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), "unshare")
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os.setgroups([])
        os.setgid(0)
        os.setuid(0)

    def map_ids() -> None:
        os.read(ready[0], 1)
        (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1:]
        for kind in ("uid", "gid"):
            Path(f"/proc/{child}/{kind}_map").write_text(f"0 {IDS} 65536\n")
        os.write(go[1], b"x")

    mapper = threading.Thread(target=map_ids)
    mapper.start()
    with (place / "said").open("w+") as said:
        code = subprocess.call(
            argv,
            env={"PATH": os.environ["PATH"], **OPTIONS},
            cwd=place,
            preexec_fn=enter,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        mapper.join()
        said.seek(0)
        return code, said.read()


def _python() -> str:
    """An interpreter that others may run: one in root's home is not."""
    found = "/usr/bin/python3"
    return found if os.access(found, os.X_OK) else sys.executable


# -- inside ----------------------------------------------------------------------------------------


class Broken(Exception):
    """The agent ended, or does not answer."""


class Agent:
    """One agent, and this side of its wire."""

    def __init__(self, place: Path) -> None:
        taken, self.to = os.pipe()
        self.from_, given = os.pipe()
        self.said = (place / "home" / "said").open("w+b")
        self.process = subprocess.Popen(
            [str(place / "agent"), "--plain", "--net=5353,3128,1080"],
            stdin=taken,
            stdout=given,
            stderr=self.said,
        )
        os.close(taken)
        os.close(given)
        os.set_blocking(self.to, False)
        os.set_blocking(self.from_, False)
        self.received = bytearray()

    def read(self) -> int:
        """Take what is there; how much."""
        try:
            data = os.read(self.from_, 1 << 20)
        except BlockingIOError:
            return 0
        self.received += data
        if len(self.received) > 4 << 20:
            del self.received[: -(1 << 20)]
        return len(data)

    def send(self, data: bytes, *, reading: bool = True) -> bool:
        """Write it all, or as much as an agent takes that nobody reads from."""
        view = memoryview(data)
        deadline = time.monotonic() + (ANSWER_S if reading else 0.05)
        while view:
            try:
                view = view[os.write(self.to, view) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    if reading:
                        raise Broken("it does not take what it is sent") from None
                    return False
                if reading:
                    self.read()
                select.select([self.from_] if reading else [], [self.to], [], 0.02)
            except BrokenPipeError:
                raise Broken(f"it ended with {self.process.wait()}") from None
        return True

    def expect(self, needle: bytes) -> None:
        """Read until something comes."""
        deadline = time.monotonic() + ANSWER_S
        while needle not in self.received:
            if not self.read():
                if self.process.poll() is not None:
                    raise Broken(f"it ended with {self.process.returncode}")
                if time.monotonic() > deadline:
                    raise Broken("no answer")
                select.select([self.from_], [], [], 0.1)

    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def end(self) -> None:
        """Its input ends, and so it does. What it wrote meanwhile is taken."""
        os.close(self.to)
        deadline = time.monotonic() + ANSWER_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
            time.sleep(0.002)
        if self.process.returncode != 0:
            raise Broken(f"its end was {self.process.returncode}")

    def words(self) -> str:
        self.said.seek(0)
        return self.said.read()[-6000:].decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.said.close()
        os.close(self.from_)


class Requests:
    """Payloads of every kind of request, as a daemon would send them."""

    def __init__(self, rnd: random.Random, home: str, wire: Any) -> None:
        self.rnd, self.home, self.wire = rnd, home, wire

    def string(self, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return len(data).to_bytes(4, "little") + data

    def number(self, size: int, *usual: int) -> bytes:
        rnd = self.rnd
        edge = [0, 1, 2, 255, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 8 * size) - 1]
        value = rnd.choice(usual) if usual and rnd.random() < 0.9 else rnd.choice(edge)
        return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def path(self) -> str:
        rnd = self.rnd
        names = [
            "a",
            "a",
            "b",
            "b",
            "c",
            "deep/er",
            "..",
            ".",
            "ä",
            "x" * 300,
            "link",
            "/proc/self/mem",
            "\n",
        ]
        return f"{self.home}/{'/'.join(rnd.choice(names) for _ in range(rnd.randrange(3)))}"

    def argv(self) -> list[str]:
        return self.rnd.choice(
            [
                ["true"],
                ["cat"],
                ["cat"],
                ["/nonexistent"],
                [],
                [""],
                ["sh", "-c", "echo out; echo err >&2; exit 3"],
                ["sh", "-c", "head -c 300000 /dev/zero"],
                ["sleep", "0.05"],
                ["sh", "-c", "kill -9 $$"],
                ["sh", "-c", "sleep 9 & exec cat"],
                ["x" * 70_000],
                ["echo", *["y"] * 500],
            ]
        )

    def spawn(self) -> bytes:
        argv, env = self.argv(), self.rnd.choice([[], [PATH], [PATH, "A=b"], ["=", "A", PATH], ["N=1"] * 300])
        return b"".join(
            (
                self.number(4, 0, 1, 2, 4, 6, 8, 14),
                self.number(2, 24),
                self.number(2, 80),
                self.number(4, 0, 64),
                self.string(self.rnd.choice(["root", "root", "0", "nobody", "none", "0:0", ""])),
                self.string(self.rnd.choice([self.home, self.home, "", self.path()])),
                self.string(os.urandom(self.rnd.choice([0, 16, 64, 65]))),
                len(argv).to_bytes(4, "little"),
                *map(self.string, argv),
                len(env).to_bytes(4, "little"),
                *map(self.string, env),
            )
        )

    def identify(self) -> bytes:
        network = self.number(4, 0, 1) if self.rnd.random() < 0.8 else b""
        return b"".join(
            (
                self.number(4, 0, 1),
                self.number(4, 1),
                self.string("box"),
                self.string("0" * 32),
                self.string("sb_x"),
                self.string(os.urandom(self.rnd.choice([0, 32, 512, 513]))),
                self.number(8, time.time_ns()),
                network,
            )
        )

    def file(self, op: int) -> bytes:
        ops, number, flag = self.wire.Op, self.number, self.number(1, 0, 1)
        tails = {
            ops.STAT: lambda: flag,
            ops.READ: lambda: number(8, 0) + number(8, 0, 100),
            ops.WRITE: lambda: number(4, 0o644, 0xFFFFFFFF) + flag,
            ops.MKDIR: lambda: number(4, 0o755) + flag,
            ops.RENAME: lambda: self.string(self.path()) + flag,
            ops.REMOVE: lambda: flag,
            ops.SYMLINK: lambda: self.string(self.path()),
            ops.CHMOD: lambda: number(4, 0o755, 0),
            ops.CHOWN: lambda: number(4, 0, 1000) + number(4, 0, 1000),
            ops.UTIME: lambda: number(8) + number(8) + flag,
        }
        user = self.rnd.choice(["root", "root", "nobody", "", "none"])
        return self.string(user) + self.string(self.path()) + tails.get(op, bytes)()

    def make(self) -> tuple[int, bytes]:
        """(op, payload)."""
        op = self.wire.Op
        rnd = self.rnd
        kinds = {
            op.SPAWN: self.spawn,
            op.ADOPT: lambda: self.number(4, 1, 2, 9) + self.number(8) + self.number(8),
            op.IDENTIFY: self.identify,
            op.KILL: lambda: self.number(4, 0xFFFF) + self.number(4, 0, 9, 15) + self.number(1, 0, 1, 3),
            op.LOOKUP: lambda: self.string(rnd.choice(["root", "nobody", "", "x" * 200])),
            op.CONNECT: lambda: self.number(2, 1, 53, 3128),
            op.EGRESS: lambda: self.number(4, 0, 1),
        }
        which = rnd.choice([*op, *op, op.SPAWN, op.SPAWN, op.WRITE, op.READ, rnd.randrange(70)])
        if op.STAT <= which <= op.UTIME:
            return which, self.file(which)
        return which, kinds[which]() if which in kinds else b""

    def mutated(self, data: bytes) -> bytes:
        """With a few bytes changed, taken away or put in."""
        rnd, out = self.rnd, bytearray(data)
        for _ in range(rnd.choice([0, 0, 0, 0, 0, 0, 1, 1, 2, 5])):
            at = rnd.randrange(len(out) + 1)
            match rnd.randrange(5):
                case 0 if at < len(out):
                    out[at] ^= 1 << rnd.randrange(8)
                case 1 if at < len(out):
                    out[at] = rnd.choice([0, 1, 0x7F, 0x80, 0xFF])
                case 2:
                    del out[at : at + rnd.choice([1, 4, 50])]
                case 3:
                    out[at:at] = rnd.randbytes(rnd.choice([1, 4, 8, 200]))
                case 4:
                    del out[at:]
        return bytes(out)


class Round:
    """One agent's life."""

    def __init__(self, agent: Agent, rnd: random.Random, home: str, wire: Any) -> None:
        self.agent, self.rnd, self.wire = agent, rnd, wire
        self.requests = Requests(rnd, home, wire)
        self.epoch = 0
        self.next = 1
        self.streams = [1, 2, 0, 0xFFFFFFFF]
        self.frames = 0
        self.attach()

    def attach(self) -> None:
        """A new epoch, from whatever state: the agent has to find it."""
        self.epoch += 1
        nonce = self.rnd.randbytes(16)
        self.agent.received.clear()
        self.agent.send(self.wire.encode_attach(self.epoch, nonce))
        self.agent.expect(nonce)

    def frame(self) -> bytes:
        rnd, wire, type_ = self.rnd, self.wire, self.wire.Type
        stream = rnd.choice(self.streams)
        epoch = self.epoch if rnd.random() < 0.95 else rnd.choice([0, self.epoch - 1, self.epoch + 1])
        number = self.requests.number
        if rnd.random() < 0.45:
            stream, self.next = self.next, self.next + 2
            self.streams = [*self.streams[-12:], stream]
            op, payload = self.requests.make()
            payload = self.requests.mutated(payload)
            return b"".join(wire.encode_request(op, stream, epoch, payload))
        which = rnd.choice([*type_, type_.DATA, type_.DATA, type_.ACK, type_.EOF, rnd.randrange(256)])
        if which in (type_.ATTACH, type_.QUIESCE) and rnd.random() < 0.9:
            which = type_.PING
        payload = {
            type_.DATA: lambda: number(8, 0, 5) + rnd.randbytes(rnd.choice([0, 5, 1000, 65536])),
            type_.ACK: lambda: number(8, 0, 100, 1 << 18) + number(8, 0, 1 << 18, 1 << 40),
            type_.SIGNAL: lambda: number(4, 0, 9, 15) + number(1, 0, 1, 3),
            type_.RESIZE: lambda: number(2, 24) + number(2, 80),
            type_.QUIESCE: lambda: b"\0",
            type_.END: lambda: (
                number(4, 0, 2) + self.requests.string("why") + number(4, 0, 1, 2) + rnd.randbytes(8)
            ),
        }.get(which, lambda: rnd.randbytes(rnd.choice([0, 1, 20])))()
        return wire.encode(
            which,
            stream,
            epoch,
            self.requests.mutated(payload)[: wire.MAX_PAYLOAD],
            chan=rnd.choice([0, 1, 2, 3, 65535]),
            flags=rnd.choice([0, 0, 0, 1, 255]),
        )

    def play(self) -> None:
        for _ in range(ACTIONS):
            data = self.frame()
            dice = self.rnd.random()
            if dice < 0.03:
                data = self.requests.mutated(data) + self.rnd.randbytes(self.rnd.choice([0, 3, 30]))
            elif dice < 0.04:
                data = data[: self.rnd.randrange(len(data))]
            self.frames += 1
            if not self.agent.send(data, reading=dice < 0.9) or self.rnd.random() < 0.01:
                self.attach()
        self.attach()
        self.agent.received.clear()
        self.agent.send(self.wire.encode(self.wire.Type.PING, 0, self.epoch, b"still there"))
        self.agent.expect(b"still there")
        if (rss := self.agent.rss_mb()) > RSS_MB:
            raise Broken(f"it takes {rss:.0f} MB")


def inside(seconds: float, seed: int) -> int:
    import wire

    # A changed path leads anywhere: what everybody may write to on the host is hidden from here.
    subprocess.run(["mount", "--bind", str(HERE.parent), "/mnt"], check=True)
    place = Path("/mnt")
    home = str(place / "home")
    for where in ("/tmp", "/var/tmp", "/dev/shm", home):
        subprocess.run(["mount", "-t", "tmpfs", "fuzz", where], check=True)
    os.chdir("/")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    until = time.monotonic() + seconds
    rounds = frames = 0
    while time.monotonic() < until or not rounds:
        agent = Agent(place)
        try:
            here = Round(agent, random.Random(f"{seed}/{rounds}"), home, wire)
            here.play()
            frames += here.frames
            agent.end()
        except Broken as error:
            time.sleep(0.5)  # the sanitizer still writes
            print(f"round {rounds}: {error}\n{agent.words()}")
            return 1
        finally:
            agent.close()
        rounds += 1
    print(f"seed {seed}: {rounds} agents took {frames} frames in {seconds:.0f} s")
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return inside(float(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(fuzz(options.seconds, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
