"""Which requests can be continued exactly. Importing this file imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.platforms import CpuArchEnum, current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

from penstock.engines.vllm.capabilities.state import Capabilities

_LOGPROBS = 20
"""Most for each token: they are recorded, too, some 20 bytes each."""


class Rules:
    """Which requests can be continued exactly, here and in engines with the same configuration."""

    def __init__(self, config: Any, capabilities: Capabilities) -> None:
        parallel, model = config.parallel_config, config.model_config
        self._v2: bool = config.use_v2_model_runner
        self._any = capabilities.has("continued_streams") and not (
            config.speculative_config
            or config.kv_transfer_config
            or getattr(config, "ec_transfer_config", None)
            or getattr(config, "watermark_config", None)
            or getattr(config, "aux_output_config", model).enable_return_routed_experts
            or getattr(model, "is_diffusion", False)
            or getattr(model, "enable_prompt_embeds", False)
            or model.is_encoder_decoder
            or model.logits_processors
            or parallel.pipeline_parallel_size > 1
            or (parallel.distributed_executor_backend == "ray" and not self._v2)
        )
        self._grammars = capabilities.has("continued_grammars")
        self._seeds = self._v2 or (capabilities.has("continued_seeds") and _draws_are_known(model))

    def allow(self, params: Any) -> bool:
        return (
            self._any
            and isinstance(params, SamplingParams)
            and params.output_kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
            and (params.num_logprobs is None or 0 <= params.num_logprobs <= _LOGPROBS)
            and not params.flat_logprobs
            and params.prompt_logprobs is None
            and getattr(params, "prompt_logprob_token_ids", None) is None
            and getattr(params, "thinking_token_budget", None) is None
            and getattr(params, "trace_decode_token_ids", None) is None
            and (params.structured_outputs is None or self._grammars)
            and (params.seed is None or not params.temperature or self._seeds)
        )


def _draws_are_known(model: Any) -> bool:
    """Whether the first runner draws for a seeded request as `worker` does."""
    if current_platform.is_cuda():
        return True
    usual = current_platform.get_cpu_architecture() in (CpuArchEnum.X86, CpuArchEnum.ARM)
    return current_platform.is_cpu() and usual and not getattr(model, "use_fp64_gumbel", False)
