"""Faults are injected into a yard of toy machines; a selection, marked slow, into real ones."""

from __future__ import annotations

from yard_fixtures import home, kind, lives  # noqa: F401
