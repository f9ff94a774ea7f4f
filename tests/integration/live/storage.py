"""Files, locks, mappings and a database. See ``state.py``."""

# Files that stay open are the point.
# ruff: noqa: SIM115

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from state import HOME, kind, wait


@kind
def files() -> Iterator[None]:
    """Offsets, O_APPEND, a file renamed while open, one of a lower layer, a directory, locks."""
    place = tempfile.mkdtemp(dir=HOME)
    half = open(f"{place}/half", "wb+", buffering=0)
    half.write(b"0123456789")
    half.seek(4)
    appending = open(f"{place}/log", "ab", buffering=0)
    appending.write(b"before ")
    moved = open(f"{place}/old", "wb+", buffering=0)
    moved.write(b"moved")
    os.rename(f"{place}/old", f"{place}/new")
    lower_path = os.__file__
    whole = open(lower_path, "rb").read()
    lower = open(lower_path, "rb", buffering=0)
    lower.seek(1000)
    directory = os.open(place, os.O_RDONLY)
    os.chdir(place)
    whole_lock = open(f"{place}/flock", "w")
    fcntl.flock(whole_lock, fcntl.LOCK_EX)
    range_lock = open(f"{place}/lockf", "w")
    fcntl.lockf(range_lock, fcntl.LOCK_EX, 10, 5)
    yield
    assert half.read() == b"456789" and half.tell() == 10
    appending.write(b"after")
    assert open(f"{place}/log", "rb").read() == b"before after"
    moved.seek(0)
    moved.write(b"MOVED")
    assert open(f"{place}/new", "rb").read() == b"MOVED"
    assert lower.read() == whole[1000:]
    assert sorted(os.listdir(directory)) == sorted(os.listdir(place)) and os.getcwd() == place
    probe = (
        "import fcntl, sys\n"
        "for name, take in (('flock', lambda f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)),\n"
        "                   ('lockf', lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7))):\n"
        "    try:\n        take(open(name, 'r+'))\n"
        "    except OSError:\n        continue\n"
        "    sys.exit(name)\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    fcntl.flock(whole_lock, fcntl.LOCK_UN)
    fcntl.lockf(range_lock, fcntl.LOCK_UN)
    assert subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode


@kind
def memory() -> Iterator[None]:
    """Shared mappings between processes (a file's and nobody's), a private one, a large heap."""
    heap = random.randbytes(16 << 20)
    digest = hashlib.sha256(heap).digest()
    path = f"{HOME}/mapped"
    with open(path, "wb") as file:
        file.write(bytes(8192))
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 8192)
        private = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE)
    anonymous = mmap.mmap(-1, 8192)
    private[:7] = b"private"
    shared[4096:4102] = b"before"
    child = os.fork()
    if child == 0:
        while True:
            # An echo from the one mapping to the other.
            anonymous[:4], anonymous[10:16] = shared[:4], b"echoed"
            time.sleep(0.005)
    yield
    assert hashlib.sha256(heap).digest() == digest
    shared[:4] = b"ping"
    wait(lambda: anonymous[:4] == b"ping" and anonymous[10:16] == b"echoed")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shared.flush()
    content = open(path, "rb").read()
    assert content[:4] == b"ping" and content[4096:4102] == b"before" and private[:7] == b"private"


@kind
def memfd() -> Iterator[None]:
    """A memfd with seals, and POSIX shared memory in /dev/shm."""
    fd = os.memfd_create("live", os.MFD_ALLOW_SEALING)
    os.write(fd, b"in a memfd")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with open("/dev/shm/live", "wb") as file:
        file.write(b"in shared memory" * 1000)
    unlinked = open("/dev/shm/unlinked", "wb+", buffering=0)
    unlinked.write(b"without a name")
    os.unlink("/dev/shm/unlinked")
    yield
    assert os.pread(fd, 100, 0) == b"in a memfd"
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    try:
        os.ftruncate(fd, 1)
        raise AssertionError("the seal is broken")
    except PermissionError:
        pass
    assert open("/dev/shm/live", "rb").read() == b"in shared memory" * 1000
    assert os.pread(unlinked.fileno(), 100, 0) == b"without a name"


@kind
def sqlite() -> Iterator[None]:
    """A write-ahead log with a transaction that is open."""
    path = f"{HOME}/live.db"
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute("pragma journal_mode=wal").fetchone() == ("wal",)
    db.execute("create table t (id integer primary key, v text)")
    db.executemany("insert into t (v) values (?)", [("x" * 100,)] * 500)
    db.execute("begin immediate")
    db.execute("insert into t (v) values ('open')")
    reader = sqlite3.connect(path)
    cursor = reader.execute("select id from t order by id")
    assert cursor.fetchone() == (1,)
    yield
    other = sqlite3.connect(path, timeout=0)
    try:
        other.execute("insert into t (v) values ('other')")
        raise AssertionError("the write lock is lost")
    except sqlite3.OperationalError as error:
        assert "locked" in str(error)
    assert len(cursor.fetchall()) == 499
    db.execute("insert into t (v) values ('after')")
    db.execute("commit")
    assert other.execute("select count(*), max(id) from t").fetchone() == (502, 502)
    assert other.execute("pragma integrity_check").fetchone() == ("ok",)
    other.execute("insert into t (v) values ('other')")
    other.commit()


@kind
def deleted_in_tmp() -> Iterator[None]:
    """A deleted file in /tmp that is still open, and a working directory that was deleted there."""
    file = tempfile.TemporaryFile(dir="/tmp")
    other = tempfile.TemporaryFile(dir="/var/tmp")
    for each in (file, other):
        each.write(b"held" * 50_000)
        each.flush()
    gone = tempfile.mkdtemp(dir="/tmp")
    os.chdir(gone)
    os.rmdir(gone)
    yield
    for each in (file, other):
        each.seek(0)
        assert each.read() == b"held" * 50_000
        each.write(b"more")
        each.flush()
        assert os.fstat(each.fileno()).st_size == 200_004
    os.chdir("/")
