"""The parts that images are handled with: names, Dockerfiles, ignore rules, layers."""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from forkyard.client.materials import Context, Ignored, build_spec, local_image, logins
from forkyard.errors import InvalidRequestError, NotFoundError
from forkyard.oci import dockerfile
from forkyard.oci.image import config_of, read, write
from forkyard.oci.pack import pack
from forkyard.oci.reference import check_reference, is_loopback, registry_of
from forkyard.yard.warmup import check

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the root directory")


# -- names


@pytest.mark.parametrize("registry", ["localhost", "localhost:5000", "127.0.0.1:5000", "127.8.9.1", "[::1]"])
def test_loopback(registry: str) -> None:
    assert is_loopback(registry)


@pytest.mark.parametrize("registry", ["", "localhost.example:1", "10.0.0.1", "127.0.0.1.example", "[::2]:1"])
def test_not_loopback(registry: str) -> None:
    assert not is_loopback(registry)


def test_references() -> None:
    assert check_reference("docker://localhost:5000/a/b:1") == "localhost:5000/a/b:1"
    assert registry_of("localhost:5000/a") == "localhost:5000"
    assert registry_of("team/app") == ""
    for bad in ("user:pass@host/app", "../x", "-flag", "a b", "", "a//b"):
        with pytest.raises(InvalidRequestError):
            check_reference(bad)


def test_images_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout").mkdir()
    (tmp_path / "a.tar").write_bytes(b"x")
    assert local_image("localhost:5000/app:1") is None
    assert local_image("app") is None
    found = local_image("oci:layout:v1")
    assert found is not None and (found.format, found.image) == ("oci", "oci:layout:v1")
    found = local_image("docker-archive:a.tar")
    assert found is not None and b"".join(found) == b"x"
    assert local_image("a.tar") is not None
    with pytest.raises(NotFoundError):
        local_image("./none.tar")
    with pytest.raises(NotFoundError):
        local_image("oci:none")


# -- Dockerfiles


def test_images_of_a_dockerfile() -> None:
    text = """
    ARG BASE=forkyard/base
    ARG TAG OTHER="b"
    FROM --platform=linux/amd64 ${BASE} AS build
    ARG LATER=forkyard/none
    FROM localhost:5000/x:${TAG:-latest}
    COPY --from=build /a /b
    COPY --from=forkyard/tools:2 /a /b
    COPY --from=0 /a /b
    RUN --mount=type=bind,from=localhost:5000/y,target=/y \\
        # a comment
        true
    FROM scratch
    """
    assert dockerfile.images(text, {}) == [
        "forkyard/base", "localhost:5000/x:latest", "forkyard/tools:2", "localhost:5000/y"]  # fmt: skip
    assert dockerfile.images(text, {"BASE": "b", "TAG": "7"})[:2] == ["b", "localhost:5000/x:7"]


# -- contexts


@pytest.mark.parametrize(
    ("rules", "path", "left_out"),
    [
        ("*.log", "a.log", True),
        ("*.log", "sub/a.log", False),
        ("**/*.log", "sub/deep/a.log", True),
        ("**/*.log", "a.log", True),
        ("node_modules", "node_modules/x/y", True),
        ("/build/", "build/x", True),
        ("# comment\n\n!", "x", False),
        ("docs\n!docs/keep.md", "docs/keep.md", False),
        ("docs\n!docs/keep.md", "docs/other.md", True),
        ("!keep\nkeep", "keep", True),
        ("a?c", "abc", True),
        ("a[bx]c", "axc", True),
        ("sub/**", "sub/a/b", True),
        ("*", "anything", True),
    ],
)
def test_ignore_rules(rules: str, path: str, left_out: bool) -> None:
    assert Ignored(rules)(path) is left_out


def _names(packed: object) -> list[str]:
    data = b"".join(packed)  # type: ignore[call-overload]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_a_context_is_packed_without_what_is_ignored(tmp_path: Path) -> None:
    for name in ("Dockerfile", "secret", "docs/a", "docs/keep", "src/x.py", "src/x.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    os.symlink("x.py", tmp_path / "src/link")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / ".dockerignore").write_text("secret\ndocs\n!docs/keep\n**/*.pyc\n")
    spec, packed = build_spec("t", tmp_path, "Dockerfile", {}, None)
    assert isinstance(packed, Context)
    assert spec.dockerfile == "FROM scratch\n"
    assert _names(packed) == [".dockerignore", "Dockerfile", "docs/keep", "src", "src/link", "src/x.py"]
    assert _names(packed) == _names(packed), "it can be sent again"
    with pytest.raises(NotFoundError):
        build_spec("t", tmp_path, "Other", {}, None)
    with pytest.raises(NotFoundError):
        build_spec("t", tmp_path / "none", "Dockerfile", {}, None)


def test_logins_come_from_the_users_auth_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = base64.b64encode(b"me:pw").decode()
    file = tmp_path / "auth.json"
    entries = {"localhost:5000": {"auth": auth}, "other.example": {"auth": auth}}
    file.write_text(json.dumps({"auths": entries}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(file))
    assert logins(["localhost:5000/app"]) == {"localhost:5000": "me:pw"}
    assert logins(["localhost:5001/app", "app"]) == {}
    assert logins(["localhost:5001/app"], "a:b") == {"localhost:5001": "a:b"}
    with pytest.raises(InvalidRequestError):
        logins(["localhost:5000/app"], "nopassword")


# -- images


def test_what_an_image_asks_for() -> None:
    asked = {"Env": ["A=1", "B=x=y"], "User": "app", "WorkingDir": "srv", "Cmd": ["run"], "Entrypoint": None}
    config = config_of(json.dumps({"os": "linux", "config": asked}).encode())
    assert (config.user, config.workdir, config.cmd, config.entrypoint) == ("app", "/srv", ["run"], [])
    assert config.env == {"A": "1", "B": "x=y"}
    bare = config_of(b'{"config": null}')
    assert (bare.user, bare.workdir) == ("root", "/workspace")
    with pytest.raises(InvalidRequestError):
        config_of(b'{"os": "windows"}')


def test_a_layout_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "ab12").write_bytes(b"layer")
    config = config_of(b'{"config": {"User": "7:8", "Env": ["K=V"]}}')
    assert write(tmp_path, config, [("ab12", 5)]) == ["sha256:ab12"]
    found = read(tmp_path)
    assert found.layers == [tmp_path / "ab12"]
    assert (found.config.user, found.config.env) == ("7:8", {"K": "V"})


def test_a_manifest_names_no_path(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"config": {"digest": "sha256:../../etc/passwd"}, "layers": []}')
    with pytest.raises(InvalidRequestError):
        read(tmp_path)


def test_ready_in_its_plain_form() -> None:
    assert check(8000, 1) == 8000 == check("port:8000", 1)
    assert check("log:up", 1) == "log:up"
    assert check(None, 1) is None
    for bad in (0, 70000, "port:x", "log:", " "):
        with pytest.raises(InvalidRequestError):
            check(bad, 1)
    with pytest.raises(InvalidRequestError):
        check(None, 0)


# -- layers


def _layer(path: Path, *members: tuple[str, object]) -> Path:
    """A layer's archive: bytes are a file, a str a link, None a directory, a TarInfo itself."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.mtime = 1000
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
                continue
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                assert isinstance(content, bytes)
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def _unpack(root: Path, *layers: Path, **job: object) -> dict[str, object]:
    root.mkdir(exist_ok=True)
    what = {"root": str(root), "layers": [str(layer) for layer in layers], **job}
    done = subprocess.run([sys.executable, "-m", "forkyard.oci.unpack"], input=json.dumps(what).encode(),
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@needs_root
def test_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    one = _layer(tmp_path / "1", ("a", None), ("a/x", b"1"), ("a/y", b"1"), ("b", None), ("b/old", b"1"),
                 ("b/sub", None), ("b/sub/old", b"1"), ("f", b"1"), ("d", None), ("d/z", b""))  # fmt: skip
    two = _layer(tmp_path / "2", ("a/.wh.x", b""), ("b/new", b"2"), ("b/sub/new", b"2"),
                 ("b/.wh..wh..opq", b""), (".wh.f", b""), ("d", b"now a file"), (".wh..wh.plnk", None),
                 (".wh.never", b""))  # fmt: skip
    _unpack(tmp_path / "r", one, two)
    assert _tree(tmp_path / "r") == ["a", "a/y", "b", "b/new", "b/sub", "b/sub/new", "d"]
    assert (tmp_path / "r/d").read_bytes() == b"now a file"


@needs_root
def test_nothing_is_written_outside_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    one = _layer(tmp_path / "1", ("link", str(outside)), ("up", "../../.."), ("../escape", b"x"))
    two = _layer(tmp_path / "2", ("link/evil", b"x"), ("up/evil", b"x"), ("link/.wh.kept", b""))
    done = _unpack(tmp_path / "r", one, two)
    assert os.listdir(outside) == ["kept"]
    assert not (tmp_path / "escape").exists()
    assert done["skipped"] == ["../escape"]
    # The root is the root: a link out of it leads to its top, one to nowhere gives way to a directory.
    assert _tree(tmp_path / "r") == ["evil", "link", "link/evil", "up"]


@needs_root
def test_owners_modes_links_and_attributes_are_kept(tmp_path: Path) -> None:
    setuid = tarfile.TarInfo()
    setuid.mode, setuid.uid, setuid.gid, setuid.mtime = 0o4755, 7, 8, 1234
    setuid.pax_headers = {"SCHILY.xattr.user.note": "hello", "SCHILY.xattr.trusted.overlay.opaque": "y"}
    hard, device, fifo = tarfile.TarInfo(), tarfile.TarInfo(), tarfile.TarInfo()
    hard.type, hard.linkname = tarfile.LNKTYPE, "bin/su"
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    fifo.type, fifo.mode = tarfile.FIFOTYPE, 0o640
    layer = _layer(tmp_path / "1", ("bin/su", setuid), ("su2", hard), ("dev/null", device), ("pipe", fifo),
                   ("l", "bin/su"))  # fmt: skip
    done = _unpack(tmp_path / "r", layer)
    info = os.stat(tmp_path / "r/bin/su")
    assert (info.st_mode & 0o7777, info.st_uid, info.st_gid, info.st_mtime) == (0o4755, 7, 8, 1234)
    assert info.st_nlink == 2 and (tmp_path / "r/su2").samefile(tmp_path / "r/bin/su")
    assert os.listxattr(tmp_path / "r/bin/su") == ["user.note"]
    assert done["skipped"] == ["dev/null"]
    assert stat.S_ISFIFO(os.stat(tmp_path / "r/pipe").st_mode)


@needs_root
def test_what_every_root_needs(tmp_path: Path) -> None:
    layer = _layer(tmp_path / "1", ("etc", None), ("etc/passwd", b"app:x:71:72::/:/bin/sh\n"),
                   ("etc/group", b"web:x:80:\n"), ("etc/resolv.conf", "/run/x"))  # fmt: skip
    complete = {"user": "app:web", "workdir": "/srv/app", "dns": "nameserver 127.0.0.1\n"}
    done = _unpack(tmp_path / "r", layer, complete=complete)
    root = tmp_path / "r"
    assert (done["uid"], done["gid"]) == (71, 80)
    assert (os.stat(root / "srv/app").st_uid, os.stat(root / "workspace").st_uid) == (71, 71)
    assert (root / "etc/resolv.conf").read_text() == "nameserver 127.0.0.1\n"
    assert os.stat(root / "tmp").st_mode & 0o7777 == 0o1777
    with pytest.raises(RuntimeError, match="nobody-here"):
        _unpack(tmp_path / "r2", layer, complete={**complete, "user": "nobody-here"})


@needs_root
def test_damaged_layers_are_refused(tmp_path: Path) -> None:
    whole = _layer(tmp_path / "1", ("f", b"x" * 100_000))
    (tmp_path / "2").write_bytes(whole.read_bytes()[:50_000])
    with pytest.raises(RuntimeError):
        _unpack(tmp_path / "r", tmp_path / "2")


@needs_root
def test_a_digest_is_of_content_not_of_times(tmp_path: Path) -> None:
    one = _layer(tmp_path / "1", ("a", b"x"), ("b", "a"))
    two = _layer(tmp_path / "2", ("b", "a"), ("a", b"x"))
    three = _layer(tmp_path / "3", ("b", "a"), ("a", b"y"))
    digests = [_unpack(tmp_path / f"r{path.name}", path, digest=True)["digest"] for path in (one, two, three)]
    assert digests[0] == digests[1] != digests[2]


@needs_root
def test_an_overlays_layer_becomes_an_images(tmp_path: Path) -> None:
    layer = tmp_path / "up"
    (layer / "dir").mkdir(parents=True)
    (layer / "dir/file").write_text("x")
    os.link(layer / "dir/file", layer / "again")
    os.mknod(layer / "gone", stat.S_IFCHR, 0)
    os.setxattr(layer / "dir", "trusted.overlay.opaque", b"y")
    with open(tmp_path / "layer.tar", "wb") as file:
        digest = pack(str(layer), file)
    assert len(digest) == 64
    below = _layer(tmp_path / "1", ("gone", b"1"), ("dir", None), ("dir/old", b"1"), ("kept", b"1"))
    _unpack(tmp_path / "r", below, tmp_path / "layer.tar")
    assert _tree(tmp_path / "r") == ["again", "dir", "dir/file", "kept"]
    assert (tmp_path / "r/again").samefile(tmp_path / "r/dir/file")
