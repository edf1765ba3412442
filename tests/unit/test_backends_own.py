"""An engine in this process, asked by rows: the simulator, without sockets."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import until

from penstock.config import LLMConfig
from penstock.data.backends.engine_config import with_runner, with_usage_details
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import RowInterrupted
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.job.api import make_worker_pool
from penstock.data.job.spec import EngineSpec
from penstock.data.pipeline.configs import EngineProcessorConfig
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.data.rows.request import RowRequest
from penstock.engines.sim import tokenizer
from penstock.errors import EngineDead, EngineStartFailed, Unavailable
from penstock.layers.adapters import Source, Store

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def config(**options: Any) -> LLMConfig:
    fields = {name: options.pop(name) for name in list(options) if name in LLMConfig.model_fields}
    speed = {"step_base_ms": 1.0, "prefill_tokens_per_s": float("inf")}
    loading = {"model_id": "m"}
    return LLMConfig(model_loading_config=loading, llm_engine="sim", engine_kwargs=speed | options, **fields)


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    made: list[InProcessEngine] = []

    async def start(**options: Any) -> InProcessEngine:
        made.append(InProcessEngine(config(**options)))
        await made[-1].start()
        return made[-1]

    yield start
    for engine in made:
        await engine.stop()


def adapters(folder: Path, *names: str) -> dict[str, Any]:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    return {"dynamic_lora_loading_path": str(folder), "max_num_adapters_per_replica": 1}


async def test_a_row_that_names_an_adapter_gets_it(make: Any, tmp_path: Path):
    engine = await make(lora_config=adapters(tmp_path, "a", "b"))
    requests = [
        RowRequest(path=COMPLETIONS, body=b'{"prompt": "hello"}', model=model)
        for model in ("m:a", "m:b", "m", "m:a")
    ]
    answers = [json.loads((await engine.send(request)).body) for request in requests]
    starts = [answer["choices"][0]["text"].partition("]")[0] for answer in answers]
    assert starts == ["[a@1", "[b@2", "hello", "[a@3"]


async def test_a_row_that_names_no_adapter_there_is_fails_alone(make: Any, tmp_path: Path):
    engine = await make(lora_config=adapters(tmp_path, "a"))
    answer = await engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "hello"}', model="m:z"))
    assert answer.status == 404
    assert "There are: 'a'" in json.loads(answer.body)["error"]["message"]


def louder(request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "prompt": request["prompt"].upper()}


async def test_the_configs_own_preprocessor_is_asked_as_in_a_replica(make: Any):
    engine = await make(preprocessor=louder)
    answer = await engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "hello"}'))
    assert b"HELLO" in answer.body


def careless(request: dict[str, Any]) -> Any:
    return ({"prompt": "x"}, {"temprature": 1}) if "pair" in request["prompt"] else request["no_such"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("one", "preprocessor of this model raised KeyError: 'no_such'"), ("pair", "temprature")],
)
async def test_what_the_authors_preprocessor_raises_is_the_rows_end_at_once(
    make: Any, prompt: str, said: str
):
    window = Window(await make(preprocessor=careless), RetryPolicy())
    end = await window.run(RowRequest(path=COMPLETIONS, body=json.dumps({"prompt": prompt}).encode()))
    assert (end.failure.code, end.attempts) == ("own_code_failed", 1)
    assert said in end.failure.message


def forgetful(answer: dict[str, Any]) -> Any:
    return answer["no_such"] if "raise" in answer["choices"][0]["text"] else None


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("raise", "postprocessor of this model raised KeyError: 'no_such'"), ("none", "returned nothing")],
)
async def test_what_the_authors_postprocessor_raises_is_the_rows_end_at_once(
    make: Any, prompt: str, said: str
):
    window = Window(await make(postprocessor=forgetful), RetryPolicy())
    end = await window.run(RowRequest(path=COMPLETIONS, body=json.dumps({"prompt": prompt}).encode()))
    assert (end.failure.code, end.attempts) == ("own_code_failed", 1)
    assert said in end.failure.message


async def test_a_row_is_answered_with_the_model_of_the_config(make: Any):
    answer = await (await make()).send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "hello"}'))
    assert answer.status == 200
    assert json.loads(answer.body)["model"] == "m"


async def test_cached_tokens_are_told(make: Any):
    answer = await (await make()).send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "hello"}'))
    assert json.loads(answer.body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_users_own_word_on_cached_tokens_stands():
    assert (
        with_usage_details(config(enable_prompt_tokens_details=False)).engine_kwargs[
            "enable_prompt_tokens_details"
        ]
        is False
    )


VLLM = {"model_loading_config": {"model_id": "m"}, "llm_engine": "vllm"}


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("generate", {}),
        ("embed", {"runner": "pooling", "convert": "embed"}),
        ("classify", {"runner": "pooling", "convert": "classify"}),
        ("score", {"runner": "pooling"}),
    ],
)
def test_the_task_of_a_batch_is_what_its_engines_run(kind: Any, runs: dict[str, Any]):
    model = LLMConfig(**VLLM, engine_kwargs={"seed": 1})
    assert with_runner(model, kind).engine_kwargs == {**runs, "seed": 1}
    pipeline = stage_spec(EngineProcessorConfig(llm_config=model, task_type=kind))
    backend: Any = pipeline.make_backend()
    assert backend._config.engine_kwargs.items() >= runs.items()
    workers: Any = make_worker_pool(EngineSpec(), model, kind=kind)
    assert workers.config.engine_kwargs == {**runs, "seed": 1}


def test_the_users_own_word_on_the_runner_stands():
    model = LLMConfig(**VLLM, engine_kwargs={"runner": "generate"})
    assert with_runner(model, "embed") == model


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"x"', b'{"prompt": 5}', b"{", b'{"prompt": "x", "n": "many"}']
)
async def test_a_bad_row_is_an_answer_with_400(make: Any, body: bytes):
    answer = await (await make()).send(RowRequest(path=COMPLETIONS, body=body))
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"]


async def test_an_unknown_path_is_an_answer_with_404(make: Any):
    assert (await (await make()).send(RowRequest(path="/v1/nothing", body=b"{}"))).status == 404


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_prompt_for_the_engine_stands_in_for_the_bodys(make: Any, path: str):
    engine = await make()
    answer = await engine.send(
        RowRequest(path=path, body=b'{"max_tokens": 9}', prompt=pickle.dumps({"prompt": "mine"}))
    )
    assert answer.status == 200, answer.body
    assert b"mine" in answer.body


async def test_a_prompt_for_the_engine_is_refused_where_none_is_taken(make: Any):
    request = RowRequest(path="/v1/embeddings", body=b"{}", prompt=pickle.dumps({"prompt": "mine"}))
    answer = await (await make()).send(request)
    assert answer.status == 400
    assert "does not take an engine prompt" in json.loads(answer.body)["error"]["message"]


async def test_token_ids_are_asked_by_generate(make: Any):
    ids = tokenizer.encode("one two three")
    body = json.dumps({"prompt_token_ids": ids, "sampling_params": {"max_tokens": 3}})
    answer = await (await make()).send(RowRequest(path="/v1/generate", body=body.encode()))
    assert json.loads(answer.body)["usage"]["prompt_tokens"] == len(ids)


async def test_a_death_ends_what_is_open_and_start_makes_a_new_engine(make: Any):
    engine = await make(die_after_tokens=500, step_base_ms=5)
    long = RowRequest(path=COMPLETIONS, body=b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true}')
    ends = await asyncio.gather(*(engine.send(long) for _ in range(20)), return_exceptions=True)
    assert {type(end) for end in ends} == {RowInterrupted}
    assert engine.available_slots(0) == 0
    await engine.start()
    assert (await engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "x"}'))).status == 200


@pytest.mark.parametrize("adapter", ["", "the same", "another"])
async def test_a_row_goes_on_in_the_engine_that_follows_a_dead_one(make: Any, tmp_path: Path, adapter: str):
    lora = {"lora_config": adapters(tmp_path, "a")} if adapter else {}
    engine = await make(step_base_ms=5, reply="word " * 40, **lora)
    row = RowRequest(path=COMPLETIONS, body=b'{"prompt": "x", "n": 2}', model="m:a" if adapter else None)
    whole = json.loads((await engine.send(row)).body)
    first = engine._started.engine
    made = first.counts().made_tokens
    running = asyncio.create_task(Window(engine, RetryPolicy()).run(row))
    await until(lambda: first.counts().made_tokens > made + 10)
    if adapter == "another":
        (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    first.die()
    outcome = await running
    found = json.loads(bytes(outcome.body))
    assert (found["choices"], found["usage"]) == (whole["choices"], whole["usage"])
    assert outcome.deaths == 1
    spared = made - engine._started.engine.counts().made_tokens
    assert spared == 0 if adapter == "another" else spared > 8  # without the tokens of the last step


async def test_a_row_begins_anew_where_its_continuation_dies_at_once(make: Any):
    engine = await make(step_base_ms=5, reply="word " * 40)
    row = RowRequest(path=COMPLETIONS, body=b'{"prompt": "x"}')
    running = asyncio.create_task(engine.send(row))
    await until(lambda: engine._started.engine.counts().made_tokens > 5)
    engine._started.engine.die()
    with pytest.raises(RowInterrupted) as first:
        await running
    assert first.value.made is not None
    await engine.start()
    running = asyncio.create_task(engine.send(msgspec.structs.replace(row, made=first.value.made)))
    await until(lambda: engine.load().running)
    engine._started.engine.die()
    with pytest.raises(RowInterrupted) as second:
        await running
    assert second.value.made is None


HELD: set[str] = set()


async def stubborn(request: dict[str, Any]) -> Any:
    HELD.add(request["prompt"])
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError("cancelled") from None


@pytest.mark.parametrize("way", ["death", "the row's own end"])
async def test_code_that_answers_to_its_cancelling_answers_no_row(make: Any, way: str):
    """As vLLM's servings do, with 400."""
    engine = await make(preprocessor=stubborn)
    asking = asyncio.create_task(
        engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "%s"}' % way.encode()))
    )
    await until(lambda: way in HELD)
    if way == "death":
        engine._started.engine.die()
    else:
        asking.cancel()
    with pytest.raises(EngineDead if way == "death" else asyncio.CancelledError):
        await asking


async def test_a_death_with_nothing_in_it_costs_the_next_row_nothing(make: Any):
    engine = await make()
    engine._started.engine.die()
    await until(lambda: engine.available_slots(0) == 0)
    assert (await engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "x"}'))).status == 200


async def test_cancelling_ends_the_request_in_the_engine(make: Any):
    engine = await make(step_base_ms=5)
    long = RowRequest(path=COMPLETIONS, body=b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}')
    asking = asyncio.create_task(engine.send(long))
    await until(lambda: engine.load().running == 1)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    await until(lambda: engine.load().running == 0)


async def test_who_asks_before_the_start_is_told_so():
    with pytest.raises(Unavailable, match="call `start` first"):
        await InProcessEngine(config()).send(RowRequest(path=COMPLETIONS, body=b"{}"))


async def test_stop_may_come_twice_and_before_the_start():
    engine = InProcessEngine(config())
    await engine.stop()
    await engine.start()
    await engine.stop()
    await engine.stop()
    with pytest.raises(Unavailable):
        await engine.send(RowRequest(path=COMPLETIONS, body=b"{}"))


async def test_stop_ends_what_is_open(make: Any):
    engine = await make(step_base_ms=5)
    long = RowRequest(path=COMPLETIONS, body=b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}')
    asking = asyncio.create_task(engine.send(long))
    await until(lambda: engine.load().running == 1)
    await engine.stop()
    with pytest.raises(EngineDead, match="stopped"):
        await asking


async def test_a_start_that_takes_too_long_says_what_to_raise():
    engine = InProcessEngine(config(start_delay_s=60.0, engine_start_timeout_s=0.05))
    with pytest.raises(EngineStartFailed, match="Raise engine_start_timeout_s"):
        await engine.start()


async def test_a_start_that_fails_ends_all_work_on_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetch = Source.fetch

    async def fetched(self: Source, name: str) -> Any:
        return await (asyncio.Event().wait() if name == "a" else fetch(self, name))

    monkeypatch.setattr(Source, "fetch", fetched)
    pinned = {"pinned": ["a", "gone"], "max_num_adapters_per_replica": 2}
    engine = InProcessEngine(config(lora_config=adapters(tmp_path, "a") | pinned))
    with pytest.raises(EngineStartFailed, match=r"pinned adapters: .* no adapter 'gone'"):
        await engine.start()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_engine_is_stopped_though_the_stop_of_its_adapters_is_given_up(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = await make(lora_config=adapters(tmp_path, "a"))
    started = engine._started
    monkeypatch.setattr(Store, "stop", lambda self: asyncio.Event().wait())
    stopping = asyncio.create_task(engine.stop())
    await until(lambda: engine._started is None)
    stopping.cancel()
    await asyncio.wait({stopping})
    with pytest.raises(EngineDead):
        await started.engine.check_health()


async def test_many_starts_make_one_engine(make: Any):
    engine = await make()
    await engine.send(RowRequest(path=COMPLETIONS, body=b'{"prompt": "x", "max_tokens": 1}'))
    before = engine._started
    await asyncio.gather(*(engine.start() for _ in range(5)))
    assert engine._started is before
