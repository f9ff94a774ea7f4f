# ruff: noqa: F401, F811
"""Templates from images: out of tars, archives, layouts and registries."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from image_kit import (
    PASSWORD,
    USER,
    Registry,
    musl_root,
    open_registry,
    packages,
    registry,
    skopeo,
    static_program,
    tar_of,
    templates,
)
from yard_home import YardHome, client, yard

from forkyard import Client
from forkyard.errors import (
    AccessDeniedError,
    ConflictError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from forkyard.types import Progress

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]

Fetch = Callable[..., Path]


def run(*argv: object) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def out(client: Client, template: str, command: str | list[str]) -> str:
    """What a command prints in a new sandbox of the template."""
    box = client.create_sandbox(template=template)
    try:
        if isinstance(command, str):
            return client.shell(box.id, command, check=True).stdout
        return client.exec(box.id, command, check=True).stdout
    finally:
        client.delete_sandbox(box.id)


def image_of(directory: Path, layers: list[Path], config: dict[str, object]) -> Path:
    """A docker archive of those layers, made by hand."""
    digests = [run("sha256sum", layer).split()[0] for layer in layers]
    raw = json.dumps({
        "architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }).encode()  # fmt: skip
    archive = directory / "image.tar"
    with tarfile.open(archive, "w") as tar:
        names = []
        for layer, digest in zip(layers, digests, strict=True):
            names.append(f"{digest}/layer.tar")
            tar.add(layer, names[-1])
        for name, data in (
            ("config.json", raw),
            ("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": ["hand/made:1"],
                                           "Layers": names}]).encode()),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def test_a_root_of_musl(templates: Client, packages: Fetch, tmp_path: Path) -> None:
    archive = tar_of(musl_root(packages, tmp_path), tmp_path / "musl.tar.gz", "-z")
    info = templates.pull_template("musl", str(archive))
    assert (info.kind, info.user, info.workdir) == ("image", "root", "/workspace")
    assert out(templates, "musl", "pwd; id -u; musl-program") == "/workspace\n0\nfrom musl\n"


def test_exploring_from_an_image(templates: Client, packages: Fetch, tmp_path: Path) -> None:
    archive = str(tar_of(musl_root(packages, tmp_path), tmp_path / "musl.tar"))
    for given in ({"source": archive}, {"source": None, "image": archive}):
        done = templates.explore(**given, variants=["exit 1", "musl-program"])
        assert done.winner is not None and done.winner.output == "from musl\n"
        assert templates.shell(done.winner.id, "musl-program").stdout == "from musl\n"
        templates.delete_sandbox(done.winner.id)
    assert [info.kind for info in templates.list_templates()].count("image") == 1


def test_an_image_of_one_static_program(templates: Client, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    static_program(tmp_path / "root")
    (tmp_path / "root/alone.c").unlink()
    layer = tar_of(tmp_path / "root", tmp_path / "layer.tar")
    archive = image_of(tmp_path, [layer], {"Entrypoint": ["/alone"], "Cmd": ["wait"], "User": "9:9"})
    info = templates.pull_template("alone", f"docker-archive:{archive}")
    assert (info.user, info.workdir) == ("9:9", "/workspace")
    assert out(templates, "alone", ["/alone"]) == "alone, uid 9\n"
    box = templates.create_sandbox(template="alone")
    missing = templates.shell(box.id, "true")
    assert missing.exit_code == 127
    templates.write_file(box.id, "note", "relative to /workspace")
    assert templates.read_text(box.id, "/workspace/note") == "relative to /workspace"
    info = templates.pull_template("waiting", f"docker-archive:{archive}", warm=True, ready="log:waiting")
    assert info.warm_command == ["/alone", "wait"]
    box = templates.create_sandbox(template="waiting")
    assert box.memory_restored or [p.command for p in templates.processes(box.id)] == ["/alone wait"]


def test_layers_with_whiteouts_owners_and_links(
    templates: Client, packages: Fetch, tmp_path: Path
) -> None:
    root = musl_root(packages, tmp_path)
    (root / "dir").mkdir()
    for name in ("dir/a", "dir/b", "gone"):
        (root / name).write_text(name)
    os.link(root / "gone", root / "stays")
    os.chmod(root / "stays", 0o4711)
    first = tar_of(root, tmp_path / "1.tar")
    second = tmp_path / "2.tar"
    with tarfile.open(second, "w") as tar:
        for name, uid in ((".wh.gone", 0), ("dir/.wh..wh..opq", 0), ("dir/c", 123), ("dev/sda", 0)):
            member = tarfile.TarInfo(name)
            member.uid = member.gid = uid
            if name == "dev/sda":
                member.type, member.devmajor, member.devminor = tarfile.BLKTYPE, 8, 0
            tar.addfile(member)
    config = {"User": "app", "WorkingDir": "/srv/app", "Env": ["COLOR=blue"]}
    archive = image_of(tmp_path, [first, second], config)
    info = templates.pull_template("layered", f"docker-archive:{archive}:hand/made:1")
    assert (info.user, info.workdir, info.env["COLOR"]) == ("app", "/srv/app", "blue")
    look = "pwd; echo $COLOR; id; ls /dir; ls -lnd /dir/c /stays; ls /gone /dev/sda; true"
    said = out(templates, "layered", look)
    assert said.splitlines()[:4] == ["/srv/app", "blue", "uid=100(app) gid=101 groups=101", "c"]
    assert "123      123" in said.splitlines()[4] and "-rws--x--x" in said.splitlines()[5]
    assert len(said.splitlines()) == 6


def test_the_same_content_is_unpacked_once(
    templates: Client, packages: Fetch, tmp_path: Path, yard: YardHome
) -> None:
    archive = tar_of(musl_root(packages, tmp_path), tmp_path / "musl.tar")
    first = templates.pull_template("one", str(archive))
    again: list[Progress] = []
    second = templates.pull_template("two", str(archive), on_progress=again.append)
    assert (first.key, second.name) == (second.key, "two")
    assert "it is here already" in [progress.text for progress in again]
    layers = {layer for path in (yard.home / "templates").glob("*.json")
              for layer in json.loads(path.read_text())["layers"]}  # fmt: skip
    assert len(layers) == 2, "that of base, and one for both"
    box = templates.create_sandbox(image=str(archive))
    templates.delete_template("one")
    templates.delete_template("two")
    assert templates.shell(box.id, "musl-program").stdout == "from musl\n"


def test_an_image_is_what_its_configuration_says(
    templates: Client, packages: Fetch, tmp_path: Path
) -> None:
    """Else whoever sends a layer of their own under another image's configuration has that image's name."""
    first = tar_of(musl_root(packages, tmp_path), tmp_path / "first.tar")
    good = image_of(tmp_path, [first], {}).rename(tmp_path / "good.tar")
    with tarfile.open(good) as tar, tarfile.open(tmp_path / "bad.tar", "w") as bad:
        for member in tar:
            data = tar.extractfile(member)
            assert data is not None
            content = data.read()
            if member.name.endswith("layer.tar"):
                content += bytes(10240)  # as long a tar as it was to whoever reads it
            member.size = len(content)
            bad.addfile(member, io.BytesIO(content))
    with pytest.raises(ForkyardError):
        templates.pull_template("bad", f"docker-archive:{tmp_path / 'bad.tar'}")
    assert templates.pull_template("good", f"docker-archive:{good}").name == "good"


def test_a_root_that_is_too_deep(templates: Client, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "deep.tar", "w") as tar:
        for level in range(1, 1500):
            member = tarfile.TarInfo("/".join(["d"] * level))
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
    with pytest.raises(InvalidRequestError, match="directories deep"):
        templates.pull_template("deep", str(tmp_path / "deep.tar"))


def test_what_cannot_be_pulled(templates: Client, tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"no archive" * 1000)
    with pytest.raises(InvalidRequestError):
        templates.pull_template("x", str(tmp_path / "broken.tar"))
    with pytest.raises(ForkyardError):
        templates.pull_template("x", f"docker-archive:{tmp_path / 'broken.tar'}")
    with pytest.raises(NotFoundError):
        templates.pull_template("x", "./none.tar")
    with pytest.raises(InvalidRequestError):
        templates.pull_template("x", "user:secret@localhost:5000/app")
    with pytest.raises(UnavailableError):
        templates.pull_template("x", "localhost:1/app")
    (tmp_path / "empty").mkdir()
    archive = tar_of(tmp_path / "empty", tmp_path / "empty.tar")
    with pytest.raises(ConflictError):
        templates.pull_template("base", str(archive))
    assert [info.name for info in templates.list_templates()] == ["base"]


def _layout(packages: Fetch, tmp_path: Path) -> str:
    layer = tar_of(musl_root(packages, tmp_path), tmp_path / "1.tar")
    archive = image_of(tmp_path, [layer], {"Env": ["A=b"]})
    skopeo("copy", "-q", f"docker-archive:{archive}", f"oci:{tmp_path}/layout:v1")
    return f"oci:{tmp_path}/layout:v1"


def test_out_of_a_registry(
    templates: Client, registry: Registry, packages: Fetch, tmp_path: Path, yard: YardHome
) -> None:
    layout = _layout(packages, tmp_path)
    reference = registry.push(layout, "team/app:1")
    info = templates.pull_template("app", reference)
    assert (info.image, info.env["A"]) == (reference, "b")
    assert templates.pull_template("same", layout).key == info.key, "the same content by another way"
    assert out(templates, "app", "musl-program; echo $A") == "from musl\nb\n"
    with pytest.raises(NotFoundError):
        templates.pull_template("none", f"{registry.address}/team/none:1")

    # create_sandbox gets it, or has it: then it asks nobody.
    box = templates.create_sandbox(image=reference)
    assert box.template == "app"
    templates.delete_template("app")
    templates.delete_template("same")
    box = templates.create_sandbox(image=reference)
    assert box.template == reference
    assert templates.shell(box.id, "musl-program").ok
    by_many: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: by_many.append(templates.create_sandbox(image=reference).template))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_many == [reference] * 3


def test_a_registry_with_a_password(
    templates: Client, packages: Fetch, tmp_path: Path, yard: YardHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_registry(packages("docker-registry"), password=True) as closed:
        reference = closed.push(_layout(packages, tmp_path), "app:1", login=True)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(AccessDeniedError):
            templates.pull_template("app", reference)
        with pytest.raises(AccessDeniedError):
            templates.pull_template("app", reference, credentials=f"{USER}:wrong")
        assert templates.pull_template("app", reference, credentials=f"{USER}:{PASSWORD}").image == reference
        templates.delete_template("app")
        skopeo("login", "--tls-verify=false", "-u", USER, "-p", PASSWORD, closed.address)
        assert templates.create_sandbox(image=reference).template == reference
    secrets = [PASSWORD.encode(), b"b3BlbiBzZXNhbWU"]
    kept = [*(yard.home / "audit").iterdir(), yard.home / "daemon.log", yard.home / "catalog.db",
            yard.home / "catalog.db-wal", *(yard.home / "templates").iterdir()]  # fmt: skip
    for path in kept:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), f"{path} has the password"


def test_prepare(templates: Client, registry: Registry, packages: Fetch, tmp_path: Path) -> None:
    references = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        root = musl_root(packages, tmp_path / str(number))
        (root / "number").write_bytes(os.urandom(3 << 20))
        archive = image_of(tmp_path, [tar_of(root, tmp_path / "1.tar")], {})
        references.append(registry.push(f"docker-archive:{archive}", f"many:{number}"))
    told: list[Progress] = []
    found = templates.prepare([*references, references[0], "base"], parallel=2, on_progress=told.append)
    assert [info.name for info in found] == [*references, references[0], "base"]
    assert sum(progress.text.startswith("UNPACK") for progress in told) == 3, "one pull however many ask"
    with pytest.raises(NotFoundError):
        templates.prepare([references[0], f"{registry.address}/none:1"])
    mixed = templates.prepare([references[0], f"{registry.address}/none:1"], check=False)
    assert mixed[0].name == references[0] and isinstance(mixed[1], NotFoundError)

    # The second was used last but one, the third is in use: the first goes, and is fetched again.
    box = templates.create_sandbox(template=references[2])
    templates.delete_sandbox(templates.create_sandbox(template=references[1]).id)
    templates.prepare([references[1]], disk_budget_mb=14)
    left = {info.name for info in templates.list_templates()}
    assert left == {"base", references[1], references[2]}
    templates.prepare([], disk_budget_mb=0)
    assert {info.name for info in templates.list_templates()} == {"base", references[2]}
    templates.delete_sandbox(box.id)
    templates.prepare([], disk_budget_mb=0)
    assert [info.name for info in templates.list_templates()] == ["base"]
