"""Seconds of each test file: at the end of a run and, by `make test-all`, in docs/inside/testing.md.

With `--report FILE` also a line of JSON for each test, as soon as it has ended: what it asserted holds, its
seconds, and what it measured (`record_property`). A run that is cut off leaves those that it got through.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "inside" / "testing.md"
BEGIN, END = "<!-- slowest files: written by make test-all -->", "<!-- end of slowest files -->"
SHOWN = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-costs", action="store_true", help=f"write the {SHOWN} slowest files to {PAGE.name}"
    )
    parser.addoption("--report", type=Path, help="append a line of JSON for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("write_costs")))
        if (file := config.getoption("report")) is not None:
            config.pluginmanager.register(Report(file))


class Report:
    """A pytest plugin. setup: the start of what a test is the first to use."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._setup_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._setup_s[report.nodeid] = report.duration
        if report.when != "call" and report.passed:
            return
        line = {
            "test": report.nodeid,
            "outcome": report.outcome if report.when == "call" or report.skipped else f"{report.when} failed",
            "setup_s": round(self._setup_s.get(report.nodeid, 0.0), 2),
            "call_s": round(report.duration, 2) if report.when == "call" else 0.0,
            **dict(report.user_properties),
        }
        if not report.passed:
            line["why"] = report.longreprtext[-4000:]
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Costs:
    """A pytest plugin. A shared fixture's start is counted where it is asked for first."""

    def __init__(self, write: bool) -> None:
        self._write = write
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration
        self._tests[report.location[0]].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) < 2:
            return
        slowest = sorted(self._seconds, key=lambda file: -self._seconds[file])[:SHOWN]
        terminalreporter.section(f"slowest {len(slowest)} files")
        for file in slowest:
            terminalreporter.write_line(
                f"{self._seconds[file]:7.1f} s  {len(self._tests[file]):4d} tests  {file}"
            )
        if self._write:
            PAGE.write_text(with_table(PAGE.read_text(), self._rows(slowest)))

    def _rows(self, files: list[str]) -> list[str]:
        return [
            f"| [{Path(file).stem}](../../{file}) | {self._seconds[file]:.0f} | {len(self._tests[file])} |"
            for file in files
        ]


def with_table(page: str, rows: list[str]) -> str:
    """`page` with these rows between its marks. Raises: ValueError where it has none."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no place for the table: {BEGIN} ... {END}")
    table = "\n".join(["| file | seconds | tests |", "|---|--:|--:|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
