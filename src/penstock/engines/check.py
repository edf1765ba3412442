"""Checks `engine_kwargs` by the engine that will take them, before anything starts. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import LLMConfig, Settings
from penstock.config.problems import Faults, told
from penstock.engines.vllm import check as vllm
from penstock.engines.vllm.check import Findings

__all__ = ["Findings", "check_arguments"]


def check_arguments(configs: Sequence[LLMConfig]) -> Findings:
    """Problems in the `engine_kwargs` of configs, each with its place, and notices of what was not checked.

    Raises: EngineStartFailed when vLLM is installed but cannot be imported.
    """
    if Settings.read().engine_cls:
        return Findings(notices=("engine_kwargs are not checked: PENSTOCK_ENGINE_CLS names another engine.",))
    of_vllm = vllm.check_arguments([config for config in configs if config.engine_name == "vllm"])
    of_sim = _simulator_problems([config for config in configs if config.engine_name == "sim"])
    return Findings((*of_vllm.problems, *of_sim), of_vllm.notices)


def _simulator_problems(configs: Sequence[LLMConfig]) -> list[str]:
    from penstock.engines.sim.options import SimOptions

    faults = Faults()
    for config in configs:
        with faults.gathered(), told(SimOptions, config.place / "engine_kwargs"):
            SimOptions.model_validate(config.engine_kwargs)
    return faults.found
