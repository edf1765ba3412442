"""Checks a plan before Ray starts: mistakes that would otherwise cost a minute. Takes no second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from penstock import ray_version
from penstock.cli.models import fitting
from penstock.cli.models.engine_arguments import read_quick_words
from penstock.cli.models.faults import faults_of_gateway, faults_of_machine, quick_faults
from penstock.cli.models.options import SERVE, YAML, Arguments, CommandOptions
from penstock.cli.models.plan import ServePlan, make_plan
from penstock.config import LLMConfig, Settings
from penstock.config.derive.prefill import halves
from penstock.config.messages.problems import ErrorCollector, config_error
from penstock.engines.check import options_form
from penstock.engines.vllm.arguments.check import installed
from penstock.engines.vllm.capabilities import version
from penstock.errors import ConfigError, EngineStartFailed
from penstock.preflight import start

_NO_VLLM = (
    "vLLM is not installed here; install it with `pip install 'penstock[vllm]'`, or `'penstock[cpu]'` on a "
    "machine without a GPU."
)
_NO_SGLANG = (
    "SGLang is not installed beside Penstock; name the interpreter of its environment: "
    "`python: /path/to/python`."
)


def planned(arguments: Arguments) -> ServePlan:
    """What `penstock serve` is to serve, `checked`.

    Raises: as `checked`; a ConfigError has all that is found in the same files without asking an engine.
    """
    try:
        plan = make_plan(arguments)
        found = ErrorCollector(
            faults_of_gateway(plan.gateway, plan.serving.location / "gateway", plan.configs)
        )
        found.found += start.faults_of_storage(plan.serving)
        with found.collecting():
            plan.refuse_serve_only()
        with found.collecting():
            plan = checked(plan, arguments.address)
        found.raise_any()
    except ConfigError as error:
        files = [word for word in arguments.sources if word.endswith(YAML) and os.path.isfile(word)]
        more = quick_faults(files, all_here=arguments.address is None)
        raise _joined(error, more) from error
    return plan


def _joined(error: ConfigError, problems: Sequence[str]) -> ConfigError:
    """The error with more problems; as it is, with its hints, where these are none but its own."""
    own = error.problems or (str(error),)
    found = dict.fromkeys([*own, *problems])
    return config_error(found) if len(found) > len(own) else error


def checked(plan: ServePlan, address: str | None, command: CommandOptions = SERVE) -> ServePlan:
    """The plan, with its engine's arguments read where that is quick. address: that of a cluster, if given.

    Raises: ConfigError with every fault; Unavailable for a Ray that is too old; EngineStartFailed when an
    engine is not installed. Without an address, the cluster is this machine alone.
    """
    ray_version.check()
    if address is not None:
        return read_quick_words(plan, command)
    found = ErrorCollector(list(dict.fromkeys(faults_of_machine(plan.configs))))
    try:
        plan = read_quick_words(plan, command)
    except ConfigError as error:
        raise _joined(error, found.found) from error
    with found.collecting():
        _refuse_certain(plan)
    found.raise_any()
    configs = [half for config in plan.configs for half in halves(config)]
    if lacking := [text for one in configs if (text := missing_engine(one))]:
        raise EngineStartFailed("\n".join(dict.fromkeys(lacking)))
    return plan


def _refuse_certain(plan: ServePlan) -> None:
    """Raises: ConfigError for what would certainly end the start of a model that is in a folder here."""
    problems = [text for config, found in fitting.examined(plan) for text in start.certain(config, found)]
    if problems:
        raise config_error(dict.fromkeys(problems))


def missing_engine(config: LLMConfig) -> str | None:
    """A sentence when the engine is certainly not here, or in a version that is refused.

    Says nothing where it comes from elsewhere: the user's own classes, a `runtime_env` that installs it.
    """
    if config.server_cls is not None or Settings.read().engine_cls or start.brings_its_own(config):
        return None
    if config.engine_name == "vllm":
        return version.refusal(version.installed()) if installed() else _NO_VLLM
    return _missing_program(config)


def _missing_program(config: LLMConfig) -> str | None:
    """Of `process` the first word of its command, of `sglang` its interpreter."""
    form = options_form(config.engine_name)
    options: Any = None if form is None else form.model_validate(config.engine_kwargs)
    command: list[str] = getattr(options, "command", [])
    program: str | None = command[0] if command else getattr(options, "python", None)
    if config.engine_name == "sglang" and program is None and find_spec("sglang") is None:
        return (config.location / "engine_kwargs").says(_NO_SGLANG)
    if program is None or "{" in program or shutil.which(program) is not None:
        return None
    return (config.location / "engine_kwargs").says(f"there is no program {program!r} on this machine.")
