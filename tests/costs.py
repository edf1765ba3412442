"""Seconds of each test file: at the end of a run and, by `make test-all`, in docs/inside/testing.md."""

from __future__ import annotations

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


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("write_costs")))


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
