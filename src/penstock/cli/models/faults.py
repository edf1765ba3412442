"""Every mistake in config files, found without starting Ray or a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.config import Application, GatewayConfig, LLMConfig, check_accelerator, load_applications
from penstock.config.derive import names
from penstock.config.derive.accelerators import missing_here
from penstock.config.derive.prefill import halves
from penstock.config.loading import keys_file, yaml_source
from penstock.config.loading.serving_args import FORMS, PREFILL
from penstock.config.messages.location import Location
from penstock.config.messages.problems import ErrorCollector, unknown
from penstock.config.schema.env_vars import are_references_kept
from penstock.config.schema.routing import POLICIES
from penstock.config.schema.strict import RootConfig
from penstock.engines import callback
from penstock.engines.check import check_arguments, find_unknown
from penstock.errors import ConfigError, Error
from penstock.hooks import hook
from penstock.preflight.start import faults_of_storage, missing_folders

_GATEWAY = "gateway"
_OF_ENGINE = {"model_loading_config", "llm_engine", "engine_kwargs"}
_Gateway = tuple[GatewayConfig, Location]
_Config = TypeVar("_Config", bound=RootConfig)


def faults(files: Sequence[str]) -> tuple[list[tuple[str, Application]], list[str], Sequence[str]]:
    """What the files describe, every fault in them, and what could not be checked.

    Raises: EngineStartFailed when the engine is installed but cannot be asked.
    """
    found = _read(files)
    if sys.stderr.isatty():
        print("Asking the engines about their arguments ...", file=sys.stderr)
    findings = check_arguments(found.configs)
    problems = [*found.problems, *findings.problems, *_policy_problems(found.configs)]
    problems += _problems_of_hooks(found.configs)
    serve_only = dict.fromkeys(text for _, one in found.applications for text in one.serve_only)
    not_here = [text for config in found.configs for text in missing_folders(config)]  # perhaps on the nodes
    not_here += [text for config in found.configs if (text := check_accelerator(config, None))]
    return found.applications, problems, [*findings.notices, *not_here, *serve_only]


def quick_faults(files: Sequence[str], *, all_here: bool) -> list[str]:
    """The faults in the files that are found without asking an engine or importing Ray.

    all_here: whether the models start on this machine.
    """
    found = _read(files)
    problems = [*found.problems, *find_unknown(found.configs), *_problems_of_hooks(found.configs)]
    return [*problems, *(faults_of_machine(found.configs) if all_here else ())]


def faults_of_machine(configs: Sequence[LLMConfig]) -> list[str]:
    """A sentence for each GPU and folder that the configs name and this machine lacks."""
    parts = [half for config in configs for half in halves(config)]
    lacking = [text for config in parts if (text := missing_here(config)) is not None]
    return [*lacking, *(text for config in parts for text in missing_folders(config))]


def faults_of_gateway(gateway: GatewayConfig, where: Location, configs: Sequence[LLMConfig]) -> list[str]:
    """A sentence for each of its files that cannot be used, and for a default model that there is not.

    configs: all models; empty where not all are known.
    """
    found = ErrorCollector()
    if (file := gateway.keys_file) is not None and (exists(file) or not are_references_kept()):
        with found.collecting(where / "keys_file"):
            keys_file.load(file)
    if gateway.tls is not None:
        from penstock.serve.http.tls import Certificate

        with found.collecting(Location(where.file, (), {(): line} if (line := (where / "tls").line) else {})):
            Certificate(gateway.tls.cert, gateway.tls.key)  # its sentences name the key
    ids = {name for config in configs for name in (config.model_id, *config.aliases)}
    if ids and gateway.default_model is not None and gateway.default_model not in ids:
        found.found.append((where / "default_model").says(unknown("model", gateway.default_model, ids)))
    return found.found


@dataclass(slots=True)
class _Read:
    """What files say. configs: every model in them; of a faulty one what can be read."""

    applications: list[tuple[str, Application]] = field(default_factory=list[tuple[str, Application]])
    problems: list[str] = field(default_factory=list[str])
    configs: list[LLMConfig] = field(default_factory=list[LLMConfig])
    gateways: list[_Gateway] = field(default_factory=list[_Gateway])


def _read(files: Sequence[str]) -> _Read:
    read = _Read()
    for file in files:
        try:
            found = load_applications(file)
        except ConfigError as error:
            read.problems += error.problems or [str(error)]
            with suppress(Error):
                _read_faulty(file, read)
        else:
            read.applications += [(file, application) for application in found]
            for args in (application.args for application in found):
                read.configs += args.llm_configs
                read.problems += faults_of_storage(args)
                read.gateways.append((args.gateway, args.location / _GATEWAY))
    all_known = all(config.model_id not in files for config in read.configs)
    named = read.configs if all_known else []
    read.problems += names.problems(named)
    for gateway, where in read.gateways:
        read.problems += faults_of_gateway(gateway, where, named)
    return read


def _problems_of_hooks(configs: Sequence[LLMConfig]) -> list[str]:
    return [text for config in configs for text in (*hook.problems(config), *callback.problems(config))]


def _policy_problems(configs: Sequence[LLMConfig]) -> list[str]:
    own = [config for config in configs if config.routing_policy not in POLICIES]
    if not own:
        return []
    from penstock.serve.routing.registry import problems  # two seconds: it imports Ray

    return problems(own)


def _read_faulty(file: str, read: _Read) -> None:
    """Adds what a file with faults still says, so that all is checked in the same run. Raises: Error."""
    for values, where in _sections(*yaml_source.read(file, twice=[])):
        if where.path[-1:] == (_GATEWAY,):
            if (gateway := _faultless(GatewayConfig, values, where)) is not None:
                read.gateways.append((gateway, where))
            continue
        if where.path[-1:] == (PREFILL,):  # the same model as the other half
            values = {name: value for name, value in values.items() if name != "aliases"}
        named = values.get("model_loading_config")
        model_id = named.get("model_id") if isinstance(named, Mapping) else None
        known = {"model_id": model_id if isinstance(model_id, str) and model_id else file}
        if (config := _faultless(LLMConfig, values, where, model_loading_config=known)) is not None:
            read.configs.append(config)


def _faultless(
    kind: type[_Config], values: Mapping[str, Any], where: Location, **needed: Any
) -> _Config | None:
    """A config without its faulty fields, which are problems already. needed: what stands in for them."""
    left = {**needed, **values}
    for _ in range(len(left) + 1):
        try:
            return kind.model_validate(left, context=(where, {})).at(where)
        except ValidationError as error:
            faulty = {detail["loc"][0] for detail in error.errors(include_url=False) if detail["loc"]}
            kept = left.keys() - faulty if faulty else left.keys() & _OF_ENGINE  # else fields do not fit
            if kept == left.keys():
                return None
            left = needed | {name: left[name] for name in kept}
    return None


def _sections(data: Any, location: Location) -> Iterator[tuple[Mapping[str, Any], Location]]:
    """The mappings in which a file describes models and gateways, whatever its form. Raises: ConfigError."""
    if isinstance(data, str) and location.path:
        data, location = yaml_source.read(data, Path(location.file).parent, twice=[])
    if isinstance(data, list):
        for i, entry in enumerate(data):
            yield from _sections(entry, location / i)
    elif isinstance(data, Mapping):
        inner = [key for key in ("applications", "args", *FORMS, _GATEWAY) if key in data]
        for key in inner:
            yield from _sections(data[key], location / key)
        if not inner:
            yield data, location
