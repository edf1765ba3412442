"""A whole command: settings to a run, and a run to a table, JSON, a page and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.bench.report.page import to_html
from penstock.bench.report.progress import Screen
from penstock.bench.report.record import to_json, write_records
from penstock.bench.report.table import print_tables
from penstock.bench.run.options import BenchOptions, Files
from penstock.bench.run.session import Result, run
from penstock.bench.run.settings import BenchSettings
from penstock.errors import ConfigError

_STOPPED = 130  # what a shell gives for SIGINT


def measure(options: BenchOptions, files: Files, *, fail_on_errors: bool = False) -> int:
    """Exit code: 1 when no request succeeded, or one failed and that is to count; 130 when it was stopped.

    Raises: Error when nothing could be measured at all.
    """
    settings = BenchSettings.of(options)
    writers: list[tuple[Path | None, Callable[[Result, Path], object]]] = [
        (files.json, lambda result, path: path.write_text(json.dumps(to_json(result), indent=1) + "\n")),
        (files.html, lambda result, path: path.write_text(to_html(result))),
        (files.records, write_records),
    ]
    for path, _ in writers:
        _refuse_unwritable(path)
    screen = Screen(sys.stderr)
    with screen.bar:
        result = run(settings, screen)
    print_tables(result, sys.stdout)
    for path, write in writers:
        if path is not None:
            write(result, path)
    return _code(result, fail_on_errors)


def _refuse_unwritable(path: Path | None) -> None:
    """Before the run, not after it. An existing file stays as it is until then."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error


def _code(result: Result, fail_on_errors: bool) -> int:
    if result.stopped:
        return _STOPPED
    failed = any(figures.requests.failed for figures in result.figures)
    return int(not any(figures.requests.good for figures in result.figures) or (fail_on_errors and failed))
