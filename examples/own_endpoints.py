"""Endpoints of your own, beside OpenAI's and behind the same gateway: methods of a server class.

curl http://127.0.0.1:8000/v1/glossary -d '{"terms": ["Penstock", "a KV cache"]}'
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from penstock.serve import LLMConfig, LLMRouter, LLMServer, endpoint

PROMPT = "<|im_start|>user\nWhat is {}?<|im_end|>\n<|im_start|>assistant\n"


class Glossary(LLMServer):
    @endpoint("/v1/glossary")
    async def glossary(self, request: dict[str, Any]) -> dict[str, str]:
        """All terms at once: the engine answers them in one batch."""
        terms = request["terms"]
        if len(terms) > 20:
            raise ValueError("Ask for 20 terms at most.")  # a 400 with this text
        return dict(zip(terms, await asyncio.gather(*map(self.explain, terms)), strict=True))

    @endpoint("/v1/glossary/stream")
    async def stream(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, str], None]:
        """An async generator is a stream of events."""
        async for delta in await self.ask(request["term"]):
            yield {"text": delta.text}

    async def explain(self, term: str) -> str:
        return "".join([delta.text async for delta in await self.ask(term)])

    async def ask(self, term: str) -> AsyncGenerator[Any, None]:
        return await self.generate(PROMPT.format(term), {"max_tokens": 100, "temperature": 0})


config = LLMConfig(
    model_loading_config={"model_id": "helper", "model_source": "demo"},
    server_cls=Glossary,  # or its path, "my_module.Glossary", as in YAML
)
serve.run(LLMRouter.as_deployment().bind([config]))
