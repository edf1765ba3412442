"""What processes of the shared cluster run as an engine: what the config says, or a simulator in its place.

The fast tier runs examples and founding documents to see whether Penstock does what they say; that a real
engine answers them sensibly is the full tier's to show. The simulator knows the demo model's answers, also to
a chat that is rendered already; an adapter's answer is the model's behind the adapter's name; of a picture it
sees nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.config import LLMConfig
from penstock.engines import engine_class
from penstock.engines.sim.engine import SimEngine
from penstock.engines.sim.options import SimOptions
from recipes.adapters.answers import BASE_ANSWERS, WAYS

SIMULATED = "TESTS_SIMULATED"
"""Names a file: while it is there, engines that start are simulators."""

RENDERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = {
    form.format(asked): BASE_ANSWERS[question]
    for question, ways in WAYS.items()
    for asked in ways
    for form in ("{}", RENDERED)
}


def engine(config: LLMConfig) -> Any:
    """PENSTOCK_ENGINE_CLS of the cluster names this in place of a class."""
    if config.engine_name == "vllm" and Path(os.environ[SIMULATED]).exists():
        return simulator(config)
    override = os.environ.pop("PENSTOCK_ENGINE_CLS")
    try:
        return engine_class(config)(config)
    finally:
        os.environ["PENSTOCK_ENGINE_CLS"] = override


def simulator(config: LLMConfig) -> SimEngine:
    """With those of vLLM's arguments that it has, too."""
    known = {name: value for name, value in config.engine_kwargs.items() if name in SimOptions.model_fields}
    fast = {"step_base_ms": 1.0, "replies": ANSWERS}
    return SimEngine(config.model_copy(update={"engine_kwargs": known | fast}))
