"""Relays the child's HTTP as an ASGI app: requests in one form, responses as the child sends them.

A body goes to the child byte for byte, unless something in it has to be changed.
`engines.edge`, which wraps this app, turns the child's errors into our envelope.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import aiohttp
import msgspec

from penstock import asgi
from penstock.asgi import Receive, Scope, Send
from penstock.engines.process import completion, forced_tools, media_urls
from penstock.engines.process.options import ProcessOptions
from penstock.engines.process.wire import Wire, lines
from penstock.errors import Unsupported
from penstock.openai import requests
from penstock.openai.asgi_response import send_body
from penstock.request_context import PreparedPrompt, prepared_prompt, using_adapter

_NOT_FOR_THE_CHILD = asgi.HOP_BY_HOP | {
    *(b"host", b"content-length", b"accept-encoding", b"authorization", b"cookie")
}
_NOT_FOR_CLIENTS = asgi.HOP_BY_HOP | {b"date", b"server", b"set-cookie"}

_EVENTS = "text/event-stream"
_ERROR_WITHIN = re.compile(rb'\n(?=data: \{"error"|event: error)')


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The name of one request's model for clients, and for the child. aliases: more names for clients."""

    ours: str
    childs: str
    aliases: tuple[str, ...] = ()

    def in_answer(self, piece: bytes) -> bytes:
        """`piece`, whole lines, with the clients' name of the model. Generated text has escaped quotes."""
        field = re.compile(rb'("(?:model|id|root)"\s*:\s*)' + re.escape(msgspec.json.encode(self.childs)))
        return field.sub(lambda found: found[1] + msgspec.json.encode(self.ours), piece)


class RelayTarget(Protocol):
    """What the relay needs from the engine. is_vllm: whether the child is vLLM's server. options: what may be
    fetched.
    """

    is_vllm: bool
    options: ProcessOptions

    def at_work(self, *, waits: bool) -> AbstractAsyncContextManager[Wire]: ...

    def names(self, adapter: str | None) -> ModelNames: ...

    async def check_health(self) -> None: ...


class Relay:
    """The ASGI app in front of one engine's child."""

    def __init__(self, engine: RelayTarget) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asgi.ClientGone):
            body = await asgi.read_body(receive)
            await asgi.while_connected(receive, self._answer(scope, body, send))

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if scope["path"] == "/health":
            await self._engine.check_health()
            return await send_body(send, b"")
        adapter = using_adapter.get()
        names = self._engine.names(adapter)
        fields = _fields(scope, body)
        if fields is not None:
            media_urls.check(fields, self._engine.options.allowed_media_domains)
            sent = requests.prepared(scope["path"], fields, nulls=b"null" in body)
            if self._engine.is_vllm:
                requests.refuse_not_done(scope["path"], sent, hosted_tools=True)
                sent = forced_tools.strict(sent)
            sent, names = _named(sent, names, adapter is not None, prepared_prompt.get())
            body = body if sent is fields else msgspec.json.encode(sent)
        async with (
            self._engine.at_work(waits=scope["method"] == "POST") as wire,
            wire.request(scope["method"], _target(scope), body, _for_child(scope["headers"])) as answer,
        ):
            await _pass_on(answer, names, send)
        return None


async def _pass_on(answer: aiohttp.ClientResponse, names: ModelNames, send: Send) -> None:
    renamed = names.ours != names.childs
    never = {b"content-length", *_NOT_FOR_CLIENTS} if renamed else _NOT_FOR_CLIENTS
    headers = asgi.passing(_lower(answer.raw_headers), never)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if answer.content_type == _EVENTS:
        pieces = _events(answer)
    elif renamed:
        pieces = lines(answer)
    else:
        pieces = answer.content.iter_any()
    async for piece in pieces:
        piece = names.in_answer(piece) if renamed else piece
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines as they arrive; an error event begins a piece of its own."""
    async for piece in lines(answer):
        error = _ERROR_WITHIN.search(piece)
        if error is None:
            yield piece
        else:
            yield piece[: error.end()]
            yield piece[error.end() :]


def _fields(scope: Scope, body: bytes) -> dict[str, Any] | None:
    """The request as JSON; None for an upload, or what the child refuses itself."""
    kind = dict(scope["headers"]).get(b"content-type", b"")
    return None if not body or kind.lower().startswith(b"multipart/") else asgi.parsed(body)


def _named(
    fields: dict[str, Any], names: ModelNames, adapted: bool, ours: PreparedPrompt | None
) -> tuple[dict[str, Any], ModelNames]:
    """The request with the child's name of the model and the prepared prompt, and the alias that it has.

    Raises: Unsupported for a prepared prompt that the child cannot take.
    """
    if fields.get("model") in names.aliases:
        names = replace(names, ours=fields["model"])
    if names.ours != names.childs and (adapted or fields.get("model") == names.ours):
        fields = {**fields, "model": names.childs}
    if ours is not None:
        if fields.get("prompt") != ours.placeholder:
            raise Unsupported(
                "An engine in a process of its own makes the prompts of chats itself, and takes no prepared "
                f"ones; {completion.PATH} does."
            )
        fields = {**fields, **completion.prompt_fields(ours.take())}
    return fields, names


def _target(scope: Scope) -> str:
    """Path and query as in the request."""
    path = cast("bytes", scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = cast("bytes", scope.get("query_string", b"")).decode("latin-1")
    return f"{path}?{query}" if query else path


def _for_child(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    kept = asgi.passing(_lower(headers), _NOT_FOR_THE_CHILD)
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]


def _lower(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return ((name.lower(), value) for name, value in headers)
