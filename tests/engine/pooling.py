"""Models that write nothing, each in a replica's server over a real vLLM, and how tests ask them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from enginetest import MODEL_ID, listening, vllm_config
from models import model

from penstock.asgi_client import call
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import classify_response
from penstock.data.results.columns import result_columns
from penstock.data.rows.builder import build_request
from penstock.data.rows.request import Task
from penstock.serve import LLMServer

LIMIT = 128
EMBEDDINGS, EMBED, RERANK = "/v1/embeddings", "/v2/embed", "/v1/rerank"
SOUP, BREAD, TRAIN = "the soup tastes salty", "a chef bakes bread", "the train departs"
LONG = "the dog barks " * LIMIT
GOAL, LOAN, PUPPY = "the team scores a goal", "the bank pays interest on a loan", "a puppy barks"
DOCUMENTS = [GOAL, LOAN, PUPPY]
SALARY = "salary and tax"
LABELS = ("negative", "neutral", "positive")
JUDGED = {
    "the film is not bad": "positive",
    "the chair is round": "neutral",
    "it was good at first , later the hotel was awful": "negative",
}
ONE_AFTER_ANOTHER = (
    "{% for message in messages %}{{ message.content }}{% if not loop.last %} {% endif %}{% endfor %}"
)
EMBEDDER: dict[str, Any] = {
    "chat_template": ONE_AFTER_ANOTHER,
    "hf_overrides": {"task_instructions": {"search_query": "tell me about ", "search_document": ""}},
}
"""Arguments of the embedder's engine."""


@dataclass(frozen=True)
class Pooled:
    """A started replica, and a client of its engine's app."""

    server: LLMServer
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL_ID} | body)

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    async def vectors(self, **body: Any) -> np.ndarray:
        rows = (await self.ask(EMBEDDINGS, **body))["data"]
        assert [row["index"] for row in rows] == list(range(len(rows)))
        return np.array([row["embedding"] for row in rows])

    async def tokens(self, text: str) -> list[int]:
        return (await self.ask("/tokenize", prompt=text))["tokens"]


@asynccontextmanager
async def pooled(name: str, **engine_kwargs: Any) -> AsyncIterator[Pooled]:
    """The model that `recipes/NAME` makes, started."""
    server = await LLMServer(vllm_config(str(model(name)), max_model_len=LIMIT, **engine_kwargs))
    try:
        async with listening(server.engine.app()) as http:
            yield Pooled(server, http)
    finally:
        await server.stop()


def same(found: Any, expected: Any, within: float = 1e-5) -> bool:
    return bool(np.allclose(found, expected, atol=within))


def floats(text: str | bytes, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text) if isinstance(text, str) else text, dtype=kind)


async def told(answers: Any) -> Any:
    """The one answer to a call by handle."""
    (answer,) = [answer async for answer in await answers]
    return answer


async def row(served: Pooled, task: Task, **fields: Any) -> dict[str, Any]:
    """The columns of a row of a batch."""
    request = build_request(fields, task)
    answer = await call(served.server.engine.app(), request.path, request.body)
    return result_columns(task, classify_response(Response(answer.status, await answer.read()), attempts=1))
