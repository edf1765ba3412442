"""`penstock check`: every mistake in configs, and where their models would be placed. Starts no Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.cli.models.faults import faults
from penstock.cli.models.placement import placement_of
from penstock.config import Application
from penstock.config.derive.prefill import halves
from penstock.errors import ConfigError

_BAD_CONFIG = 2


def check(files: Sequence[str]) -> int:
    """Exit code: 0 when `files` can be served, 2 when they have faults, which go to stderr.

    Raises: EngineStartFailed when the engine is installed but cannot be asked.
    """
    applications, problems, notices = faults(files)
    for file, application in applications:
        try:
            _print(file, application)
        except ConfigError as error:  # a placement that cannot work
            problems += error.problems or [str(error)]
    _tell(problems, notices)
    return _BAD_CONFIG if problems else 0


def _print(file: str, application: Application) -> None:
    print(file)
    gateway = application.args.gateway
    port = gateway.port or "no port of its own (8000 under `penstock serve`)"
    _row(1, "gateway", f"{gateway.host}, {port}; {'one API key' if gateway.api_key else 'any API key'}")
    for config in application.args.llm_configs:
        _row(1, "model", config.model_id)
        for half in halves(config):
            for name, text in placement_of(half):
                _row(2, name, text)


def _row(depth: int, name: str, text: str) -> None:
    print(f"{'  ' * depth}{name:<{18 - 2 * depth}}{text}")


def _tell(problems: Sequence[str], notices: Sequence[str]) -> None:
    for notice in notices:
        print(f"Not checked: {notice}")
    if not problems:
        print("No mistakes found.")
        return
    count = "1 mistake:" if len(problems) == 1 else f"{len(problems)} mistakes:"
    print("\n".join([count, *problems]), file=sys.stderr)
