"""Plain rows are answered past vLLM's application as it answers them, field by field."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from backend_contract import CHAT, COMPLETIONS, row
from borrowed import Borrowed, lent
from enginetest import ALIAS, MODEL_ID, Served, vllm_config
from tests.waiting import until

from penstock.data.backends.http_client import ConnectionLost
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.backends.replica import ReplicaClient
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.engines.vllm.capabilities.state import capabilities
from penstock.layers.stack import stacked
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.serve.replica.tiers.controller import Targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.transport import continuation, link
from penstock.transport.continuation import RecordBudget, StreamRecord

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("D10"),
]

AT_ONCE = 12
TEXTS = ["What is Penstock?", "Wie geht es dir heute, alter Freund?", "日本語で話して", "🙂🙃 ok", "a"]
PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 3, "skip_special_tokens": False},
    {"temperature": 0, "stop_token_ids": [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]},
    {"temperature": 0, "logit_bias": {"5": 50.0, "17": -100}},
    {"temperature": 0, "bad_words": ["the", "a"], "repetition_penalty": 1.3},
    {"temperature": 0, "allowed_token_ids": list(range(40, 80))},
    {"temperature": 2, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 2, "return_token_ids": None, "ignore_eos": False},
    {"top_k": None, "stop_token_ids": None, "user": "somebody"},
]
OTHERS: list[dict[str, Any]] = [
    {"stop": ["e", "."]},
    {"stop": "a", "include_stop_str_in_output": True},
    {"n": 2, "temperature": 1},
    {"logprobs": 1},
    {"echo": True},
    {"priority": 0},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"spaces_between_special_tokens": False, "skip_special_tokens": False},
    {"unheard_of": 1},
]
WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 1 << 40},
    {"max_tokens": 3000},
    {"max_tokens": 5, "min_tokens": 6},
    {"min_tokens": None},
    {"seed": 1 << 63},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"stop_token_ids": [99999]},
    {"bad_words": [""]},
    {"n": 0},
    {"top_k": -5},
]
INPUTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [99999]}),
    (COMPLETIONS, {"prompt": "x " * 3000}),
    (COMPLETIONS, {"prompt": [7] * 2048}),
    (COMPLETIONS, {"prompt": [7] * 2040, "max_tokens": 100}),
    (COMPLETIONS, {"prompt": "hello", "add_special_tokens": False}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": None}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": [{"role": "robot", "content": "hello"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 3000}]}),
    (CHAT, {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 3, "max_tokens": 9}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "tools": []}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "chat_template_kwargs": {"x": 1}}),
]


class Directly(Borrowed):
    """Counts what is answered directly."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.answered = 0

    async def respond(self, path: str, body: bytes, **more: Any) -> bytes | None:
        answer = await self._engine.respond(path, body, **more)  # pyright: ignore[reportAttributeAccessIssue]
        self.answered += answer is not None
        return answer


class ByApp(Borrowed):
    """Has no shorter way."""

    def __getattr__(self, name: str) -> Any:
        if name == "respond":
            raise AttributeError(name)
        return super().__getattr__(name)


async def backend(engine: Borrowed) -> InProcessEngine:
    with lent(engine):  # pyright: ignore[reportArgumentType]
        own = InProcessEngine(vllm_config())
        await own.start()
    return own


@pytest_asyncio.fixture(loop_scope="session")
async def directly(demo: Served) -> AsyncIterator[tuple[Directly, InProcessEngine]]:
    if not capabilities().has("bulk_generation"):
        pytest.skip("vLLM's capability bulk_generation is off with this version")
    engine = Directly(demo.engine)
    own = await backend(engine)
    yield engine, own
    await own.stop()


def requests() -> list[RowRequest]:
    """Some 300. Prompts of plain ones begin each in its own way: the prefix cache has nothing of them."""
    draw = random.Random(22)
    found = [_drawn(draw, number, draw.choice(PLAIN)) for number in range(220)]
    found += [_drawn(draw, number, fields) for number, fields in enumerate(OTHERS + WRONG, 220)]
    greedy = {"max_tokens": 5, "temperature": 0}
    found += [row(path, **greedy | body) for path, body in INPUTS]
    found += [row(prompt="hello", model=model, **greedy) for model in (MODEL_ID, ALIAS, "other")]
    return found


def _drawn(draw: random.Random, number: int, fields: dict[str, Any]) -> RowRequest:
    limits = {"max_tokens": draw.choice([3, 7, 30, 60]), "seed": number}
    told: dict[str, Any] = draw.choice([{}, {"return_token_ids": True}])
    text = f"{number} {draw.choice(TEXTS)}"
    if draw.random() < 0.5:
        return row(CHAT, messages=[{"role": "user", "content": text}], **limits | told | fields)
    ids = [draw.randrange(1000) for _ in range(draw.choice([1, 5, 40]))]
    return row(COMPLETIONS, prompt=draw.choice([text, ids]), **limits | told | fields)


Ask = Callable[[RowRequest], Awaitable[Response]]


async def answered(ask: Ask, asked: Sequence[RowRequest]) -> list[tuple[int, Any]]:
    found = list[Response]()
    for at in range(0, len(asked), AT_ONCE):
        found += await asyncio.gather(*map(ask, asked[at : at + AT_ONCE]))
    return [(answer.status, without_names(json.loads(answer.body))) for answer in found]


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@asynccontextmanager
async def replica(engine: Borrowed, record: StreamRecord | None = None, **hooks: Any) -> AsyncIterator[Ask]:
    """How batch asks a replica of a deployment: over its socket. record: of the only row."""
    config = vllm_config()
    layers = {"adapters": None, "preprocessor": None, "postprocessor": None} | hooks
    turns = Turns(BatchShare(engine.load, Targets(), time.monotonic))
    listener = await Listener.open(
        ByClass(stacked(engine, config, **layers), turns, lambda: DEFAULT_WEIGHTS),  # pyright: ignore[reportArgumentType]
        StatusSource(
            load=engine.load,
            hello=lambda: link.Hello(MODEL_ID, engine.max_model_len(), engine.kv_tokens()),
            batch=turns.share,
            version="v",
        ),
        node_id="here",
        node_host=None,
    )
    client = ReplicaClient(listener.address, "here", "batch", bool)

    async def ask(request: RowRequest) -> Response:
        body = with_fields(request.body, {"model": request.model or MODEL_ID})
        return await client.send(request.path, body, None, record)

    await until(lambda: client.ready)
    try:
        yield ask
    finally:
        await client.close()
        await listener.close()


@pytest.mark.parametrize("way", ["own engine", "replica"])
async def test_300_requests_are_answered_as_the_application_answers_them(
    demo: Served, directly: tuple[Directly, InProcessEngine], way: str
):
    counted, own = directly
    asked, before = requests(), counted.answered
    await demo.engine.control.reset_prefix_cache()
    if way == "own engine":
        found = await answered(own.send, asked)
        await demo.engine.control.reset_prefix_cache()
        expected = await answered((await backend(ByApp(demo.engine))).send, asked)
    else:
        async with replica(counted) as ask, replica(ByApp(demo.engine)) as ask_app:
            found = await answered(ask, asked)
            await demo.engine.control.reset_prefix_cache()
            expected = await answered(ask_app, asked)
    for request, one, other in zip(asked, found, expected, strict=True):
        assert one == other, request
    assert 220 <= counted.answered - before <= len(asked) - len(OTHERS) - len(WRONG)
    choices = [choice for status, body in found if status == 200 for choice in body["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    texts = "".join(
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    )
    assert "\N{REPLACEMENT CHARACTER}" in texts, "no character was torn"


async def test_a_body_has_every_field_of_the_applications(
    demo: Served, directly: tuple[Directly, InProcessEngine]
):
    request = row(CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=3, temperature=0)
    by_app = await backend(ByApp(demo.engine))
    found, expected = [json.loads((await own.send(request)).body) for own in (directly[1], by_app)]
    assert list(found) == list(expected)
    assert found["id"].startswith("chatcmpl-")
    assert len(found["id"]) == len(expected["id"])


async def test_cached_tokens_are_told(directly: tuple[Directly, InProcessEngine]):
    _, own = directly
    request = row(prompt=list(range(200)), max_tokens=1)
    first, second = [json.loads((await own.send(request)).body)["usage"] for _ in range(2)]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 100


async def test_an_abort_keeps_what_was_made(directly: tuple[Directly, InProcessEngine]):
    """Also what the core still held."""
    counted, own = directly
    asking = asyncio.create_task(own.send(row(prompt="water", max_tokens=1500, ignore_eos=True)))
    await until(lambda: own.load().running - own.load().unseen == 1)
    await counted.control.pause(mode="abort")
    try:
        body = json.loads((await asking).body)
    finally:
        await counted.control.resume()
    assert body["choices"][0]["finish_reason"] == "abort"
    assert 0 < body["usage"]["completion_tokens"] < 1500


async def test_tokens_are_counted_in_vllms_metrics(demo: Served, directly: tuple[Directly, InProcessEngine]):
    before = await demo.counted("generation_tokens_total")
    await directly[1].send(row(prompt="water", max_tokens=300, ignore_eos=True))
    assert await demo.counted("generation_tokens_total") - before == 300


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["plain", "by the application"])
async def test_a_row_that_its_driver_gives_up_leaves_the_replicas_engine(
    demo: Served, directly: tuple[Directly, InProcessEngine], more: dict[str, Any]
):
    counted, own = directly
    before = await demo.counted("generation_tokens_total")
    async with replica(counted) as ask:
        asking = asyncio.create_task(ask(row(prompt="water", max_tokens=1500, ignore_eos=True, **more)))
        await until(lambda: own.load().running == 1)
        asking.cancel()
        await until(lambda: own.load().running == 0)
    assert await demo.counted("generation_tokens_total") - before < 1500


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["plain", "by the application"])
async def test_a_row_goes_on_at_another_replica_with_its_tokens(
    directly: tuple[Directly, InProcessEngine], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.engines.vllm.rows.prompts.TOKENS_AT_A_TIME", 16)
    monkeypatch.setattr("penstock.serve.replica.inbound.listener._HAND_OVER_S", 0.02)
    counted, own = directly
    answered, record = counted.answered, StreamRecord(RecordBudget())
    more = more | {"return_token_ids": True, "temperature": 2.0}
    asked = row(prompt="water", max_tokens=100, ignore_eos=True, **more)
    async with replica(counted, record) as ask:
        asking = asyncio.create_task(ask(asked))
        await until(lambda: record.groups > 1)
    with pytest.raises(ConnectionLost):
        await asking
    await until(lambda: own.load().running == 0)
    groups = continuation.decode(record.groups, record.data)
    made = [token for group in groups for one in group for token in one.token_ids]
    async with replica(counted, record) as ask:
        answer = await ask(asked)
    body = json.loads(answer.body)
    assert (answer.status, body["usage"]["completion_tokens"]) == (200, 100)
    assert body["choices"][0]["token_ids"][: len(made)] == made  # drawn anew, they would be others
    assert counted.answered == answered + ("logprobs" not in more)


async def test_a_replicas_hooks_see_plain_rows_and_their_answers(directly: tuple[Directly, InProcessEngine]):
    counted, _ = directly
    before = counted.answered

    async def shortened(request: dict[str, Any], context: Any) -> dict[str, Any]:
        return request | {"max_tokens": 2}

    async with replica(counted, preprocessor=shortened) as ask:
        body = json.loads((await ask(row(prompt="water", max_tokens=9, ignore_eos=True))).body)
    assert body["usage"]["completion_tokens"] == 2
    assert counted.answered == before + 1
