"""vLLM's CPU worker for a pipeline stage.

A stage needs a buffer for what it receives from the previous one. vLLM allocates it during warm-up, which it
skips for an eager model with a fixed KV cache size; then the first request ends the engine. Named by
`worker_cls`.

Work-around for vLLM 0.32. Remove when its runner for CPUs makes `intermediate_tensors` without a warm-up.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """A CPU worker that has the buffer from the start."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner: Any = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
