"""Runs the user's postprocessor on responses of the engine's app; only models with one have this layer.

It gets a finished response as a dict, and each event of a stream. Its streams leave the fast path: every
event is parsed and encoded again, which costs some ten microseconds plus the user's code.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.errors import Error
from penstock.hooks.hook import Context, Hook
from penstock.layers.preprocessing import PATHS, context_of
from penstock.openai.asgi_response import send_error
from penstock.openai.errors import ERROR_EVENTS, form
from penstock.request_context import record_tokens, shortcut

_STREAM, _JSON = b"text/event-stream", b"application/json"
_DATA = b"data: "
_KEPT, _INPUT = "/v1/responses/resp_", "/input_items"
"""A stored response that is retrieved is the engine's original."""


class Postprocessing:
    """ASGI around `app`."""

    def __init__(self, app: ASGIApp, hook: Hook, config: LLMConfig) -> None:
        self._app = app
        self._hook = hook
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_answer(scope):
            return await self._app(scope, receive, send)
        shortcut.set(None)  # else pieces of a stream would bypass the layer
        record_tokens.set(None)  # the user's code might make other pieces of the same tokens
        answer = _Answer(send, self._hook, context_of(scope, self._config))
        running = asyncio.ensure_future(self._app(scope, receive, answer.send))
        try:
            await asyncio.wait({running, answer.failed}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})
        return None


class _Answer:
    """One response on its way through the hook. failed: done when the hook broke a stream off."""

    def __init__(self, send: Send, hook: Hook, context: Context) -> None:
        self._send = send
        self._hook = hook
        self._context = context
        self._start: Message | None = None
        self._held: list[bytes] = []
        self._take = self._begin
        self.failed = asyncio.get_running_loop().create_future()

    async def send(self, message: Message) -> None:
        """`send` for the engine's app."""
        await self._take(message)

    async def _begin(self, message: Message) -> None:
        kind = dict(message["headers"]).get(b"content-type", b"")
        if message["status"] >= 400 or not kind.startswith((_STREAM, _JSON)):
            self._take = self._send
        elif kind.startswith(_STREAM):
            self._take = self._events
        else:
            self._start, self._take = message, self._whole
            return
        await self._send(message)

    async def _whole(self, message: Message) -> None:
        self._held.append(message.get("body", b""))
        if message.get("more_body"):
            return
        assert self._start is not None
        try:
            given = await self._hook(msgspec.json.decode(b"".join(self._held)), self._context)
            body = msgspec.json.encode(_answer(given))
        except Exception as error:
            await send_error(self._send, self._hook.fault(error, self._context), self._context.path)
            return
        kept = [field for field in self._start["headers"] if field[0].lower() != b"content-length"]
        headers = [*kept, (b"content-length", b"%d" % len(body))]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _events(self, message: Message) -> None:
        whole, rest = asgi.split_events(b"".join([*self._held, message.get("body", b"")]))
        last = not message.get("more_body")
        self._held = [] if last else [rest]
        try:
            made = [await self._event(event) for event in whole]
        except Exception as error:
            await self._break_off(self._hook.fault(error, self._context))
            return
        body = b"".join(made) + (rest if last else b"")
        if body or last:
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _event(self, event: bytes) -> bytes:
        """One event, processed; nothing where the hook returns None. Errors and `[DONE]` pass unchanged."""
        head, found, data = event.partition(_DATA)
        if not found or not data.startswith(b"{") or event.startswith(ERROR_EVENTS):
            return event + b"\n\n"
        given: Any = self._hook.now(msgspec.json.decode(data), self._context)
        if inspect.isawaitable(given):
            given = await given
        return b"" if given is None else head + _DATA + msgspec.json.encode(_answer(given)) + b"\n\n"

    async def _break_off(self, error: Error) -> None:
        """Sends the stream's last event and ends the engine's app."""
        await self._send({"type": "http.response.body", "body": form(self._context.path).event(error)})
        self.failed.set_result(None)
        await asyncio.Event().wait()  # for the end of this task


def _is_answer(scope: Scope) -> bool:
    path: str = scope["path"]
    method: str = scope["method"]
    kept = path.startswith(_KEPT) and method != "DELETE" and not path.endswith(_INPUT)
    return (method == "POST" and path in PATHS) or kept


def _answer(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return cast("Mapping[str, Any]", given)
    what = "nothing" if given is None else f"a {type(given).__name__}"
    raise TypeError(f"The postprocessor returned {what}; an answer is a dict.")
