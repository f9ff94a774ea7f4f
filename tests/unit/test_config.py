"""Settings: precedence, types, unknown keys, defaults for create, short homes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forkyard import config
from forkyard.errors import InvalidRequestError


@pytest.fixture
def read(tmp_path: Path):
    """load() with a home, an /etc file and an environment of the test's own."""

    def load(env=None, overrides=None, *, etc="", home="", explain=False):
        etc_file = tmp_path / "etc.toml"
        etc_file.write_text(etc)
        (tmp_path / "config.toml").write_text(home)
        full = {"FORKYARD_HOME": str(tmp_path), **(env or {})}
        return (config.explain if explain else config.load)(overrides, full, etc_file=etc_file)

    return load


def test_defaults(read, tmp_path):
    got = read()
    assert got.home == tmp_path
    assert got.engine == "auto" and got.platform == "auto" and got.runsc is None
    assert got.defaults == config.Defaults()
    assert (got.defaults.template, got.defaults.type, got.defaults.egress) == ("base", "small", "deny")


def test_default_home_is_the_system_one_for_root(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    got = config.load(env={}, etc_file=tmp_path / "none")
    assert got.home == Path("/var/lib/forkyard")
    assert got.socket == Path("/var/lib/forkyard/daemon.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert config.load(env={"HOME": "/home/u"}, etc_file=tmp_path / "none").home == Path(
        "/home/u/.local/share/forkyard"
    )


def test_each_source_beats_the_one_before(read):
    assert read(etc="store_gb = 1").store_gb == 1
    assert read(etc="store_gb = 1", home="store_gb = 2").store_gb == 2
    assert read({"FORKYARD_STORE_GB": "3"}, etc="store_gb = 1", home="store_gb = 2").store_gb == 3
    assert read({"FORKYARD_STORE_GB": "3"}, {"store_gb": 4}, home="store_gb = 2").store_gb == 4
    assert read({"FORKYARD_STORE_GB": "3"}, {"store_gb": None}).store_gb == 3


def test_create_defaults_from_file_and_environment(read):
    got = read(
        {"FORKYARD_DEFAULT_EGRESS_ALLOW": "@pip, @npm"}, home='[defaults]\ntype = "large"\nttl_min = 1.5'
    )
    assert got.defaults.egress_allow == ["@pip", "@npm"]
    assert (got.defaults.type, got.defaults.ttl_min) == ("large", 1.5)


def test_empty_variable_is_not_set_but_an_empty_list_is(read):
    got = read(
        {"FORKYARD_LOG_LEVEL": "", "FORKYARD_DEFAULT_EGRESS_ALLOW": ""},
        home='[defaults]\negress_allow = ["@pip"]',
    )
    assert got.log_level == "info"
    assert got.defaults.egress_allow == []


@pytest.mark.parametrize(
    ("env", "home", "near"),
    [
        ({"FORKYARD_STORE_GIB": "3"}, "", "FORKYARD_STORE_GB"),
        ({"FORKYARD_DEFAULT_EGRES_ALLOW": "x"}, "", "FORKYARD_DEFAULT_EGRESS_ALLOW"),
        ({}, 'log_levl = "info"', "log_level"),
        ({}, '[defaults]\nty = "small"', "defaults.ty"),
        ({}, '[default]\ntype = "small"', "defaults"),
    ],
)
def test_unknown_key_names_the_nearest(read, env, home, near):
    with pytest.raises(InvalidRequestError) as error:
        read(env, home=home)
    assert near in str(error.value)


def test_variables_of_sandboxes_and_tests_are_no_settings(read):
    read({"FORKYARD_FORK_ID": "x", "FORKYARD_TEST_NET": "1", "FORKYARD_BENCH_N": "3"})


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("home", "relative/path"),
        ("store_gb", "many"),
        ("store_gb", 0),
        ("store_gb", True),
        ("log_level", "loud"),
        ("engine", "docker"),
        ("platform", "xen"),
        ("max_sandboxes", -1),
        ("defaults.type", "huge"),
        ("defaults.ttl_min", 0),
        ("defaults.ttl_min", "nan"),
        ("defaults.egress", "allow"),
        ("defaults.egress_allow", [1]),
        ("defaults.cpus", "-1"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_is_wanted(read, key, bad):
    with pytest.raises(InvalidRequestError) as error:
        read(overrides={key: bad})
    assert key in str(error.value) and config.KEYS[key].wants in str(error.value)


def test_a_broken_file_and_a_home_inside_home_are_errors(read):
    with pytest.raises(InvalidRequestError, match="not valid TOML"):
        read(home="store_gb = ")
    with pytest.raises(InvalidRequestError, match="sets home"):
        read(home='home = "/x"')
    assert read(etc='home = "/somewhere"', overrides={"home": "/else"}).home == Path("/else")


def test_explain_names_every_source(read, tmp_path):
    rows = {
        key: (value, where)
        for key, value, where in read(
            {"FORKYARD_LOG_LEVEL": "debug", "FORKYARD_TOKEN": "secret"},
            {"engine": "gvisor"},
            etc="max_sandboxes = 7",
            home="store_gb = 2",
            explain=True,
        )
    }
    assert set(rows) == set(config.KEYS)
    assert rows["store_gb"] == (2, str(tmp_path / "config.toml"))
    assert rows["max_sandboxes"] == (7, str(tmp_path / "etc.toml"))
    assert rows["log_level"] == ("debug", "FORKYARD_LOG_LEVEL")
    assert rows["engine"] == ("gvisor", "--engine (flag)")
    assert rows["token"] == ("***", "FORKYARD_TOKEN")
    assert rows["defaults.type"] == ("small", "default")


def test_for_create_fills_only_what_was_not_given():
    defaults = config.Defaults(egress_allow=["@pip"], ttl_min=5, cpus=3, user="root")
    got = defaults.for_create({"template": None, "type": None, "ttl_min": 1, "egress": None})
    assert got["template"] == "base" and got["type"] == "small" and got["cpus"] == 3
    assert got["ttl_min"] == 1 and got["egress_allow"] == ["@pip"] and got["user"] == "root"


def test_for_create_egress_is_one_answer():
    defaults = config.Defaults(egress="any", egress_allow=["@pip"])
    assert "egress_allow" not in defaults.for_create({"egress": "deny"})
    assert "egress" not in defaults.for_create({"egress_allow": []})


def test_for_create_leaves_what_a_snapshot_or_image_decides():
    defaults = config.Defaults(type="large", user="root", ttl_min=5)
    got = defaults.for_create({"snapshot": "s", "type": None, "user": None, "template": None})
    assert got["type"] is None and got["user"] is None and got["template"] is None and got["ttl_min"] == 5
    got = defaults.for_create({"image": "i", "user": None, "template": None})
    assert got["user"] is None and got["template"] is None and got["type"] == "large"
    assert "cpus" not in config.Defaults(cpus=8).for_create({"type": "small"})


def test_short_leaves_a_short_home_and_links_a_long_one(tmp_path):
    assert config.short(Path("/var/lib/forkyard")) == Path("/var/lib/forkyard")
    home = tmp_path / ("x" * 60)
    home.mkdir()
    alias = config.short(home)
    try:
        assert len(str(alias)) < 40 and alias.resolve() == home
        assert config.short(home) == alias
        socket = config.load(env={"FORKYARD_HOME": str(home)}, etc_file=tmp_path / "none").socket
        assert len(str(socket)) < 108
    finally:
        alias.unlink()
