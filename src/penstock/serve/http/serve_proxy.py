"""What Serve's own HTTP adds to every answer, and so must not be there before.

Stands between the gateway and Serve, where Serve brings the requests, by its proxy or by HAProxy. Serve gives
a request without an id one, so the gateway and Serve always mean the same one.
"""

from __future__ import annotations

import os

from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.serve.http.coalescing import Coalesced
from penstock.transport.headers import REQUEST_ID


class Proxied:
    """ASGI around `app`: its answers leave without the request's id, else clients would read it twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = [field for field in message["headers"] if field[0] != REQUEST_ID]
                message = {**message, "headers": fields}
            await send(message)

        await self._app(scope, receive, without_id)


def behind_haproxy() -> bool:
    """Ray's own switch, for the whole cluster: then Serve's proxy is not in a request's way."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def behind_serve(app: ASGIApp) -> ASGIApp:
    """`app` as Serve's HTTP is to ask it."""
    proxied = Proxied(app)
    return proxied if behind_haproxy() else Coalesced(proxied)
