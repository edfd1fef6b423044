"""A plugin of pytest that appends a line to the record of benchmarks.gpu when a test begins, and when it ends.

To use it: `python -m pytest -p benchmarks.gpu.pytest_lines --lines FILE --under KEY ...`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import lines

MESSAGE_CHARACTERS = 2000
"""The error of a test is kept up to this length, from its end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--lines` and `--under`: the file of lines, and the place of results in the record."""
    parser.addoption("--lines", type=Path, required=True, metavar="FILE")
    parser.addoption("--under", action="append", default=[], metavar="KEY")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to listen."""
    config.pluginmanager.register(Listener(config.getoption("--lines"), config.getoption("--under")))


class Listener:
    """Writes the outcome of each test: "begun", "passed", "failed" or "skipped"."""

    def __init__(self, path: Path, under: list[str]) -> None:
        self._path, self._under = path, under
        self._entry: dict[str, Any] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write how many tests there are."""
        lines.append(self._path, [*self._under, "collected"], len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a file that cannot be collected as failed."""
        if report.failed:
            self._write(report.nodeid, {"outcome": "failed", "message": _end(report)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test begins."""
        self._entry = {"outcome": "begun", "seconds": 0.0}
        self._write(nodeid, self._entry)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test, after its fixtures are ready, it has run, and its fixtures are done."""
        self._entry["seconds"] = round(self._entry["seconds"] + report.duration, 3)
        if report.failed:
            self._entry |= {"outcome": "failed", "message": _end(report)}
        elif report.skipped:
            self._entry["outcome"] = "skipped"
        elif report.when == "call":
            self._entry["outcome"] = "passed"
        if report.failed or report.when == "teardown":
            self._write(report.nodeid, self._entry)

    def _write(self, nodeid: str, entry: dict[str, Any]) -> None:
        lines.append(self._path, [*self._under, "tests", nodeid], entry)


def _end(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.longreprtext[-MESSAGE_CHARACTERS:]
