"""An engine that remembers what reached its `generate`, and a server around one, without Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from served import Served

from penstock.config import LLMConfig
from penstock.engine import Delta, Prompt
from penstock.engines.sim.engine import SimEngine
from penstock.serve import LLMServer


class Recording(SimEngine):
    """The simulator, which keeps prompts and parameters as they came."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__(config)
        self.got: list[tuple[Prompt, Mapping[str, Any]]] = []

    def generate(self, prompt: Prompt, params: Mapping[str, Any], **more: Any) -> AsyncGenerator[Delta, None]:
        self.got.append((prompt, params))
        return super().generate(prompt, params, **more)


@asynccontextmanager
async def server(kind: type[LLMServer] = LLMServer, **values: Any) -> AsyncIterator[Any]:
    """A started server whose engine records."""
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", **values)
    made = kind.sync_init(config, engine_cls=Recording)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def hooked(served: Served, **values: Any) -> AsyncIterator[Any]:
    """The same as the one replica of `m` behind a gateway."""
    async with server(**values) as made:
        await served.gateway("m")
        await served.app(made._app())
        yield made
