"""What the host offers, from made-up trees and from the real one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forkyard.host import probe


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cgroup_v2(tmp_path):
    got = probe.cgroups(tree(tmp_path, {"cgroup.controllers": "cpuset cpu io memory pids\n"}))
    assert got == probe.CgroupSupport(2, ("cpu", "memory", "pids", "freezer"))
    assert got.missing == ()


def test_cgroup_v1_beside_an_empty_v2_mount(tmp_path):
    names = {f"{name}/cgroup.procs": "" for name in ("cpu", "memory", "pids")}
    got = probe.cgroups(tree(tmp_path, names | {"unified/cgroup.controllers": ""}))
    assert got == probe.CgroupSupport(1, ("cpu", "memory", "pids"))
    assert got.missing == ("freezer",)


def test_no_cgroups(tmp_path):
    assert probe.cgroups(tmp_path).version == 0
    assert probe.cgroups(tree(tmp_path, {"cgroup.controllers": "\n"})).version == 0


@pytest.mark.parametrize(("text", "value"), [("0\n", False), ("1\n", True), ("2\n", True)])
def test_rcu_setting(tmp_path, text, value):
    file = tmp_path / "rcu_expedited"
    file.write_text(text)
    assert probe.rcu_expedited(file) is value
    probe.set_rcu_expedited(not value, file)
    assert probe.rcu_expedited(file) is not value
    assert probe.rcu_expedited(tmp_path / "none") is None


def test_filesystems_memory_and_flags(tmp_path):
    root = tree(
        tmp_path,
        {
            "filesystems": "nodev\toverlay\n\text4\n",
            "meminfo": "MemTotal:       2048000 kB\nMemFree: 1 kB\nMemAvailable:   1024000 kB\n",
            "cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2\n\nprocessor\t: 1\nflags\t\t: other\n",
        },
    )
    assert probe.filesystems(root / "filesystems") == {"overlay", "ext4"}
    assert probe.memory_mb(root / "meminfo") == (2000, 1000)
    assert probe.cpu_flags(root / "cpuinfo") == {"fpu", "sse2"}
    assert probe.memory_mb(root / "none") == (0, 0)


def test_kvm_device_has_to_open(tmp_path):
    assert probe.kvm_device(tmp_path / "none") is False


def test_this_host():
    started = time.monotonic()
    assert probe.kernel_release() >= (4, 14)
    total, available = probe.memory_mb()
    assert total >= available > 0
    assert probe.cgroups().version in (0, 1, 2)
    wait = probe.grace_period_ms()
    assert wait is None or 0 <= wait < 1000
    assert time.monotonic() - started < 5
