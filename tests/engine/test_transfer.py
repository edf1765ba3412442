"""A KV cache that one engine computes and another one fetches, over NIXL, also when the first one dies."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from tests.waiting import until

from penstock.asgi_client import call
from penstock.config import LLMConfig
from penstock.config.derive.prefill import prefill_half
from penstock.engines.vllm.engine import VLLMEngine
from penstock.layers.prefill import WHERE, for_prefill

pytest.importorskip("nixl")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.parity("S24"), pytest.mark.full]

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
    """Engines of their own: one fetches from the other, which a test kills."""
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
    """NIXL's thread, left as it is, takes one for each engine: as much as a process that never waits."""
    assert pair.prefill._core is not None
    core = psutil.Process(pair.prefill._core.pid)
    with busy() as other:
        async with asyncio.timeout(60):
            while await taken(core, other) > 1 / 3:  # what a start leaves to do is soon done
                pass


async def taken(process: psutil.Process, other: psutil.Process) -> float:
    """CPU time of one for each second of the other's, while that takes half a second."""
    began, before = cpu_s(other), cpu_s(process)
    await until(lambda: cpu_s(other) - began >= 0.5, 60)
    return (cpu_s(process) - before) / (cpu_s(other) - began)


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


@contextmanager
def busy() -> Iterator[psutil.Process]:
    """A process that never waits."""
    process = psutil.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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
