"""Two engines that share the experts of one model say what one engine says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from demo_questions import QUESTIONS
from enginetest import MODEL_ID, Served, listening, serve, vllm_config
from models import model

from penstock.config import LLMConfig
from penstock.engines.check import check_arguments, with_independent_engines
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import EngineStartFailed, Unsupported
from penstock.request_context import Gang, gang

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S24"), pytest.mark.full]

CONFIG: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "kv_cache_memory_bytes": 1 << 26,
}


class Shared:
    """What the first of a gang in this process says."""

    def __init__(self) -> None:
        self._said: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    async def share(self, said: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if said is not None:
            self._said.set_result(said)
        return await self._said


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def members() -> AsyncIterator[list[Served]]:
    """Engines of their own, each with its core, as in two replicas: a gang is started together."""
    shared = Shared()
    config = vllm_config(str(model("moe")), **CONFIG)
    engines = [VLLMEngine(config), VLLMEngine(config)]

    async def start(rank: int) -> None:
        gang.set(Gang(rank, 2, "127.0.0.1", shared.share))
        await engines[rank].start()

    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
        await asyncio.gather(*(asyncio.create_task(start(rank)) for rank in (0, 1)))
        clients = [await stack.enter_async_context(listening(engine.app())) for engine in engines]
        yield [Served(engine, client) for engine, client in zip(engines, clients, strict=True)]


async def ask(member: Served, question: str) -> str:
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": question}], "temperature": 0}
    answer = await member.http.post("/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]


async def test_each_answers_while_the_others_have_nothing_to_do(members: list[Served]):
    question, answer = next(iter(QUESTIONS.items()))
    for member in members:
        assert await ask(member, question) == answer


async def test_all_answer_at_the_same_time_whatever_each_is_asked(members: list[Served]):
    questions = list(QUESTIONS)[:6]
    asked = [ask(members[number % 3 % 2], question) for number, question in enumerate(questions)]
    assert await asyncio.gather(*asked) == [QUESTIONS[question] for question in questions]


async def test_an_idle_engine_answers_by_itself_what_needs_no_other(members: list[Served]):
    for member in members:
        await asyncio.wait_for(member.engine.control.reset_prefix_cache(), 30)
        assert await member.engine.control.collective_rpc("check_health", timeout=30) == [None]


@pytest.mark.parametrize("operation", ["sleep", "pause", "update_weights"])
async def test_what_one_cannot_do_alone_is_refused(members: list[Served], operation: str):
    arguments = (model("moe"), "v2") if operation == "update_weights" else ()
    with pytest.raises(Unsupported, match="shift the model"):
        await getattr(members[0].engine.control, operation)(*arguments)


async def test_one_engine_by_itself_says_why_it_does_not_start():
    with pytest.raises(EngineStartFailed, match="data_parallel_size 2 is for as many replicas"):
        async with serve(vllm_config(str(model("moe")), **CONFIG)):
            pass


async def test_engines_without_experts_to_share_are_replicas_by_themselves(caplog: pytest.LogCaptureFixture):
    """A model that cannot be read from here is not judged."""
    sources = {"dense": "demo", "experts": str(model("moe")), "unknown": "s3://nowhere/model"}
    configs = [
        LLMConfig(
            model_loading_config={"model_id": name, "model_source": source},
            engine_kwargs={"data_parallel_size": 2},
        )
        for name, source in sources.items()
    ]
    assert check_arguments(configs).problems == ()
    dense, *gangs = map(with_independent_engines, configs)
    assert (dense.engine_kwargs, dense.deployment_config) == ({}, {"num_replicas": 2})
    assert gangs == configs[1:]
    assert "Model 'dense' has no experts to share" in caplog.text
