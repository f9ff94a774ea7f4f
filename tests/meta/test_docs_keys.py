"""Every setting is documented, no documented setting is made up, and there are few of them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from forkyard.config import KEYS, Defaults, Settings

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_documented_keys_are_the_keys():
    documented = re.findall(r"^\| `([a-z_.]+)` \|", DOC.read_text(), re.M)
    assert documented == list(KEYS)


def test_fewer_than_25_keys():
    assert len(KEYS) < 25


def test_keys_are_the_fields_of_the_settings():
    top = [f.name for f in dataclasses.fields(Settings) if f.name != "defaults"]
    assert [*top, *(f"defaults.{f.name}" for f in dataclasses.fields(Defaults))] == list(KEYS)
