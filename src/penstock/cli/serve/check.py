"""`penstock check`: every fault of configs, and what they would place where. Starts no Ray and no model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock import hooks
from penstock.cli.serve.placement import placement_of
from penstock.cli.serve.precheck import missing_folders
from penstock.config import Application, LLMConfig, load_applications
from penstock.config.derive.prefill import halves
from penstock.config.loading import yaml_source
from penstock.config.loading.serving_args import FORMS
from penstock.config.messages.location import Location
from penstock.config.schema.routing import POLICIES
from penstock.engines import callback
from penstock.engines.check import check_arguments
from penstock.errors import ConfigError, Error

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


def faults(files: Sequence[str]) -> tuple[list[tuple[str, Application]], list[str], Sequence[str]]:
    """What the files describe, every fault in them, and what could not be checked.

    Raises: EngineStartFailed when the engine is installed but cannot be asked.
    """
    applications: list[tuple[str, Application]] = []
    problems: list[str] = []
    asked: list[LLMConfig] = []
    for file in files:
        try:
            found = load_applications(file)
        except ConfigError as error:
            problems += error.problems or [str(error)]
            asked += _readable_models(file)
        else:
            applications += [(file, application) for application in found]
            asked += [config for application in found for config in application.args.llm_configs]
    if sys.stderr.isatty():
        print("Asking the engines about their arguments ...", file=sys.stderr)
    findings = check_arguments(asked)
    problems += [*findings.problems, *_policy_problems(asked)]
    for config in asked:
        problems += [*hooks.problems(config), *callback.problems(config)]
    return applications, problems, [*findings.notices, *_not_here(asked)]


def _not_here(configs: Sequence[LLMConfig]) -> list[str]:
    """Folders that may be on the nodes that will run it."""
    return [text for config in configs for text in missing_folders(config)]


def _policy_problems(configs: Sequence[LLMConfig]) -> list[str]:
    own = [config for config in configs if config.routing_policy not in POLICIES]
    if not own:
        return []
    from penstock.serve.routing.registry import problems  # two seconds: it imports Ray

    return problems(own)


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


def _readable_models(file: str) -> list[LLMConfig]:
    """What a file with faults still says to engines, so that their arguments are checked in the same run."""
    try:
        found = yaml_source.read(file)
    except Error:
        return []
    models: list[LLMConfig] = []
    for values, place in _entries(found.data, found.location):
        kept = {name: values[name] for name in ("llm_engine", "engine_kwargs") if name in values}
        try:
            models.append(LLMConfig.parse({"model_loading_config": {"model_id": file}, **kept}, place))
        except ConfigError:
            continue  # told already
    return models


def _entries(data: Any, place: Location) -> Iterator[tuple[Mapping[str, Any], Location]]:
    """The mappings in which a file describes models, whatever its form."""
    if isinstance(data, list):
        for i, entry in enumerate(data):
            yield from _entries(entry, place / i)
    elif isinstance(data, Mapping):
        inner = [key for key in ("applications", "args", *FORMS) if key in data]
        for key in inner:
            yield from _entries(data[key], place / key)
        if not inner:
            yield data, place
