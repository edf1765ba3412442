"""Facts that hold of every backend alike, in front of a simulator of `OPTIONS` that is called `m`.

Each tier checks those backends that it can have: tests of it are parametrised with `FACTS`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.waiting import until

from penstock.config import LLMConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Backend, Response
from penstock.data.rows.request import RowRequest

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
OPTIONS: dict[str, Any] = {
    "step_base_ms": 1.0,
    "prefill_tokens_per_s": 1e6,
    "max_model_len": 512,
    "enable_prompt_tokens_details": True,
}
_OWN = ("id", "created", "service_tier")
"""Of each answer alone."""


def config(**options: Any) -> LLMConfig:
    loading, more = (
        {"model_id": "m"},
        {name: options.pop(name) for name in ("lora_config",) if name in options},
    )
    return LLMConfig(model_loading_config=loading, llm_engine="sim", engine_kwargs=OPTIONS | options, **more)


def row(path: str = COMPLETIONS, model: str | None = None, **body: Any) -> RowRequest:
    return RowRequest(path=path, body=json.dumps(body).encode(), model=model)


def long(**more: Any) -> RowRequest:
    """One that takes seconds."""
    return row(prompt="x", max_tokens=500, ignore_eos=True, **more)


REQUESTS: dict[str, RowRequest] = {
    "a completion": row(prompt="hello world", max_tokens=5),
    "a chat": row(CHAT, messages=[{"role": "user", "content": "Wie geht's, König? \U0001f600"}]),
    "two outputs": row(prompt="hello", n=2),
    "an embedding": row(EMBEDDINGS, input="hello"),
    "the engine's generate": row("/v1/generate", prompt="hello", sampling_params={"max_tokens": 3}),
    "the model by its name": row(prompt="hello", model="m"),
    "a long number": RowRequest(
        path=COMPLETIONS, body=b'{"prompt": "x", "seed": 123456789012345678901234567890}'
    ),
    "no object": RowRequest(path=COMPLETIONS, body=b"[]"),
    "no JSON": RowRequest(path=COMPLETIONS, body=b'{"prompt": '),
    "a wrong type": row(prompt=5),
    "an unknown role's field": row(CHAT, messages=[{"content": "hello"}]),
    "a prompt that is too long": row(prompt="x " * 600),
    "an adapter where there are none": row(prompt="hello", model="m:none"),
    "another model": row(prompt="hello", model="other"),
    "an unknown path": row("/v1/nothing"),
}
"""What every backend answers as an engine in this process does."""


def meaning(answer: Response) -> tuple[int, Any]:
    """The answer without what is its own. A gateway says the same of an error in other words."""
    body = json.loads(answer.body)
    if "error" in body:
        return answer.status, body["error"]["code"]
    return answer.status, {name: value for name, value in body.items() if name not in _OWN}


Running = Callable[[], int]
"""How many requests the engine has."""


async def many_rows_get_each_its_own_answer(backend: Backend, running: Running) -> None:
    answers = await asyncio.gather(*(backend.send(row(prompt=f"row {i}", max_tokens=8)) for i in range(100)))
    texts = [json.loads(answer.body)["choices"][0]["text"] for answer in answers]
    assert texts == [f"row {i}" for i in range(100)]


async def an_idle_backend_wants_some(backend: Backend, running: Running) -> None:
    await until(lambda: backend.available_slots(0) > 0)


async def a_backend_with_far_too_many_wants_none(backend: Backend, running: Running) -> None:
    assert backend.available_slots(10_000) == 0


async def what_runs_is_in_the_engine_and_leaves_it_when_cancelled(backend: Backend, running: Running) -> None:
    asking = [asyncio.create_task(backend.send(long())) for _ in range(3)]
    await until(lambda: running() == 3)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    assert all(task.cancelled() for task in asking)
    await until(lambda: running() == 0)


async def starting_again_changes_nothing(backend: Backend, running: Running) -> None:
    asking = asyncio.create_task(backend.send(row(prompt="hello", max_tokens=400, ignore_eos=True)))
    await until(lambda: running() == 1)
    await backend.start()
    assert (await asking).status == 200


Fact = Callable[[Backend, Running], Awaitable[None]]
_ALL: list[Fact] = [
    many_rows_get_each_its_own_answer,
    an_idle_backend_wants_some,
    a_backend_with_far_too_many_wants_none,
    what_runs_is_in_the_engine_and_leaves_it_when_cancelled,
    starting_again_changes_nothing,
]
FACTS: dict[str, Fact] = {fact.__name__: fact for fact in _ALL}


async def expected(request: RowRequest, config: LLMConfig) -> tuple[int, Any]:
    """What an engine in this process answers."""
    own = InProcessEngine(config)
    await own.start()
    try:
        return meaning(await own.send(request))
    finally:
        await own.stop()
