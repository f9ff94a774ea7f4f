"""Set-up's decisions, on files and servers of the test's own: no root, no registry."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.config import Settings
from forkyard.errors import UnsupportedError
from forkyard.setup import apt, borrow, chroot, newest, progress, recipes, runsc

MIRROR = "http://mirror.test/debian"
KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"


@pytest.fixture
def apt_dir(tmp_path: Path):
    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "apt" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "apt"

    return make


BOOKWORM = apt.Release("debian", "bookworm")


def test_sources_from_deb822(apt_dir):
    text = f"""Types: deb
# a comment
URIs: {MIRROR}
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: {KEY}

Types: deb deb-src
URIs: {MIRROR}-security
Suites: bookworm-security
Components: main
Signed-By: {KEY}

Types: deb
Enabled: no
URIs: http://off.test/debian
Suites: bookworm
Components: main
"""
    got = apt.sources(BOOKWORM, apt_dir({"sources.list.d/debian.sources": text}))
    assert got == [
        apt.Source(MIRROR, "bookworm", ("main",), KEY),
        apt.Source(MIRROR, "bookworm-updates", ("main",), KEY),
        apt.Source(f"{MIRROR}-security", "bookworm-security", ("main",), KEY),
    ]
    assert got[0].line() == f"deb [signed-by={KEY}] {MIRROR} bookworm main"


def test_sources_from_one_line_entries(apt_dir):
    text = f"""# deb {MIRROR} bookworm main
deb {MIRROR} bookworm main non-free # the archive
deb [arch=amd64 signed-by={KEY}] {MIRROR} bookworm-updates main
deb-src {MIRROR} bookworm main
"""
    got = apt.sources(BOOKWORM, apt_dir({"sources.list": text}))
    assert [(s.suite, s.signed_by) for s in got] == [("bookworm", None), ("bookworm-updates", KEY)]


def test_other_peoples_archives_are_left_out(apt_dir):
    files = {
        "sources.list.d/vendor.list": "deb [signed-by=/keys/vendor.gpg] http://v.test bookworm main\n",
        "sources.list.d/tool.list": "deb http://tool.test/linux/apt bookworm main\n",
        "sources.list.d/pg.list": f"deb {MIRROR} bookworm-pgdg main\n",
        "sources.list": f"deb {MIRROR} bookworm main\ndeb {MIRROR} bookworm-backports main\n",
    }
    assert [s.uri for s in apt.sources(BOOKWORM, apt_dir(files))] == [MIRROR]


def test_a_mirror_file_is_resolved(apt_dir, tmp_path):
    mirrors = tmp_path / "debian.list"
    mirrors.write_text(f"# best first\n{MIRROR}\tpriority:1\nhttp://other.test/debian\n")
    got = apt.sources(BOOKWORM, apt_dir({"sources.list": f"deb mirror+file:{mirrors} bookworm main\n"}))
    assert [s.uri for s in got] == [MIRROR]


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ('ID=debian\nVERSION_CODENAME=bookworm\nVERSION_ID="12"\n', ("debian", "bookworm")),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\nUBUNTU_CODENAME=noble\n", ("ubuntu", "noble")),
        (
            'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_CODENAME=wilma\nUBUNTU_CODENAME=noble\n',
            ("ubuntu", "noble"),
        ),
        ("ID=fedora\n", ("fedora", "")),
        ("", ("", "")),
    ],
)
def test_host_release(tmp_path, text, release):
    (tmp_path / "os-release").write_text(text)
    assert apt.host_release(tmp_path / "os-release") == apt.Release(*release)


def test_missing_programs_by_package_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    wanted = {
        "sh": "dash",
        "no-such-a": "pkg",
        "no-such-b": "pkg",
        str(tmp_path / "key"): "keys",
        "/etc": "etc",
    }
    assert apt.missing(wanted) == ["pkg", "keys"]


async def test_install_without_apt_says_what_to_do(monkeypatch):
    monkeypatch.setattr(apt.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"btrfs-progs.*no apt-get"):
        await apt.install(["btrfs-progs"])


# -- certificates and pip ------------------------------------------------------------------------


def test_pem_texts_compare_whatever_surrounds_them():
    body = "-----BEGIN CERTIFICATE-----\nQUJD\nREVG\n-----END CERTIFICATE-----"
    windows = body.replace("\n", "\r\n")
    text = f"# Some CA\n{body}\r\n\n{windows}\njunk -----BEGIN CERTIFICATE-----\ncut"
    assert set(chroot._pem(text)) == {body + "\n"}


def test_pip_conf_keeps_passwords_out():
    text = recipes.pip_conf({"index-url": "https://me:secret@index.test/simple", "trusted-host": "a b"})
    assert "secret" not in text and "index-url = https://index.test/simple" in text
    assert "trusted-host = a\n    b" in text and "cert = /etc/ssl/certs/ca-certificates.crt" in text


def test_a_recipes_key_changes_with_all_that_it_says():
    base = recipes.BASE
    child = recipes.Recipe(name="pg", packages=("postgresql",), parent=base)
    keys = {
        base.key(system="debian/bookworm/x86_64"),
        base.key(system="debian/trixie/x86_64"),
        dataclasses.replace(base, packages=(*base.packages, "vim")).key(system="debian/bookworm/x86_64"),
        dataclasses.replace(base, env={}).key(system="debian/bookworm/x86_64"),
        child.key(system="debian/bookworm/x86_64"),
        dataclasses.replace(child, parent=dataclasses.replace(base, commands=())).key(
            system="debian/bookworm/x86_64"
        ),
    }
    assert len(keys) == 6
    assert base.key(system="a") == base.key(system="a")


# -- engine ----------------------------------------------------------------------------------------


def fake_program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_candidates_best_first_and_a_setting_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    settings = Settings(home=tmp_path, socket=tmp_path / "s")
    assert runsc.candidates(settings) == []
    debian = fake_program(tmp_path / "engine/debian/usr/bin/runsc")
    newest = fake_program(tmp_path / "engine/newest/runsc")
    on_path = fake_program(tmp_path / "bin/runsc")
    got = [(c.origin, c.path) for c in runsc.candidates(settings)]
    assert got == [("newest", newest), ("PATH", on_path), ("debian", debian)]
    mine = dataclasses.replace(settings, runsc=str(debian))
    assert [c.origin for c in runsc.candidates(mine)] == ["setting"]


async def test_find_passes_over_what_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    settings = Settings(home=tmp_path, socket=tmp_path / "s")
    broken = fake_program(tmp_path / "engine/newest/runsc", "#!/bin/sh\nexit 3\n")
    found, why = await runsc.find(settings)
    assert found is None and str(broken) in why
    with pytest.raises(UnsupportedError):
        await runsc.find(dataclasses.replace(settings, runsc=str(broken)))


def test_engine_record_is_void_once_the_program_changed(tmp_path):
    program = fake_program(tmp_path / "runsc")
    info = program.stat()
    record = {"runsc": str(program), "size": info.st_size, "mtime": info.st_mtime, "platform": "systrap"}
    runsc.engine_file(tmp_path).parent.mkdir()
    runsc.engine_file(tmp_path).write_text(json.dumps(record))
    assert runsc.read_engine(tmp_path) == record
    program.write_text("#!/bin/sh\n# another\n")
    assert runsc.read_engine(tmp_path) is None
    program.unlink()
    assert runsc.read_engine(tmp_path) is None
    runsc.engine_file(tmp_path).write_text("{")
    assert runsc.read_engine(tmp_path) is None


@pytest.fixture
def release_server(tmp_path) -> Iterator[tuple[str, Path]]:
    """An HTTP server on loopback laid out as gVisor's release server is: (address, directory)."""
    root = tmp_path / "www"
    directory = root / os.uname().machine
    directory.mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", directory
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_official_release_is_taken_by_its_checksum(tmp_path, release_server):
    address, www = release_server
    (www / "runsc").write_bytes(b"program")
    (www / "runsc.sha512").write_text(f"{hashlib.sha512(b'program').hexdigest()}  runsc\n")
    got = runsc._fetch_release(tmp_path / "release", address)
    assert got.read_bytes() == b"program" and os.access(got, os.X_OK)

    (www / "runsc").write_bytes(b"another")
    with pytest.raises(UnsupportedError, match="checksum"):
        runsc._fetch_release(tmp_path / "release", address)
    assert got.read_bytes() == b"program"
    (www / "runsc").unlink()
    with pytest.raises(UnsupportedError, match="could not be downloaded") as error:
        runsc._fetch_release(tmp_path / "release", address)
    assert "FORKYARD_RUNSC" in error.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["release", "www"]


async def test_newest_without_go_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="needs Go"):
        await newest.build_newest(tmp_path)


# -- progress and second homes ----------------------------------------------------------------------


def test_plain_progress_says_what_takes_time_and_what_was_there():
    stream = io.StringIO()
    show = progress.progress_for(stream)
    with progress.step(show, "a"):
        pass
    with progress.step(show, "b") as it:
        it.doing("working")
    with pytest.raises(ValueError), progress.step(show, "c"):
        raise ValueError
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("a: already there (") and lines[1] == "b: working ..."
    assert lines[2].startswith("b: done (") and lines[3].startswith("c: failed (")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_progress_ends_with_the_same_words():
    stream = Terminal()
    show = progress.progress_for(stream)
    assert isinstance(show, progress.TerminalProgress)
    with progress.step(show, "b") as it:
        it.doing("working")
        it.result = "made"
    assert "b: made" in stream.getvalue()


def ready_home(path: Path) -> Path:
    """A home that looks set up, as far as lending goes."""
    program = fake_program(path / "engine/runsc")
    info = program.stat()
    record = {"runsc": str(program), "size": info.st_size, "mtime": info.st_mtime}
    (path / "engine/engine.json").write_text(json.dumps(record))
    (path / "templates").mkdir()
    (path / "templates/base.json").write_text(json.dumps({"name": "base", "key": "k", "layers": []}))
    return path


def test_who_lends_to_whom(tmp_path):
    lender = ready_home(tmp_path / "system")
    own = tmp_path / "own"
    settings = Settings(home=own, socket=own / "s", base_from=lender)
    assert borrow.find_lender(settings) == lender
    assert borrow.find_lender(dataclasses.replace(settings, home=lender)) is None
    assert borrow.find_lender(dataclasses.replace(settings, runsc="/some/runsc")) is None
    assert borrow.find_lender(dataclasses.replace(settings, base_from=tmp_path / "nothing")) is None
    ready_home(own)
    assert borrow.find_lender(settings) is None, "a home that is set up by itself stays so"
    (lender / "templates/base.json").unlink()
    assert borrow.find_lender(dataclasses.replace(settings, home=tmp_path / "third")) is None
