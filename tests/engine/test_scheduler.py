"""The simulator schedules as vLLM's own scheduler does: the same tokens of the same requests in each step.

vLLM's scheduler and block pool run here without a model; what a model would sample is told to them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import penstock
from penstock.engines.sim.batch import Batch
from penstock.engines.sim.batch import Sequence as Output
from penstock.engines.sim.cache import Chain
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply

BLOCK_SIZE = 16
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 256, "max_model_len": 1024}
SAID = 7
"""Every token that the model would make."""


@dataclass(frozen=True)
class Asked:
    """A request, and the step before which it comes."""

    name: str
    step: int
    prompt: list[int]
    tokens: int


@pytest.mark.parametrize("kv_blocks", [64, 70, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_each_step_computes_what_vllm_would(kv_blocks: int, seed: int):
    asked = list(requests(seed))
    real, simulated = list(vllm_steps(asked, kv_blocks)), list(simulated_steps(asked, kv_blocks))
    assert simulated == real


def test_the_requests_are_such_that_some_give_way_and_many_find_something():
    batch = Batch(options(64))
    list(simulated_steps(list(requests(0)), 64, batch))
    assert batch.cache_counts.preemptions > 3
    assert 0.1 < batch.cache_counts.hits / batch.cache_counts.queries < 0.9


def requests(seed: int) -> Iterator[Asked]:
    """Sixty that come close together; most begin with one of a few prefixes."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(10, 900) for _ in range(draw.choice((48, 100, 320)))] for _ in range(4)]
    step = 0
    for number in range(60):
        step += draw.choice((0, 0, 1, 2, 9))
        own = [draw.randrange(10, 900) for _ in range(draw.choice((1, 16, 40, 300)))]
        begun = draw.choice([*prefixes, []])
        yield Asked(str(number), step, begun + own, draw.choice((1, 2, 30, 120)))


def simulated_steps(
    asked: Sequence[Asked], kv_blocks: int, batch: Batch | None = None
) -> Iterator[dict[str, int]]:
    batch = batch or Batch(options(kv_blocks))
    names: dict[Output, str] = {}
    for step in range(100_000):
        for one in (one for one in asked if one.step == step):
            reply = PlannedReply((SAID,), ("",), one.tokens, "length")
            output = Output(len(one.prompt), reply, Chain(one.prompt, reply, BLOCK_SIZE), 0.0)
            names[output] = one.name
            batch.submit(output)
        if batch.idle():
            yield {}
            if step > asked[-1].step:
                return
            continue
        batch.begin_step()
        yield {names[output]: tokens for output, tokens in batch.work()}
        batch.end_step()


def options(kv_blocks: int) -> SimOptions:
    return SimOptions(block_size=BLOCK_SIZE, kv_tokens=BLOCK_SIZE * kv_blocks, **LIMITS)


def vllm_steps(asked: Sequence[Asked], kv_blocks: int) -> Iterator[dict[str, int]]:
    scheduler, hasher = vllm_scheduler(kv_blocks)
    for step in range(100_000):
        for one in (one for one in asked if one.step == step):
            params = SamplingParams(max_tokens=one.tokens, ignore_eos=True)
            scheduler.add_request(Request(one.name, one.prompt, params, None, block_hasher=hasher))
        planned = scheduler.schedule()
        yield dict(planned.num_scheduled_tokens)
        if not planned.num_scheduled_tokens and step > asked[-1].step:
            return
        names = list(planned.num_scheduled_tokens)
        made = [[] if scheduler.requests[name].is_prefill_chunk else [SAID] for name in names]
        places = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(planned, ModelRunnerOutput(names, places, made))


def vllm_scheduler(kv_blocks: int):
    init_none_hash(sha256)
    given = {**LIMITS, "block_size": BLOCK_SIZE, "enable_prefix_caching": True, "async_scheduling": False}
    arguments = EngineArgs(penstock.demo_model(), **given)
    with patch.dict(os.environ):  # it sets variables for engines of this process
        config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = kv_blocks + 1
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(kv_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one it keeps for itself
    scheduler = Scheduler(config, blocks, StructuredOutputManager(config), BLOCK_SIZE)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, sha256)
