"""Requests to an engine's app, and what came back, for tests that look at its meaning."""

from __future__ import annotations

import json
from typing import Any

import httpx
from enginetest import MODEL_ID, Served

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
STATED = {"temperature": 0}

CITIES = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Arguments of a strict tool that must be called whatever is asked: so small a model makes no sense else."""

Chunk = dict[str, Any]


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


async def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return await served.http.post(path, json={"model": MODEL_ID} | STATED | body)


async def ask(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = await post(served, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def said(served: Served, messages: Any, **body: Any) -> dict[str, Any]:
    """The one choice of a chat."""
    return (await ask(served, CHAT, messages=messages, **body))["choices"][0]


async def events(served: Served, path: str, **body: Any) -> list[Chunk]:
    """Of a stream that ends as it should."""
    answer = await post(served, path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    *pieces, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


async def named_events(served: Served, path: str, **body: Any) -> list[tuple[str, Chunk]]:
    """Of a stream of Responses or Messages, whose events have names."""
    answer = await post(served, path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    pieces = [piece for piece in answer.text.strip().split("\n\n") if piece.startswith("event: ")]
    found = [piece.removeprefix("event: ").partition("\ndata: ") for piece in pieces]
    return [(name, json.loads(data)) for name, _, data in found]


def joined(chunks: list[Chunk], field: str, index: int = 0) -> str:
    """A field of the deltas of one choice."""
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(field) or "" for delta in deltas)


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Tools that a choice calls, with their arguments."""
    found = choice["message"]["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
