"""What vLLM finds in its prefix cache is what the simulator's model of it says, request by request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import msgspec
import pytest
from enginetest import BLOCK_SIZE, KV_BLOCKS, MODEL_ID, WINDOW, Served

from penstock.engines.process.engine import ProcessEngine
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.cache import Chain
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.layers.generation import PATH as GENERATE
from penstock.layers.generation import GenerateRequest
from penstock.openai.cache_salt import salted

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_cached_tokens_are_those_that_the_model_says(under_test: Served):
    if isinstance(under_test.engine, ProcessEngine):
        pytest.skip(
            "another program may tell of its cache at an answer's end, if at all, and has rules of its own"
        )
    words = "Water turns the wheel, and the wheel turns the mill."
    said = await under_test.http.post("/tokenize", json={"model": MODEL_ID, "prompt": words})
    model, found, expected = Batch(_options()), [], []
    conversations = _Conversations(said.json()["tokens"])
    for prompt, tokens in conversations.turns(40):
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        deltas = [delta async for delta in under_test.engine.generate(prompt, params)]
        answer = tuple(token for delta in deltas for token in delta.token_ids)
        conversations.go_on(prompt, answer)
        found.append(deltas[0].cached_tokens)
        expected.append(_cached(model, prompt, answer))
    assert found == expected
    assert found.count(0) > 5  # some were overwritten, and some begin anew
    assert len(set(found)) > 10


BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "{}", "max_tokens": 1},
    "/v1/responses": {"input": "{}", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 1},
    GENERATE: {"prompt": "{}", "sampling_params": {"max_tokens": 1}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_tenants_find_nothing_of_one_another(demo: Served, path: str):
    """Whatever an endpoint reports of it, the engine's own counts are what was found."""
    prompt = f"The wheel of {path} turns in the water, and " * 6
    text = json.dumps({"model": MODEL_ID, **BODIES[path]}).replace("{}", prompt)

    found = list[bool]()
    for tenant in ("a", "a", "b", "b", "a"):
        before = await demo.counted("prefix_cache_hits_total")
        body = json.loads(text) | salted(tenant, path, b"")
        if path == GENERATE:  # a layer before the engine's application
            given = msgspec.convert(body, GenerateRequest)
            assert [one async for one in demo.engine.generate(given.engine_prompt(), given.sampling_params)]
        else:
            answer = await demo.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        found.append(await demo.counted("prefix_cache_hits_total") > before)
    assert found == [False, True, False, True, True]


def _options() -> SimOptions:
    return SimOptions(max_model_len=WINDOW, block_size=BLOCK_SIZE, kv_tokens=KV_BLOCKS * BLOCK_SIZE)


def _cached(model: Batch, prompt: list[int], answer: tuple[int, ...]) -> int:
    reply = PlannedReply(answer, (), len(answer), "length")
    sequence = Sequence(len(prompt), reply, Chain(prompt, reply, BLOCK_SIZE), 0.0)
    model.submit(sequence)
    while not model.idle():
        model.begin_step()
        model.end_step()
    return sequence.cached_tokens


class _Conversations:
    """Some begin with one of a few long prefixes, some go on with what was answered; drawn by a seed."""

    def __init__(self, vocabulary: list[int]) -> None:
        self._draw = random.Random(7)
        self._vocabulary = vocabulary
        self._prefixes = [self._some(length) for length in (320, 321, 640, 800, 1000, 1270)]
        self._histories: list[list[int]] = []

    def turns(self, count: int) -> Iterator[tuple[list[int], int]]:
        for _ in range(count):
            begun = self._draw.choice(self._histories[-6:] or self._prefixes)
            if self._draw.random() < 0.6:
                begun = self._draw.choice(self._prefixes)
            yield (
                [*begun, *self._some(self._draw.choice((1, 31, 32, 100)))],
                self._draw.choice((1, 2, 33, 40)),
            )

    def go_on(self, prompt: list[int], answer: tuple[int, ...]) -> None:
        if len(prompt) + len(answer) < WINDOW - 200:
            self._histories.append([*prompt, *answer])

    def _some(self, count: int) -> list[int]:
        return [self._draw.choice(self._vocabulary) for _ in range(count)]
