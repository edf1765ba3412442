"""Passes plain requests of batch to the engine's shorter way, past its application.

The innermost layer, so it sees a request as hooks and adapters leave it. What the engine does not answer that
way goes on to its application, whose errors clients know. It does not watch the client: batch's share of the
replica, or the caller in this process, cancels a request when its client goes.
"""

from __future__ import annotations

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.engine import DirectResponder
from penstock.errors import Error
from penstock.openai.asgi_response import send_body, send_error
from penstock.request_context import prepared_prompt, tier, using_adapter
from penstock.tiers import FLEX

_JSON = (b"content-type", b"application/json")
_ID = b"x-request-id"
_HARMLESS = {b"host", b"content-length", b"accept", b"accept-encoding", b"connection", b"user-agent", _ID}
"""Header fields that no engine's application reads; with any other, the request is not plain."""


class Direct:
    """ASGI before `app`, which is the engine's own."""

    def __init__(self, app: ASGIApp, engine: DirectResponder) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _may_be_plain(scope):
            return await self._app(scope, receive, send)
        try:
            body = await asgi.read_body(receive)
            request_id = asgi.header(scope, _ID).decode("latin-1") or None
            answer = await self._engine.respond(scope["path"], body, request_id=request_id)
        except asgi.ClientGone:
            return None
        except Error as error:
            return await send_error(send, error, scope["path"])
        if answer is None:
            return await self._app(*asgi.with_body(scope, receive, body), send)
        return await send_body(send, answer)


def _may_be_plain(scope: Scope) -> bool:
    return (
        scope["method"] == "POST"
        and tier.get() == FLEX
        and using_adapter.get() is None
        and prepared_prompt.get() is None
        and all(name in _HARMLESS or (name, value) == _JSON for name, value in scope["headers"])
    )
