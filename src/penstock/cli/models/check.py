"""`penstock check`: every mistake in configs and models, what fits, and where it is placed. Starts no Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.models import fitting
from penstock.cli.models.engine_arguments import read_quick_words
from penstock.cli.models.faults import faults
from penstock.cli.models.options import CHECK, Arguments
from penstock.cli.models.plan import ServePlan, is_file, make_plan
from penstock.config import Application, LLMConfig, Settings, accelerator_kind
from penstock.config.derive.placement import executor, workers
from penstock.config.derive.prefill import halves
from penstock.config.derive.serve_options import own_resources, replica_range
from penstock.config.schema.processing import own_deployment
from penstock.engines.check import with_independent_engines
from penstock.errors import ConfigError
from penstock.hooks.hook import POSTPROCESSOR, PREPROCESSOR
from penstock.preflight import start
from penstock.preflight.devices import parse_devices
from penstock.preflight.examine import Examined

_BAD_CONFIG = 2
_SHAPES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
}


def check(
    words: Sequence[str], engine_words: Sequence[str] = (), *, gpu: str | None = None, as_json: bool = False
) -> int:
    """Exit code: 0 when all can be served, 2 when there are mistakes, which go to stderr.

    words: config files and models. engine_words: as after the model of `penstock serve`.
    Raises: ConfigError for a `gpu` that is not known, and for engine_words of several models;
    EngineStartFailed when the engine is installed but cannot be asked.
    """
    planned = parse_devices(gpu, Settings.read().gpus) if gpu else None
    applications, problems, notices = faults([word for word in words if is_file(word)])
    notices = [f"Not checked: {notice}" for notice in notices]
    placed: list[dict[str, Any]] = []
    for file, application in applications:
        try:
            placed.append(_application(file, application))
        except ConfigError as error:  # a placement that cannot work
            problems += error.problems or [str(error)]
    # Words of the engine are of the only model, whether a file describes it or not.
    named = tuple(word for word in words if engine_words or not is_file(word))
    plans = [] if engine_words else [ServePlan(application.args) for _, application in applications]
    asked: list[tuple[LLMConfig, Examined]] = []
    try:
        if named:
            plan = make_plan(Arguments(sources=named, engine_words=tuple(engine_words)))
            problems += [text for config in plan.configs for text in start.missing_folders(config)]
            plans.append(read_quick_words(plan, CHECK))
        asked = [one for plan in plans for one in fitting.examined(plan, planned, ask_hub=True)]
    except ConfigError as error:
        problems += error.problems or [str(error)]
    for config, found in asked:
        problems += [start.said(config, mistake) for mistake in found.mistakes]
        notices += [f"{config.model_id}: {notice}" for notice in found.notices]
    problems = list(dict.fromkeys(problems))
    if as_json:
        fits = [fitting.as_json(config, found) for config, found in asked]
        shown = {"applications": placed, "models": fits, "mistakes": problems, "not_checked": notices}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        for application in placed:
            _print(application)
        for config, found in asked:
            if found.model and found.fit:
                _row(0, f"{config.model_source} ", f"{found.model.architecture}, {found.fit.dtype}")
            for name, text in fitting.rows(found):
                _row(1, name, text)
        _print_mistakes(problems, notices)
    return _BAD_CONFIG if problems else 0


def _application(file: str, application: Application) -> dict[str, Any]:
    """What `--json` prints of one application. Raises: ConfigError when a placement cannot work."""
    gateway = application.args.gateway
    return {
        "file": file,
        "gateway": {
            "host": gateway.host,
            "port": gateway.port,
            "api_key": gateway.api_key is not None,
            "tenants": gateway.keyed,
        },
        "models": [
            {
                "model": config.model_id,
                "deployments": [dict(placement_of(with_independent_engines(h))) for h in halves(config)],
            }
            for config in application.args.llm_configs
        ],
    }


def _print(application: Mapping[str, Any]) -> None:
    print(application["file"])
    gateway = application["gateway"]
    port = gateway["port"] or "no port of its own (8000 under `penstock serve`)"
    keys = "keys of tenants" if gateway["tenants"] else "one API key" if gateway["api_key"] else "any API key"
    _row(1, "gateway", f"{gateway['host']}, {port}; {keys}")
    for model in application["models"]:
        _row(1, "model", model["model"])
        for deployment in model["deployments"]:
            for name, text in deployment.items():
                _row(2, name, text)


def _row(depth: int, name: str, text: str) -> None:
    print(f"{'  ' * depth}{name:<{18 - 2 * depth}}{text}")


def _print_mistakes(problems: Sequence[str], notices: Sequence[str]) -> None:
    for notice in notices:
        print(notice)
    if not problems:
        print("No mistakes found.")
        return
    count = "1 mistake:" if len(problems) == 1 else f"{len(problems)} mistakes:"
    print("\n".join([count, *problems]), file=sys.stderr)


def placement_of(config: LLMConfig) -> Iterator[tuple[str, str]]:
    """Names and texts, in the order in which a reader asks for them.

    Raises: ConfigError when the placement cannot work.
    """
    options = config.get_serve_options()
    yield "source", config.model_source
    yield "engine", config.engine_name
    yield "accelerator", _accelerator(config)
    if config.engine_name == "vllm":
        yield "workers", _workers(config)
    yield "replicas", _replicas(options)
    yield "actor", _resources(own_resources(options))
    if bundles := options.get("placement_group_bundles"):
        yield "bundles", _bundles(bundles, _strategy(options))
    else:
        yield "bundles", "none; the actor's own resources are all"
    for field in (PREPROCESSOR, POSTPROCESSOR):
        if (named := getattr(config, field)) is not None:
            yield field, f"{named}, {_where(config, field)}"


def _accelerator(config: LLMConfig) -> str:
    kind = config.accelerator_type or accelerator_kind(config)
    decided = config.accelerator_type or config.accelerator_config or config.engine_name == "sim"
    return str(kind) if decided else f"{kind}, judging by this machine; decided when it is deployed"


def _workers(config: LLMConfig) -> str:
    sizes = {word: config.engine_kwargs.get(name) or 1 for name, word in _SHAPES.items()}
    shape = " x ".join(f"{word} {size}" for word, size in sizes.items() if size > 1)
    return f"{workers(config)}{f' ({shape})' if shape else ''}, executor {executor(config)!r}"


def _replicas(options: Mapping[str, Any]) -> str:
    (least, most), gang = replica_range(options), options.get("gang_scheduling_config")
    count = f"{least}" if least == most else f"{least} to {most}, autoscaled"
    return f"{count}, in gangs of {gang['gang_size']}" if gang else count


def _where(config: LLMConfig, field: str) -> str:
    options = own_deployment(config.preprocessor_options) if field == PREPROCESSOR else None
    if options is None:
        return "in the replica"
    return f"a deployment of its own: {_replicas(options)} x [{_resources(own_resources(options))}]"


def _bundles(bundles: list[dict[str, float]], strategy: str) -> str:
    kinds = [_resources(bundle) for bundle in bundles]
    counted = [f"{kinds.count(kind)} x [{kind}]" for kind in dict.fromkeys(kinds)]
    return f"{', '.join(counted)}, {strategy}"


def _strategy(options: Mapping[str, Any]) -> str:
    gang = options.get("gang_scheduling_config")
    if gang is None:
        return options["placement_group_strategy"]
    return f"each gang {gang.get('gang_placement_strategy', 'PACK')}"


def _resources(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items() if amount) or "nothing"
