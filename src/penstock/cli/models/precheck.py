"""Checks a plan before Ray starts: mistakes that would otherwise cost a minute. Takes no second."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

from penstock import ray_version
from penstock.cli.models import fitting
from penstock.cli.models.engine_arguments import read_quick_words
from penstock.cli.models.faults import quick_faults
from penstock.cli.models.options import SERVE, YAML, Arguments, CommandOptions
from penstock.cli.models.plan import ServePlan
from penstock.config import LLMConfig, Settings
from penstock.config.derive.accelerators import missing_here
from penstock.config.derive.prefill import halves
from penstock.config.messages.problems import config_error
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


def with_all_faults(error: ConfigError, arguments: Arguments) -> ConfigError:
    """The error, and all else that is found in the same files without asking an engine."""
    files = [word for word in arguments.sources if word.endswith(YAML) and os.path.isfile(word)]
    return config_error(dict.fromkeys([*(error.problems or [str(error)]), *quick_faults(files)]))


def checked(plan: ServePlan, address: str | None, command: CommandOptions = SERVE) -> ServePlan:
    """The plan, with its engine's arguments read where that is quick. address: that of a cluster, if given.

    Raises: ConfigError; Unavailable for a Ray that is too old; EngineStartFailed when an engine is not
    installed. Without an address, the cluster is this machine alone.
    """
    ray_version.check()
    configs = [half for config in plan.configs for half in halves(config)]
    if address is None:
        problems = [text for config in configs if (text := missing_here(config)) is not None]
        problems += [text for config in configs for text in start.missing_folders(config)]
        if problems:
            raise config_error(dict.fromkeys(problems))
    plan = read_quick_words(plan, command)
    if address is None and (lacking := [text for one in configs if (text := missing_engine(one))]):
        raise EngineStartFailed("\n".join(dict.fromkeys(lacking)))
    if address is None:
        _refuse_certain(plan)
    return plan


def _refuse_certain(plan: ServePlan) -> None:
    """Raises: ConfigError for what would certainly end the start of a model that is in a folder here."""
    problems = [text for config, found in fitting.examined(plan) for text in start.certain(config, found)]
    if problems:
        raise config_error(dict.fromkeys(problems))


def refuse_certificate(plan: ServePlan) -> None:
    """Raises: ConfigError when it cannot be used: the gateway runs on this machine, on whatever cluster."""
    if (tls := plan.gateway.tls) is not None:
        from penstock.serve.http.tls import Certificate

        Certificate(tls.cert, tls.key)


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
