"""Checks `engine_kwargs` against their engine, before anything starts. Imports no engine.

`find_unknown` takes milliseconds; `check_arguments` may ask vLLM in a process of its own, for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

from penstock.config import LLMConfig, Settings
from penstock.config.derive.placement import gang_size
from penstock.config.derive.prefill import to_check
from penstock.config.derive.serve_options import independent
from penstock.config.messages.problems import ErrorCollector, translated, warn_once
from penstock.config.schema.strict import StrictModel
from penstock.engines.vllm.arguments import check as vllm
from penstock.engines.vllm.arguments import names
from penstock.engines.vllm.arguments.check import Findings

__all__ = ["Findings", "check_arguments", "find_unknown", "options_form", "with_independent_engines"]

_FORMS = {
    "process": "penstock.engines.process.options:ProcessOptions",
    "sglang": "penstock.engines.sglang.flags:SGLangOptions",
    "sim": "penstock.engines.sim.options:SimOptions",
}


def check_arguments(configs: Sequence[LLMConfig]) -> Findings:
    """Problems in the `engine_kwargs` of configs, each with its place, and notices of what was not checked.

    Raises: EngineStartFailed when vLLM is installed but cannot be imported.
    """
    if Settings.read().engine_cls:
        return Findings(notices=("engine_kwargs are not checked: PENSTOCK_ENGINE_CLS names another engine.",))
    configs = [half for config in configs for half in to_check(config)]
    of_vllm = vllm.check_arguments([config for config in configs if config.engine_name == "vllm"])
    return Findings((*of_vllm.problems, *_problems_of_forms(configs)), of_vllm.notices)


def with_independent_engines(config: LLMConfig) -> LLMConfig:
    """The config with more replicas in place of a `data_parallel_size`, where there are no experts to share.

    Asks vLLM, for seconds, about a config that has one. Raises: EngineStartFailed when it cannot be imported.
    """
    if gang_size(config) == 1 or Settings.read().engine_cls or not vllm.is_dense(config):
        return config
    warn_once(
        f"Model '{config.model_id}' has no experts to share: each engine of its data_parallel_size of "
        f"{gang_size(config)} is a replica by itself."
    )
    return independent(config)


def find_unknown(configs: Sequence[LLMConfig]) -> list[str]:
    """The problems that are known without asking an engine: unknown names, and all of engines with a form."""
    if Settings.read().engine_cls:
        return []
    configs = [half for config in configs for half in to_check(config)]
    of_vllm = names.unknown_arguments([config for config in configs if config.engine_name == "vllm"])
    return [*of_vllm, *_problems_of_forms(configs)]


def options_form(engine_name: str) -> type[StrictModel] | None:
    """The model of an engine's `engine_kwargs`, where it is ours; None for vLLM, which has its own."""
    path = _FORMS.get(engine_name)
    return None if path is None else resolve_name(path)


def _problems_of_forms(configs: Sequence[LLMConfig]) -> list[str]:
    faults = ErrorCollector()
    for config in configs:
        form = options_form(config.engine_name)
        if form is not None:
            with faults.collecting(), translated(form, config.location / "engine_kwargs"):
                form.model_validate(config.engine_kwargs)
    return faults.found
