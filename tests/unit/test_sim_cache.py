"""The simulator's prefix cache, against cases reckoned by hand from vLLM's rules. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import httpx
import pytest

from penstock.config import LLMConfig
from penstock.engines.sim import tokenizer
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.cache import Cache, Chain
from penstock.engines.sim.engine import SimEngine
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply, plan

NOTHING = plan("x", 1, ignore_eos=True)
A, B, C = ([letter] * 4 for letter in (1, 2, 3))


def hashes(*tokens: int, reply: PlannedReply = NOTHING) -> Chain:
    return Chain(tokens, reply, 4)


def batch(blocks: int = 16, **options: object) -> Batch:
    given = {"block_size": 4, "kv_tokens": 4 * blocks, "max_model_len": 4 * blocks} | options
    return Batch(SimOptions.model_validate(given))


def request(prompt: Tokens[int], tokens: int = 1) -> Sequence:
    reply = PlannedReply((9,), ("x",), tokens, "length")
    return Sequence(len(prompt), reply, Chain(prompt, reply, 4), 0.0)


def run(batch: Batch, *requests: Sequence) -> list[int]:
    """Cached tokens of requests that come together, when all have ended."""
    for one in requests:
        batch.submit(one)
    while not batch.idle():
        batch.begin_step()
        batch.end_step()
    return [one.cached_tokens for one in requests]


def alone(batch: Batch, *prompts: Tokens[int]) -> list[int]:
    """Cached tokens of requests that come one after the other."""
    return [run(batch, request(prompt))[0] for prompt in prompts]


# -- hashes


def test_equal_beginnings_have_equal_hashes_up_to_the_first_difference():
    left, right = hashes(*A, *B, *C), hashes(*A, *C, *C)
    assert left[0] == right[0]
    assert left[1] != right[1]
    assert left[2] != right[2]  # the same tokens behind other ones


def test_a_block_across_the_end_of_the_prompt_holds_the_beginning_of_the_reply():
    reply = PlannedReply((7, 8), ("a", "b"), 10, "length")
    chain = hashes(1, 2, reply=reply)
    assert [chain[0], chain[1]] == [hashes(1, 2, 7, 8)[0], hashes(1, 2, 7, 8, 7, 8, 7, 8)[1]]


# -- what is found


def test_a_prompt_finds_its_full_blocks_but_never_its_last_token():
    assert alone(batch(), [*A, *B, 5], [*A, *B, 5]) == [0, 8]
    assert alone(batch(), [*A, *B], [*A, *B]) == [0, 4]


def test_a_prompt_shorter_than_a_block_finds_nothing():
    assert alone(batch(), [1, 1, 1], [1, 1, 1]) == [0, 0]


def test_only_the_common_beginning_is_found():
    assert alone(batch(), [*A, *B, 5], [*A, *C, 5], [*C, *B, 5]) == [0, 4, 0]


def test_the_next_turn_finds_the_answer_but_for_its_last_token():
    engine = batch()
    run(engine, request([*A, *B], tokens=4))  # the fourth token is given out, but never computed
    assert alone(engine, [*A, *B, 9, 9, 9, 9, 5])[0] == 8
    run(engine, request([*A, *B], tokens=5))
    assert alone(engine, [*A, *B, 9, 9, 9, 9, 5])[0] == 12


def test_requests_of_one_step_share_what_the_first_of_them_computes():
    first, second = request([*A, *B, 5]), request([*A, *B, 6])
    engine = batch(prefill_tokens_per_s=1000.0, step_base_ms=0.0, step_per_request_ms=0.0)
    assert run(engine, first, second) == [0, 8]
    engine.submit(one := request([*C, *C, 1]))
    engine.submit(two := request([*C, *C, 2]))
    assert engine.begin_step() == pytest.approx(0.009 + 0.001 + 0.009 + 0.001)
    assert engine.end_step() == [one, two]


def test_without_prefix_caching_nothing_is_found():
    engine = batch(enable_prefix_caching=False)
    assert alone(engine, [*A, *B, 5], [*A, *B, 5]) == [0, 0]
    assert engine.counts.queries == 0


# -- what is overwritten


def test_the_least_recently_used_goes_first():
    engine = batch(blocks=6)
    alone(engine, [*A, 1], [*B, 1], [*A, 1])  # B is now older than A, and three blocks are blank
    alone(engine, [7] * 17)  # takes five: all but one of the old ones
    assert alone(engine, [*A, 1], [*B, 1]) == [4, 0]


def test_of_one_request_the_end_goes_before_the_beginning():
    engine = batch(blocks=4)
    alone(engine, [*A, *B, *C, 1])
    alone(engine, [7, 7, 7, 7, 7])  # one blank block, and the place of C
    assert alone(engine, [*A, *B, *C, 1]) == [8]


def test_shared_blocks_take_their_place_once():
    engine = batch(blocks=4)
    first, second = request([*A, *B, 5], tokens=3), request([*A, *B, 6], tokens=3)
    engine.submit(first)
    engine.submit(second)
    engine.begin_step()
    assert engine.load().running == 2  # alone they would need 3 blocks each
    assert engine.load().kv_usage == 1.0


def test_unused_blocks_count_as_free():
    engine = batch()
    alone(engine, [*A, *B, 5])
    assert engine.load().kv_usage == 0.0


def test_twins_outlive_each_other():
    cache = Cache(2, 4)
    left, right, other = [], [], []
    for blocks in (left, right):  # neither finds the other: both were let in before
        cache.extend(blocks, hashes(*A), 0, 4)
    cache.free(left)
    cache.free(right)
    cache.extend(other, hashes(*B), 0, 4)  # overwrites the first of the two
    cache.free(other)
    assert len(cache.admit(hashes(*A), 5) or []) == 1


def test_a_request_is_let_in_when_all_of_its_prompt_fits():
    engine = batch(blocks=4, max_num_batched_tokens=4)
    engine.submit(request([*A, *B, 5], tokens=2))
    engine.submit(request([*C, *B, 5], tokens=2))  # its first chunk would fit
    engine.begin_step()
    engine.end_step()
    engine.begin_step()
    assert (engine.load().running, engine.load().waiting) == (1, 1)


def test_a_preempted_request_finds_its_own_blocks_and_is_counted_once():
    engine = batch(blocks=5)
    old, new = request(A, tokens=10), request(B, tokens=10)
    assert run(engine, old, new) == [0, 0]
    assert (old.made, new.made) == (10, 10)
    assert engine.counts.preemptions == 1
    assert engine.counts.queries == 8


# -- the engine


def engine(**options: object) -> SimEngine:
    instant = {"step_base_ms": 0.0, "step_per_request_ms": 0.0, "prefill_tokens_per_s": float("inf")}
    return SimEngine(
        LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=instant | options)
    )


async def test_a_delta_tells_how_much_of_the_prompt_was_cached():
    sim = engine()
    await sim.start()
    for cached in (0, 96):
        deltas = sim.generate([tokenizer.EOS] * 100, {"max_tokens": 2, "ignore_eos": True})
        assert [delta.cached_tokens async for delta in deltas] == [cached, cached]
    await sim.stop()


@pytest.mark.parametrize("told", [True, False])
async def test_usage_tells_the_cached_tokens_when_it_is_to(told: bool):
    sim = engine(enable_prompt_tokens_details=told)
    await sim.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(sim.app()), base_url="http://sim") as client:
        body = {"prompt": "word " * 50, "max_tokens": 1}
        usages = [(await client.post("/v1/completions", json=body)).json()["usage"] for _ in range(2)]
    await sim.stop()
    details = [usage.get("prompt_tokens_details") for usage in usages]
    assert details == ([{"cached_tokens": 0}, {"cached_tokens": 96}] if told else [None, None])
