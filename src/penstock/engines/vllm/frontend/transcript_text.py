"""Transcriptions and translations as `text`: plain text, as OpenAI's clients expect it.

vLLM accepts that format and answers in JSON.

Work-around for vLLM 0.32: https://github.com/vllm-project/vllm/issues/49095. Remove when that is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from penstock.asgi import ASGIApp, Receive, Scope, Send

_CREATES = {
    "/v1/audio/transcriptions": ("openai_serving_transcription", "create_transcription"),
    "/v1/audio/translations": ("openai_serving_translation", "create_translation"),
}


class _Text(Exception):
    """A response on its way through vLLM's route, which returns JSON and events only."""


def answer_texts(app: FastAPI) -> None:
    """Adds the format to vLLM's app, if its model takes audio."""
    routes: list[Any] = [route for route in app.routes if getattr(route, "path", None) in _CREATES]
    for route in routes:
        name, create = _CREATES[route.path]
        serving = getattr(app.state, name)
        setattr(serving, create, _raising(getattr(serving, create)))
        route.app = _sending(route.app)


def _raising(create: Callable[..., Any]) -> Callable[..., Any]:
    async def created(audio: bytes, request: Any, raw_request: Any = None) -> Any:
        answer = await create(audio, request, raw_request)
        if request.response_format == "text" and hasattr(answer, "text"):
            raise _Text(answer.text)
        return answer

    return created


def _sending(app: ASGIApp) -> ASGIApp:
    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except _Text as text:
            await PlainTextResponse(f"{text}\n")(scope, receive, send)

    return asked
