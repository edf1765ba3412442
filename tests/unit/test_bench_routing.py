"""The routing benchmark: what it feeds to gateways and engines, and that it tells policies apart."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from benchmarks import agreement, routing, virtual
from benchmarks.prompts import WORKLOADS, Dialogue, Turn, words

from penstock.engines.sim.cache import Chain
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.serve.gateway import body
from penstock.serve.gateway.routing_features import prompt_of
from penstock.serve.routing.prefix_hashes import blocks

pytestmark = pytest.mark.full

BY_NAME = {workload.name: workload for workload in WORKLOADS}


def plan(policy: str, **changes: int) -> virtual.Plan:
    engine = SimOptions.model_validate(routing.ENGINE)
    fields = {"replicas": 4, "gateways": 1, "warmup_s": 15, "measured_s": 10, "options": engine}
    return virtual.Plan(policy, **fields | changes)  # type: ignore[arg-type]


def measured(workload: str, policy: str, **changes: int) -> routing.Row:
    slots = BY_NAME[workload].adapter_slots
    return routing.measure(BY_NAME[workload], plan(policy, adapter_slots=slots, **changes))


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


def gateway_blocks(turn: Turn) -> tuple[int, ...]:
    return blocks(prompt_of(body.fields(turn.body)))


def engine_blocks(turn: Turn) -> tuple[int, ...]:
    hashes = virtual.TextHashes(turn.text, 16)
    return tuple(hashes[index] for index in range(turn.prompt_tokens // 16))


@pytest.mark.parametrize("workload", list(BY_NAME))
def test_bodies_say_what_the_engine_reads(workload: str):
    turn = next(BY_NAME[workload].make(1)("u1", Random(1)))
    fields = body.fields(turn.body)
    assert fields.model is not None
    assert fields.model.partition(":")[0] == "m"
    assert len(turn.text) == 4 * (turn.prompt_tokens + turn.answer_tokens)
    assert 0.9 < len(prompt_of(fields)) / (4 * turn.prompt_tokens) < 1.5


def test_the_next_turn_begins_for_both_with_all_that_was_said():
    draw = Random(1)
    dialogue = Dialogue("u1", words(draw, 500))
    first = dialogue.ask(words(draw, 500), words(draw, 100), 0.0)
    second = dialogue.ask(words(draw, 500), words(draw, 100), 0.0)
    assert common(engine_blocks(first), engine_blocks(second)) == len(engine_blocks(first))
    assert common(gateway_blocks(first), gateway_blocks(second)) == len(gateway_blocks(first))


def test_dialogues_with_another_beginning_share_nothing():
    turns = [Dialogue("u", words(Random(n), 500)).ask(b"same", b"same", 0.0) for n in range(2)]
    assert common(*map(engine_blocks, turns)) == 0
    assert common(*map(gateway_blocks, turns)) == 0


def test_texts_are_known_by_the_hashes_of_their_tokens():
    text = words(Random(1), 64)
    tokens = memoryview(text).cast("I").tolist()
    chain, hashes = Chain(tokens, PlannedReply((0,), ("",), 1, "length"), 16), virtual.TextHashes(text, 16)
    other = virtual.TextHashes(text[:-1] + b"!", 16)
    assert [chain[n] == chain[m] for n in range(4) for m in range(4)] == [
        hashes[n] == hashes[m] for n in range(4) for m in range(4)
    ]
    assert [hashes[n] == other[n] for n in range(4)] == [True, True, True, False]


def test_the_same_plan_gives_the_same_figures():
    first, second = (measured("chats", "prefix_affinity", measured_s=5) for _ in "ab")
    assert first.ttft_p99_s == second.ttft_p99_s
    assert first.requests == second.requests


def test_prefix_affinity_finds_more_and_makes_more_where_long_prefixes_are_shared():
    dice, affinity = (measured("agents", name) for name in ("power_of_two", "prefix_affinity"))
    assert affinity.hit_rate > dice.hit_rate + 0.15
    assert affinity.made_tokens_per_s > 1.3 * dice.made_tokens_per_s


def test_prefix_affinity_costs_nothing_where_nothing_is_shared():
    dice, affinity = (measured("independent", name) for name in ("power_of_two", "prefix_affinity"))
    assert affinity.hit_rate < 0.01
    assert affinity.made_tokens_per_s > 0.99 * dice.made_tokens_per_s


@pytest.mark.parity("X14")
@pytest.mark.parametrize("name", ["prefix_affinity", "adapter_affinity", "least_loaded"])
def test_adapters_stay_loaded_where_their_requests_go(name: str):
    dice, affinity = (measured("adapters", policy, replicas=8) for policy in ("power_of_two", name))
    assert affinity.loads_per_s < dice.loads_per_s / 50
    assert affinity.ttft_p99_s < dice.ttft_p50_s
    assert affinity.made_tokens_per_s > 1.1 * dice.made_tokens_per_s


@pytest.mark.parity("X14")
def test_gateways_that_do_not_talk_load_adapters_no_more_often():
    row = measured("adapters", "prefix_affinity", replicas=8, gateways=4)
    assert row.loads_per_s < 1


def test_requests_of_all_gateways_are_served_and_counted():
    row = measured("system", "prefix_affinity", gateways=4, measured_s=5)
    assert row.requests > 100
    [text] = routing.tables([row])
    assert text.splitlines()[-1].split("|")[4].strip() == "4"


def test_the_fit_finds_the_speeds_that_times_were_made_with():
    times = [(c, n, 0.007 + n * 4e-5 + n * (c + n / 2) * 3e-8) for c in (0, 1800) for n in (60, 400, 2000)]
    assert agreement.prefill(times) == pytest.approx([0.007, 4e-5, 3e-8])
    assert agreement.decode([(n, 0.002 + n * 1e-4) for n in (1, 2, 4)]) == pytest.approx([0.002, 1e-4])
