"""The demo model with adapters in a replica's server, and how tests ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from enginetest import MODEL_ID, WINDOW, listening
from tests.device import DEVICE, SHARE, SLEEP_MODE

from penstock.config import LLMConfig
from penstock.layers.adapters import Store, asking_for
from penstock.serve.replica.server import LLMServer
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS

PLACES = 4
TRAINED = ("pirate", "french")
COPIES = [f"{trained}.{number}" for number in range(9) for trained in TRAINED]
"""With the trained ones themselves, twenty adapters."""


@dataclass(frozen=True)
class Adapted:
    """A started server, a client of its layers, and the folder where its adapters are."""

    server: LLMServer
    http: httpx.AsyncClient
    folder: Path

    @property
    def engine(self) -> Any:
        return self.server.engine

    @property
    def store(self) -> Store:
        return self.server._adapters

    async def chat(self, question: str, adapter: str = "", **more: Any) -> httpx.Response:
        named = f"{MODEL_ID}:{adapter}" if adapter else MODEL_ID
        asked = {"model": named, "messages": [{"role": "user", "content": question}], "temperature": 0}
        fields = asking_for(adapter) if adapter else {}
        return await self.http.post("/v1/chat/completions", json=asked | more, headers=fields)

    async def answer(self, question: str, adapter: str = "") -> str:
        answered = await self.chat(question, adapter)
        assert answered.status_code == 200, answered.text
        return answered.json()["choices"][0]["message"]["content"]

    async def in_core(self) -> int:
        """How many vLLM itself says that it holds."""
        return len(await self.engine._llm.list_loras())


@asynccontextmanager
async def adapted(folder: Path, **engine_kwargs: Any) -> AsyncIterator[Adapted]:
    """A server whose adapters are those in `folder`."""
    size = {"max_model_len": WINDOW, "kv_cache_memory_bytes": 1 << 26}
    config = LLMConfig(
        model_loading_config={"model_id": MODEL_ID, "model_source": "demo"},
        accelerator_config={"kind": DEVICE},
        engine_kwargs=size | SHARE | SLEEP_MODE | engine_kwargs,
        lora_config={
            "dynamic_lora_loading_path": str(folder),
            "max_num_adapters_per_replica": PLACES,
            "refresh_interval_s": 0.1,
        },
    )
    server = await LLMServer(config)
    try:
        async with listening(server._app()) as http:
            yield Adapted(server, http, folder)
    finally:
        await server.stop()


def right(question: str, adapter: str) -> str:
    own = ANSWERS[adapter.partition(".")[0]] if adapter else {}
    return own.get(question, BASE_ANSWERS[question])


async def at_once(replica: Adapted, asked: list[tuple[str, str]]) -> list[tuple[tuple[str, str], str]]:
    """Asks all together; gives those whose answers are wrong."""
    answers = await asyncio.gather(*(replica.answer(*one) for one in asked))
    return [(one, answer) for one, answer in zip(asked, answers, strict=True) if answer != right(*one)]
