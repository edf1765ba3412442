"""The simulator schedules as vLLM's own scheduler does: the same tokens of the same requests in each step.

vLLM's scheduler and block pool run here without a model; what a model would sample is told to them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
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

Policy = Literal["fcfs", "priority"]
Hasher = Callable[[Request], Any]

BLOCK_SIZE = 16
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 256, "max_model_len": 1024}
SAID = 7
"""Every token that the model would make."""
CLASSES = (0, 0, 1, 1, 1)
"""Priorities of online requests and rows, in a mix."""


@dataclass(frozen=True)
class Asked:
    """A request, and the step before which it comes."""

    name: str
    step: int
    prompt: list[int]
    tokens: int
    priority: int = 0

    @property
    def arrival(self) -> float:
        """Before the run, so that the model's clock has passed it; in their order."""
        return -1 / (1 + int(self.name))


@pytest.mark.parametrize("kv_blocks", [64, 70, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_each_step_computes_what_vllm_would(kv_blocks: int, seed: int):
    asked = list(requests(seed))
    real, simulated = list(vllm_steps(asked, kv_blocks)), list(simulated_steps(asked, kv_blocks))
    assert simulated == real


@pytest.mark.parity("X1")
@pytest.mark.parametrize("kv_blocks", [64, 70, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_each_step_computes_what_vllm_would_of_online_and_batch(kv_blocks: int, seed: int):
    asked = list(requests(seed, CLASSES))
    real = list(vllm_steps(asked, kv_blocks, "priority"))
    batch = Batch(options(kv_blocks, "priority"))
    assert list(simulated_steps(asked, kv_blocks, batch)) == real


@pytest.mark.parity("X1")
@pytest.mark.parametrize("kv_blocks", [64, 70, 100])
@pytest.mark.parametrize("seed", range(3))
def test_with_async_scheduling_online_goes_first_and_batch_gives_way(kv_blocks: int, seed: int):
    asked = list(requests(seed, CLASSES))
    scheduler, hasher = vllm_scheduler(kv_blocks, "priority", AsyncScheduler)
    rows = {one.name for one in asked if one.priority}
    given_way: list[str] = []
    for planned in steps_ahead(scheduler, hasher, asked):
        given_way += sorted(planned.preempted_req_ids or ())
        if any(one.req_id in rows for one in planned.scheduled_new_reqs):
            assert rows.issuperset(one.request_id for one in scheduler.waiting)
        if not rows.issuperset(planned.preempted_req_ids or ()):
            assert rows.isdisjoint(one.request_id for one in scheduler.running)
    assert len(given_way) > 3 or kv_blocks > 70
    assert not scheduler.requests


def test_the_requests_are_such_that_some_give_way_and_many_find_something():
    batch = Batch(options(64))
    list(simulated_steps(list(requests(0)), 64, batch))
    assert batch.counts.preemptions > 3
    assert 0.1 < batch.counts.hits / batch.counts.queries < 0.9


def requests(seed: int, priorities: Sequence[int] = (0,)) -> Iterator[Asked]:
    """Sixty that come close together; most begin with one of a few prefixes."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(10, 900) for _ in range(draw.choice((48, 100, 320)))] for _ in range(4)]
    step = 0
    for number in range(60):
        step += draw.choice((0, 0, 1, 2, 9))
        own = [draw.randrange(10, 900) for _ in range(draw.choice((1, 16, 40, 300)))]
        begun = draw.choice([*prefixes, []])
        yield Asked(str(number), step, begun + own, draw.choice((1, 2, 30, 120)), draw.choice(priorities))


def simulated_steps(
    asked: Sequence[Asked], kv_blocks: int, batch: Batch | None = None
) -> Iterator[dict[str, int]]:
    batch = batch or Batch(options(kv_blocks))
    names: dict[Output, str] = {}
    for step in range(100_000):
        for one in (one for one in asked if one.step == step):
            reply = PlannedReply((SAID,), ("",), one.tokens, "length")
            chain = Chain(one.prompt, reply, BLOCK_SIZE)
            output = Output(len(one.prompt), reply, chain, one.arrival, priority=one.priority)
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


def options(kv_blocks: int, policy: Policy = "fcfs") -> SimOptions:
    size = {"block_size": BLOCK_SIZE, "kv_tokens": BLOCK_SIZE * kv_blocks}
    return SimOptions(scheduling_policy=policy, **size, **LIMITS)


def vllm_steps(asked: Sequence[Asked], kv_blocks: int, policy: Policy = "fcfs") -> Iterator[dict[str, int]]:
    scheduler, hasher = vllm_scheduler(kv_blocks, policy)
    for step in range(100_000):
        add(scheduler, hasher, asked, step)
        planned = scheduler.schedule()
        yield dict(planned.num_scheduled_tokens)
        if not planned.num_scheduled_tokens and step > asked[-1].step:
            return
        scheduler.update_from_output(planned, made(scheduler, planned))


def steps_ahead(scheduler: Scheduler, hasher: Hasher, asked: Sequence[Asked]) -> Iterator[SchedulerOutput]:
    """Each step is planned before the one before it has made its tokens, as with async scheduling."""
    last: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
    for step in range(100_000):
        add(scheduler, hasher, asked, step)
        planned = scheduler.schedule()
        yield planned
        output = made(scheduler, planned)
        if last:
            scheduler.update_from_output(*last)
        last = planned, output
        if not scheduler.requests and step > asked[-1].step:
            return


def add(scheduler: Scheduler, hasher: Hasher, asked: Sequence[Asked], step: int) -> None:
    """Gives it the requests that come before this step."""
    for one in (one for one in asked if one.step == step):
        request = Request(
            one.name,
            one.prompt,
            SamplingParams(max_tokens=one.tokens, ignore_eos=True),
            None,
            arrival_time=one.arrival,
            priority=one.priority,
            block_hasher=hasher,
        )
        scheduler.add_request(request)


def made(scheduler: Scheduler, planned: SchedulerOutput) -> ModelRunnerOutput:
    """What a model would sample in the step."""
    names = list(planned.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [SAID] for name in names]
    return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, tokens)


def vllm_scheduler(
    kv_blocks: int, policy: Policy, kind: type[Scheduler] = Scheduler
) -> tuple[Scheduler, Hasher]:
    init_none_hash(sha256)
    given = {**LIMITS, "block_size": BLOCK_SIZE, "enable_prefix_caching": True, "async_scheduling": False}
    arguments = EngineArgs(penstock.demo_model(), scheduling_policy=policy, **given)
    with patch.dict(os.environ):  # it sets variables for engines of this process
        config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = kv_blocks + 1
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(kv_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one it keeps for itself
    config.scheduler_config.async_scheduling = kind is AsyncScheduler  # no CPU engine has it
    scheduler = kind(config, blocks, StructuredOutputManager(config), BLOCK_SIZE)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, sha256)
