"""Set-up on this host: a second home in a moment, what `base` holds, templates on it, the doctor.

They use the engine and the base template of the home that `make setup` made (or the one
in FORKYARD_TEST_BASE), read-only, and build in homes of their own.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forkyard.config import Settings
from forkyard.engines.gvisor import Runsc
from forkyard.errors import UnsupportedError
from forkyard.guest import Guest, SpawnSpec
from forkyard.host import mounts
from forkyard.setup import (
    apt,
    borrow,
    build_template,
    doctor,
    progress,
    quick_setup,
    recipes,
    run_setup,
    runsc,
)
from forkyard.setup.templates import layer_paths, read_template
from forkyard.setup.trial import choose_platform, open_trial
from forkyard.store.disks import DiskStore

pytestmark = pytest.mark.root

LENDER = Path(os.environ.get("FORKYARD_TEST_BASE") or borrow.SYSTEM_HOME)


@pytest.fixture
async def settings(tmp_home) -> AsyncIterator[Settings]:
    """A home of the test's own that may borrow; its store is unmounted afterwards."""
    assert runsc.read_engine(LENDER) and read_template(LENDER, "base"), "run `make setup` first"
    made = Settings(home=tmp_home, socket=tmp_home / "s", base_from=LENDER, store_gb=4)
    yield made
    for target in mounts.mounts_below(tmp_home):
        mounts.unmount(target)


async def run(guest: Guest, command: str, user: str = "user", timeout_s: float = 60) -> tuple[int, str]:
    """A shell command with the environment of `base`: its exit code and what it printed."""
    env = dict(recipes.BASE.env)
    spec = SpawnSpec(argv=["/bin/sh", "-c", command], env=env, user=user, merge=True)
    async with asyncio.timeout(timeout_s):
        child = await guest.spawn(spec)
        text = b""
        async for piece in child.output():
            text += piece.data
        return (await child.wait()).code, text.decode(errors="replace")


@asynccontextmanager
async def machine(settings: Settings, template: str = "base") -> AsyncIterator[Guest]:
    """A trial machine on a template's layers."""
    record = read_template(settings.home, template)
    engine = runsc.read_engine(settings.home)
    assert record and engine
    binary = await Runsc.probe(Path(engine["runsc"]))
    lowers = layer_paths(settings.home, record["layers"])
    async with open_trial(binary, engine["platform"] or "systrap", settings.home, lowers) as trial:
        yield (await trial.boot())[1]


async def test_a_second_home_is_ready_in_a_second(settings):
    started = time.monotonic()
    assert await quick_setup(settings)
    took = time.monotonic() - started
    assert took < 3, f"{took:.1f} s"
    assert runsc.read_engine(settings.home) == runsc.read_engine(LENDER)
    started = time.monotonic()
    assert await quick_setup(settings)
    assert time.monotonic() - started < 0.2
    async with machine(settings) as guest:
        assert await run(guest, "echo $HOME; id -un") == (0, "/home/user\nuser\n")


async def test_base_is_what_it_promises(settings):
    await quick_setup(settings)
    script = """
        set -e
        test "$(id -u)" = 1000; test "$HOME" = /home/user
        test "$(readlink -f /workspace)" = /home/user
        test "$(command -v python3)" = /opt/forkyard/venv/bin/python3
        test -w /opt/forkyard/venv/bin
        python -c 'import numpy, matplotlib.pyplot, IPython; print(numpy.arange(3).sum())'
        pip --version; git --version; curl --version; ps -ef >/dev/null
        python3 -m venv /tmp/v && /tmp/v/bin/python -m pip --version
        echo 'int main(void){return 3;}' >/tmp/a.c && cc -o /tmp/a /tmp/a.c
        rc=0; /tmp/a || rc=$?; test $rc = 3
        test -d /etc/forkyard/on-fork.d
        test "$(stat -c %a /tmp)" = 1777; test "$(stat -c %a /var/tmp)" = 1777
        curl -s file:///etc/hosts >/dev/null
        sh -lc 'command -v pip' | grep -q /opt/forkyard/venv
        echo fine
    """
    async with machine(settings) as guest:
        code, text = await run(guest, script, timeout_s=120)
        assert code == 0 and text.endswith("fine\n"), text
        code, text = await run(guest, "command -v adduser && touch /etc/x && rm /etc/x", user="root")
        assert code == 0, text


async def test_base_trusts_what_the_host_trusts(settings):
    from forkyard.setup.chroot import CA_FILE, _pem, host_certificates

    await quick_setup(settings)
    record = read_template(settings.home, "base")
    assert record
    root = layer_paths(settings.home, record["layers"])[0]
    assert set(host_certificates()) <= set(_pem((root / CA_FILE.lstrip("/")).read_text()))
    leftovers = [*(root / "var/lib/apt/lists").glob("*Packages*"), *(root / "var/cache/apt").glob("*.bin")]
    assert leftovers == [] and not (root / "usr/sbin/policy-rc.d").exists()
    assert (root / "etc/resolv.conf").read_text() == "nameserver 127.0.0.1\n"


async def test_setup_of_a_second_home_says_what_it_did_and_does_it_once(settings):
    said = io.StringIO()
    report = await run_setup(settings, progress=progress.PlainProgress(said))
    assert report.version and report.platform and report.template["name"] == "base"
    assert f"borrow: engine and base of {LENDER}" in said.getvalue()
    started = time.monotonic()
    again = await run_setup(settings, progress=progress.PlainProgress(said))
    assert time.monotonic() - started < 1
    assert again.template == report.template


@pytest.mark.slow
@pytest.mark.net
async def test_a_template_is_one_layer_on_its_parent(settings):
    """Packages and commands run with the host's network in the merged root, above the base."""
    await quick_setup(settings)
    recipe = recipes.Recipe(
        name="tools",
        packages=("tree",),
        commands=("echo made >/etc/made\nrm /etc/bash.bashrc", "su user -c 'echo hello >~/greeting'"),
        parent=recipes.BASE,
        env=recipes.BASE.env,
    )
    disks = DiskStore(settings.home, settings)
    await disks.open()
    try:
        record = await build_template(settings.home, disks, recipe)
        base = read_template(LENDER, "base")
        assert base and record["layers"][1:] == base["layers"]
        async with machine(settings, "tools") as guest:
            code, text = await run(guest, "tree --version && cat /etc/made ~/greeting; ls /etc/bash.bashrc")
            assert "made\nhello\n" in text and code != 0, text
        upper = disks.layer_path(record["layers"][0])
        assert not list((upper / "var/lib/apt/lists").glob("*Packages*"))
        assert not (upper / "usr/sbin/policy-rc.d").exists()
        for layer in record["layers"]:
            await disks.drop_layer(layer)
    finally:
        await disks.close(unmount=True)


async def test_a_failing_command_is_told_with_its_output_and_leaves_nothing(settings):
    await quick_setup(settings)
    recipe = recipes.Recipe(name="bad", commands=("echo the reason >&2; exit 7",), parent=recipes.BASE)
    disks = DiskStore(settings.home, settings)
    await disks.open()
    try:
        before = disks.layers.all()
        with pytest.raises(Exception, match="ended with 7: the reason"):
            await build_template(settings.home, disks, recipe)
        assert disks.layers.all() == before
        assert list((settings.home / "store" / "tmp").iterdir()) == []
        assert read_template(settings.home, "bad") is None
    finally:
        await disks.close(unmount=True)


async def test_the_platform_is_chosen_by_figures(settings):
    await quick_setup(settings)
    engine = runsc.read_engine(settings.home)
    template = read_template(settings.home, "base")
    assert engine and template
    lowers = layer_paths(settings.home, template["layers"])
    chosen, figures = await choose_platform(await Runsc.probe(Path(engine["runsc"])), settings.home, lowers)
    assert {row.platform for row in figures} == {"systrap", "ptrace"}
    assert chosen in ("systrap", "ptrace")
    assert all(0 < row.command_ms < row.boot_ms * 10 for row in figures)


async def test_doctor_finds_this_machine_well(settings):
    await quick_setup(settings)
    seen = []
    checks = await doctor.run(settings, on_check=seen.append)
    assert checks == seen
    assert [(c.name, c.detail) for c in checks if not c.ok] == []
    details = {c.name: c.detail for c in checks}
    assert "restore" in details["machine"] and "works" not in details["kvm"]
    assert not list(settings.home.glob("doctor-*")) and not list(settings.home.glob("try-*"))


async def test_doctor_in_an_empty_home_names_the_remedy(tmp_home):
    settings = Settings(home=tmp_home, socket=tmp_home / "s", base_from=tmp_home / "nobody")
    checks = {c.name: c for c in await doctor.run(settings)}
    for name in ("engine", "machine"):
        assert checks[name].ok or "forkyard setup" in checks[name].remedy
    assert not checks["base"].ok and checks["base"].remedy == "forkyard setup"
    assert checks["store"].ok and checks["overlay"].ok


@pytest.mark.net
async def test_runsc_is_downloaded_with_its_signature_checked(tmp_home):
    if apt.host_release().id != "debian":
        pytest.skip("for Debian hosts")
    program = await runsc.fetch(tmp_home)
    assert (await Runsc.probe(program)).version >= "0.0~2024"
    assert [p.name for p in (tmp_home / "engine").iterdir()] == ["debian"]

    other = tmp_home / "empty.gpg"
    other.write_bytes(b"")
    archive = apt.sources(apt.host_release())[0]
    forged = apt.Source(archive.uri, runsc.SUITE, ("main",), str(other))
    with pytest.raises(UnsupportedError, match="apt could not update"):
        await apt.download("runsc", [forged], tmp_home / "engine" / "forged")
    assert not (tmp_home / "engine" / "forged").exists()
