"""vLLM's CPU workers for a pipeline stage, and for an engine that shares a model's experts with others.

Named by `worker_cls`. A stage needs a buffer for what it receives from the previous one. vLLM allocates it
during warm-up, which it skips for an eager model with a fixed KV cache size; then the first request ends the
engine. Engines of a gang exchange the tokens of their batches, each a different number. vLLM's CPU
communicator cannot do that; here rows are padded to equal shapes, which Gloo supports. And vLLM's CPU kernel
treats every expert as local: it reads beyond its weights for an expert of another engine.

Work-arounds for vLLM 0.32. Remove the first when its runner for CPUs makes `intermediate_tensors` without a
warm-up; the others (https://github.com/vllm-project/vllm/issues/57837) when `CpuCommunicator` has
`all_gatherv` and `reduce_scatterv`, and `CPUUnquantizedExperts` heeds `expert_map`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker

Tensors = torch.Tensor | list[torch.Tensor]


class StageWorker(CPUWorker):
    """A CPU worker that has the buffer from the start."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner: Any = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class ExpertWorker(StageWorker):
    """Its communicators exchange different numbers of rows; its kernel skips other engines' experts."""

    def init_device(self) -> None:
        communicator: Any = CpuCommunicator
        communicator.all_gatherv = all_gatherv
        communicator.reduce_scatterv = reduce_scatterv
        kernel: Any = CPUUnquantizedExperts
        kernel.apply = _of_own_experts(kernel.apply)
        super().init_device()


def _of_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Maps to local expert numbers, from 0. Experts of other engines, -1 in `expert_map`, get weight 0."""
    named = inspect.signature(apply)

    def own(*args: Any, **kwargs: Any) -> None:
        given = named.bind(*args, **kwargs).arguments
        if (numbers := given["expert_map"]) is not None:
            experts = numbers[given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(experts < 0, 0.0).contiguous()
            given["topk_ids"] = experts.clamp(min=0).int().contiguous()
        apply(**given)

    return own


def all_gatherv(self: Any, input_: Tensors, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensors:
    """The rows of all ranks, in rank order. sizes: rows per rank; None for as many as here."""
    assert dim == 0, "vLLM gathers rows"
    if isinstance(input_, list):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def _gathered(communicator: Any, rows: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    counts = sizes or [len(rows)] * communicator.world_size
    filled = rows.new_zeros((max(counts), *rows.shape[1:]))
    filled[: len(rows)] = rows
    parts = [torch.empty_like(filled) for _ in counts]
    distributed.all_gather(parts, filled, group=communicator.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0, "vLLM scatters rows"
    counts = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=self.device_group)
    return total.split(list(counts))[self.rank_in_group].contiguous()
