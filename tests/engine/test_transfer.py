"""A KV cache that one engine computes and another one fetches, over NIXL, also when the first one dies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from penstock.call import call
from penstock.config import LLMConfig
from penstock.config.disaggregation import prefill_half
from penstock.engines.vllm.engine import VLLMEngine
from penstock.layers.prefill import WHERE, for_prefill

pytest.importorskip("nixl")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.parity("S24")]

PATH = "/v1/completions"
LONG = "Tell me what the weather of the north is like in winter. " * 12


class Pair:
    """Two engines of one model."""

    def __init__(self, prefill: VLLMEngine, decode: VLLMEngine) -> None:
        self.prefill = prefill
        self.decode = decode

    async def computed(self, prompt: str) -> dict[str, Any]:
        """Where the first engine has the cache of a prompt."""
        answer = await asked(self.prefill, for_prefill(PATH, request(prompt)))
        return answer[WHERE]

    async def decoded(self, prompt: str, where: dict[str, Any]) -> str:
        return text(await asked(self.decode, {**request(prompt), WHERE: where}))


def request(prompt: str) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0}


async def asked(engine: VLLMEngine, body: dict[str, Any]) -> dict[str, Any]:
    reply = await call(engine.app(), PATH, json.dumps(body).encode())
    answer = await reply.read()
    assert reply.status == 200, answer
    return json.loads(answer)


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def fetched() -> int:
    """Tokens of prompts that came from elsewhere, of the engine that was started last."""
    families = [family for family in REGISTRY.collect() if family.name == "vllm:prompt_tokens_by_source"]
    counts = [sample for family in families for sample in family.samples if sample.name.endswith("_total")]
    return int(sum(one.value for one in counts if one.labels["source"] == "external_kv_transfer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    whole = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": "demo"},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={"max_model_len": 1024},
        prefill={},
    )
    half = prefill_half(whole)
    assert half is not None
    engines = VLLMEngine(half), VLLMEngine(half)
    try:
        for engine in engines:
            await engine.start()
        yield Pair(*engines)
    finally:
        for engine in engines:
            await engine.stop()


async def test_engines_with_nothing_to_do_take_no_core(pair: Pair):
    """NIXL's thread, left as it is, takes one for each engine."""
    assert pair.prefill._core is not None
    core = psutil.Process(pair.prefill._core.pid)
    began, before = time.monotonic(), sum(core.cpu_times()[:2])
    await asyncio.sleep(2)
    assert sum(core.cpu_times()[:2]) - before < (time.monotonic() - began) / 3


async def test_what_one_computed_another_one_decodes(pair: Pair):
    before = fetched()
    prompts = [f"{number}: {LONG}" for number in range(4)]
    places = await asyncio.gather(*map(pair.computed, prompts))
    answers = await asyncio.gather(*map(pair.decoded, prompts, places))
    assert answers == [text(await asked(pair.prefill, request(prompt))) for prompt in prompts]
    assert fetched() > before + 4 * 100


async def test_a_cache_that_is_gone_is_computed_anew(pair: Pair):
    """The other engine dies after it has answered, before its cache is fetched: nobody notices."""
    prompts = [f"And {number}: {LONG}" for number in range(4)]
    wanted = [text(await asked(pair.prefill, request(prompt))) for prompt in prompts]
    places = await asyncio.gather(*map(pair.computed, prompts))
    assert pair.prefill._core is not None
    pair.prefill._core.kill()
    await pair.prefill.wait_dead()
    assert await asyncio.gather(*map(pair.decoded, prompts, places)) == wanted
    fresh = f"Still there: {LONG}"
    assert text(await asked(pair.decode, request(fresh)))
