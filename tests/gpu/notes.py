"""A pytest plugin that notes each test as it begins and ends, one JSON object a line.

`-p tests.gpu.notes --notes FILE`: used by suite.py, which reads the file while the tests
run, so that a run which is cut still has a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--notes", type=Path, required=True, help="where to note each test as it begins and ends"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers report to the process that started them
        config.pluginmanager.register(
            Notes(config.getoption("--notes").open("a", encoding="utf-8"))
        )


class Notes:
    def __init__(self, file: TextIO) -> None:
        self.file = file

    def note(self, **what: Any) -> None:
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(test=nodeid, what="began")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, what="error", seconds=0.0, text=report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown each have one. A test has failed in its call, and is an error
        elsewhere."""
        if report.failed:
            what = "failed" if report.when == "call" else "error"
            self.note(
                test=report.nodeid, what=what, seconds=report.duration, text=report.longreprtext
            )
        elif report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            )
            self.note(test=report.nodeid, what="skipped", seconds=report.duration, text=reason)
        else:
            self.note(
                test=report.nodeid,
                what="passed" if report.when == "call" else "took",
                seconds=report.duration,
            )
