"""`penstock check`: every mistake in configs, and where their models would be placed. Starts no Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cli.models.faults import faults
from penstock.cli.models.placement import placement_of
from penstock.config import Application
from penstock.config.derive.prefill import halves
from penstock.errors import ConfigError

_BAD_CONFIG = 2


def check(files: Sequence[str], *, as_json: bool = False) -> int:
    """Exit code: 0 when `files` can be served, 2 when they have mistakes, which go to stderr.

    Raises: EngineStartFailed when the engine is installed but cannot be asked.
    """
    applications, problems, notices = faults(files)
    placed: list[dict[str, Any]] = []
    for file, application in applications:
        try:
            placed.append(_application(file, application))
        except ConfigError as error:  # a placement that cannot work
            problems += error.problems or [str(error)]
    if as_json:
        found = {"applications": placed, "mistakes": problems, "not_checked": list(notices)}
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        for application in placed:
            _print(application)
        _print_mistakes(problems, notices)
    return _BAD_CONFIG if problems else 0


def _application(file: str, application: Application) -> dict[str, Any]:
    """What `--json` prints of one application. Raises: ConfigError when a placement cannot work."""
    gateway = application.args.gateway
    return {
        "file": file,
        "gateway": {"host": gateway.host, "port": gateway.port, "api_key": gateway.api_key is not None},
        "models": [
            {"model": config.model_id, "deployments": [dict(placement_of(half)) for half in halves(config)]}
            for config in application.args.llm_configs
        ],
    }


def _print(application: Mapping[str, Any]) -> None:
    print(application["file"])
    gateway = application["gateway"]
    port = gateway["port"] or "no port of its own (8000 under `penstock serve`)"
    _row(1, "gateway", f"{gateway['host']}, {port}; {'one API key' if gateway['api_key'] else 'any API key'}")
    for model in application["models"]:
        _row(1, "model", model["model"])
        for deployment in model["deployments"]:
            for name, text in deployment.items():
                _row(2, name, text)


def _row(depth: int, name: str, text: str) -> None:
    print(f"{'  ' * depth}{name:<{18 - 2 * depth}}{text}")


def _print_mistakes(problems: Sequence[str], notices: Sequence[str]) -> None:
    for notice in notices:
        print(f"Not checked: {notice}")
    if not problems:
        print("No mistakes found.")
        return
    count = "1 mistake:" if len(problems) == 1 else f"{len(problems)} mistakes:"
    print("\n".join([count, *problems]), file=sys.stderr)
