"""vLLM's CPU worker for one of several engines that share a model's experts. Named by `worker_cls`.

Engines of a gang exchange the tokens of their batches, each a different number. vLLM's CPU communicator
cannot do that; here rows are padded to equal shapes, which Gloo supports. And vLLM's CPU kernel treats every
expert as local: it reads beyond its weights for an expert of another engine.

Work-around for vLLM 0.32: https://github.com/vllm-project/vllm/issues/57837. Remove when `CpuCommunicator`
has `all_gatherv` and `reduce_scatterv`, and `CPUUnquantizedExperts` heeds `expert_map`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from penstock.engines.vllm.core.cpu_pipeline import StageWorker

Tensors = torch.Tensor | list[torch.Tensor]


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
