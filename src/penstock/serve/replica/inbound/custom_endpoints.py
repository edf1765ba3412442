"""Custom endpoints: methods of an `LLMServer` subclass that answer HTTP paths.

    class Summaries(LLMServer):
        @endpoint("/v1/summarize")
        async def summarize(self, request: dict) -> dict: ...

The gateway sends a path's requests to the models that have it, with the same keys, limits, ids and metrics as
all others; this calls the method.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.errors import BadRequest
from penstock.hooks.hook import Threads, fault, takes
from penstock.layers.preprocessing import context_of
from penstock.openai.asgi_response import EventStream, is_event_stream, send_error, send_json
from penstock.openai.errors import form
from penstock.request_context import id_seed, record_tokens, shortcut, tokens_so_far
from penstock.serve.gateway.routes import RESERVED

_MARK, _BATCH = "_penstock_path", "_penstock_batch"
_DONE = b"data: [DONE]\n\n"
_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@/-]*")  # it is sent as it is. RFC 3986, 3.3
_LINE_END = re.compile(r"\r\n|\r|\n")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def endpoint(path: str, *, batch: bool = False) -> Callable[[_Method], _Method]:
    """Makes a method answer POST `path`. It takes the parsed body (a dict), or starlette's `Request`.

    batch: whether lines of the Batches API may ask it, too; then it must answer with JSON, not with a stream.
    A second argument gets the `Context`. It returns a dict or a starlette `Response`; an async generator
    yields the events of a stream. A ValueError is a 400 with its text, anything else that it raises a 500.
    Raises: ValueError for a path that is reserved or invalid.
    """
    if path in RESERVED or not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is reserved or not a valid path; use one such as '/v1/summarize'.")

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, path)
        setattr(method, _BATCH, batch)
        return method

    return mark


@cache
def paths(server: type[Any]) -> Mapping[str, str]:
    """The custom paths of a class and its bases, with the names of their methods."""
    found = {name: getattr(getattr(server, name), _MARK, None) for name in dir(server)}
    return {path: name for name, path in found.items() if path is not None}


def batch_paths(server: type[Any]) -> tuple[str, ...]:
    """Of the custom paths, those that lines of batches may ask."""
    return tuple(path for path, name in paths(server).items() if getattr(getattr(server, name), _BATCH))


class CustomEndpoints:
    """ASGI before `app`, for the paths of `server`."""

    def __init__(self, app: ASGIApp, server: object, config: LLMConfig) -> None:
        self._app = app
        self._config = config
        self._threads = Threads("endpoints")
        self._methods = {path: getattr(server, name) for path, name in paths(type(server)).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = self._methods.get(scope["path"])
        if method is None or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        # What the method asks of the engine is no part of this answer, and may be several requests.
        record_tokens.set(None)
        tokens_so_far.set(None)
        shortcut.set(None)
        id_seed.set("")
        try:
            body = await asgi.read_body(receive)
            scope, again = asgi.with_body(scope, receive, body)
            await asgi.while_connected(receive, self._answer(method, body, scope, again, send))
        except asgi.ClientGone:
            return None

    async def _answer(
        self, method: Callable[..., Any], body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """An error is a status before the first byte, else the last event of a stream. Another answer is cut
        off: nobody may take it for a whole one.
        """
        path, start = scope["path"], None

        async def noted(message: Message) -> None:
            nonlocal start
            start = start or message
            await send(message)

        try:
            argument: Any = HTTPRequest(scope, receive) if _wants_http(method) else _object(body)
            context = (context_of(scope, self._config),) if takes(method, 2) else ()
            await _send(await self._called(method, argument, *context), scope, receive, noted)
        except Exception as error:
            request_id = context_of(scope, self._config).request_id
            failure = fault(f"The endpoint {path}", error, request_id)
            if start is None:
                await send_error(send, failure, path)
            elif is_event_stream(start):
                await send({"type": "http.response.body", "body": form(path).event(failure)})

    async def _called(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The method's result; a plain function runs in a thread."""
        if inspect.isasyncgenfunction(method):
            return method(*arguments)
        if not inspect.iscoroutinefunction(method):
            return await self._threads.run(method, *arguments)
        return await method(*arguments)


def _wants_http(method: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(method).parameters), None)
    try:
        return typing.get_type_hints(method).get(first or "") is HTTPRequest
    except NameError:  # an annotation that is imported for type checking only
        return False


def _object(body: bytes) -> dict[str, Any]:
    found = asgi.parsed(body)
    if found is None:
        raise BadRequest("The body must be a JSON object.")
    return found


async def _send(given: Any, scope: Scope, receive: Receive, send: Send) -> None:
    if isinstance(given, Response):
        return await given(scope, receive, send)
    if not inspect.isasyncgen(given):
        return await send_json(send, _plain(given))
    stream, events = EventStream(send), cast("AsyncGenerator[Any, None]", given)
    async with aclosing(events):
        async for event in events:
            await stream.add(_event(event))
    return await stream.add(_DONE, more=False)


def _event(event: Any) -> bytes:
    """A string as it is, line by line; anything else as JSON."""
    if isinstance(event, str):
        return "".join(f"data: {line}\n" for line in _LINE_END.split(event)).encode() + b"\n"
    return b"data: " + msgspec.json.encode(_plain(event)) + b"\n\n"


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value
