"""Every mistake in config files, found without starting Ray or a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock import hooks
from penstock.config import Application, LLMConfig, check_accelerator, load_applications
from penstock.config.derive import names
from penstock.config.loading import yaml_source
from penstock.config.loading.serving_args import FORMS
from penstock.config.messages.location import Location
from penstock.config.schema.routing import POLICIES
from penstock.engines import callback
from penstock.engines.check import check_arguments, find_unknown
from penstock.errors import ConfigError, Error
from penstock.preflight.start import missing_folders


def faults(files: Sequence[str]) -> tuple[list[tuple[str, Application]], list[str], Sequence[str]]:
    """What the files describe, every fault in them, and what could not be checked.

    Raises: EngineStartFailed when the engine is installed but cannot be asked.
    """
    applications, problems, configs = _read(files)
    if sys.stderr.isatty():
        print("Asking the engines about their arguments ...", file=sys.stderr)
    findings = check_arguments(configs)
    problems += [*findings.problems, *_policy_problems(configs), *_problems_of_hooks(configs)]
    serve_only = dict.fromkeys(text for _, application in applications for text in application.serve_only)
    not_here = [text for config in configs for text in missing_folders(config)]  # perhaps on the nodes
    not_here += [text for config in configs if (text := check_accelerator(config, None))]
    return applications, problems, [*findings.notices, *not_here, *serve_only]


def quick_faults(files: Sequence[str]) -> list[str]:
    """The faults in the files that are found without asking an engine or importing Ray."""
    _, problems, configs = _read(files)
    return [*problems, *find_unknown(configs), *_problems_of_hooks(configs)]


def _read(files: Sequence[str]) -> tuple[list[tuple[str, Application]], list[str], list[LLMConfig]]:
    """What the files describe, the faults of those that cannot be read, and every model in them."""
    applications: list[tuple[str, Application]] = []
    problems: list[str] = []
    configs: list[LLMConfig] = []
    for file in files:
        try:
            found = load_applications(file)
        except ConfigError as error:
            problems += error.problems or [str(error)]
            configs += _readable_models(file)
        else:
            applications += [(file, application) for application in found]
            configs += [config for application in found for config in application.args.llm_configs]
    served = [config for _, application in applications for config in application.args.llm_configs]
    return applications, [*problems, *names.problems(served)], configs


def _problems_of_hooks(configs: Sequence[LLMConfig]) -> list[str]:
    return [text for config in configs for text in (*hooks.problems(config), *callback.problems(config))]


def _policy_problems(configs: Sequence[LLMConfig]) -> list[str]:
    own = [config for config in configs if config.routing_policy not in POLICIES]
    if not own:
        return []
    from penstock.serve.routing.registry import problems  # two seconds: it imports Ray

    return problems(own)


def _readable_models(file: str) -> list[LLMConfig]:
    """What a file with faults still says to engines, so that their arguments are checked in the same run."""
    try:
        found = yaml_source.read(file)
    except Error:
        return []
    models: list[LLMConfig] = []
    for values, location in _entries(found.data, found.location):
        kept = {name: values[name] for name in ("llm_engine", "engine_kwargs") if name in values}
        try:
            models.append(LLMConfig.parse({"model_loading_config": {"model_id": file}, **kept}, location))
        except ConfigError:
            continue  # already in `problems`
    return models


def _entries(data: Any, location: Location) -> Iterator[tuple[Mapping[str, Any], Location]]:
    """The mappings in which a file describes models, whatever its form."""
    if isinstance(data, list):
        for i, entry in enumerate(data):
            yield from _entries(entry, location / i)
    elif isinstance(data, Mapping):
        inner = [key for key in ("applications", "args", *FORMS) if key in data]
        for key in inner:
            yield from _entries(data[key], location / key)
        if not inner:
            yield data, location
