"""By the short way past HTTP's layers comes what comes by the long way."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from asking import CHAT, CITIES, COMPLETIONS, STATED, user
from enginetest import MODEL_ID, Served, listening
from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from tests.waiting import until

from penstock.engines.vllm.capabilities.table import CAPABILITIES
from penstock.engines.vllm.frontend.direct_routes import DirectRoutes

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
HELLO: dict[str, Any] = {"messages": user("Hello"), "max_tokens": 12}

RIGHT: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | {"stream": True}),
    (
        CHAT,
        HELLO
        | {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 1, "temperature": 1},
    ),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1, "temperature": 1}),
    (CHAT, HELLO | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    (
        CHAT,
        HELLO | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITIES}}},
    ),
    (COMPLETIONS, {"prompt": "Hello", "max_tokens": 9, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": [[5, 6], [7, 8]], "max_tokens": 9, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 9, "stream": True}),
    (CHAT, HELLO | {"no_such_field": 1}),
]
WRONG: list[tuple[str, Any]] = [
    (CHAT, {"messages": user("Hello"), "max_tokens": -1}),
    (CHAT, {"messages": "Hello"}),
    (CHAT, {}),
    (CHAT, None),
    (CHAT, []),
    (CHAT, HELLO | {"model": "another"}),
    (CHAT, HELLO | {"n": 0}),
    (CHAT, HELLO | {"messages": user("Hello " * 5000)}),
    (CHAT, HELLO | {"tool_choice": "required"}),
    (CHAT, HELLO | {"structured_outputs": {"regex": "("}}),
    (COMPLETIONS, {"prompt": "Hello", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": []}),
    ("/v1/embeddings", {"input": "Hello"}),
]


@contextmanager
def long_ways(served: Served) -> Iterator[list[str]]:
    """Paths of the requests that went through all layers."""
    inside: Any = served.engine.app()._app  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    app, paths = inside._app, list[str]()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await app(scope, receive, send)

    inside._app = watched
    try:
        yield paths
    finally:
        inside._app = app


def masked(answer: httpx.Response) -> tuple[int, str, str]:
    text = re.sub(r'("id":\s?)"[^"]*"|("created":\s?)\d+', r"\1\g<2>0", answer.text)
    kind = answer.headers["content-type"]
    return answer.status_code, kind, _whole(text) if kind.startswith("text/event-stream") else text


def _whole(stream: str) -> str:
    """The texts of a stream, which come in pieces of any size, and all that stands beside them once.

    A piece of nothing but text stands for none: the end may bring all of it.
    """
    *pieces, end = stream.strip().split("\n\n")
    texts: dict[int, str] = {}
    rest: set[str] = {end}
    for piece in pieces:
        told = json.loads(piece.removeprefix("data: "))
        for choice in told["choices"]:
            holder = choice.get("delta", choice)
            texts[choice["index"]] = texts.get(choice["index"], "") + (
                holder.pop("content" if "delta" in choice else "text", "") or ""
            )
        if not told["choices"] or any(beside_text(choice) for choice in told["choices"]):
            rest.add(json.dumps(told, sort_keys=True))
    return f"{sorted(texts.items())} {sorted(rest)}"


def beside_text(choice: dict[str, Any]) -> bool:
    """Whether it says more than its text, which has been taken out."""
    return bool(choice["finish_reason"] or choice.get("delta") or choice.get("logprobs"))


async def both(served: Served, path: str, body: Any) -> tuple[httpx.Response, httpx.Response]:
    """The answer by the short way, and by the long one."""
    if isinstance(body, dict):
        body = {"model": MODEL_ID} | STATED | body
    async with listening(served.engine.app(), ours=False) as plain:
        long = await plain.post(path, json=body)
    return await served.http.post(path, json=body), long


@pytest.mark.parametrize(("path", "body"), RIGHT)
async def test_the_same_answer(assistant: Served, path: str, body: dict[str, Any]) -> None:
    with long_ways(assistant) as paths:
        short, long = await both(assistant, path, body)
    assert masked(short) == masked(long)
    assert short.status_code == 200
    assert paths == [path], "only the one that is none of ours"


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_the_same_refusal(assistant: Served, path: str, body: Any) -> None:
    short, long = await both(assistant, path, body)
    assert masked(short) == masked(long)
    assert 400 <= short.status_code < 500


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", {"content-type": "application/json"}),
        (b"", {"content-type": "application/json"}),
        (b'{"a": "\\ud800"}', {"content-type": "application/json"}),
        (b"\xff", {"content-type": "application/json"}),
        (json.dumps(HELLO).encode(), {"content-type": "text/plain"}),
        (json.dumps(HELLO).encode(), {}),
    ],
)
async def test_the_same_refusal_of_what_is_no_json(
    assistant: Served, content: bytes, headers: dict[str, str]
) -> None:
    async with listening(assistant.engine.app(), ours=False) as plain:
        long = await plain.post(CHAT, content=content, headers=headers)
    short = await assistant.http.post(CHAT, content=content, headers=headers)
    assert masked(short) == masked(long)
    assert short.status_code >= 400


async def test_half_a_surrogate_is_no_json(assistant: Served) -> None:
    body = b'{"model": "m", "prompt": "a", "structured_outputs": "\\ud800"}'
    answer = await assistant.http.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


async def test_a_page_is_told_whether_it_may_read_the_answer(assistant: Served) -> None:
    body = {"model": MODEL_ID, **HELLO}
    with long_ways(assistant) as paths:
        answer = await assistant.http.post(CHAT, json=body, headers={"origin": "http://a.page"})
    assert answer.headers["vary"] == "Origin"
    assert paths == [CHAT]


async def test_a_client_that_leaves_aborts_its_request(assistant: Served) -> None:
    body = {"model": MODEL_ID, "messages": user("Hello"), "max_tokens": 1500, "ignore_eos": True}
    with long_ways(assistant) as paths:
        asking = asyncio.create_task(assistant.http.post(CHAT, json=body))
        await until(lambda: assistant.engine.load().running == 1)
        asking.cancel()
        await until(lambda: assistant.engine.load().running == 0, limit_s=3)
    assert paths == []


@pytest.mark.parametrize(("own", "expected"), [([], None), ([GZipMiddleware], "gzip")])
async def test_with_a_middleware_of_the_users_all_go_by_it(
    own: list[Any], expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()

    @app.post(CHAT)
    async def answer(request: dict[str, Any], raw_request: Request) -> PlainTextResponse:
        return PlainTextResponse(request["text"])

    for middleware in own:
        app.add_middleware(middleware)
    with caplog.at_level(logging.WARNING):  # vLLM may have raised the root's
        async with listening(DirectRoutes(app)) as client:
            answered = await client.post(CHAT, json={"text": "long " * 500})
    assert answered.text == "long " * 500
    assert answered.headers.get("content-encoding") == expected
    assert ("the long way" in caplog.text) == bool(own)


async def test_metrics_show_what_is_on(demo: Served):
    lines = (await demo.http.get("/metrics")).text.splitlines()
    shown = [line for line in lines if line.startswith("penstock_engine_capability{")]
    assert 'penstock_engine_capability{capability="direct_routes"} 1.0' in shown
    assert len(shown) == len(CAPABILITIES)
