"""The simulator's model of time, on a clock of its own; its options; its answers; its misfortunes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from penstock.config import LLMConfig
from penstock.engine import Delta
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.engines import engine_class
from penstock.engines.sim import tokenizer
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.cache import Chain
from penstock.engines.sim.engine import SimEngine
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import plan
from penstock.engines.sim.scheduler import Clock
from penstock.errors import (
    AdapterBroken,
    BadRequest,
    ConfigError,
    EngineDead,
    EngineStartFailed,
    Error,
    ModelNotFound,
    PromptTooLong,
)
from penstock.request_context import using_adapter

pytestmark = pytest.mark.parity("X16")

_numbers = itertools.count(1)
TEXT = "The quick brown fox jumps over the lazy dog, ünïcode and 漢字 included.\n\n  Two spaces."


def config(**options: object) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=instant() | options
    )


def instant() -> dict[str, object]:
    return {"step_base_ms": 0.0, "step_per_request_ms": 0.0, "prefill_tokens_per_s": float("inf")}


def sequence(prompt_tokens: int, tokens: int, arrival: float = 0.0) -> Sequence:
    """A request that shares nothing with any other."""
    reply = plan("x", tokens, ignore_eos=True)
    return Sequence(prompt_tokens, reply, Chain([next(_numbers)] * prompt_tokens, reply, 16), arrival)


def step(batch: Batch) -> tuple[float, list[Sequence]]:
    end = batch.begin_step()
    return end, batch.end_step()


class Virtual(Clock):
    """Time that passes only when somebody waits for it."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep_until(self, due: float) -> None:
        for _ in range(3):  # those who were handed a token look at the clock first
            await asyncio.sleep(0)
        self.time = max(self.time, due)


async def stamps(engine: SimEngine, clock: Clock, prompt: str, max_tokens: int) -> list[float]:
    """When each token was seen, from the request on."""
    begun = clock.now()
    deltas = engine.generate(prompt, {"max_tokens": max_tokens, "ignore_eos": True})
    return [clock.now() - begun async for _ in deltas]


# -- time


def test_prompt_then_tokens_take_the_time_that_the_model_says():
    batch = Batch(SimOptions(prefill_tokens_per_s=1000.0, step_base_ms=10.0, step_per_request_ms=1.0))
    batch.submit(sequence(100, 3))
    ends = [step(batch)[0] for _ in range(3)]
    assert ends == pytest.approx([0.110, 0.121, 0.132])
    assert batch.idle()


def test_a_step_costs_more_with_every_request_that_decodes():
    batch = Batch(SimOptions(prefill_tokens_per_s=1e9, step_base_ms=10.0, step_per_request_ms=2.0))
    for _ in range(8):
        batch.submit(sequence(10, 5))
    first, _ = step(batch)
    second, emitted = step(batch)
    assert second - first == pytest.approx(0.010 + 8 * 0.002)
    assert len(emitted) == 8


def test_long_contexts_cost_what_the_model_says():
    options = SimOptions(
        prefill_tokens_per_s=1000.0,
        prefill_per_kv_token_ns=1e6,
        step_per_kv_token_ns=1e6,
        step_base_ms=0.0,
        step_per_request_ms=0.0,
        max_num_batched_tokens=10,
    )
    batch = Batch(options)
    batch.submit(sequence(20, 2))
    ends = [step(batch)[0] for _ in range(3)]
    first = 0.010 + 10 * 5 * 1e-3  # ten tokens, each after five others on average
    second = 0.010 + 10 * 15 * 1e-3
    assert ends == pytest.approx([first, first + second, first + second + 20 * 1e-3])


def test_a_request_that_comes_during_a_step_waits_for_the_next():
    batch = Batch(SimOptions(prefill_tokens_per_s=1000.0, step_base_ms=0.0, step_per_request_ms=0.0))
    early, late = sequence(100, 2), sequence(100, 1, arrival=0.05)
    batch.submit(early)
    batch.submit(late)
    assert step(batch) == (pytest.approx(0.1), [early])
    assert step(batch) == (pytest.approx(0.2), [early, late])


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding():
    batch = Batch(SimOptions(max_num_batched_tokens=64))
    short, long = sequence(10, 10), sequence(150, 1, arrival=0.0)
    batch.submit(short)
    step(batch)
    batch.submit(long)
    emitted = [step(batch)[1] for _ in range(3)]
    assert emitted == [[short], [short], [short, long]]


def test_more_requests_than_places_wait_in_order():
    batch = Batch(SimOptions(max_num_seqs=2))
    requests = [sequence(1, 1) for _ in range(5)]
    for request in requests:
        batch.submit(request)
    load = batch.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 5, 5)
    assert [step(batch)[1] for _ in range(3)] == [requests[:2], requests[2:4], requests[4:]]


def test_a_full_kv_cache_makes_the_newest_wait_and_prefill_again():
    batch = Batch(SimOptions(max_model_len=20, kv_tokens=20, block_size=1, enable_prefix_caching=False))
    old, new = sequence(8, 8), sequence(8, 4)
    batch.submit(old)
    batch.submit(new)
    emitted: list[list[Sequence]] = []
    while not batch.idle():
        emitted.append(step(batch)[1])
        assert batch.load().kv_usage <= 1.0
    assert [step_.count(old) for step_ in emitted].count(1) == 8
    assert [step_.count(new) for step_ in emitted].count(1) == 4
    assert emitted[0] == [old, new]
    assert emitted[-1] == [new]
    assert len(emitted) > 8


def test_removing_a_request_frees_its_place_and_its_cache():
    batch = Batch(SimOptions())
    running, waiting = sequence(100, 100), sequence(100, 100)
    batch.submit(running)
    step(batch)
    batch.submit(waiting)
    batch.remove(running)
    batch.remove(waiting)
    batch.remove(waiting)
    assert batch.idle()
    assert batch.load().kv_usage == 0


async def test_ttft_and_itl_are_the_models_to_the_microsecond():
    clock = Virtual()
    options = {"prefill_tokens_per_s": 1000.0, "step_base_ms": 10.0, "step_per_request_ms": 1.0}
    engine = SimEngine(config(**options, enable_prefix_caching=False), clock)
    await engine.start()
    seen = await asyncio.gather(*(stamps(engine, clock, "word " * 100, 11) for _ in range(16)))
    await engine.stop()
    ttft = 0.010 + 16 * len(tokenizer.encode("word " * 100)) / 1000.0
    for times in seen:
        assert times[0] == pytest.approx(ttft, abs=1e-6)
        assert times[10] - times[0] == pytest.approx(10 * (0.010 + 16 * 0.001), abs=1e-6)


def test_a_stop_string_is_why_even_an_answer_without_an_end_stops():
    reply = plan("one two ", 100, ["two"], ignore_eos=True)
    assert ("".join(reply.pieces), reply.finish_reason) == ("one ", "stop")


async def test_no_token_comes_before_its_time_nor_five_percent_later_than_plain_sleeps():
    """Sleeps of the same lengths run beside the stream, so that a busy machine delays both."""
    options = {"prefill_tokens_per_s": 1000.0, "step_base_ms": 40.0, "step_per_request_ms": 1.0}
    engine = SimEngine(config(**options, enable_prefix_caching=False))
    await engine.start()
    prompt = "word " * 100
    ttft, itl = 0.040 + len(tokenizer.encode(prompt)) / 1000.0, 0.041
    due = [ttft + number * itl for number in range(12)]
    deviations: list[float] = []
    for _ in range(3):  # the machine may stop one of the two for a moment, but hardly three times
        times, control = await asyncio.gather(stamps(engine, Clock(), prompt, 12), slept(Clock(), due))
        assert all(time >= moment - 1e-9 for time, moment in zip(times, due, strict=True))
        deviations.append(max(times[0] - control[0], times[-1] - control[-1]) / ttft)
        if deviations[-1] <= 0.05:
            break
    await engine.stop()
    assert min(deviations) <= 0.05


async def slept(clock: Clock, due: list[float]) -> list[float]:
    """When plain sleeps until these moments ended, from now on."""
    begun = clock.now()
    ends: list[float] = []
    for moment in due:
        await clock.sleep_until(begun + moment)
        ends.append(clock.now() - begun)
    return ends


async def test_two_thousand_streams_in_one_process_keep_their_own_text():
    engine = SimEngine(config(max_num_seqs=4096, kv_tokens=1 << 20))
    await engine.start()

    async def ask(number: int) -> str:
        return "".join([delta.text async for delta in engine.generate(f"number {number}", {})])

    answers = await asyncio.gather(*(ask(number) for number in range(2000)))
    await engine.stop()
    assert answers == [f"number {number}" for number in range(2000)]


# -- tokens and text


@pytest.mark.parametrize("text", ["", "a", TEXT, "\x00\t\r\n", "🙂🙃"])
def test_tokens_give_back_their_text(text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("token_id", [-1, 1, 255, 2**33, (1 << 8) + 0xFF])
def test_a_number_that_is_no_token_is_refused(token_id: int):
    with pytest.raises(BadRequest, match=str(token_id)):
        tokenizer.decode([token_id])


def test_an_answer_ends_with_the_end_token():
    reply = plan("one two", 100)
    assert (reply.token_ids[-1], reply.finish_reason) == (tokenizer.EOS, "stop")
    assert "".join(reply.pieces) == "one two"


def test_a_limit_cuts_the_answer_and_says_so():
    reply = plan("one two three", 2)
    assert (reply.tokens, reply.finish_reason) == (2, "length")


@pytest.mark.parametrize(
    ("stop", "shown"), [("two", "one "), ("e tw", "on"), ("o", ""), ("absent", "one two")]
)
def test_a_stop_string_ends_the_answer_before_it(stop: str, shown: str):
    reply = plan("one two", 100, [stop])
    assert "".join(reply.pieces) == shown
    assert reply.finish_reason == "stop"


def test_ignoring_the_end_repeats_the_answer():
    reply = plan("ab", 5, ignore_eos=True)
    assert (reply.tokens, reply.finish_reason) == (5, "length")


# -- the engine


async def test_a_scripted_reply_goes_to_its_prompt_only():
    engine = SimEngine(config(replies={"ping": "pong"}, reply="what?"))
    await engine.start()
    texts = [
        "".join([delta.text async for delta in engine.generate(prompt, {})]) for prompt in ("ping", "else")
    ]
    await engine.stop()
    assert texts == ["pong", "what?"]


async def test_a_prompt_as_long_as_the_window_is_refused():
    engine = SimEngine(config(max_model_len=10, kv_tokens=10))
    await engine.start()
    with pytest.raises(PromptTooLong, match="10"):
        await anext(engine.generate([tokenizer.EOS] * 10, {}))
    await engine.stop()


async def test_a_dead_engine_ends_its_streams_and_says_why():
    engine = SimEngine(config())
    await engine.start()
    async with aclosing(engine.generate("hello", {"ignore_eos": True})) as deltas:
        await anext(deltas)
        engine.die("pulled the plug")
        with pytest.raises(EngineDead):
            await drain(deltas)
    assert await engine.wait_dead() == "pulled the plug"
    with pytest.raises(EngineDead):
        await engine.check_health()
    await engine.stop()


async def drain(deltas: AsyncGenerator[Delta, None]) -> int:
    return len([delta async for delta in deltas])


async def test_a_text_that_would_hold_up_others_is_refused():
    engine = SimEngine(config())
    await engine.start()
    with pytest.raises(BadRequest, match="characters"):
        await drain(engine.generate("a " * tokenizer.MOST_CHARS, {}))
    await engine.stop()


async def test_one_that_died_can_be_started_again():
    engine = SimEngine(config())
    await engine.start()
    engine.die()
    await engine.stop()
    await engine.start()
    await engine.check_health()
    await engine.stop()


async def test_it_dies_after_as_many_tokens_as_told():
    engine = SimEngine(config(die_after_tokens=5))
    await engine.start()
    with pytest.raises(EngineDead):
        await drain(engine.generate("hello", {"ignore_eos": True}))
    assert "die_after_tokens" in await engine.wait_dead()
    await engine.stop()


async def test_it_dies_after_as_many_requests_as_told():
    engine = SimEngine(config(die_after_requests=2))
    await engine.start()
    for _ in range(2):
        await drain(engine.generate("hello", {}))
    assert "die_after_requests" in await engine.wait_dead()
    await engine.stop()


async def test_every_nth_request_fails_as_told():
    engine = SimEngine(config(error_every=2))
    await engine.start()
    await drain(engine.generate("hello", {}))
    with pytest.raises(Error, match="error_every"):
        await drain(engine.generate("hello", {}))
    await engine.stop()


async def test_an_answer_breaks_off_after_as_many_tokens_as_told():
    engine = SimEngine(config(fail_after_tokens=3))
    await engine.start()
    deltas = engine.generate("hello", {"ignore_eos": True})
    for _ in range(3):
        await anext(deltas)
    with pytest.raises(Error, match="fail_after_tokens"):
        await anext(deltas)
    await engine.stop()


async def test_a_start_fails_with_the_scripted_reason():
    engine = SimEngine(config(start_error="no such weights"))
    with pytest.raises(EngineStartFailed, match="no such weights"):
        await engine.start()
    await engine.stop()


async def test_a_start_tells_its_phases():
    phases: list[str] = []
    engine = SimEngine(config())
    await engine.start(phases.append)
    await engine.stop()
    assert phases == ["load", "warm up"]


@pytest.mark.parametrize("operation", ["sleep", "update_weights"])
async def test_an_operation_that_is_given_up_leaves_it_working(tmp_path: Path, operation: str):
    engine = await started()
    arguments = {"sleep": (), "update_weights": (tmp_path, "2")}[operation]
    async with aclosing(engine.generate("hello", {"ignore_eos": True})) as deltas:
        await anext(deltas)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(getattr(engine, operation)(*arguments), 0.05)
    assert not engine.is_sleeping()
    assert engine.weights_version() == DEFAULT_WEIGHTS
    assert await asyncio.wait_for(drain(engine.generate("hello", {})), 10) > 1
    await engine.stop()


# -- config


def test_the_config_finds_the_engine():
    assert engine_class(config()) is SimEngine


def test_the_environment_names_another_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_ENGINE_CLS", "penstock.engines.sim.engine:SimEngine")
    assert engine_class(LLMConfig(model_loading_config={"model_id": "m"})) is SimEngine


def test_an_engine_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_ENGINE_CLS", "nowhere:Engine")
    with pytest.raises(ConfigError, match="nowhere:Engine"):
        engine_class(config())


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="step_base_ms"):
        SimEngine(config(step_bas_ms=1))


def test_a_cache_smaller_than_one_request_is_refused():
    with pytest.raises(ConfigError, match="kv_tokens"):
        SimEngine(config(kv_tokens=10))


# -- adapters


def adapter_folder(tmp_path: Path, config: str = "{}") -> Path:
    (tmp_path / "adapter_config.json").write_text(config)
    return tmp_path


async def started(**options: object) -> SimEngine:
    engine = SimEngine(config(**options))
    await engine.start()
    return engine


async def test_an_adapters_answer_names_it(tmp_path: Path):
    engine = await started()
    await engine.load_adapter("pirate@2", adapter_folder(tmp_path))
    assert engine.adapters() == {"pirate@2"}
    token = using_adapter.set("pirate@2")
    under = "".join([delta.text async for delta in engine.generate("ahoy", {})])
    using_adapter.reset(token)
    named = "".join([delta.text async for delta in engine.generate("ahoy", {}, adapter="pirate@2")])
    assert under == named == "[pirate@2] ahoy"
    await engine.unload_adapter("pirate@2")
    assert engine.adapters() == frozenset()
    with pytest.raises(ModelNotFound, match="'pirate' is not loaded"):
        await anext(engine.generate("ahoy", {}, adapter="pirate@2"))
    await engine.stop()


async def test_an_adapter_that_is_none_is_refused_with_the_reason(tmp_path: Path):
    engine = await started()
    with pytest.raises(AdapterBroken, match=r"'pirate' cannot be loaded: it has no readable adapter_config"):
        await engine.load_adapter("pirate@1", tmp_path)
    with pytest.raises(AdapterBroken, match="is no JSON"):
        await engine.load_adapter("pirate@1", adapter_folder(tmp_path, "{"))
    assert engine.adapters() == frozenset()
    await engine.stop()


async def cached_tokens(engine: SimEngine, adapter: str | None) -> int:
    deltas = engine.generate("x " * 200, {"max_tokens": 1}, adapter=adapter)
    return [delta.cached_tokens async for delta in deltas][-1]


async def test_an_adapter_shares_no_cache_with_its_base(tmp_path: Path):
    engine = await started(block_size=16)
    await engine.load_adapter("pirate", adapter_folder(tmp_path))
    found = [await cached_tokens(engine, adapter) for adapter in (None, "pirate", "pirate", None)]
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 0
    await engine.stop()


async def test_an_adapter_that_comes_while_it_sleeps_is_loaded_when_it_wakes(tmp_path: Path):
    slow, quick = await started(adapter_load_s=3600), await started()
    for engine in (slow, quick):
        await engine.sleep()
        await asyncio.wait_for(engine.load_adapter("pirate", adapter_folder(tmp_path)), 10)
        assert engine.adapters() == {"pirate"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.wakeup(), 0.05)
    assert slow.is_sleeping()
    await quick.wakeup()
    assert [delta.text async for delta in quick.generate("x", {"max_tokens": 1}, adapter="pirate")] == [
        "[pir"
    ]
    await slow.stop()
    await quick.stop()


async def test_requests_that_a_pause_holds_finish_before_a_sleep():
    engine = await started(step_base_ms=5)
    deltas = engine.generate("x", {"max_tokens": 50, "ignore_eos": True})
    await anext(deltas)
    await engine.pause("keep")
    rest = asyncio.create_task(drain(deltas))
    await asyncio.wait_for(engine.sleep(), 10)
    assert await asyncio.wait_for(rest, 10) == 49
    assert (engine.is_sleeping(), engine.is_paused()) == (True, True)
    await engine.stop()


async def test_a_pause_that_is_given_up_leaves_the_engine_as_it_was():
    engine = await started(step_base_ms=5)
    running = engine.generate("x", {"ignore_eos": True})
    await anext(running)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not engine.is_paused()
    assert await asyncio.wait_for(drain(engine.generate("x", {"max_tokens": 1})), 10) == 1
    await engine.stop()
