from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import time

import pytest

from forkyard.audit import AuditLog, export, heads, verify
from forkyard.audit import log as audit
from forkyard.errors import CapacityError, InternalError, InvalidRequestError, NotFoundError


async def _filled(directory, count: int = 5) -> AuditLog:
    log = AuditLog(directory)
    await log.open()
    for n in range(count):
        assert log.append("exec", f"sb_{n % 2}", "uid:0", {"argv": ["x", 'ü"\n'], "n": n}) == n + 1
    await log.close()
    return log


def _file(directory):
    (path,) = directory.glob("*.jsonl")
    return path


async def test_a_chain_that_anyone_can_check(tmp_path):
    log = await _filled(tmp_path)
    prev = "0" * 64
    for line in _file(tmp_path).read_bytes().splitlines():
        body, _, tail = line.rpartition(b',"hash":"')
        prev = hashlib.sha256(prev.encode() + body + b"}").hexdigest()
        assert tail == prev.encode() + b'"}' and json.loads(line)["hash"] == prev
        assert list(json.loads(body + b"}")) == sorted(json.loads(body + b"}"))
    assert log.head == (5, prev) and verify(tmp_path) == (True, 5, "")
    assert _file(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_it_goes_on_after_a_restart_and_over_days(tmp_path, monkeypatch):
    await _filled(tmp_path, 3)
    log = AuditLog(tmp_path)
    await log.open()
    real = time.time
    monkeypatch.setattr(audit.time, "time", lambda: real() + 86400)
    assert log.append("stop", "sb_1", "yard", {}) == 4
    await log.flush()
    await log.close()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert verify(tmp_path) == (True, 4, "")
    assert [r.seq for r in log.read()] == [1, 2, 3, 4]
    assert [r.kind for r in log.read(since=real() + 3600)] == ["stop"]


async def test_reading(tmp_path):
    log = await _filled(tmp_path, 1000)
    assert [r.data["n"] for r in log.read(limit=3)] == [997, 998, 999]
    assert [r.seq for r in log.read(sandbox="sb_1", limit=2)] == [998, 1000]
    assert len(log.read()) == 1000 and log.read()[0].data["argv"] == ["x", 'ü"\n']
    assert log.read(since=time.time() + 10) == [] and log.read(sandbox="sb") == []
    assert AuditLog(tmp_path / "absent").read() == []


@pytest.mark.parametrize("size", [1, 7, 100, 333, 5000])
async def test_lines_backwards_are_lines(tmp_path, monkeypatch, size):
    await _filled(tmp_path, 20)
    path = _file(tmp_path)
    monkeypatch.setattr(audit, "_CHUNK", size)
    expected, offset = [], 0
    for line in path.read_bytes().splitlines():
        expected.append((offset, line))
        offset += len(line) + 1
    assert list(audit._lines_backwards(path))[::-1] == expected
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "torn").write_bytes(b"no newline")
    assert list(audit._lines_backwards(tmp_path / "empty")) == []
    assert list(audit._lines_backwards(tmp_path / "torn")) == []


@pytest.mark.parametrize("change", ["edit", "remove", "swap", "insert", "rehash"])
async def test_any_change_shows(tmp_path, change):
    await _filled(tmp_path, 6)
    path = _file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[2] = lines[2].replace(b'"n":2', b'"n":9')
    elif change == "remove":
        del lines[2]
    elif change == "swap":
        lines[2], lines[3] = lines[3], lines[2]
    elif change == "insert":
        lines.insert(2, b"whatever\n")
    else:  # a record with a right hash of its own: the next one gives it away
        body = lines[2].replace(b'"n":2', b'"n":9').rpartition(b',"hash"')[0] + b"}"
        prev = json.loads(lines[1])["hash"].encode()
        lines[2] = body[:-1] + b',"hash":"' + hashlib.sha256(prev + body).hexdigest().encode() + b'"}\n'
    path.write_bytes(b"".join(lines))
    ok, seq, why = verify(tmp_path)
    assert not ok and seq == (4 if change == "rehash" else 3) and why


async def test_a_cut_end_shows_against_a_head_kept_elsewhere(tmp_path):
    head = (await _filled(tmp_path, 4)).head
    lines = _file(tmp_path).read_bytes().splitlines(keepends=True)
    _file(tmp_path).write_bytes(b"".join(lines[:-1]))
    assert verify(tmp_path).ok
    assert not verify(tmp_path, head).ok and "cut off" in verify(tmp_path, head).why


@pytest.mark.parametrize("tail", [b'{"actor":"ui', b"\0" * 4096, b'{"a":1}\n\0\0', b"x"])
async def test_a_torn_end_is_sealed(tmp_path, tail):
    await _filled(tmp_path, 3)
    _file(tmp_path).write_bytes(_file(tmp_path).read_bytes() + tail)
    assert not verify(tmp_path).ok
    log = AuditLog(tmp_path)
    await log.open()
    log.append("stop", None, "yard", {})
    await log.close()
    kinds = [r.kind for r in log.read()]
    assert kinds == ["exec"] * 3 + ["recovered", "stop"]
    assert log.read()[3].data["torn_bytes"] == len(tail.removesuffix(b"\n"))
    assert verify(tmp_path) == (True, 5, "")
    # what was torn is evidence: it cannot be touched either
    _file(tmp_path).write_bytes(_file(tmp_path).read_bytes().replace(tail, b"y" * len(tail), 1))
    assert not verify(tmp_path).ok


async def test_a_torn_first_record_of_a_day(tmp_path):
    await _filled(tmp_path, 3)
    (tmp_path / "2999-01-01.jsonl").write_bytes(b"{to")
    log = AuditLog(tmp_path)
    await log.open()
    assert log.head[0] == 4
    await log.close()
    assert verify(tmp_path) == (True, 4, "")


async def test_a_clock_that_goes_back_over_midnight(tmp_path, monkeypatch):
    log = AuditLog(tmp_path)
    await log.open()
    real = time.time
    for days in (3, 2, 3):
        monkeypatch.setattr(audit.time, "time", lambda days=days: real() + days * 86400)
        log.append("a", None, "x", {})
    await log.close()
    assert verify(tmp_path) == (True, 3, "") and len(list(tmp_path.glob("*.jsonl"))) == 1


async def test_flush_means_durable_and_failures_are_retried(tmp_path, monkeypatch):
    log = AuditLog(tmp_path)
    await log.open()
    real, full = os.write, True

    def write(fd: int, data: bytes) -> int:
        if full:
            real(fd, bytes(data)[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    log.append("a", None, "x", {})
    await log.flush()
    monkeypatch.setattr(audit.os, "write", write)
    log.append("b", None, "x", {})
    with pytest.raises(CapacityError, match="No space"):
        await log.flush()
    full = False
    log.append("c", None, "x", {})
    await log.flush()
    assert [r.kind for r in log.read()] == ["a", "b", "c"] and verify(tmp_path).ok
    await log.close()
    await log.close()
    with pytest.raises(InternalError):
        log.append("d", None, "x", {})
    await log.flush()


async def test_written_soon_without_a_flush(tmp_path):
    log = AuditLog(tmp_path)
    await log.open()
    log.append("a", None, "x", {"path": tmp_path})
    async with asyncio.timeout(5):
        while not log.read():  # noqa: ASYNC110  (only the file tells)
            await asyncio.sleep(0.01)
    await log.close()


async def test_a_head_that_is_not_the_one_kept(tmp_path):
    head = (await _filled(tmp_path / "log", 4)).head
    for path in (tmp_path / "log").glob("*.jsonl"):
        path.unlink()
    await _filled(tmp_path / "log", 6)  # a whole chain, of other records
    ok, seq, why = verify(tmp_path / "log", head)
    assert not ok and seq == 4 and "written anew" in why


@pytest.mark.parametrize("name", ["copy.tar", "copy.tar.gz"])
async def test_an_export_can_be_verified_and_shows_any_change(tmp_path, name):
    log = await _filled(tmp_path / "log", 6)
    day = _file(tmp_path / "log")
    day.write_bytes(day.read_bytes() + b'{"being":"written')
    export(tmp_path / "log", tmp_path / name)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert verify(tmp_path / name, log.head) == (True, 6, "")
    assert not list(tmp_path.glob("*.part"))
    lines = day.read_bytes().splitlines(keepends=True)[:6]
    day.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    export(tmp_path / "log", tmp_path / name)
    assert verify(tmp_path / name)[:2] == (False, 4)
    day.write_bytes(b"".join(lines[:5]))
    export(tmp_path / "log", tmp_path / name)
    assert verify(tmp_path / name).ok
    assert verify(tmp_path / name, log.head)[:2] == (False, 6)
    with pytest.raises(NotFoundError):
        export(tmp_path, tmp_path / "none.tar")
    (tmp_path / "other").write_bytes(b"no archive")
    with pytest.raises(InvalidRequestError, match="no copy"):
        verify(tmp_path / "other")


async def test_one_record(tmp_path):
    log = await _filled(tmp_path, 5)
    assert log.get(3).data["n"] == 2 and log.get(3).seq == 3
    assert log.get(0) is None and log.get(6) is None


async def test_secrets_have_digests_that_need_the_key(tmp_path):
    one, other = AuditLog(tmp_path / "audit"), AuditLog(tmp_path / "other")
    assert one.digest("hunter2") == one.digest("hunter2") == AuditLog(tmp_path / "audit").digest("hunter2")
    assert one.digest("hunter2") not in (one.digest("hunter3"), other.digest("hunter2"))
    assert (tmp_path / "audit.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_signed_head(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    text = heads.sign_head((7, "ab" * 32), tmp_path / "mine")
    key = heads.key_of(tmp_path / "mine")
    assert key.stat().st_mode & 0o077 == 0
    public, foreign = (heads.key_of(tmp_path / name).with_suffix(".key.pub") for name in ("mine", "other"))
    assert heads.parse_head(text) == (7, "ab" * 32)
    assert heads.signed_by(text, public)
    assert not heads.signed_by(text, foreign)
    assert not heads.signed_by(text.replace("7:", "6:", 1), public)
    with pytest.raises(InvalidRequestError, match="not signed"):
        heads.signed_by(text.splitlines()[0], public)
