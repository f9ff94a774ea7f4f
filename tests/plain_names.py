"""Reports of tests by the names that they have without pytest-xdist.

It adds "@" and the group to the name of a grouped test; by such a name ``--last-failed`` finds
nothing in a run without it, and then runs everything.
"""

from __future__ import annotations

import re

import pytest


class _PlainNames:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = re.sub(r"@\w+$", "", report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker's reports have to have the controller's names
        config.pluginmanager.register(_PlainNames())
