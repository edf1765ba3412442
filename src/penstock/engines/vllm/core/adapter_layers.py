"""Refuses an adapter of whose layers the engine would leave some out.

vLLM skips a layer whose name the model does not have, and answers as if the adapter, or half of it, were not
there. Which names fit is known only to its workers, which also rename layers. Importing this file imports
vLLM.
"""

# No `from __future__ import annotations`: vLLM's core decodes arguments by annotations, which must be types.

from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore


def add_lora(self: EngineCore, lora_request: LoRARequest) -> bool:
    """In the place of the core's own. Raises: ValueError."""
    added = self.model_executor.add_lora(lora_request)
    missing = set.intersection(*self.collective_rpc(_missing, args=(lora_request.lora_int_id,)))
    if missing:
        raise ValueError(
            f"this model has no {min(missing)} ({len(missing)} of the adapter's layers would be left out); "
            "the adapter was made for another model, or its tensors have other names"
        )
    return added


def _missing(worker: Any, adapter_id: int) -> set[str]:
    """The adapter's layers that this worker's part of the model does not have.

    vLLM has by now put the parts of a packed layer together under the packed layer's name. Experts are left
    out: each kind of file names them in its own way, and vLLM checks those.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    prefixes = ("", "model.") if manager.is_pooling_model else ("",)
    return {
        layer
        for layer in manager.get_adapter(adapter_id).loras
        if ".experts" not in layer and not any(prefix + layer in manager.modules for prefix in prefixes)
    }
